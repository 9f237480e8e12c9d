package leased

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// The bodies of replies. Member order is the order on the wire.
type (
	freedBody struct {
		Released bool   `json:"released"`
		Held     bool   `json:"held"`
		Key      string `json:"key"`
		Holder   string `json:"holder,omitempty"`
		Revision uint64 `json:"revision"`
	}
	freeBody struct {
		Held bool   `json:"held"`
		Key  string `json:"key"`
	}
	forwardBody struct {
		Holder   string `json:"holder"`
		Revision uint64 `json:"revision"`
		Payload  []byte `json:"payload"`
		Attempts int    `json:"attempts"`
	}
	errorBody struct {
		Key      string     `json:"key,omitempty"` // in a list of replies
		Error    string     `json:"error"`
		Kind     kinds.Kind `json:"kind"`
		Holder   string     `json:"holder,omitempty"`
		Revision uint64     `json:"revision,omitempty"`
	}
)

// appendLease appends the members of a lease and the end of the object. Keys and
// holders are of an alphabet that needs no escaping; a test holds the result to
// encoding/json's.
func appendLease(b []byte, l service.Lease) []byte {
	b = slices.Grow(b, 320)
	b = append(b, `"key":"`...)
	b = append(b, l.Key...)
	b = append(b, `","holder":"`...)
	b = append(b, l.Holder...)
	b = append(b, `","revision":`...)
	b = strconv.AppendUint(b, l.Revision, 10)
	b = append(b, `,"acquired_at":`...)
	b = l.AcquiredAt.AppendJSON(b)
	b = append(b, `,"expires_at":`...)
	b = l.ExpiresAt.AppendJSON(b)
	b = append(b, `,"ttl_ms":`...)
	b = strconv.AppendInt(b, l.TTL.Milliseconds(), 10)
	b = append(b, `,"left_ms":`...)
	b = strconv.AppendInt(b, l.Left.Milliseconds(), 10)
	if l.Meta != "" {
		meta, _ := json.Marshal(l.Meta) // a string can be encoded
		b = append(b, `,"meta":`...)
		b = append(b, meta...)
	}
	return append(b, '}')
}

// leaseAnswer makes the reply of a lease call.
func leaseAnswer(r service.Result, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	var body any
	switch r.Kind {
	case kinds.Granted, kinds.Renewed:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"granted":true,"held":true,`), r.Lease)}, nil
	case kinds.Denied:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"granted":false,"held":true,`), r.Lease)}, nil
	case kinds.Held:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"held":true,`), r.Lease)}, nil
	case kinds.Free:
		body = freeBody{false, r.Lease.Key}
	case kinds.Released, kinds.Evicted:
		body = freedBody{true, false, r.Lease.Key, r.Lease.Holder, r.Lease.Revision}
	}
	return encode(r.Kind, body)
}

// listAnswer makes the reply of a page, cut where it would not fit the connection.
func (s *Service) listAnswer(leases []service.Lease, next string, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	most := int(s.front.MaxPayload()) - 1024 // for what is around the leases
	body := []byte(`{"leases":[`)
	for i, l := range leases {
		whole := len(body)
		if i > 0 {
			body = append(body, ',')
		}
		if body = appendLease(append(body, '{'), l); len(body) > most {
			body, next = body[:whole], ""
			if i > 0 {
				next = leases[i-1].Key
			}
			break
		}
	}
	body = append(body, ']')
	if next != "" {
		body = append(append(append(body, `,"next":"`...), next...), '"')
	}
	return answer{kind: kinds.Listed, body: append(body, '}')}, nil
}

// helpersOfRenewMany bounds the goroutines that all renew_many calls together have
// besides their own.
const helpersOfRenewMany = 256

// renewMany renews the leases of r side by side and answers for each in order.
// What was stored at once is answered here; those that need more, each takes
// its own way.
func (s *Service) renewMany(ctx context.Context, r *request) (answer, error) {
	leases := make([]service.KeyRevision, len(r.Leases))
	for i, p := range r.Leases {
		leases[i] = service.KeyRevision(p)
	}
	renewals := s.leases.StartRenewals(r.Holder, r.TTL, leases)
	replies := make([]answer, len(renewals))
	finish := func(i int) {
		err := s.safely("renew_many", func() (err error) {
			replies[i], err = leaseAnswer(renewals[i].Finish(ctx))
			return err
		})
		if err != nil {
			replies[i], _ = errorAnswerOf(leases[i].Key, err)
		}
	}
	var rest []int
	for i := range renewals {
		if !renewals[i].Waits() {
			finish(i)
		} else {
			rest = append(rest, i)
		}
	}
	var next atomic.Int64
	work := func() {
		for n := int(next.Add(1)) - 1; n < len(rest); n = int(next.Add(1)) - 1 {
			finish(rest[n])
		}
	}
	var wg sync.WaitGroup
	for range len(rest) - 1 {
		select {
		case s.helpers <- struct{}{}:
			wg.Add(1)
			s.workers.run(func() {
				defer wg.Done()
				defer func() { <-s.helpers }()
				work()
			})
			continue
		default:
		}
		break
	}
	work()
	wg.Wait()

	counts := make([]kinds.Kind, len(replies))
	body := append(make([]byte, 0, 256*len(replies)), `{"leases":[`...)
	for i, a := range replies {
		if i > 0 {
			body = append(body, ',')
		}
		body, counts[i] = append(body, a.body...), a.kind
	}
	return answer{counts: counts, body: append(body, "]}"...)}, nil
}

// forwardAnswer makes the reply of a forward, if it fits the connection.
func (s *Service) forwardAnswer(f service.Forwarded, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	payload := f.Payload
	if payload == nil {
		payload = []byte{} // an empty reply is "", not null
	}
	a, err := encode(kinds.Forwarded, forwardBody{f.Holder, f.Revision, payload, f.Attempts})
	if limit := s.front.MaxPayload(); err == nil && int64(len(a.body)) > limit {
		e := kinds.Errorf(kinds.ReplyTooLarge, "the owner processed the request, but its reply of %d bytes does not fit a message of at most %d bytes", len(f.Payload), limit)
		e.Holder, e.Revision = f.Holder, f.Revision
		return answer{}, e
	}
	return a, err
}

func encode(k kinds.Kind, body any) (answer, error) {
	b, err := json.Marshal(body)
	return answer{kind: k, body: b}, err
}

// errorAnswer makes the body of an error reply and the sentence in it. What is
// not an error of the contract is internal, and its text stays inside.
func errorAnswer(err error) (answer, string) { return errorAnswerOf("", err) }

// errorAnswerOf is errorAnswer for one key of many.
func errorAnswerOf(key string, err error) (answer, string) {
	var e *kinds.Error
	if !errors.As(err, &e) {
		e = &kinds.Error{Kind: kinds.Internal, Text: "the service failed; its log says how"}
	}
	text := sentence(e.Text)
	a, err := encode(e.Kind, errorBody{key, text, e.Kind, e.Holder, e.Revision})
	if err != nil {
		panic(err) // strings and numbers
	}
	return a, text
}

// maxSentence bounds the error text of a reply, in bytes.
const maxSentence = 500

// sentence makes text fit for a header: one line, no control characters, valid
// UTF-8, bounded.
func sentence(text string) string {
	text = strings.ToValidUTF8(text, "?")
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > maxSentence {
		cut := maxSentence
		for !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut]
	}
	if strings.TrimSpace(text) == "" {
		return "the call failed"
	}
	return text
}

// ms shows a duration in milliseconds with microsecond precision, for stats.
func ms(d time.Duration) json.Number {
	return json.Number(strconv.FormatFloat(float64(d.Microseconds())/1000, 'f', -1, 64))
}
