package schemas

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v5"
)

// Error says why a request is invalid. Both texts are printable ASCII of bounded length; what the client
// sent stands in them quoted, escaped and cut.
type Error struct {
	Member string // the member at fault, empty when it is the request as a whole
	Rule   string // one sentence that names the member and the rule it breaks
}

func (e *Error) Error() string { return e.Rule }

// maxShown is how much of what a client sent is shown to it again, in bytes.
const maxShown = 64

// quote makes printable ASCII of s, in quotes, and cuts it.
func quote(s string) string {
	if len(s) > maxShown {
		s = s[:maxShown] // bounds the work below; the escaped form is cut again
	}
	q := strconv.QuoteToASCII(s)
	if len(q) <= maxShown+2 {
		return q
	}
	return q
}

func syntax(err error) *Error {
	var at *jsontext.SyntacticError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return &Error{Rule: "the request ends before its JSON object does"}
	case errors.As(err, &at):
		return &Error{Rule: fmt.Sprintf("the request is not valid JSON at byte %d: %s", at.ByteOffset, printable(at.Err.Error()))}
	default:
		return &Error{Rule: "the request is not valid JSON"}
	}
}

// printable makes printable ASCII of a library's message.
func printable(s string) string {
	q := strconv.QuoteToASCII(s)
	q = strings.ReplaceAll(q[1:len(q)-1], `\"`, `"`)
	return q[:min(len(q), 200)]
}

func unknownMember(name string, n *node) *Error {
	q := quote(name)
	return &Error{
		Member: q[1 : len(q)-1],
		Rule:   fmt.Sprintf("unknown member %s; known members are %s", q, strings.Join(n.names, ", ")),
	}
}

func nesting(name string, n *node, kind jsontext.Kind) *Error {
	if n == nil {
		return &Error{Member: name, Rule: fmt.Sprintf("%s must not be nested, got %s", name, kindText(kind))}
	}
	return &Error{Member: name, Rule: fmt.Sprintf("%s must be %s, got %s", name, typeText(n.schema), kindText(kind))}
}

// explain makes one sentence of what the schema found, always the same one for the same request.
func (s *Schema) explain(err error, doc map[string]any) *Error {
	var found *jsonschema.ValidationError
	if !errors.As(err, &found) {
		return &Error{Rule: "the request could not be validated"}
	}
	faults := s.faults(nil, found, doc)
	first := slices.MinFunc(faults, func(a, b fault) int {
		return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(len(a.member), len(b.member)),
			cmp.Compare(a.member, b.member), cmp.Compare(a.order, b.order))
	})
	return &Error{Member: first.member, Rule: first.rule}
}

// fault is one rule broken at one place.
type fault struct {
	rank   int // the place of the outermost member in the list of members
	order  int // which rule of a member is named first
	member string
	rule   string
}

// keywords in the order in which they are named when several are broken.
var keywords = []string{"required", "type", "minLength", "pattern", "maxLength", "minimum", "maximum", "multipleOf", "contentEncoding"}

func (s *Schema) faults(to []fault, e *jsonschema.ValidationError, doc map[string]any) []fault {
	for _, cause := range e.Causes {
		to = s.faults(to, cause, doc)
	}
	if len(e.Causes) > 0 {
		return to
	}
	keyword := e.KeywordLocation[strings.LastIndexByte(e.KeywordLocation, '/')+1:]
	n, value, member := s.root, any(doc), ""
	rank := 0
	for i, token := range strings.Split(e.InstanceLocation, "/")[1:] {
		switch v := value.(type) {
		case map[string]any:
			if i == 0 {
				rank = slices.Index(s.root.names, token)
			}
			member = strings.TrimPrefix(member+"."+token, ".")
			n, value = n.members[token], v[token]
		case []any:
			index, _ := strconv.Atoi(token)
			member += "[" + token + "]"
			n, value = n.items, v[index]
		}
	}
	f := fault{rank: rank, order: slices.Index(keywords, keyword), member: member}
	if keyword == "required" {
		object, _ := value.(map[string]any)
		for _, name := range n.schema.Required {
			if _, ok := object[name]; !ok {
				f.member = strings.TrimPrefix(member+"."+name, ".")
				f.rule = fmt.Sprintf("%s is missing", f.member)
				if member == "" {
					f.rank = slices.Index(s.root.names, name)
				}
				break
			}
		}
		return append(to, f)
	}
	f.rule = fmt.Sprintf("%s %s, got %s", member, ruleText(n.schema, keyword, member), shown(value))
	return append(to, f)
}

// ruleText says in words what a keyword of a schema asks for.
func ruleText(js *jsonschema.Schema, keyword, member string) string {
	switch keyword {
	case "type":
		return "must be " + typeText(js)
	case "minLength", "maxLength":
		return fmt.Sprintf("must be %d to %d characters long", js.MinLength, js.MaxLength)
	case "pattern":
		return "must use only the characters A-Z a-z 0-9 _ -"
	case "minimum", "maximum":
		return fmt.Sprintf("must be from %s to %s", js.Minimum.RatString(), js.Maximum.RatString())
	case "multipleOf":
		text := "must be a multiple of " + js.MultipleOf.RatString()
		if strings.HasSuffix(member, "_ms") && js.MultipleOf.RatString() == "1000" {
			text += " (whole seconds)"
		}
		return text
	case "contentEncoding":
		return "must be standard base64 with padding, without line breaks, in its canonical form"
	default:
		return "must keep the rule " + keyword
	}
}

func typeText(js *jsonschema.Schema) string {
	switch strings.Join(js.Types, " ") {
	case "integer":
		return "a whole number"
	case "string":
		return "a string"
	case "array":
		return "an array"
	case "object":
		return "an object"
	default:
		return strings.Join(js.Types, " or ")
	}
}

// shown is a value as the client may see it again.
func shown(v any) string {
	switch v := v.(type) {
	case nil:
		return "null"
	case bool:
		return strconv.FormatBool(v)
	case json.Number:
		return string(v)
	case string:
		return quote(v)
	case []any:
		return "an array"
	default:
		return "an object"
	}
}
