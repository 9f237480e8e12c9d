package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"strconv"
	"strings"
	"time"

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
}

// fields says where the members that requests use go. Values come here after the schema has accepted them.
var fields = map[string]func(*Request, any){
	"key":        func(r *Request, v any) { r.Key = v.(string) },
	"holder":     func(r *Request, v any) { r.Holder = v.(string) },
	"ttl_ms":     func(r *Request, v any) { r.TTL = time.Duration(whole(v)) * time.Millisecond },
	"revision":   func(r *Request, v any) { r.Revision = whole(v) },
	"timeout_ms": func(r *Request, v any) { r.Timeout = time.Duration(whole(v)) * time.Millisecond },
	"payload": func(r *Request, v any) {
		if s := v.(string); s != "" {
			r.Payload, _ = canonicalBase64(s)
		}
	},
}

// whole is the value of an integer from 0 to 2^64-1, however it is written, without ever being a float.
func whole(v any) uint64 {
	literal := string(v.(json.Number))
	if n, err := strconv.ParseUint(literal, 10, 64); err == nil {
		return n
	}
	r, _ := new(big.Rat).SetString(literal)
	return r.Num().Uint64()
}

// node is what the token pass must know of a schema to refuse early what the schema could never accept.
type node struct {
	schema  *jsonschema.Schema
	names   []string         // what an object may have, in the schema's order
	members map[string]*node // by name; nil where the value is not looked at; a nil map where no object may stand
	items   *node            // of an array, nil where no array may stand
}

// requestNode is the node of a request schema, which must keep to what the decoder supports.
func requestNode(js *jsonschema.Schema) (*node, error) {
	n, err := newNode(js)
	if err != nil {
		return nil, err
	}
	if n.members == nil {
		return nil, errors.New("a request must be an object")
	}
	for name, member := range n.members {
		if member != nil && fields[name] == nil {
			return nil, fmt.Errorf("no field for member %q", name)
		}
	}
	return n, nil
}

func newNode(js *jsonschema.Schema) (*node, error) {
	js = deref(js)
	n := &node{schema: js}
	if js.PropertyNames != nil {
		for _, name := range deref(js.PropertyNames).Enum {
			n.names = append(n.names, name.(string))
		}
	}
	if len(js.Properties) > 0 {
		n.members = map[string]*node{}
		for _, name := range n.names {
			n.members[name] = nil
		}
		for name, property := range js.Properties {
			if _, ok := n.members[name]; !ok {
				return nil, fmt.Errorf("member %q is not in the list of propertyNames", name)
			}
			child, err := newNode(property)
			if err != nil {
				return nil, err
			}
			n.members[name] = child
		}
	}
	if js.Items2020 != nil {
		items, err := newNode(js.Items2020)
		if err != nil {
			return nil, err
		}
		n.items = items
	}
	return n, nil
}

// deref follows references that stand alone.
func deref(js *jsonschema.Schema) *jsonschema.Schema {
	for js.Ref != nil && len(js.Types) == 0 {
		js = js.Ref
	}
	return js
}

// Decode reads one request. Its error is an [*Error], fit to be shown to the client.
func (s *Schema) Decode(raw []byte) (Request, error) {
	if s.root == nil {
		return Request{}, &Error{Rule: s.name + " is not the schema of a request"}
	}
	doc, fault := readRequest(raw, s.root)
	if fault != nil {
		return Request{}, fault
	}
	if err := s.js.Validate(doc); err != nil {
		return Request{}, s.explain(err, doc)
	}
	var req Request
	for name, member := range s.root.members {
		if member == nil {
			continue
		}
		if v, ok := doc[name]; ok {
			fields[name](&req, v)
		} else if member.schema.Default != nil {
			fields[name](&req, member.schema.Default)
		}
	}
	return req, nil
}

// reader builds the generic form of one request from its tokens, for the schema to judge.
type reader struct {
	dec *jsontext.Decoder
}

const (
	maxNumber   = 32 // characters of a number
	maxExponent = 3  // digits of its exponent
)

func readRequest(raw []byte, n *node) (map[string]any, *Error) {
	if bytes.HasPrefix(raw, []byte("\xef\xbb\xbf")) {
		return nil, &Error{Rule: "the request must be plain UTF-8 without a byte order mark"}
	}
	// Names are compared here, where an unknown one ends the reading: that bounds the memory of the comparison.
	r := reader{jsontext.NewDecoder(bytes.NewBuffer(raw), jsontext.AllowDuplicateNames(true))}
	switch kind := r.dec.PeekKind(); kind {
	case jsontext.KindBeginObject:
	case jsontext.KindInvalid:
		_, err := r.dec.ReadToken()
		if err == io.EOF {
			return nil, &Error{Rule: "the request is empty and must be one JSON object"}
		}
		return nil, syntax(err)
	default:
		return nil, &Error{Rule: "the request must be one JSON object, got " + kindText(kind)}
	}
	doc, fault := r.object(n)
	if fault != nil {
		return nil, fault
	}
	end := r.dec.InputOffset()
	if rest := bytes.TrimLeft(raw[end:], " \t\r\n"); len(rest) > 0 {
		return nil, &Error{Rule: fmt.Sprintf("the request must end after its JSON object, got more data at byte %d", len(raw)-len(rest))}
	}
	return doc, nil
}

func (r *reader) object(n *node) (map[string]any, *Error) {
	if _, err := r.dec.ReadToken(); err != nil {
		return nil, syntax(err)
	}
	doc := make(map[string]any, len(n.names))
	for {
		switch kind := r.dec.PeekKind(); kind {
		case jsontext.KindEndObject:
			if _, err := r.dec.ReadToken(); err != nil {
				return nil, syntax(err)
			}
			return doc, nil
		case jsontext.KindString, jsontext.KindInvalid:
		default:
			return nil, &Error{Rule: "the name of a member must be a string, got " + kindText(kind)}
		}
		name, fault := r.text()
		if fault != nil {
			return nil, fault
		}
		member, known := n.members[name]
		if !known {
			return nil, unknownMember(name, n)
		}
		if _, twice := doc[name]; twice {
			return nil, &Error{Member: name, Rule: fmt.Sprintf("member %q stands twice", name)}
		}
		if doc[name], fault = r.value(name, member); fault != nil {
			return nil, fault
		}
	}
}

func (r *reader) array(name string, n *node) ([]any, *Error) {
	if _, err := r.dec.ReadToken(); err != nil {
		return nil, syntax(err)
	}
	list := []any{}
	for r.dec.PeekKind() != jsontext.KindEndArray {
		if max := n.schema.MaxItems; max >= 0 && len(list) == max {
			return nil, &Error{Member: name, Rule: fmt.Sprintf("%s must have at most %d items", name, max)}
		}
		item, fault := r.value(fmt.Sprintf("%s[%d]", name, len(list)), n.items)
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

// value reads the value of the named member. Where n is nil nobody looks at it: it is checked and given as nil.
func (r *reader) value(name string, n *node) (any, *Error) {
	switch kind := r.dec.PeekKind(); kind {
	case jsontext.KindBeginObject:
		if n == nil || n.members == nil {
			return nil, nesting(name, n, kind)
		}
		return r.object(n)
	case jsontext.KindBeginArray:
		if n == nil || n.items == nil {
			return nil, nesting(name, n, kind)
		}
		return r.array(name, n)
	case jsontext.KindString:
		if n != nil {
			return r.text()
		}
	case jsontext.KindNumber:
		v, err := r.dec.ReadValue()
		if err != nil {
			return nil, syntax(err)
		}
		return number(name, v)
	case jsontext.KindTrue, jsontext.KindFalse:
		if _, err := r.dec.ReadValue(); err != nil {
			return nil, syntax(err)
		}
		return kind == jsontext.KindTrue, nil
	}
	// null, a string that nobody looks at, or no value at all
	if _, err := r.dec.ReadValue(); err != nil {
		return nil, syntax(err)
	}
	return nil, nil
}

// text reads a string and gives what it means.
func (r *reader) text() (string, *Error) {
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

func number(name string, v jsontext.Value) (any, *Error) {
	if len(v) > maxNumber {
		return nil, &Error{Member: name, Rule: fmt.Sprintf("%s must be written with at most %d characters, got a number of %d", name, maxNumber, len(v))}
	}
	if e := bytes.IndexAny(v, "eE"); e >= 0 && len(bytes.TrimLeft(v[e+1:], "+-")) > maxExponent {
		return nil, &Error{Member: name, Rule: fmt.Sprintf("%s must have at most %d digits in its exponent, got %s", name, maxExponent, v)}
	}
	return json.Number(v), nil
}

func kindText(k jsontext.Kind) string {
	switch k {
	case jsontext.KindBeginObject, jsontext.KindEndObject:
		return "an object"
	case jsontext.KindBeginArray, jsontext.KindEndArray:
		return "an array"
	case jsontext.KindString:
		return "a string"
	case jsontext.KindNumber:
		return "a number"
	default:
		return strings.Trim(k.String(), "<>")
	}
}
