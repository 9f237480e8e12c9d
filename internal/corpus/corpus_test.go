package corpus

import (
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
)

func TestLoad(t *testing.T) {
	got, err := Load(fstest.MapFS{
		".gitattributes":   {Data: []byte("* -text\n")},
		"owner/a.txt":      {Data: []byte("call: owner\nexpect: valid\nwhy: a: b\nsource: I01\n\n{\"key\":\n\n\"k\"}\xff\x00")},
		"owner/empty.txt":  {Data: []byte("call: owner\nexpect: invalid\n\n")},
		"renew/repeat.txt": {Data: []byte("call: renew\nexpect: invalid\nmember: key\nrepeat: 3 \"\\u00e9\\n\"\n\n{\"<repeat>\n")},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []Case{
		{Name: "owner/a", Call: "owner", Valid: true, Why: "a: b", Source: "I01", Body: []byte("{\"key\":\n\n\"k\"}\xff\x00")},
		{Name: "owner/empty", Call: "owner", Body: []byte{}},
		{Name: "renew/repeat", Call: "renew", Member: "key", Body: []byte("{\"é\né\né\n\n")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestLoadRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"call: owner\nexpect: valid\n":                                    "no empty line",
		"call: owner\n\n{}":                                               "expect must be",
		"expect: valid\n\n{}":                                             "no call",
		"call: owner\nexpect: maybe\n\n{}":                                "expect must be",
		"call: owner\nexpect: valid\nmember: key\n\n{}":                   "no member at fault",
		"call: owner\nexpect: valid\ncolour: red\n\n{}":                   "unknown header",
		"call: owner\nexpect\n\n{}":                                       "NAME: VALUE",
		"call: owner\nexpect: valid\nrepeat: x \"a\"\n\n<repeat>":         "no number",
		"call: owner\nexpect: valid\nrepeat: 2 a\n\n<repeat>":             "Go quotes",
		"call: owner\nexpect: valid\nrepeat: 2 \"a\"\n\n{}":               "once",
		"call: owner\nexpect: valid\nrepeat: 9000000 \"a\"\n\n<repeat>":   "more than",
		"call: owner\nexpect: valid\nrepeat: 2 \"a\"\n\n<repeat><repeat>": "once",
	} {
		if _, err := Load(fstest.MapFS{"x.txt": {Data: []byte(text)}}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want an error with %q", text, err, want)
		}
	}
}
