package testnats

import (
	"bytes"
	"strconv"
)

// splitter cuts what a NATS server sends into protocol messages, so that one can be left out.
type splitter struct {
	buf    []byte
	opaque bool // not the text protocol (TLS, websocket): passed as it comes
}

// maxLine bounds a protocol line; what is longer is some other protocol.
const maxLine = 1 << 20

// feed takes the next bytes, of which it keeps copies, and returns what to send on: whole messages,
// in as few chunks as dropped allows. The end of a message not yet whole waits for the rest.
func (s *splitter) feed(b []byte, dropped func(frame []byte) (Mode, bool)) []chunk {
	if s.opaque {
		if len(b) == 0 {
			return nil
		}
		return []chunk{{data: bytes.Clone(b)}}
	}
	s.buf = append(s.buf, b...)
	var out []chunk
	start, end := 0, 0 // what is whole and not yet in out
	for end < len(s.buf) {
		n := frameLen(s.buf[end:])
		if n < 0 {
			s.opaque = true
			out = append(out, chunk{data: s.buf[start:]})
			s.buf = nil
			return out
		}
		if n == 0 {
			break
		}
		if then, drop := dropped(s.buf[end : end+n]); drop {
			out = append(out, chunk{data: s.buf[start:end], mark: true, then: then})
			start = end + n
		}
		end += n
	}
	if end > start {
		out = append(out, chunk{data: s.buf[start:end]})
	}
	if end > 0 { // the chunks keep the old array
		s.buf = append([]byte(nil), s.buf[end:]...)
	}
	return out
}

// frameLen is the length of the message at the start of b, 0 when it is not all there, -1 when b
// is not the NATS text protocol.
func frameLen(b []byte) int {
	if c := b[0]; (c < 'A' || c > 'Z') && c != '+' && c != '-' {
		return -1
	}
	i := bytes.IndexByte(b[:min(len(b), maxLine)], '\n')
	if i < 0 {
		if len(b) >= maxLine {
			return -1
		}
		return 0
	}
	line := bytes.TrimRight(b[:i], "\r")
	verb, _, _ := bytes.Cut(line, []byte(" "))
	switch string(verb) {
	case "MSG", "HMSG", "RMSG", "LMSG":
		// In all of them the last field is the length of what follows, headers included.
		size, err := strconv.Atoi(string(line[bytes.LastIndexByte(line, ' ')+1:]))
		if err != nil || size < 0 {
			return -1
		}
		n := i + 1 + size + len("\r\n")
		if len(b) < n {
			return 0
		}
		return n
	}
	return i + 1
}

// PubAck matches JetStream's acknowledgement of a message stored in stream, for DropNext.
func PubAck(stream string) func(frame []byte) bool {
	name := []byte(`"stream":"` + stream + `"`)
	return func(frame []byte) bool {
		return bytes.Contains(frame, name) && bytes.Contains(frame, []byte(`"seq":`)) && !bytes.Contains(frame, []byte(`"error":`))
	}
}

// Containing matches what holds each of the parts, for DropNext.
func Containing(parts ...string) func(frame []byte) bool {
	return func(frame []byte) bool {
		for _, p := range parts {
			if !bytes.Contains(frame, []byte(p)) {
				return false
			}
		}
		return true
	}
}
