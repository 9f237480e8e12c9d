// Package corpus reads the input corpus: requests, good and bad, one file a case, with what must come of them.
//
// A file is a few header lines, an empty line, and the exact bytes of the request to the end of the file:
//
//	call: acquire
//	expect: invalid
//	member: ttl_ms
//	why: message TTLs are whole seconds
//
//	{"key":"k","holder":"A","ttl_ms":1500}
//
// expect is valid or invalid. member, only for invalid cases, must stand in the error. For large requests
// the header "repeat: COUNT TEXT" (TEXT in Go quotes) says what <repeat>, which must stand in the body once,
// is replaced by. why is for people. source, if there is one, names the public report that the case comes
// from, by its short name in the issues of this project.
package corpus

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Case is one request and what must come of it.
type Case struct {
	Name   string // of the file, without its ending: "acquire/ttl-1500"
	Call   string // acquire, renew, ...
	Valid  bool   // the request keeps its schema
	Member string // must stand in the error of an invalid request; may be empty
	Why    string // for people
	Source string // the row of the field reports
	Body   []byte
}

// maxBody bounds what a repeat may make.
const maxBody = 8 << 20

// Load reads every case below fsys, the .txt files, in the order of their names.
func Load(fsys fs.FS) ([]Case, error) {
	var cases []Case
	err := fs.WalkDir(fsys, ".", func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Ext(file) != ".txt" {
			return err
		}
		raw, err := fs.ReadFile(fsys, file)
		if err != nil {
			return err
		}
		c, err := parse(raw)
		if err != nil {
			return fmt.Errorf("corpus %s: %w", file, err)
		}
		c.Name = strings.TrimSuffix(file, ".txt")
		cases = append(cases, c)
		return nil
	})
	return cases, err
}

func parse(raw []byte) (Case, error) {
	var c Case
	head, body, ok := bytes.Cut(raw, []byte("\n\n"))
	if !ok {
		return c, fmt.Errorf("no empty line after the header")
	}
	c.Body = body
	expect := ""
	for line := range strings.Lines(string(head)) {
		name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		if !ok {
			return c, fmt.Errorf("header line %q is not NAME: VALUE", line)
		}
		switch name {
		case "call":
			c.Call = value
		case "expect":
			expect = value
		case "member":
			c.Member = value
		case "why":
			c.Why = value
		case "source":
			c.Source = value
		case "repeat":
			var err error
			if c.Body, err = repeat(body, value); err != nil {
				return c, err
			}
		default:
			return c, fmt.Errorf("unknown header %q", name)
		}
	}
	c.Valid = expect == "valid"
	switch {
	case c.Call == "":
		return c, fmt.Errorf("no call")
	case expect != "valid" && expect != "invalid":
		return c, fmt.Errorf("expect must be valid or invalid, got %q", expect)
	case c.Valid && c.Member != "":
		return c, fmt.Errorf("a valid case has no member at fault")
	}
	return c, nil
}

// repeat fills the one <repeat> of body as value, COUNT TEXT, says.
func repeat(body []byte, value string) ([]byte, error) {
	const mark = "<repeat>"
	count, quoted, _ := strings.Cut(value, " ")
	n, err := strconv.Atoi(count)
	if err != nil {
		return nil, fmt.Errorf("repeat %q: the count is no number", value)
	}
	text, err := strconv.Unquote(quoted)
	if err != nil {
		return nil, fmt.Errorf("repeat %q: the text is not in Go quotes", value)
	}
	if n < 0 || n*len(text) > maxBody {
		return nil, fmt.Errorf("repeat %q: more than %d bytes", value, maxBody)
	}
	if bytes.Count(body, []byte(mark)) != 1 {
		return nil, fmt.Errorf("repeat: %s must stand in the body once", mark)
	}
	return bytes.Replace(body, []byte(mark), bytes.Repeat([]byte(text), n), 1), nil
}
