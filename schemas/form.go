package schemas

import (
	"encoding/base64"
	"maps"
	"math"
	"math/big"
	"reflect"
	resyntax "regexp/syntax"
	"slices"
	"sync"

	"github.com/santhosh-tekuri/jsonschema/v5"
)

// form is a schema of requests as their two readers need it, made from the compiled one. The reader of
// tokens (decode.go) refuses early what the schema could never accept. The reader of plain requests, below,
// takes what nearly every client writes: strings of printable ASCII without escapes, whole numbers in digits,
// in any order and spacing. What that accepts the schema accepts, with the same meaning (the fuzz targets
// hold it to that); everything else, and so every refusal, it leaves to the library.
type form struct {
	js      *jsonschema.Schema
	names   []string // of the members of an object, in the order in which they are told
	members []member // of an object, by name
	items   *form    // of an array
	plain   bool     // the plain reader checks all that the schema says

	kind                  kind
	required              uint64 // bits of members
	class                 *class // characters of a text
	shortest, longest     int    // a text
	least, most, multiple uint64 // an integer
}

// member is a member of an object.
type member struct {
	name  string
	*form // nil where nobody looks at the value
	to    field
}

// kind is what the plain reader makes of a value.
type kind int

const (
	object kind = iota
	text
	base64Text
	integer
	list
)

// class is a set of characters.
type class [256]bool

// printable is what may stand in a text whose schema says nothing of its characters.
var printable = func() *class {
	var c class
	for b := ' '; b <= '~'; b++ {
		c[b] = b != '"' && b != '\\'
	}
	return &c
}()

// newForm is the form of a schema. The names of a request stand in the order of its family; an object inside
// an array has those it describes.
func newForm(js *jsonschema.Schema, names []string) *form {
	f := &form{js: js, names: names}
	for _, name := range slices.Sorted(maps.Keys(js.Properties)) {
		m := member{name: name, to: fields[name]}
		if property := js.Properties[name]; len(property.Types) > 0 {
			m.form = newForm(property, nil)
		}
		if slices.Contains(js.Required, name) {
			f.required |= 1 << len(f.members)
		}
		f.members = append(f.members, m)
	}
	if items := js.Items2020; items != nil {
		f.items = newForm(items, slices.Sorted(maps.Keys(items.Properties)))
	}
	f.plain = f.simplify()
	return f
}

// member is the member of that name, nil if there is none.
func (f *form) member(name string) *member {
	i := slices.IndexFunc(f.members, func(m member) bool { return m.name == name })
	if i < 0 {
		return nil
	}
	return &f.members[i]
}

// simplify takes from the schema what the plain reader checks; false if it says more.
func (f *form) simplify() bool {
	rest := *f.js // what it says besides
	rest.Types = nil
	ok := len(f.js.Types) == 1
	number := func(r **big.Rat, absent uint64) uint64 {
		v := *r
		if *r = nil; v == nil {
			return absent
		}
		ok = ok && v.IsInt() && v.Sign() >= 0 && v.Num().IsUint64()
		return v.Num().Uint64()
	}
	if !ok {
		return false
	}
	switch f.js.Types[0] {
	case "object":
		f.kind = object
		ok = f.js.AdditionalProperties == false && len(f.members) <= 64
		for _, m := range f.members {
			ok = ok && (m.form == nil && !asks(*f.js.Properties[m.name]) || m.form != nil && m.plain)
		}
		rest.Properties, rest.Required, rest.AdditionalProperties = nil, nil, nil
	case "string":
		f.kind, f.class, f.shortest, f.longest = text, printable, max(0, rest.MinLength), math.MaxInt
		if rest.MaxLength >= 0 {
			f.longest = rest.MaxLength
		}
		if rest.Pattern != nil {
			var shortest int
			f.class, shortest, ok = oneClass(rest.Pattern.String())
			f.shortest = max(f.shortest, shortest)
		}
		if rest.ContentEncoding == "base64" {
			f.kind, rest.ContentEncoding = base64Text, ""
		}
		rest.MinLength, rest.MaxLength, rest.Pattern = -1, -1, nil
	case "integer":
		f.kind = integer
		f.least, f.most, f.multiple = number(&rest.Minimum, 0), number(&rest.Maximum, math.MaxUint64), number(&rest.MultipleOf, 1)
		rest.Default = nil
	case "array":
		f.kind = list
		ok = f.items != nil && f.items.kind == object && f.items.plain && rest.MaxItems > 0
		rest.MinItems, rest.MaxItems, rest.Items2020 = -1, -1, nil
	default:
		return false
	}
	return ok && !asks(rest)
}

// asks reports whether a schema asks for anything.
func asks(js jsonschema.Schema) bool {
	js.Location, js.Title, js.Description, js.Examples = silent().Location, "", "", nil
	some, none := reflect.ValueOf(js), reflect.ValueOf(*silent())
	for i := range some.NumField() {
		if some.Type().Field(i).IsExported() && !reflect.DeepEqual(some.Field(i).Interface(), none.Field(i).Interface()) {
			return true
		}
	}
	return false
}

// silent is a schema that asks for nothing.
var silent = sync.OnceValue(func() *jsonschema.Schema {
	js, err := compile("silent.json", "{}")
	if err != nil {
		panic(err) // it is a schema
	}
	return js
})

// oneClass gives the characters that a pattern allows if it only says that all are of one class of ASCII,
// and how many there must be.
func oneClass(pattern string) (c *class, shortest int, ok bool) {
	re, err := resyntax.Parse(pattern, resyntax.Perl)
	if err != nil || re.Op != resyntax.OpConcat || len(re.Sub) != 3 ||
		re.Sub[0].Op != resyntax.OpBeginText || re.Sub[2].Op != resyntax.OpEndText {
		return nil, 0, false
	}
	switch re.Sub[1].Op {
	case resyntax.OpPlus:
		shortest = 1
	case resyntax.OpStar:
	default:
		return nil, 0, false
	}
	set := re.Sub[1].Sub[0]
	if set.Op != resyntax.OpCharClass {
		return nil, 0, false
	}
	c = &class{}
	for i := 0; i < len(set.Rune); i += 2 {
		for r := set.Rune[i]; r <= set.Rune[i+1]; r++ {
			if r > '~' || !printable[r] {
				return nil, 0, false
			}
			c[r] = true
		}
	}
	return c, shortest, true
}

// decode reads raw as a whole; ok is false where the library has to look at it.
func (f *form) decode(raw []byte) (r Request, ok bool) {
	s := scanner{raw: raw}
	ok = s.object(f, &r) && s.next() == 0 && s.at == len(raw)
	return r, ok
}

// scanner walks over a request. Its methods report false where the request is not plain.
type scanner struct {
	raw []byte
	at  int
}

// next skips white space and gives the byte after it, 0 at the end.
func (s *scanner) next() byte {
	for ; s.at < len(s.raw); s.at++ {
		switch c := s.raw[s.at]; c {
		case ' ', '\t', '\r', '\n':
		default:
			return c
		}
	}
	return 0
}

// take skips white space and the byte c.
func (s *scanner) take(c byte) bool {
	ok := s.next() == c
	s.at++
	return ok
}

func (s *scanner) object(f *form, r *Request) bool {
	if !s.take('{') {
		return false
	}
	var seen uint64
	for more := s.next() != '}'; more; more = s.next() == ',' {
		if seen != 0 {
			s.at++
		}
		name, ok := s.text(printable)
		if !ok || !s.take(':') {
			return false
		}
		i := 0
		for i < len(f.members) && f.members[i].name != string(name) {
			i++
		}
		if i == len(f.members) || seen>>i&1 != 0 || !s.value(&f.members[i], r) {
			return false
		}
		seen |= 1 << i
	}
	if !s.take('}') || seen&f.required != f.required {
		return false
	}
	for i := range f.members {
		if m := &f.members[i]; m.form != nil && seen>>i&1 == 0 && m.js.Default != nil {
			m.to.put(r, m.js.Default)
		}
	}
	return true
}

func (s *scanner) value(m *member, r *Request) bool {
	if m.form == nil {
		if s.next() == '"' {
			_, ok := s.text(printable)
			return ok
		}
		_, ok := s.digits()
		return ok
	}
	switch m.kind {
	case text:
		text, ok := s.text(m.class)
		if !ok || len(text) < m.shortest || len(text) > m.longest {
			return false
		}
		*m.to.text(r) = string(text)
		return true
	case base64Text:
		text, ok := s.text(printable)
		if !ok || len(text) == 0 {
			return ok
		}
		data := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
		n, err := base64.StdEncoding.Strict().Decode(data, text)
		*m.to.bytes(r) = data[:n]
		return err == nil
	case integer:
		n, ok := s.digits()
		if !ok || n < m.least || n > m.most || n%m.multiple != 0 {
			return false
		}
		m.to.number(r, n)
		return true
	default:
		return s.list(m, r)
	}
}

func (s *scanner) list(m *member, r *Request) bool {
	if !s.take('[') {
		return false
	}
	n := 0
	for more := s.next() != ']'; more; more = s.next() == ',' {
		if n > 0 {
			s.at++
		}
		var item Request
		if n++; n > m.js.MaxItems || !s.object(m.items, &item) {
			return false
		}
		m.to.item(r, item)
	}
	return s.take(']') && n >= m.js.MinItems
}

// text reads a string whose characters are all of class c.
func (s *scanner) text(c *class) ([]byte, bool) {
	if !s.take('"') {
		return nil, false
	}
	from := s.at
	for s.at < len(s.raw) && c[s.raw[s.at]] {
		s.at++
	}
	if s.at == len(s.raw) || s.raw[s.at] != '"' {
		return nil, false
	}
	s.at++
	return s.raw[from : s.at-1], true
}

// digits reads a whole number of at most 19 digits, which fit 64 bits.
func (s *scanner) digits() (n uint64, ok bool) {
	s.next()
	from := s.at
	for s.at < len(s.raw) && '0' <= s.raw[s.at] && s.raw[s.at] <= '9' {
		n = 10*n + uint64(s.raw[s.at]-'0')
		s.at++
	}
	long := s.at - from
	return n, long == 1 || long > 1 && long <= 19 && s.raw[from] != '0'
}
