package schemas

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v5"
)

// Error says why a request is invalid. Both texts are printable ASCII and short; what the client sent
// stands in them quoted, escaped and cut.
type Error struct {
	Member string // the member at fault, empty if it is the request as a whole
	Rule   string // one sentence that names the member and the rule it breaks
}

func (e *Error) Error() string { return e.Rule }

// broken is the fault of a request as a whole.
func broken(format string, args ...any) *Error {
	return &Error{Rule: fmt.Sprintf(format, args...)}
}

// breaks is the fault of the value at a place.
func breaks(at place, format string, args ...any) *Error {
	member := at.String()
	return &Error{Member: member, Rule: member + " " + fmt.Sprintf(format, args...)}
}

// syntax is the fault of text that is not JSON.
func syntax(err error) *Error {
	var at *jsontext.SyntacticError
	if !errors.As(err, &at) || errors.Is(err, io.ErrUnexpectedEOF) {
		return broken("the request must be one JSON object, got only the beginning of one")
	}
	// The library escapes what it shows, but keeps printable characters outside ASCII.
	reason := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, at.Err.Error())
	return broken("the request must be valid JSON, got at byte %d: %.150s", at.ByteOffset, reason)
}

func unknown(name string, at place, n *form) *Error {
	where := ""
	if at.list != "" {
		where = fmt.Sprintf(" in %s[%d]", at.list, at.index)
	}
	shown, _ := escape(name)
	return &Error{
		Member: shown,
		Rule:   fmt.Sprintf("unknown member %s%s; known members are %s", quote(name), where, strings.Join(n.names, ", ")),
	}
}

// nested is the fault of an object or array where the schema has none.
func nested(n *form, at place, kind jsontext.Kind) *Error {
	if n == nil {
		return breaks(at, "must be a plain value, got %s", kindText(kind))
	}
	return breaks(at, "must be %s, got %s", typeText(n.js), kindText(kind))
}

// fault is one rule of the schema, broken at one place of the request.
type fault struct {
	at      place
	member  int // place in the family of the outermost member
	keyword string
	form    *form
	value   any
}

// keywords stand in the order in which they are told if several are broken at one place.
var keywords = []string{"required", "type", "minLength", "pattern", "maxLength", "minimum", "maximum", "multipleOf", "contentEncoding"}

// explain makes one sentence of what the schema found, always the same for the same request.
func (s *Schema) explain(err error, doc map[string]any) *Error {
	var found *jsonschema.ValidationError
	if !errors.As(err, &found) {
		return broken("the request cannot be validated")
	}
	f := slices.MinFunc(s.faults(nil, found, doc), func(a, b fault) int {
		return cmp.Or(
			cmp.Compare(a.member, b.member),
			cmp.Compare(a.at.index, b.at.index),
			cmp.Compare(a.at.member, b.at.member),
			cmp.Compare(slices.Index(keywords, a.keyword), slices.Index(keywords, b.keyword)))
	})
	if f.keyword == "required" {
		return breaks(f.at, "is missing")
	}
	return breaks(f.at, "must %s, got %s", ruleText(f), gotText(f))
}

// faults gives the innermost causes of e.
func (s *Schema) faults(list []fault, e *jsonschema.ValidationError, doc map[string]any) []fault {
	for _, cause := range e.Causes {
		list = s.faults(list, cause, doc)
	}
	if len(e.Causes) > 0 {
		return list
	}
	f := fault{form: s.form, value: doc, keyword: e.KeywordLocation[strings.LastIndexByte(e.KeywordLocation, '/')+1:]}
	path := strings.Split(e.InstanceLocation, "/")[1:]
	for _, token := range path {
		switch v := f.value.(type) {
		case map[string]any:
			f.at.member = token
			f.form, f.value = f.form.member(token).form, v[token]
		case []any:
			f.at.list, f.at.member = f.at.member, ""
			f.at.index, _ = strconv.Atoi(token)
			f.form, f.value = f.form.items, v[f.at.index]
		}
	}
	if f.keyword == "required" {
		object, _ := f.value.(map[string]any)
		f.at.member = f.form.js.Required[slices.IndexFunc(f.form.js.Required, func(name string) bool {
			_, ok := object[name]
			return !ok
		})]
	}
	f.member = slices.Index(s.form.names, cmp.Or(f.at.list, f.at.member))
	return append(list, f)
}

// ruleText says in words what the schema asks for where f broke it.
func ruleText(f fault) string {
	js := f.form.js
	switch f.keyword {
	case "type":
		return "be " + typeText(js)
	case "minimum", "maximum":
		return "be " + span(js.Minimum, js.Maximum)
	case "multipleOf":
		text := "be a multiple of " + js.MultipleOf.RatString()
		if strings.HasSuffix(f.at.member, "_ms") && js.MultipleOf.RatString() == "1000" {
			text += " (whole seconds)"
		}
		return text
	case "minLength", "maxLength":
		return "have " + lengthText(js) + " characters"
	case "minItems", "maxItems":
		return "have " + span(length(js.MinItems), length(js.MaxItems)) + " items"
	case "pattern":
		return "have only the characters A-Z a-z 0-9 _ -"
	case "contentEncoding":
		return "be canonical standard base64 with padding and without line breaks"
	default:
		return "keep its rule " + f.keyword
	}
}

func lengthText(js *jsonschema.Schema) string {
	return span(length(js.MinLength), length(js.MaxLength))
}

func length(n int) *big.Rat {
	if n < 0 {
		return nil
	}
	return big.NewRat(int64(n), 1)
}

func span(least, most *big.Rat) string {
	switch {
	case most == nil:
		return "at least " + least.RatString()
	case least == nil:
		return "at most " + most.RatString()
	default:
		return least.RatString() + " to " + most.RatString()
	}
}

// gotText shows what the client sent instead.
func gotText(f fault) string {
	switch v := f.value.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case json.Number:
		return string(v)
	case string:
		if f.keyword == "maxLength" {
			return strconv.Itoa(utf8.RuneCountInString(v))
		}
		return quote(v)
	case []any:
		if f.keyword == "minItems" {
			return strconv.Itoa(len(v))
		}
		return "an array"
	default:
		return "an object"
	}
}

func typeText(js *jsonschema.Schema) string {
	switch types := strings.Join(js.Types, " or "); types {
	case "integer":
		return "a whole number"
	case "array", "object":
		return "an " + types
	default:
		return "a " + types
	}
}

func kindText(k jsontext.Kind) string {
	switch k {
	case jsontext.KindBeginObject:
		return "an object"
	case jsontext.KindBeginArray:
		return "an array"
	case jsontext.KindString:
		return "a string"
	case jsontext.KindNumber:
		return "a number"
	case jsontext.KindNull:
		return "null"
	case jsontext.KindTrue, jsontext.KindFalse:
		return "true or false"
	default:
		return "something else"
	}
}

// maxShown is how much a client sees again of one thing it sent, in bytes of its escaped form.
const maxShown = 64

// quote makes printable ASCII of s, cut and in quotes.
func quote(s string) string {
	shown, cut := escape(s)
	if cut {
		return `"` + shown + `"...`
	}
	return `"` + shown + `"`
}

// escape makes printable ASCII of as much of s as may be shown.
func escape(s string) (shown string, cut bool) {
	for len(s) > 0 {
		_, size := utf8.DecodeRuneInString(s)
		q := strconv.QuoteToASCII(s[:size])
		q = q[1 : len(q)-1]
		if len(shown)+len(q) > maxShown {
			return shown, true
		}
		shown, s = shown+q, s[size:]
	}
	return shown, false
}
