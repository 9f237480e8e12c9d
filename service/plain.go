package service

import (
	"bytes"
	"encoding/base64"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// The forms that nearly all records and replies have, read in one pass: each
// reader here takes only the exact form and reports false for any other, which
// is then left to encoding/json. Fuzz targets hold the two to each other.

// cursor reads a text from the front.
type cursor struct {
	rest string
	bad  bool
}

// skip takes text off the front if it stands there.
func (c *cursor) skip(text string) bool {
	rest, ok := strings.CutPrefix(c.rest, text)
	c.rest = rest
	return ok
}

// must takes text off the front.
func (c *cursor) must(text string) {
	if !c.skip(text) {
		c.bad = true
	}
}

// until takes what stands before the next quote, and the quote.
func (c *cursor) until() string {
	text, rest, ok := strings.Cut(c.rest, `"`)
	if !ok {
		c.bad = true
	}
	c.rest = rest
	return text
}

// token takes a text of the alphabet of keys and holders, and its quote.
func (c *cursor) token() string {
	text := c.until()
	if !isToken(text) {
		c.bad = true
	}
	return text
}

// number takes digits.
func (c *cursor) number() uint64 {
	var n uint64
	i := 0
	for i < len(c.rest) && '0' <= c.rest[i] && c.rest[i] <= '9' {
		n = 10*n + uint64(c.rest[i]-'0')
		i++
	}
	if i == 0 || i > 19 || i > 1 && c.rest[0] == '0' {
		c.bad = true
	}
	c.rest = c.rest[i:]
	return n
}

// time takes a time as Timestamp writes it, and its quote.
func (c *cursor) time() Timestamp {
	text := c.until()
	if len(text) != len(timestampLayout) {
		c.bad = true
		return 0
	}
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		c.bad = true
	}
	return TimestampOf(t)
}

// base64 decodes bytes.
func (c *cursor) base64(text string) []byte {
	b, err := base64.StdEncoding.DecodeString(text)
	c.bad = c.bad || err != nil || strings.ContainsAny(text, "\r\n") // which the decoder skips
	return b
}

// plainRecord reads what encode writes.
func plainRecord(data []byte) (r Record, ok bool) {
	c := cursor{rest: string(data)}
	c.must(`{"v":`)
	v := c.number()
	c.must(`,"key":"`)
	r.Key = c.token()
	if c.skip(`,"holder":"`) {
		r.Holder = c.token()
	}
	if c.skip(`,"ttl_ms":`) {
		ttl := c.number()
		c.bad = c.bad || ttl > 1<<53
		r.TTLMillis = int64(ttl)
	}
	if c.skip(`,"acquired_at":"`) {
		r.AcquiredAt = c.time()
	}
	c.must(`,"written_at":"`)
	r.WrittenAt = c.time()
	c.must(`,"event":"`)
	switch event := Event(c.until()); event {
	case Acquired, Renewed, Released, Expired:
		r.Event = event
	default:
		c.bad = true
	}
	c.must(`,"nonce":"`)
	r.Nonce = c.token()
	if c.skip(`,"horizon":"`) {
		r.Horizon = c.time()
	}
	if c.skip(`,"meta":"`) {
		r.Meta = c.until()
		for _, b := range []byte(r.Meta) {
			c.bad = c.bad || b < ' ' || b > '~' || b == '\\'
		}
	}
	if c.skip(`,"previous":{"holder":"`) {
		p := &Previous{Holder: c.token()}
		c.must(`,"revision":`)
		p.Revision = c.number()
		c.must(`,"ended":"`)
		p.Ended = c.token()
		c.must(`}`)
		r.Previous = p
	}
	if c.skip(`,"revision":`) {
		r.Revision = c.number()
	}
	r.Evicted = c.skip(`,"evicted":true`)
	c.must(`}`)
	r.V = int(v)
	return r, !c.bad && c.rest == "" && v < 100
}

// storedMessage is a message of the bucket as the JetStream API gives it.
type storedMessage struct {
	seq  uint64
	hdr  nats.Header
	data []byte
	at   time.Time
}

// How replies of STREAM.MSG.GET begin.
const (
	plainGet   = `{"type":"io.nats.jetstream.api.v1.stream_msg_get_response",`
	plainFound = plainGet + `"message":{"subject":"` + SubjectPrefix
	plainNone  = plainGet + `"error":{"code":404,"err_code":10037,"description":"no message found"}}`
)

// plainMessage reads the reply of STREAM.MSG.GET for key's last message; seq is
// 0 when there is none. What known has is given as e instead, without a look at
// the message's text.
func plainMessage(key string, reply []byte, known Known) (m storedMessage, e Entry, ok bool) {
	if string(reply) == plainNone {
		return m, e, true
	}
	rest, found := bytes.CutPrefix(reply, []byte(plainFound))
	if !found {
		return m, e, false
	}
	c := cursor{rest: string(rest)}
	c.must(key)
	c.must(`","seq":`)
	m.seq = c.number()
	c.must(`,"hdrs":"`)
	hdr := c.until()
	c.must(`,"data":"`)
	data := c.until()
	c.must(`,"time":"`)
	at, err := time.Parse(time.RFC3339, c.until()) // takes fractions
	m.at = at
	c.must(`}}`)
	if c.bad || err != nil || c.rest != "" || m.seq == 0 {
		return m, e, false
	}
	if known != nil {
		if e, ok := known(key, m.seq, at); ok {
			return m, e, true
		}
	}
	h := c.base64(hdr)
	m.data = c.base64(data)
	if c.bad {
		return m, e, false
	}
	m.hdr, ok = plainHeader(string(h))
	return m, e, ok
}

// plainHeader reads the lines of a NATS header.
func plainHeader(text string) (nats.Header, bool) {
	text, ok := strings.CutPrefix(text, "NATS/1.0\r\n")
	if !ok {
		return nil, false
	}
	h := make(nats.Header, 5)
	for {
		line, rest, ok := strings.Cut(text, "\r\n")
		if !ok {
			return nil, false
		}
		if line == "" {
			return h, rest == ""
		}
		name, value, ok := strings.Cut(line, ": ")
		if !ok || !isToken(name) || value == "" || value[0] == ' ' || value[len(value)-1] == ' ' || h[name] != nil {
			return nil, false
		}
		h[name] = []string{value}
		text = rest
	}
}

// plainAck reads the ack of a write that was stored.
func plainAck(data []byte) (seq uint64, ok bool) {
	c := cursor{rest: string(data)}
	c.must(`{"stream":"` + StreamName + `",`)
	c.skip(" ")
	c.must(`"seq":`)
	seq = c.number()
	c.must(`}`)
	if c.bad || c.rest != "" || seq == 0 {
		return 0, false
	}
	return seq, true
}

// getRequest is the body of STREAM.MSG.GET for key's last message.
func getRequest(key string) []byte {
	b := make([]byte, 0, 64+len(key))
	b = append(b, `{"last_by_subj":"`+SubjectPrefix...)
	b = append(b, key...)
	return append(b, `"}`...)
}

// appendTimestamp appends t as RFC 3339 in UTC with three decimals.
func appendTimestamp(b []byte, t Timestamp) []byte {
	u := t.Time()
	year, month, day := u.Date()
	hour, minute, second := u.Clock()
	if year < 0 || year > 9999 {
		return u.AppendFormat(b, timestampLayout)
	}
	b = appendPadded(b, year, 4)
	b = appendPadded(append(b, '-'), int(month), 2)
	b = appendPadded(append(b, '-'), day, 2)
	b = appendPadded(append(b, 'T'), hour, 2)
	b = appendPadded(append(b, ':'), minute, 2)
	b = appendPadded(append(b, ':'), second, 2)
	b = appendPadded(append(b, '.'), u.Nanosecond()/1e6, 3)
	return append(b, 'Z')
}

func appendPadded(b []byte, n, width int) []byte {
	for limit := 10; width > 1; width, limit = width-1, limit*10 {
		if n < limit {
			b = append(b, "000"[:width-1]...)
			break
		}
	}
	return strconv.AppendInt(b, int64(n), 10)
}
