package schemas

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDecode(t *testing.T) {
	set := loadSet(t)
	for _, c := range []struct {
		call, body string
		want       Request
	}{
		{"acquire", `{"key":"k","holder":"A","ttl_ms":15000}`, Request{Key: "k", Holder: "A", TTL: 15 * time.Second}},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":1.5e4}`, Request{Key: "k", Holder: "A", TTL: 15 * time.Second}},
		{"renew", `{"key":"k","holder":"A","ttl_ms":600000.0,"revision":18446744073709551615}`, Request{Key: "k", Holder: "A", TTL: 10 * time.Minute, Revision: 1<<64 - 1}},
		{"renew", `{"key":"k","holder":"A","ttl_ms":1e3,"revision":9007199254740993}`, Request{Key: "k", Holder: "A", TTL: time.Second, Revision: 1<<53 + 1}},
		{"release", `{"key":"k","holder":"A","ttl_ms":1500,"revision":1844674407370955161.5e1}`, Request{Key: "k", Holder: "A", Revision: 1<<64 - 1}},
		{"release", `{"key":"k","holder":"A","revision":50e-1,"payload":null}`, Request{Key: "k", Holder: "A", Revision: 5}},
		{"owner", `{"holder":"a.b","\u006bey":"\u006b"}`, Request{Key: "k"}},
		{"forward", `{"key":"k"}`, Request{Key: "k", Timeout: 5 * time.Second}},
		{"forward", `{"key":"k","payload":"","timeout_ms":100}`, Request{Key: "k", Timeout: 100 * time.Millisecond}},
		{"forward", `{"key":"k","payload":"AP8=","timeout_ms":30000}`, Request{Key: "k", Timeout: 30 * time.Second, Payload: []byte{0, 255}}},
	} {
		got, err := set.Request(c.call).Decode([]byte(c.body))
		if err != nil {
			t.Errorf("%s %s: %v", c.call, c.body, err)
		} else if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s %s: %s", c.call, c.body, diff)
		}
	}
}

// TestSentences shows every kind of error once: it is read by people and must not change by accident (P2).
func TestSentences(t *testing.T) {
	set := loadSet(t)
	const known = "; known members are key, holder, ttl_ms, revision, timeout_ms, payload, wait_ms, meta, prefix, after, limit, leases"
	for _, c := range []struct{ call, body, member, want string }{
		{"acquire", ``, "", `the request must be one JSON object, got nothing`},
		{"acquire", " \n", "", `the request must be one JSON object, got nothing`},
		{"acquire", `[`, "", `the request must be one JSON object, got an array`},
		{"acquire", `"a"`, "", `the request must be one JSON object, got a string`},
		{"acquire", `-1`, "", `the request must be one JSON object, got a number`},
		{"acquire", `null`, "", `the request must be one JSON object, got null`},
		{"acquire", `false`, "", `the request must be one JSON object, got true or false`},
		{"acquire", "\xef\xbb\xbf{}", "", `the request must be UTF-8 without a byte order mark`},
		{"acquire", `{"key":"k"`, "", `the request must be one JSON object, got only the beginning of one`},
		{"owner", `{"key":"k"} x`, "", `the request must be one JSON object, got more data after it at byte 12`},
		{"acquire", `{"key":'k'}`, "", `the request must be valid JSON, got at byte 7: invalid character '\'' at start of value`},
		{"acquire", `{1:2}`, "", `the request must be valid JSON, got at byte 1: object member name must be a string`},
		{"acquire", "{\"key\":\"\xff\"}", "", `the request must be valid JSON, got at byte 8: invalid UTF-8`},
		{"acquire", "{\"key\":é}", "", `the request must be valid JSON, got at byte 7: invalid character '?' at start of value`},
		{"acquire", `{"key":"k","KEY":"b"}`, "KEY", `unknown member "KEY"` + known},
		{"acquire", `{"a\n` + strings.Repeat("é", 20) + `":1}`, `a\n` + strings.Repeat(`\u00e9`, 10), `unknown member "a\n` + strings.Repeat(`\u00e9`, 10) + `"...` + known},
		{"acquire", `{"key":"k","\u006bey":"k"}`, "key", `member "key" stands twice`},
		{"acquire", `{"key":"k","holder":"A"}`, "ttl_ms", `ttl_ms is missing`},
		{"acquire", `{}`, "key", `key is missing`},
		{"acquire", `{"ttl_ms":1}`, "key", `key is missing`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":1500}`, "ttl_ms", `ttl_ms must be a multiple of 1000 (whole seconds), got 1500`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":999}`, "ttl_ms", `ttl_ms must be 1000 to 600000, got 999`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":-0}`, "ttl_ms", `ttl_ms must be 1000 to 600000, got -0`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":"5000"}`, "ttl_ms", `ttl_ms must be a whole number, got "5000"`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":1000.5}`, "ttl_ms", `ttl_ms must be a whole number, got 1000.5`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":null}`, "ttl_ms", `ttl_ms must be a whole number, got null`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":{}}`, "ttl_ms", `ttl_ms must be a whole number, got an object`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":000}`, "", `the request must be valid JSON, got at byte 34: invalid character '0' after object value (expecting ',' or '}')`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":100000000000000000000000000000000}`, "ttl_ms", `ttl_ms must be a number of at most 32 characters, got 33`},
		{"acquire", `{"key":"k","holder":"A","ttl_ms":1e1000}`, "ttl_ms", `ttl_ms must be a number with at most 3 digits of exponent, got 1e1000`},
		{"acquire", `{"key":"a.b"}`, "key", `key must have only the characters A-Z a-z 0-9 _ -, got "a.b"`},
		{"acquire", `{"key":""}`, "key", `key must have 1 to 128 characters, got ""`},
		{"acquire", `{"key":"` + strings.Repeat("a", 129) + `"}`, "key", `key must have 1 to 128 characters, got 129`},
		{"acquire", `{"key":"` + strings.Repeat("a", 999) + `"}`, "key", `key must have 1 to 128 characters, got 999 bytes`},
		{"acquire", `{"key":"` + strings.Repeat("a.", 40) + `"}`, "key", `key must have only the characters A-Z a-z 0-9 _ -, got "` + strings.Repeat("a.", 32) + `"...`},
		{"acquire", `{"key":true}`, "key", `key must be a string, got true`},
		{"acquire", `{"payload":[]}`, "payload", `payload must be a plain value, got an array`},
		{"renew", `{"key":"k","holder":"A","ttl_ms":1000,"revision":18446744073709551616}`, "revision", `revision must be 1 to 18446744073709551615, got 18446744073709551616`},
		{"forward", `{"key":"k","payload":"YQ"}`, "payload", `payload must be canonical standard base64 with padding and without line breaks, got "YQ"`},
		{"forward", `{"key":"k","timeout_ms":99}`, "timeout_ms", `timeout_ms must be 100 to 30000, got 99`},
	} {
		_, err := set.Request(c.call).Decode([]byte(c.body))
		if err == nil {
			t.Errorf("%s: valid", c.body)
			continue
		}
		if e := checkError(t, err); e.Error() != c.want || e.Member != c.member {
			t.Errorf("%s\n got %q %s\nwant %q %s", c.body, e.Member, e, c.member, c.want)
		}
	}
}

// TestSchemaDecides proves that the rules are the schema's: another schema, other verdicts.
func TestSchemaDecides(t *testing.T) {
	const old, bad = `{"key":"k","holder":"A","ttl_ms":5000}`, `{"key":"k","holder":"A","ttl_ms":700}`
	for _, c := range []struct{ file, from, to, body, want string }{
		{"defs.json", `"maximum": 600000,`, `"maximum": 4000,`, old, "ttl_ms must be 1000 to 4000, got 5000"},
		{"defs.json", `"multipleOf": 1000`, `"multipleOf": 3000`, old, "ttl_ms must be a multiple of 3000, got 5000"},
		{"defs.json", `"type": "integer",
      "minimum": 1000`, `"type": "string",
      "minimum": 1000`, old, "ttl_ms must be a string, got 5000"},
		{"defs.json", `"ttl_ms", "revision"`, `"revision"`, old, "not in the list of propertyNames"},
		{"defs.json", `"limit", "leases"]`, `"limit", "leases", "colour"]`, `{"colour":1}`, "key is missing"},
		{"acquire.request.json", `["key", "holder", "ttl_ms"]`, `["key", "holder", "ttl_ms", "payload"]`, old, "payload is missing"},
		{"acquire.request.json", `"$ref": "defs.json#/$defs/ttl_ms"`, `"type": "integer"`, bad, ""},
		{"acquire.request.json", `{"$ref": "defs.json#/$defs/key"}`, `{"type": "string", "const": "x"}`, old, `key must keep its rule const, got "k"`},
		{"acquire.request.json", `{"$ref": "defs.json#/$defs/key"}`, `{"type": "string", "minLength": 2}`, old, `key must have at least 2 characters, got "k"`},
		{"acquire.request.json", `{"$ref": "defs.json#/$defs/key"}`, `{"type": "string", "maxLength": 0}`, old, `key must have at most 0 characters, got 1`},
	} {
		set, err := read(changed(t, c.file, c.from, c.to))
		if err == nil {
			_, err = set.Request("acquire").Decode([]byte(c.body))
		}
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s with %s: got %v, want %q", c.file, c.to, err, c.want)
		}
	}
}

// changed is the embedded files with one text in one file replaced.
func changed(t *testing.T, file, from, to string) fstest.MapFS {
	t.Helper()
	fsys := fstest.MapFS{}
	names, _ := files.ReadDir(".")
	for _, entry := range names {
		raw, err := files.ReadFile(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		if entry.Name() == file {
			if !strings.Contains(string(raw), from) {
				t.Fatalf("%s has no %s", file, from)
			}
			raw = []byte(strings.Replace(string(raw), from, to, 1))
		}
		fsys[entry.Name()] = &fstest.MapFile{Data: raw}
	}
	return fsys
}

// TestList reads a request with a list, which no call has yet.
func TestList(t *testing.T) {
	js, err := compile("list.json", `{
		"type": "object",
		"required": ["leases"],
		"properties": {
			"holder": {},
			"leases": {
				"type": "array", "minItems": 1, "maxItems": 3,
				"items": {
					"type": "object", "required": ["key", "revision"],
					"properties": {"key": {"type": "string", "maxLength": 3}, "revision": {"type": "integer", "minimum": 1}},
					"additionalProperties": false
				}
			}
		},
		"additionalProperties": false
	}`)
	if err != nil {
		t.Fatal(err)
	}
	sch := &Schema{js: js, form: newForm(js, []string{"holder", "leases"})}
	for body, want := range map[string]string{
		`{"holder":5,"leases":[{"key":"a","revision":1},{"revision":2e0,"key":"b"}]}`: "",
		`{"leases":[]}`:                        "leases must have 1 to 3 items, got 0",
		`{"leases":{}}`:                        "leases must be an array, got an object",
		`{"leases":[1]}`:                       "leases[0] must be an object, got 1",
		`{"leases":[[]]}`:                      "leases[0] must be an object, got an array",
		`{"leases":[{"key":"a"}]}`:             "leases[0].revision is missing",
		`{"leases":[{"key":[],"revision":1}]}`: "leases[0].key must be a string, got an array",
		`{"leases":[{"key":"a","revision":1},{"key":"aaaa","revision":0}]}`:            "leases[1].key must have at most 3 characters, got 4",
		`{"leases":[{"key":"a","revision":1},{"key":"aaaaaaaaaaaaaaa","revision":0}]}`: "leases[1].key must have at most 3 characters, got 15 bytes",
		`{"leases":[{"key":"a","revision":1},{"key":"a","revision":0}],"holder":null}`: "leases[1].revision must be at least 1, got 0",
		`{"leases":[{"key":"a","key":"b"}]}`:                                           `member "leases[0].key" stands twice`,
		`{"leases":[{"key":"a","colour":"b"}]}`:                                        `unknown member "colour" in leases[0]; known members are key, revision`,
		`{"leases":[{},{},{},{}]}`:                                                     "leases must have at most 3 items, got more",
		`{"leases":[{"key":1e0001}]}`:                                                  "leases[0].key must be a number with at most 3 digits of exponent, got 1e0001",
		`{"leases":[{"key":"a"]}`:                                                      "the request must be valid JSON, got at byte 21: invalid character ']' after object value (expecting ',' or '}')",
		`{"leases":[{"key":"a","revision":1}}`:                                         "the request must be valid JSON, got at byte 35: invalid character '}' after array element (expecting ',' or ']')",
		`{"leases":[{"key":"a","revision":1}`:                                          "the request must be one JSON object, got only the beginning of one",
		`{"leases":[{"key":"a","revision":1},]}`:                                       "the request must be valid JSON, got at byte 35: invalid character ',' at start of value",
		`{"holder":[{"key":"a","revision":1}]}`:                                        "holder must be a plain value, got an array",
	} {
		doc, fault := readRequest([]byte(body), sch.form)
		if fault == nil {
			if err := sch.js.Validate(doc); err != nil {
				fault = sch.explain(err, doc)
			}
		}
		got := ""
		if fault != nil {
			got = checkError(t, fault).Error()
		}
		if got != want {
			t.Errorf("%s\n got %s\nwant %s", body, got, want)
		}
	}
}

func TestWhole(t *testing.T) {
	for literal, want := range map[string]uint64{
		"0": 0, "-0": 0, "0.0e5": 0, "7": 7, "70e-1": 7, "0.7e1": 7, "18446744073709551615": 1<<64 - 1, "18446744073709551615.0": 1<<64 - 1, "1844674407370955161.5e1": 1<<64 - 1,
	} {
		if got := whole(json.Number(literal)); got != want {
			t.Errorf("%s: got %d, want %d", literal, got, want)
		}
	}
}
