// Package schemas holds what may be asked of the lease service and what it answers: one JSON Schema
// (draft 2020-12) a request, a reply and the change event, and the strict decoder of requests.
//
// The schemas are embedded and compiled once; nothing is ever loaded from elsewhere. A request is
// first read token by token (names, UTF-8, nesting, numbers), then validated against its schema, then
// handed out as a [Request]. What a request schema says is enforced by the schema alone; requests in plain
// form are held to the same rules by form.go, which has them from the compiled schema.
//
// A new member takes a name in the list "member" of defs.json, a definition, a line in the requests
// that use it, and a line in the table fields. A new call takes its two files.
package schemas

import (
	"bytes"
	"embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"sync"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v5"
)

//go:embed *.json
var files embed.FS

// Set is all schemas of the service. It does not change and may be used from many goroutines.
type Set struct {
	requests, replies map[string]*Schema
	event             *Schema
}

// Schema is one compiled schema.
type Schema struct {
	name string // of its file
	text string
	js   *jsonschema.Schema
	form *form // of a request, else nil

	open func() (*jsonschema.Schema, error) // js of a reply that may have more members
}

// Load gives the embedded schemas, compiled on the first call. An error is a fault of this package.
func Load() (*Set, error) { return load() }

var load = sync.OnceValues(func() (*Set, error) { return read(files) })

// Request is the schema of a call's request, nil if there is no such call.
func (s *Set) Request(call string) *Schema { return s.requests[call] }

// Reply is the schema of a call's reply, answers and errors, nil if there is no such call.
func (s *Set) Reply(call string) *Schema { return s.replies[call] }

// Event is the schema of what is stored for a key and published on a change.
func (s *Set) Event() *Schema { return s.event }

// Text is the schema as compact JSON that refers to nothing outside itself.
func (s *Schema) Text() string { return s.text }

// Validate reports whether raw is valid JSON, names unique, that keeps the schema. Its errors are for
// developers; what a client sent goes through [Schema.Decode].
func (s *Schema) Validate(raw []byte) error {
	if !jsontext.Value(raw).IsValid() {
		return fmt.Errorf("%s: not one valid JSON value", s.name)
	}
	doc, err := parse(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	if err := s.js.Validate(doc); err != nil {
		return fmt.Errorf("%s: %#v", s.name, err)
	}
	return nil
}

// Admits is Validate for a reader of replies: a member that the schema does not name is one of a newer service,
// and passes. It is for replies only.
func (s *Schema) Admits(raw []byte) error {
	if !jsontext.Value(raw).IsValid() {
		return fmt.Errorf("%s: not one valid JSON value", s.name)
	}
	js, err := s.open()
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	doc, err := parse(raw)
	if err != nil {
		return fmt.Errorf("%s: %w", s.name, err)
	}
	if err := js.Validate(doc); err != nil {
		return fmt.Errorf("%s: %#v", s.name, err)
	}
	return nil
}

// parse is json.Unmarshal that keeps numbers as they are written.
func parse(raw []byte) (any, error) {
	var doc any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	err := dec.Decode(&doc)
	return doc, err
}

// read compiles every schema of fsys: NAME.request.json, NAME.reply.json, event.json.
func read(fsys fs.FS) (*Set, error) {
	set := &Set{requests: map[string]*Schema{}, replies: map[string]*Schema{}}
	files, err := fs.Glob(fsys, "*.json")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		if file == "defs.json" || file == "error.reply.json" {
			continue // parts of the others
		}
		call, kind, _ := strings.Cut(strings.TrimSuffix(file, ".json"), ".")
		sch, err := newSchema(fsys, file, kind == "request")
		if err != nil {
			return nil, fmt.Errorf("schema %s: %w", file, err)
		}
		switch {
		case kind == "request":
			set.requests[call] = sch
		case kind == "reply":
			set.replies[call] = sch
		case call == "event":
			set.event = sch
		default:
			return nil, fmt.Errorf("schema %s is neither a request nor a reply nor the event", file)
		}
	}
	return set, nil
}

func newSchema(fsys fs.FS, file string, request bool) (*Schema, error) {
	doc, err := bundle(fsys, file)
	if err != nil {
		return nil, err
	}
	var names []string
	if request {
		if names, err = closeMembers(doc); err != nil {
			return nil, err
		}
	}
	text, err := compact(doc)
	if err != nil {
		return nil, err
	}
	s := &Schema{name: file, text: text}
	if s.js, err = compile(file, text); err != nil {
		return nil, err
	}
	if !request {
		s.open = sync.OnceValues(func() (*jsonschema.Schema, error) { return compileOpen(file, text) })
		return s, nil
	}
	s.form = newForm(s.js, names)
	for _, m := range s.form.members {
		if _, ok := fields[m.name]; m.form != nil && !ok {
			return nil, fmt.Errorf("no field for member %q", m.name)
		}
	}
	return s, nil
}

// compile compiles the text that is published, so that this is what is enforced.
func compile(name, text string) (*jsonschema.Schema, error) {
	c := jsonschema.NewCompiler()
	c.Draft = jsonschema.Draft2020
	c.AssertFormat = true
	c.AssertContent = true
	c.ExtractAnnotations = true
	c.Decoders["base64"] = canonicalBase64
	c.LoadURL = func(url string) (io.ReadCloser, error) {
		return nil, fmt.Errorf("%s is not embedded, and nothing is loaded from elsewhere", url)
	}
	if err := c.AddResource(name, strings.NewReader(text)); err != nil {
		return nil, err
	}
	return c.Compile(name)
}

// compileOpen compiles the schema of a reply without what forbids members that it does not name.
func compileOpen(name, text string) (*jsonschema.Schema, error) {
	doc, err := parse([]byte(text))
	if err != nil {
		return nil, err
	}
	text, err = compact(opened(doc))
	if err != nil {
		return nil, err
	}
	return compile(name, text)
}

func opened(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = opened(v[i])
		}
	case map[string]any:
		for name, item := range v {
			if item == false && (name == "unevaluatedProperties" || name == "additionalProperties") {
				delete(v, name)
				continue
			}
			v[name] = opened(item)
		}
	}
	return v
}

// canonicalBase64 decodes the one standard form of the bytes. The standard library skips line breaks even when strict (P6).
func canonicalBase64(s string) ([]byte, error) {
	if strings.ContainsAny(s, "\r\n") {
		return nil, errors.New("line break in base64")
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}
