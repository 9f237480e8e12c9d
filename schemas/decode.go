package schemas

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v5"
)

// Request is what a call uses of its request. Members that the call's schema does not describe stay zero.
type Request struct {
	Key      string
	Holder   string
	TTL      time.Duration // whole seconds
	Revision uint64        // 1 or more
	Timeout  time.Duration // of a forward; the schema's default if it was not sent
	Payload  []byte        // decoded; nil if absent or empty
	Wait     time.Duration // of an acquire
	Meta     string
	Prefix   string // list
	After    string // list: the key before the page
	Limit    int    // list
	Leases   []Pair // renew_many
}

// Pair is a key and the revision its holder knows.
type Pair struct {
	Key      string
	Revision uint64
}

// maxMeta bounds meta in bytes, which its schema can only bound in characters.
const maxMeta = 512 // P5

// field is where a member goes; one of its functions is set. Values come here after the schema has accepted
// them.
type field struct {
	text   func(*Request) *string
	number func(*Request, uint64)
	bytes  func(*Request) *[]byte  // base64
	item   func(*Request, Request) // one of a list, read like a request
}

// fields says where the members that requests use go.
var fields = map[string]field{
	"key":        {text: func(r *Request) *string { return &r.Key }},
	"holder":     {text: func(r *Request) *string { return &r.Holder }},
	"ttl_ms":     {number: func(r *Request, n uint64) { r.TTL = time.Duration(n) * time.Millisecond }},
	"revision":   {number: func(r *Request, n uint64) { r.Revision = n }},
	"timeout_ms": {number: func(r *Request, n uint64) { r.Timeout = time.Duration(n) * time.Millisecond }},
	"payload":    {bytes: func(r *Request) *[]byte { return &r.Payload }},
	"wait_ms":    {number: func(r *Request, n uint64) { r.Wait = time.Duration(n) * time.Millisecond }},
	"meta":       {text: func(r *Request) *string { return &r.Meta }},
	"prefix":     {text: func(r *Request) *string { return &r.Prefix }},
	"after":      {text: func(r *Request) *string { return &r.After }},
	"limit":      {number: func(r *Request, n uint64) { r.Limit = int(n) }},
	"leases":     {item: func(r *Request, item Request) { r.Leases = append(r.Leases, Pair{item.Key, item.Revision}) }},
}

// put stores a value that the schema has accepted.
func (f field) put(r *Request, v any) {
	switch {
	case f.text != nil:
		*f.text(r) = v.(string)
	case f.number != nil:
		f.number(r, whole(v))
	case f.bytes != nil:
		if data, _ := canonicalBase64(v.(string)); len(data) > 0 {
			*f.bytes(r) = data
		}
	case f.item != nil:
		for _, members := range v.([]any) {
			var item Request
			for name, v := range members.(map[string]any) {
				fields[name].put(&item, v)
			}
			f.item(r, item)
		}
	}
}

// whole is the value of an integer from 0 to 2^64-1, however it is written. It is never a float on the way (P4).
func whole(v any) uint64 {
	literal := string(v.(json.Number))
	if n, err := strconv.ParseUint(literal, 10, 64); err == nil {
		return n
	}
	r, _ := new(big.Rat).SetString(literal)
	return r.Num().Uint64()
}

// Decode reads one request. It returns an [*Error], fit to be shown to the client, if the request is not
// exactly one that the schema allows. The result shares no memory with raw.
func (s *Schema) Decode(raw []byte) (Request, error) {
	if req, ok := s.DecodePlain(raw); ok {
		return req, nil
	}
	return s.decode(raw)
}

// DecodePlain is Decode for a valid request in the form that nearly every client writes, which takes a few
// microseconds; ok is false for any other, and says nothing about it.
func (s *Schema) DecodePlain(raw []byte) (req Request, ok bool) {
	if !s.form.plain {
		return Request{}, false
	}
	req, ok = s.form.decode(raw)
	return req, ok && req.check() == nil
}

// decode reads a request of any form, and words what is wrong with it.
func (s *Schema) decode(raw []byte) (Request, error) {
	doc, fault := readRequest(raw, s.form)
	if fault != nil {
		return Request{}, fault
	}
	if err := s.js.Validate(doc); err != nil {
		return Request{}, s.explain(err, doc)
	}
	var req Request
	for _, m := range s.form.members {
		if m.form == nil {
			continue
		}
		if v, ok := doc[m.name]; ok {
			m.to.put(&req, v)
		} else if v := m.js.Default; v != nil {
			m.to.put(&req, v)
		}
	}
	if err := req.check(); err != nil {
		return Request{}, err
	}
	return req, nil
}

// check holds what a schema cannot say.
func (r *Request) check() error {
	if len(r.Meta) > maxMeta {
		return breaks(place{member: "meta"}, "must have at most %d bytes in UTF-8, got %d", maxMeta, len(r.Meta))
	}
	if len(r.Leases) < 2 {
		return nil
	}
	seen := make(map[string]bool, len(r.Leases))
	for i, p := range r.Leases {
		if seen[p.Key] {
			return breaks(place{list: "leases", index: i, member: "key"}, "must not stand twice in leases, got %s", quote(p.Key))
		}
		seen[p.Key] = true
	}
	return nil
}

// place says where in a request a value stands: a member, or a member of an item of a list.
type place struct {
	list   string
	index  int
	member string
}

func (p place) String() string {
	switch {
	case p.list == "":
		return p.member
	case p.member == "":
		return fmt.Sprintf("%s[%d]", p.list, p.index)
	default:
		return fmt.Sprintf("%s[%d].%s", p.list, p.index, p.member)
	}
}

const (
	maxNumber   = 32 // characters of a number
	maxExponent = 3  // digits of its exponent
)

// readRequest builds the generic form of a request, for the schema to judge, in one pass over its tokens (P2).
func readRequest(raw []byte, n *form) (map[string]any, *Error) {
	if bytes.HasPrefix(raw, []byte("\xef\xbb\xbf")) {
		return nil, broken("the request must be UTF-8 without a byte order mark")
	}
	// Equal names are found here, not by the library: an unknown name ends the pass, which bounds what must be remembered.
	r := reader{jsontext.NewDecoder(bytes.NewBuffer(raw), jsontext.AllowDuplicateNames(true))}
	switch kind := r.dec.PeekKind(); kind {
	case jsontext.KindBeginObject:
	case jsontext.KindInvalid:
		_, err := r.dec.ReadToken()
		if err == io.EOF {
			return nil, broken("the request must be one JSON object, got nothing")
		}
		return nil, syntax(err)
	default:
		return nil, broken("the request must be one JSON object, got %s", kindText(kind))
	}
	doc, fault := r.object(n, place{})
	if fault != nil {
		return nil, fault
	}
	rest := bytes.TrimLeft(raw[r.dec.InputOffset():], " \t\r\n")
	if len(rest) > 0 {
		return nil, broken("the request must be one JSON object, got more data after it at byte %d", len(raw)-len(rest))
	}
	return doc, nil
}

type reader struct {
	dec *jsontext.Decoder
}

func (r reader) object(n *form, at place) (map[string]any, *Error) {
	if _, err := r.dec.ReadToken(); err != nil {
		return nil, syntax(err)
	}
	doc := map[string]any{}
	for {
		switch kind := r.dec.PeekKind(); kind {
		case jsontext.KindString:
		case jsontext.KindEndObject:
			_, err := r.dec.ReadToken()
			if err != nil {
				return nil, syntax(err)
			}
			return doc, nil
		default:
			_, err := r.dec.ReadToken()
			return nil, syntax(err)
		}
		name, fault := r.text()
		if fault != nil {
			return nil, fault
		}
		at.member = name
		m := n.member(name)
		if m == nil {
			return nil, unknown(name, at, n)
		}
		if _, twice := doc[name]; twice {
			return nil, &Error{Member: at.String(), Rule: fmt.Sprintf("member %q stands twice", at)}
		}
		if doc[name], fault = r.value(m.form, at); fault != nil {
			return nil, fault
		}
	}
}

func (r reader) array(n *form, at place) ([]any, *Error) {
	if _, err := r.dec.ReadToken(); err != nil {
		return nil, syntax(err)
	}
	list := []any{}
	for r.dec.PeekKind() != jsontext.KindEndArray {
		if most := n.js.MaxItems; most >= 0 && len(list) == most {
			return nil, breaks(at, "must have at most %d items, got more", most)
		}
		item, fault := r.value(n.items, place{list: at.member, index: len(list)})
		if fault != nil {
			return nil, fault
		}
		list = append(list, item)
	}
	if _, err := r.dec.ReadToken(); err != nil {
		return nil, syntax(err)
	}
	return list, nil
}

// value reads the value at a place. Where nobody looks at it, n is nil, and so is the value once it is checked.
func (r reader) value(n *form, at place) (any, *Error) {
	kind := r.dec.PeekKind()
	switch kind {
	case jsontext.KindBeginObject:
		if n != nil && n.members != nil {
			return r.object(n, at)
		}
		return nil, nested(n, at, kind)
	case jsontext.KindBeginArray:
		if n != nil && n.items != nil {
			return r.array(n, at)
		}
		return nil, nested(n, at, kind)
	case jsontext.KindString:
		if n != nil {
			s, fault := r.text()
			if fault == nil && tooLong(s, n.js) {
				fault = breaks(at, "must have %s characters, got %d bytes", lengthText(n.js), len(s))
			}
			return s, fault
		}
	}
	v, err := r.dec.ReadValue()
	if err != nil {
		return nil, syntax(err)
	}
	switch kind {
	case jsontext.KindNumber:
		return number(v, at)
	case jsontext.KindTrue, jsontext.KindFalse:
		return kind == jsontext.KindTrue, nil
	default:
		return nil, nil
	}
}

// text reads a string and gives what it means.
func (r reader) text() (string, *Error) {
	v, err := r.dec.ReadValue()
	if err != nil {
		return "", syntax(err)
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1]), nil
	}
	s, err := jsontext.AppendUnquote(nil, v)
	if err != nil {
		return "", syntax(err)
	}
	return string(s), nil
}

// tooLong reports whether s is longer than the schema allows however many bytes a character has. A
// pattern need not be matched against such a string.
func tooLong(s string, js *jsonschema.Schema) bool {
	return js.MaxLength >= 0 && len(s) > utf8.UTFMax*js.MaxLength
}

func number(v jsontext.Value, at place) (any, *Error) {
	if len(v) > maxNumber {
		return nil, breaks(at, "must be a number of at most %d characters, got %d", maxNumber, len(v))
	}
	if e := bytes.IndexAny(v, "eE"); e >= 0 && len(bytes.TrimLeft(v[e+1:], "+-")) > maxExponent {
		return nil, breaks(at, "must be a number with at most %d digits of exponent, got %s", maxExponent, v)
	}
	return json.Number(v), nil
}
