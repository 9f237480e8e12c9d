package leased

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"math"
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
		b = append(b, `,"meta":`...)
		b = append(b, marshal(l.Meta)...)
	}
	return append(b, '}')
}

// leaseAnswer makes the reply of a lease call, without meta if it would not fit the
// connection.
func (s *Service) leaseAnswer(r service.Result, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	a := leaseReply(r)
	if r.Lease.Meta != "" && len(a.body) > int(s.front.MaxPayload()) {
		r.Lease.Meta = ""
		a = leaseReply(r)
	}
	if r.Waited {
		a.unheard = func() {
			s.workers.run(func() {
				_ = s.safely("acquire", func() error {
					s.leases.TakeBack(s.callCtx, r.Lease)
					return nil
				})
			})
		}
	}
	return a, nil
}

func leaseReply(r service.Result) answer {
	var body any
	switch r.Kind {
	case kinds.Granted, kinds.Renewed:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"granted":true,"held":true,`), r.Lease)}
	case kinds.Denied:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"granted":false,"held":true,`), r.Lease)}
	case kinds.Held:
		return answer{kind: r.Kind, body: appendLease([]byte(`{"held":true,`), r.Lease)}
	case kinds.Free:
		body = freeBody{false, r.Lease.Key}
	case kinds.Released, kinds.Evicted:
		body = freedBody{true, false, r.Lease.Key, r.Lease.Holder, r.Lease.Revision}
	}
	return encode(r.Kind, body)
}

// listAnswer makes the reply of a page, cut where it would not fit the connection. A lease
// that alone does not is shown without meta.
func (s *Service) listAnswer(leases []service.Lease, next string, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	most := int(s.front.MaxPayload()) - len(`],"next":""}`) - 128 // for the longest key
	body := []byte(`{"leases":[`)
	for i, l := range leases {
		whole := len(body)
		if i > 0 {
			body = append(body, ',')
		}
		if body = appendLease(append(body, '{'), l); len(body) <= most {
			continue
		}
		body = body[:whole]
		if i > 0 {
			next = leases[i-1].Key
			break
		}
		l.Meta = ""
		body = appendLease(append(body, '{'), l)
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
	most := int(s.front.MaxPayload())
	if fit := renewalsThatFit(most, r.Holder, leases); fit < len(leases) {
		return answer{}, kinds.Errorf(kinds.ReplyTooLarge, "nothing was renewed: the reply for %d leases might not fit a message of at most %d bytes, and that for the first %d does", len(leases), most, fit)
	}
	renewals := s.leases.StartRenewals(r.Holder, r.TTL, leases)
	results := make([]renewal, len(renewals))
	finish := func(i int) {
		results[i].key = leases[i].Key
		results[i].err = s.safely("renew_many", func() (err error) {
			results[i].Result, err = renewals[i].Finish(ctx)
			return err
		})
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

	s.logFailed(results)
	a := renewalsAnswer(results, false)
	if len(a.body) > most {
		a = renewalsAnswer(results, true)
	}
	return a, nil
}

// renewal is what came of one lease of many.
type renewal struct {
	key string
	service.Result
	err error
}

// logFailed tells of the results that are internal, in one line: there may be many.
func (s *Service) logFailed(results []renewal) {
	var failed []renewal
	for _, r := range results {
		if kinds.Of(r.err) == kinds.Internal {
			failed = append(failed, r)
		}
	}
	if len(failed) > 0 {
		s.log.Error("renewals of a call failed", "endpoint", "renew_many", "leases", len(failed), "key", failed[0].key, "error", failed[0].err)
	}
}

// renewalsAnswer makes the reply of a renew_many; a brief one is without meta and cuts
// the sentences.
func renewalsAnswer(results []renewal, brief bool) answer {
	counts := make([]kinds.Kind, len(results))
	body := append(make([]byte, 0, 256*len(results)), `{"leases":[`...)
	for i, r := range results {
		if i > 0 {
			body = append(body, ',')
		}
		if brief {
			r.Lease.Meta = ""
		}
		a := leaseReply(r.Result)
		if r.err != nil {
			a = errorAnswerOf(r.key, r.err, brief)
		}
		body, counts[i] = append(body, a.body...), a.kind
	}
	return answer{counts: counts, body: append(body, "]}"...)}
}

// longestRenewal is what a renewed lease takes in a brief reply, but for its key and
// holder, and a comma. An error, with its key and a short sentence, takes less.
var longestRenewal = len(appendLease([]byte(`{"granted":true,"held":true,`), service.Lease{Revision: math.MaxUint64,
	AcquiredAt: endOfTime, ExpiresAt: endOfTime, TTL: service.MaxTTL, Left: service.MaxTTL})) + 1

const endOfTime service.Timestamp = 253402300799999 // the last that RFC 3339 can say

// renewalsThatFit is how many of leases, from the first on, have a brief reply of at most
// most bytes, whatever comes of them (P18).
func renewalsThatFit(most int, holder string, leases []service.KeyRevision) int {
	room := most - len(`{"leases":[]}`)
	for i, l := range leases {
		if room -= longestRenewal + len(l.Key) + len(holder); room < 0 {
			return i
		}
	}
	return len(leases)
}

// forwardAnswer makes the reply of a forward.
func forwardAnswer(f service.Forwarded, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	payload := f.Payload
	if payload == nil {
		payload = []byte{} // an empty reply is "", not null
	}
	return encode(kinds.Forwarded, forwardBody{f.Holder, f.Revision, payload, f.Attempts}), nil
}

// forwardRoom is how long the answer of an owner may be for the reply of the forward to
// fit the connection.
func (s *Service) forwardRoom(to service.Forwarded) int {
	frame := len(`{"holder":"","revision":,"payload":"","attempts":}`) + len(to.Holder) + len(strconv.FormatUint(to.Revision, 10)) + len(strconv.Itoa(to.Attempts))
	return max(0, base64.StdEncoding.DecodedLen((int(s.front.MaxPayload())-frame)/4*4))
}

func encode(k kinds.Kind, body any) answer { return answer{kind: k, body: marshal(body)} }

// marshal is JSON that is not meant for HTML: it needs fewer escapes.
func marshal(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err) // strings, numbers and bytes
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// errorAnswer makes an error reply. What is not an error of the contract is internal,
// and its text stays inside.
func errorAnswer(err error) answer { return errorAnswerOf("", err, false) }

// errorAnswerOf is errorAnswer for one key of many, if there is a key.
func errorAnswerOf(key string, err error, brief bool) answer {
	var e *kinds.Error
	if !errors.As(err, &e) {
		e = &kinds.Error{Kind: kinds.Internal, Text: "the service failed; its log says how"}
	}
	text := sentence(e.Text)
	if brief {
		text = sentence(text[:min(len(text), shortSentence)])
	}
	a := encode(e.Kind, errorBody{key, text, e.Kind, e.Holder, e.Revision})
	a.text = text
	return a
}

// shortSentence is how long the text of an error is where little fits.
const shortSentence = 48

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
