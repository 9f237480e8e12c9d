package leased

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// The bodies of replies. Member order is the order on the wire.
type (
	leaseBody struct {
		Granted *bool `json:"granted,omitempty"`
		Held    bool  `json:"held"`
		leaseMembers
	}
	leaseMembers struct {
		Key        string            `json:"key"`
		Holder     string            `json:"holder"`
		Revision   uint64            `json:"revision"`
		AcquiredAt service.Timestamp `json:"acquired_at"`
		ExpiresAt  service.Timestamp `json:"expires_at"`
		TTLMillis  int64             `json:"ttl_ms"`
		LeftMillis int64             `json:"left_ms"`
	}
	freedBody struct {
		Released bool   `json:"released"`
		Held     bool   `json:"held"`
		Key      string `json:"key"`
		Holder   string `json:"holder"`
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
		Error    string     `json:"error"`
		Kind     kinds.Kind `json:"kind"`
		Holder   string     `json:"holder,omitempty"`
		Revision uint64     `json:"revision,omitempty"`
	}
)

func members(l service.Lease) leaseMembers {
	return leaseMembers{l.Key, l.Holder, l.Revision, l.AcquiredAt, l.ExpiresAt, l.TTL.Milliseconds(), l.Left.Milliseconds()}
}

// leaseAnswer makes the reply of a lease call.
func leaseAnswer(r service.Result, err error) (answer, error) {
	if err != nil {
		return answer{}, err
	}
	yes, no := true, false
	var body any
	switch r.Kind {
	case kinds.Granted, kinds.Renewed:
		body = leaseBody{&yes, true, members(r.Lease)}
	case kinds.Denied:
		body = leaseBody{&no, true, members(r.Lease)}
	case kinds.Held:
		body = leaseBody{nil, true, members(r.Lease)}
	case kinds.Free:
		body = freeBody{false, r.Lease.Key}
	case kinds.Released, kinds.Evicted:
		body = freedBody{true, false, r.Lease.Key, r.Lease.Holder, r.Lease.Revision}
	}
	return encode(r.Kind, body)
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
	return answer{k, b}, err
}

// errorAnswer makes the body of an error reply and the sentence in it. What is
// not an error of the contract is internal, and its text stays inside.
func errorAnswer(err error) (answer, string) {
	var e *kinds.Error
	if !errors.As(err, &e) {
		e = &kinds.Error{Kind: kinds.Internal, Text: "the service failed; its log says how"}
	}
	text := sentence(e.Text)
	a, err := encode(e.Kind, errorBody{text, e.Kind, e.Holder, e.Revision})
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
