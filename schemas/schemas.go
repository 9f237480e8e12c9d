// Package schemas holds what may be asked of the lease service and what it answers: one JSON Schema
// (draft 2020-12) a request, a reply and the change event, and the strict decoder of requests.
//
// The schemas are embedded and compiled once; nothing is ever loaded from elsewhere. A request is
// first read token by token (names, UTF-8, nesting, numbers), then validated against its schema, then
// handed out as a [Request]. What a request schema says is enforced by the schema alone.
//
// A new member takes a name in the list "member" of defs.json, a definition, a line in the requests
// that use it, and a line in the table fields. A new call takes its two files.
package schemas

import (
	"bytes"
	"embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"path"
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
	name string // of its file, without .json
	text string
	js   *jsonschema.Schema
	root *node // what the decoder needs of a request schema, else nil
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
	names, err := fs.Glob(fsys, "*.json")
	if err != nil {
		return nil, err
	}
	for _, file := range names {
		name := strings.TrimSuffix(file, ".json")
		call, kind, _ := strings.Cut(name, ".")
		if call == "error" || name == "defs" {
			continue
		}
		sch, err := compile(fsys, name)
		if err != nil {
			return nil, fmt.Errorf("schema %s: %w", file, err)
		}
		switch {
		case kind == "request":
			if sch.root, err = requestNode(sch.js); err != nil {
				return nil, fmt.Errorf("schema %s: %w", file, err)
			}
			set.requests[call] = sch
		case kind == "reply":
			set.replies[call] = sch
		case name == "event":
			set.event = sch
		default:
			return nil, fmt.Errorf("schema %s: neither a request nor a reply nor the event", file)
		}
	}
	return set, nil
}

// compile compiles the self-contained text of NAME.json, so that what is published is what is enforced.
func compile(fsys fs.FS, name string) (*Schema, error) {
	text, err := bundle(fsys, name+".json")
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.Draft = jsonschema.Draft2020
	c.AssertFormat = true
	c.AssertContent = true
	c.ExtractAnnotations = true
	c.Decoders["base64"] = canonicalBase64
	c.LoadURL = func(url string) (io.ReadCloser, error) {
		return nil, fmt.Errorf("%s is not embedded, and nothing is loaded from elsewhere", url)
	}
	url := name + ".json"
	if err := c.AddResource(url, bytes.NewReader(text)); err != nil {
		return nil, err
	}
	js, err := c.Compile(url)
	if err != nil {
		return nil, err
	}
	return &Schema{name: name, text: string(text), js: js}, nil
}

// canonicalBase64 decodes the one standard form of the bytes. The standard library skips line breaks even when strict.
func canonicalBase64(s string) ([]byte, error) {
	if strings.ContainsAny(s, "\r\n") {
		return nil, fmt.Errorf("line break in base64")
	}
	return base64.StdEncoding.Strict().DecodeString(s)
}

// bundle gives the schema of a file as compact JSON, with every definition it refers to in other
// files moved into its own $defs.
func bundle(fsys fs.FS, file string) ([]byte, error) {
	b := bundler{fsys: fsys, docs: map[string]map[string]any{}, defs: map[string]any{}}
	root, err := b.doc(file)
	if err != nil {
		return nil, err
	}
	if local, ok := root["$defs"].(map[string]any); ok {
		b.defs = local
		delete(root, "$defs")
		for _, def := range local {
			if err := b.walk(def, file, file); err != nil {
				return nil, err
			}
		}
	}
	if err := b.walk(root, file, file); err != nil {
		return nil, err
	}
	if len(b.defs) > 0 {
		root["$defs"] = b.defs
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(root); err != nil {
		return nil, err
	}
	return bytes.TrimSpace(out.Bytes()), nil
}

type bundler struct {
	fsys fs.FS
	docs map[string]map[string]any // by file
	defs map[string]any            // of the bundle
}

func (b *bundler) doc(file string) (map[string]any, error) {
	if doc, ok := b.docs[file]; ok {
		return doc, nil
	}
	raw, err := fs.ReadFile(b.fsys, file)
	if err != nil {
		return nil, err
	}
	v, err := parse(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	doc, ok := v.(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%s: not an object", file)
	}
	b.docs[file] = doc
	return doc, nil
}

// walk rewrites the references below v, which stands in file, to the $defs of the bundle of root.
func (b *bundler) walk(v any, file, root string) error {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			if err := b.walk(item, file, root); err != nil {
				return err
			}
		}
	case map[string]any:
		for name, item := range v {
			if ref, ok := item.(string); ok && name == "$ref" {
				local, err := b.include(ref, file, root)
				if err != nil {
					return err
				}
				v[name] = local
				continue
			}
			if err := b.walk(item, file, root); err != nil {
				return err
			}
		}
	}
	return nil
}

// include makes sure that the bundle has what ref, written in file, points to, and gives its new reference.
func (b *bundler) include(ref, file, root string) (string, error) {
	target, fragment, _ := strings.Cut(ref, "#")
	if target == "" {
		target = file
	}
	if target == root {
		return "#" + fragment, nil
	}
	doc, err := b.doc(target)
	if err != nil {
		return "", err
	}
	var def any = doc
	name := strings.TrimSuffix(target, ".json")
	if fragment != "" {
		name = path.Base(fragment)
		defs, _ := doc["$defs"].(map[string]any)
		if def = defs[name]; def == nil || fragment != "/$defs/"+name {
			return "", fmt.Errorf("%s: %s points to nothing", file, ref)
		}
	} else {
		delete(doc, "$id")
		delete(doc, "$schema")
	}
	local := "#/$defs/" + name
	if have, ok := b.defs[name]; ok {
		if !same(have, def) {
			return "", fmt.Errorf("%s: two definitions are called %s", file, name)
		}
		return local, nil
	}
	b.defs[name] = def
	return local, b.walk(def, target, root)
}

// same reports whether two parsed objects are one and the same, not only equal.
func same(a, b any) bool { return fmt.Sprintf("%p", a) == fmt.Sprintf("%p", b) }
