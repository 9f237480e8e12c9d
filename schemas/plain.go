package schemas

import (
	"encoding/base64"
	"encoding/json"
	"maps"
	"math"
	resyntax "regexp/syntax"
	"slices"
	"strconv"
)

// plain reads requests written the way nearly every client writes them: strings of printable ASCII without
// escapes, whole numbers in digits, in any order and spacing. It takes its rules from the published text of
// the schema and has none of its own. What it accepts the schema accepts, with the same meaning (the fuzz
// targets hold it to that); everything else, and so every refusal, it leaves to the library.
type plain struct {
	members            []plainMember
	required           uint64 // bits of members
	minItems, maxItems int    // of the list whose items this describes
}

type plainMember struct {
	name   string
	form   plainForm
	to     field
	preset bool   // number stands for an absent one
	number uint64 // the default

	class                 *class // characters of a text
	shortest, longest     int    // a text
	least, most, multiple uint64 // an integer
	items                 *plain // a list
}

type plainForm int

const (
	plainIgnored plainForm = iota // nobody looks at the value
	plainText
	plainBase64
	plainInteger
	plainList
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

// newPlain makes the plain reader of an object; nil if its schema says more than that can check.
func newPlain(doc map[string]any) *plain {
	for keyword := range doc {
		switch keyword {
		case "$schema", "$id", "title", "description", "examples", "type", "required", "properties", "additionalProperties":
		default:
			return nil
		}
	}
	properties, _ := doc["properties"].(map[string]any)
	if doc["type"] != "object" || doc["additionalProperties"] != false || len(properties) > 64 {
		return nil
	}
	p := &plain{}
	required, _ := doc["required"].([]any)
	for _, name := range slices.Sorted(maps.Keys(properties)) {
		property, _ := properties[name].(map[string]any)
		m, ok := newPlainMember(property)
		if !ok {
			return nil
		}
		m.name, m.to = name, fields[name]
		if slices.Contains(required, any(name)) {
			p.required |= 1 << len(p.members)
		}
		p.members = append(p.members, m)
	}
	return p
}

func newPlainMember(property map[string]any) (m plainMember, ok bool) {
	m = plainMember{class: printable, longest: math.MaxInt, most: math.MaxUint64, multiple: 1}
	switch property["type"] {
	case nil:
	case "string":
		m.form = plainText
	case "integer":
		m.form = plainInteger
	case "array":
		m.form = plainList
	default:
		return m, false
	}
	var minItems, maxItems int
	for keyword, v := range property {
		literal, _ := v.(json.Number)
		n, err := strconv.ParseUint(string(literal), 10, 63)
		small := err == nil
		switch keyword {
		case "type", "description":
			ok = true
		case "default":
			m.preset, m.number, ok = true, n, small && m.form == plainInteger
		case "minLength":
			m.shortest, ok = max(m.shortest, int(n)), small && m.form == plainText
		case "maxLength":
			m.longest, ok = int(n), small && m.form == plainText
		case "pattern":
			text, _ := v.(string)
			c, shortest, one := oneClass(text)
			m.class, m.shortest, ok = c, max(m.shortest, shortest), one && m.form == plainText
		case "contentEncoding":
			m.form, ok = plainBase64, v == "base64" && m.form == plainText
		case "minimum":
			m.least, ok = n, small && m.form == plainInteger
		case "maximum":
			m.most, err = strconv.ParseUint(string(literal), 10, 64)
			ok = err == nil && m.form == plainInteger
		case "multipleOf":
			m.multiple, ok = n, small && n > 0 && m.form == plainInteger
		case "minItems":
			minItems, ok = int(n), small && m.form == plainList
		case "maxItems":
			maxItems, ok = int(n), small && m.form == plainList
		case "items":
			items, _ := v.(map[string]any)
			m.items = newPlain(items)
			ok = m.items != nil && m.form == plainList
		default:
			ok = false
		}
		if !ok {
			return m, false
		}
	}
	if m.form == plainList {
		if m.items == nil || maxItems == 0 {
			return m, false
		}
		m.items.minItems, m.items.maxItems = minItems, maxItems
	}
	return m, true
}

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
func (p *plain) decode(raw []byte) (r Request, ok bool) {
	s := scanner{raw: raw}
	ok = s.object(p, &r) && s.next() == 0 && s.at == len(raw)
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

func (s *scanner) object(p *plain, r *Request) bool {
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
		for i < len(p.members) && p.members[i].name != string(name) {
			i++
		}
		if i == len(p.members) || seen>>i&1 != 0 || !s.value(&p.members[i], r) {
			return false
		}
		seen |= 1 << i
	}
	if !s.take('}') || seen&p.required != p.required {
		return false
	}
	for i := range p.members {
		if m := &p.members[i]; m.preset && seen>>i&1 == 0 {
			m.to.number(r, m.number)
		}
	}
	return true
}

func (s *scanner) value(m *plainMember, r *Request) bool {
	switch m.form {
	case plainText:
		text, ok := s.text(m.class)
		if !ok || len(text) < m.shortest || len(text) > m.longest {
			return false
		}
		*m.to.text(r) = string(text)
		return true
	case plainBase64:
		text, ok := s.text(printable)
		if !ok || len(text) == 0 {
			return ok
		}
		data := make([]byte, base64.StdEncoding.DecodedLen(len(text)))
		n, err := base64.StdEncoding.Strict().Decode(data, text)
		*m.to.bytes(r) = data[:n]
		return err == nil
	case plainInteger:
		n, ok := s.digits()
		if !ok || n < m.least || n > m.most || n%m.multiple != 0 {
			return false
		}
		m.to.number(r, n)
		return true
	case plainList:
		return s.list(m, r)
	default:
		if s.next() == '"' {
			_, ok := s.text(printable)
			return ok
		}
		_, ok := s.digits()
		return ok
	}
}

func (s *scanner) list(m *plainMember, r *Request) bool {
	if !s.take('[') {
		return false
	}
	n := 0
	for more := s.next() != ']'; more; more = s.next() == ',' {
		if n > 0 {
			s.at++
		}
		var item Request
		if n++; n > m.items.maxItems || !s.object(m.items, &item) {
			return false
		}
		m.to.item(r, item)
	}
	return s.take(']') && n >= m.items.minItems
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
