package schemas

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/santhosh-tekuri/jsonschema/v5"
)

func everySchema(set *Set) map[string]*Schema {
	all := map[string]*Schema{"event": set.Event()}
	for _, call := range calls {
		all[call+".request"], all[call+".reply"] = set.Request(call), set.Reply(call)
	}
	return all
}

// TestText holds the published texts to what a stranger needs: compact, complete by themselves, every member described.
func TestText(t *testing.T) {
	for name, sch := range everySchema(loadSet(t)) {
		text := sch.Text()
		if strings.ContainsAny(text, "\n\t") || len(text) > 8192 {
			t.Errorf("%s: not compact: %d bytes", name, len(text))
		}
		doc, err := parse([]byte(text))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		root := doc.(map[string]any)
		for _, member := range []string{"$schema", "$id", "title", "description"} {
			if root[member] == nil {
				t.Errorf("%s: no %s", name, member)
			}
		}
		walk(root, "", func(path string, v map[string]any) {
			if ref, ok := v["$ref"].(string); ok && !strings.HasPrefix(ref, "#/$defs/") {
				t.Errorf("%s: %s refers to %s", name, path, ref)
			}
			if properties, ok := v["properties"].(map[string]any); ok {
				for member, p := range properties {
					p := p.(map[string]any)
					// kind and event are described once, where all their values stand
					if p["description"] == nil && member != "kind" && member != "event" {
						t.Errorf("%s: %s/%s has no description", name, path, member)
					}
				}
			}
		})
		if _, err := compile("again.json", text); err != nil {
			t.Errorf("%s does not stand alone: %v", name, err)
		}
	}
}

func walk(v any, path string, visit func(string, map[string]any)) {
	switch v := v.(type) {
	case map[string]any:
		visit(path, v)
		for name, item := range v {
			walk(item, path+"/"+name, visit)
		}
	case []any:
		for i, item := range v {
			walk(item, fmt.Sprint(path, "/", i), visit)
		}
	}
}

// TestExamples decodes the examples that the request schemas show.
func TestExamples(t *testing.T) {
	set := loadSet(t)
	for _, call := range calls {
		var doc struct{ Examples []json.RawMessage }
		if err := json.Unmarshal([]byte(set.Request(call).Text()), &doc); err != nil || len(doc.Examples) == 0 {
			t.Errorf("%s: %d examples, %v", call, len(doc.Examples), err)
		}
		for _, example := range doc.Examples {
			if _, err := set.Request(call).Decode(example); err != nil {
				t.Errorf("%s: %s: %v", call, example, err)
			}
		}
	}
}

// TestFilesAgree compiles the files as they are, references and all, with the library alone. They must judge
// the corpus as Decode does, except for what is invalid before a schema sees it.
func TestFilesAgree(t *testing.T) {
	set := loadSet(t)
	c := jsonschema.NewCompiler()
	c.AssertFormat, c.AssertContent = true, true
	c.Decoders["base64"] = canonicalBase64
	const base = "https://github.com/leased/leased/schemas/"
	c.LoadURL = func(url string) (io.ReadCloser, error) { return files.Open(strings.TrimPrefix(url, base)) }
	judges := map[string]*jsonschema.Schema{}
	for _, call := range calls {
		js, err := c.Compile(base + call + ".request.json")
		if err != nil {
			t.Fatal(err)
		}
		judges[call] = js
	}
	compared := 0
	for _, test := range loadCorpus(t) {
		if len(test.Body) > 1<<16 || !jsontext.Value(test.Body).IsValid() {
			continue
		}
		_, err := set.Request(test.Call).Decode(test.Body)
		if err != nil && (strings.Contains(err.Error(), "must be a number") || strings.Contains(err.Error(), "must be a plain value")) {
			continue // a literal too long, nesting
		}
		if err != nil && (strings.Contains(err.Error(), "bytes in UTF-8") || strings.Contains(err.Error(), "must not stand twice in leases")) {
			continue // check says what a schema cannot
		}
		doc, parseErr := parse(test.Body)
		if parseErr != nil {
			t.Fatal(parseErr)
		}
		compared++
		file, text := judges[test.Call].Validate(doc), set.Request(test.Call).Validate(test.Body)
		if (file == nil) != test.Valid || (text == nil) != test.Valid {
			t.Errorf("%s: valid: %v, but the file says %v, the published text %v", test.Name, test.Valid, file, text)
		}
	}
	if compared < 300 {
		t.Errorf("only %d cases compared", compared)
	}
}

func TestNothingRemote(t *testing.T) {
	for _, text := range []string{
		`{"$ref":"https://example.com/x.json"}`,
		`{"$ref":"file:///etc/hostname"}`,
		`{"$ref":"defs.json#/$defs/key"}`,
		`{"$schema":"https://example.com/schema"}`,
	} {
		if _, err := compile("x.json", text); err == nil || !strings.Contains(err.Error(), "not embedded") {
			t.Errorf("%s: got %v", text, err)
		}
	}
}

func TestLoadErrors(t *testing.T) {
	for _, c := range []struct{ file, from, to, want string }{
		{"owner.request.json", `defs.json#/$defs/key`, `defs.json#/$defs/kee`, "refers to nothing"},
		{"owner.request.json", `defs.json#/$defs/key`, `deafs.json#/$defs/key`, "not exist"},
		{"owner.request.json", `defs.json#/$defs/key`, `defs.json#/key`, "refers to nothing"},
		{"owner.request.json", `"propertyNames"`, `"x"`, "propertyNames"},
		{"owner.request.json", `"type": "object"`, `"type": "objekt"`, "compilation failed"},
		{"owner.request.json", `"key": {"$ref"`, `"colour": {"$ref"`, "not in the list"},
		{"owner.request.json", `"key": {"$ref": "defs.json#/$defs/key"}`, `"key": {"$ref": "defs.json#/$defs/key"}, "payload": {"type": "array"}, "holder": 5`, "compilation failed"},
		{"owner.request.json", `{`, `[`, "owner.request.json"},
		{"defs.json", `"limit", "leases"]`, `"limit"]`, "not in the list"},
		{"event.json", `"record": {`, `"lease": {`, "refers to nothing"},
	} {
		if _, err := read(changed(t, c.file, c.from, c.to)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s with %s: got %v, want %q", c.file, c.to, err, c.want)
		}
	}
	fsys := changed(t, "defs.json", `"leases"]`, `"leases", "colour"]`)
	raw, _ := fs.ReadFile(fsys, "owner.request.json")
	fsys["owner.request.json"].Data = bytes.Replace(raw, []byte(`"key": {`), []byte(`"colour": {"type": "string"}, "key": {`), 1)
	if _, err := read(fsys); err == nil || !strings.Contains(err.Error(), `no field for member "colour"`) {
		t.Errorf("a member without a field: %v", err)
	}
	fsys = changed(t, "event.json", "x", "x")
	fsys["other.json"] = &fstest.MapFile{Data: []byte(`{"type":"object"}`)}
	if _, err := read(fsys); err == nil || !strings.Contains(err.Error(), "neither") {
		t.Errorf("a file without a place: %v", err)
	}
	fsys = fstest.MapFS{
		"event.json": {Data: []byte(`{"$ref":"a.json#/$defs/x","title":"t","allOf":[{"$ref":"b.json#/$defs/x","title":"t"}]}`)},
		"a.json":     {Data: []byte(`{"$defs":{"x":{"type":"object"}}}`)},
		"b.json":     {Data: []byte(`{"$defs":{"x":{"type":"string"}}}`)},
	}
	if _, err := bundle(fsys, "event.json"); err == nil || !strings.Contains(err.Error(), "two definitions") {
		t.Errorf("two definitions with one name: %v", err)
	}
}

const (
	lease   = `"key":"k","holder":"A","revision":1760788800123456,"acquired_at":"2026-10-18T12:00:00.000Z","expires_at":"2026-10-18T12:00:15.123Z","ttl_ms":15000,"left_ms":14999`
	noLeft  = `"key":"k","holder":"A","revision":1760788800123456,"acquired_at":"2026-10-18T12:00:00.000Z","expires_at":"2026-10-18T12:00:15.123Z","ttl_ms":15000`
	badTime = `"key":"k","holder":"A","revision":1,"acquired_at":"2026-10-18T12:00:00Z","expires_at":"2026-10-18T12:00:15.123Z","ttl_ms":15000,"left_ms":1`
	badDay  = `"key":"k","holder":"A","revision":1,"acquired_at":"2026-13-18T12:00:00.000Z","expires_at":"2026-10-18T12:00:15.123Z","ttl_ms":15000,"left_ms":1`
)

func TestReplies(t *testing.T) {
	set := loadSet(t)
	for call, bodies := range map[string]struct{ valid, invalid []string }{
		"acquire": {
			[]string{`{"granted":true,"held":true,` + lease + `}`, `{"granted":false,"held":true,` + lease + `}`},
			[]string{`{"granted":true,` + lease + `}`, `{"held":true,` + lease + `}`, `{"granted":false,"held":false,` + lease + `}`, `{"granted":true,"held":true,` + noLeft + `}`,
				`{"granted":true,"held":true,` + badTime + `}`, `{"granted":true,"held":true,` + badDay + `}`, `{"granted":true,"held":true,` + lease + `,"extra":1}`, `{"granted":true,"held":true}`,
				`{"granted":true,"held":true,` + lease + `,"error":"x","kind":"busy"}`, `{"granted":true,"held":true,` + lease + `,"key":"k"}`, `{}`, `null`, `[]`, ``},
		},
		"renew": {
			[]string{`{"granted":true,"held":true,` + lease + `}`},
			[]string{`{"granted":false,"held":true,` + lease + `}`, `{"held":true,` + lease + `}`},
		},
		"release": {
			[]string{`{"released":true,"held":false,"key":"k","holder":"A","revision":5}`},
			[]string{`{"released":false,"held":false,"key":"k","holder":"A","revision":5}`, `{"released":true,"held":true,"key":"k","holder":"A","revision":5}`, `{"released":true,"held":false,"key":"k","holder":"A","revision":0}`, `{"released":true,"held":false,"key":"k","holder":"A"}`},
		},
		"owner": {
			[]string{`{"held":true,` + lease + `}`, `{"held":false,"key":"k"}`},
			[]string{`{"held":false,` + lease + `}`, `{"held":true,"key":"k"}`, `{"held":false}`, `{"granted":true,"held":true,` + lease + `}`},
		},
		"forward": {
			[]string{`{"holder":"A","revision":5,"payload":"","attempts":1}`, `{"holder":"A","revision":5,"payload":"YQ==","attempts":3}`,
				`{"error":"x","kind":"owner_timeout","holder":"A","revision":5}`},
			[]string{`{"holder":"A","revision":5,"payload":"YQ","attempts":1}`, `{"holder":"A","revision":5,"payload":null,"attempts":1}`, `{"holder":"A","revision":5,"attempts":1}`, `{"holder":"A","revision":5,"payload":"","attempts":4}`,
				`{"holder":"A","revision":5,"payload":"","attempts":0}`, `{"error":"x","kind":"owner_timeout","holder":"A"}`, `{"error":"x","kind":"owner_timeout","holder":"A","revision":5,"payload":""}`},
		},
	} {
		for _, body := range bodies.valid {
			if err := set.Reply(call).Validate([]byte(body)); err != nil {
				t.Errorf("%s: %v", call, err)
			}
		}
		for _, body := range bodies.invalid {
			if set.Reply(call).Validate([]byte(body)) == nil {
				t.Errorf("%s: %s is valid", call, body)
			}
		}
	}
}

// TestErrorReplies holds the kinds of each call to the contract.
func TestErrorReplies(t *testing.T) {
	set := loadSet(t)
	kinds := map[string]string{ // kind: the calls that cannot answer it
		"invalid": "", "unsupported": "", "busy": "", "unavailable": "", "internal": "",
		"lost": "acquire owner forward", "unknown": "owner forward",
		"not_held": "acquire renew release owner", "owner_unavailable": "acquire renew release owner", "owner_rejected": "acquire renew release owner",
		"owner_timeout": "acquire renew release owner", "request_too_large": "acquire renew release owner", "reply_too_large": "acquire renew release owner",
		"granted": "acquire renew release owner forward", "": "acquire renew release owner forward",
	}
	for _, call := range []string{"acquire", "forward", "owner", "release", "renew"} {
		for kind, not := range kinds {
			body := fmt.Sprintf(`{"error":"a sentence","kind":%q}`, kind)
			if got, want := set.Reply(call).Validate([]byte(body)) == nil, !strings.Contains(not, call); got != want {
				t.Errorf("%s with %q: valid: %v, want %v", call, kind, got, want)
			}
		}
		for _, body := range []string{`{"error":"","kind":"busy"}`, `{"error":"a\nb","kind":"busy"}`, `{"error":"a\u0085","kind":"busy"}`, `{"kind":"busy"}`, `{"error":"x"}`, `{"error":"x","kind":"busy","code":429}`} {
			if set.Reply(call).Validate([]byte(body)) == nil {
				t.Errorf("%s: %s is valid", call, body)
			}
		}
		if err := set.Reply(call).Validate([]byte(`{"error":"key \"é\" is bad","kind":"busy"}`)); err != nil {
			t.Error(err)
		}
		if call != "forward" && set.Reply(call).Validate([]byte(`{"error":"x","kind":"busy","holder":"A","revision":1}`)) == nil {
			t.Errorf("%s: an error names an owner", call)
		}
	}
}

func TestEvent(t *testing.T) {
	const record = `"v":1,"key":"k","holder":"A","ttl_ms":15000,"acquired_at":"2026-10-18T12:00:00.000Z","written_at":"2026-10-18T12:00:05.000Z","nonce":"x1"`
	sch := loadSet(t).Event()
	for _, body := range []string{
		`{` + record + `,"event":"acquired"}`,
		`{` + record + `,"event":"acquired","horizon":"2026-10-18T12:10:00.000Z","previous":{"holder":"B","revision":4,"ended":"expired"}}`,
		`{` + record + `,"event":"renewed"}`,
		`{` + record + `,"event":"released","revision":5}`,
		`{` + record + `,"event":"released","revision":5,"evicted":true}`,
		`{` + record + `,"event":"expired","revision":5}`,
	} {
		if err := sch.Validate([]byte(body)); err != nil {
			t.Error(err)
		}
	}
	for _, body := range []string{
		`{` + record + `}`,
		`{` + record + `,"event":"stolen"}`,
		`{` + record + `,"event":"released"}`,
		`{` + record + `,"event":"expired"}`,
		`{` + record + `,"event":"expired","revision":5,"evicted":true}`,
		`{` + record + `,"event":"released","revision":5,"evicted":false}`,
		`{` + record + `,"event":"acquired","revision":5}`,
		`{` + record + `,"event":"renewed","previous":{"holder":"B","revision":4,"ended":"expired"}}`,
		`{` + record + `,"event":"acquired","previous":{"holder":"B","revision":4}}`,
		`{` + record + `,"event":"acquired","previous":{"holder":"B","revision":4,"ended":"lost"}}`,
		`{` + record + `,"event":"acquired","colour":1}`,
		strings.Replace(`{`+record+`,"event":"renewed"}`, `"v":1`, `"v":2`, 1),
		strings.Replace(`{`+record+`,"event":"renewed"}`, `"nonce":"x1"`, `"nonce":""`, 1),
	} {
		if sch.Validate([]byte(body)) == nil {
			t.Errorf("%s is valid", body)
		}
	}
}

// TestAdmits: a reader of replies takes those of a newer service, which have more members,
// and nothing else that breaks the schema.
func TestAdmits(t *testing.T) {
	set, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	const lease = `"key":"k","holder":"a","revision":7,"acquired_at":"2026-11-29T18:56:14.961Z","expires_at":"2026-11-29T18:56:19.961Z","ttl_ms":5000,"left_ms":4000`
	for _, c := range []struct {
		call, reply string
		want        bool
	}{
		{"owner", `{"held":false,"key":"k"}`, true},
		{"owner", `{"held":false,"key":"k","new":{"a":[1]}}`, true},
		{"owner", `{"held":true,"new":1,` + lease + `}`, true},
		{"list", `{"leases":[{"new":1,` + lease + `}],"new":2}`, true},
		{"forward", `{"holder":"a","revision":7,"payload":"","attempts":1,"new":true}`, true},
		{"acquire", `{"error":"x","kind":"busy","new":1}`, true},
		{"owner", `{}`, false},
		{"owner", `{"stream":"AUDIT","seq":10}`, false},
		{"owner", `{"Held":false,"key":"k"}`, false},
		{"owner", `{"held":true,"held":false,"key":"k"}`, false},
		{"owner", `{"held":false,"key":"a b"}`, false},
		{"acquire", `{"granted":true,` + lease + `}`, false},
		{"acquire", `{"granted":true,"held":true,"error":"x","kind":"busy",` + lease + `}`, false},
		{"list", `{"leases":[{"key":"a\tb"}]}`, false},
		{"forward", `{"holder":"a","revision":7,"attempts":1}`, false},
		{"acquire", ``, false},
	} {
		if err := set.Reply(c.call).Admits([]byte(c.reply)); (err == nil) != c.want {
			t.Errorf("%s %s: %v", c.call, c.reply, err)
		}
	}
}
