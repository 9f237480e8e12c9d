package schemas

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPlain holds the plain reader to the library's: what it accepts, the library accepts with the same
// result, and the requests that clients send are among it.
func TestPlain(t *testing.T) {
	set := loadSet(t)
	accepted, valid := map[string]int{}, 0
	for _, c := range loadCorpus(t) {
		sch := set.Request(c.Call)
		if !sch.form.plain {
			t.Fatalf("%s has no plain reader", c.Call)
		}
		if c.Valid {
			valid++
		}
		got, ok := sch.form.decode(c.Body)
		if !ok || got.check() != nil {
			continue
		}
		accepted[c.Call]++
		want, err := sch.decode(c.Body)
		if err != nil {
			t.Errorf("%s: plain, but %v", c.Name, err)
		} else if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", c.Name, diff)
		}
	}
	t.Logf("plain, of %d valid: %v", valid, accepted)
	for _, call := range calls {
		if accepted[call] == 0 {
			t.Errorf("no request of %s is plain", call)
		}
	}
}

// TestPlainForms says which spellings are plain and which are left to the library.
func TestPlainForms(t *testing.T) {
	set := loadSet(t)
	for _, c := range []struct {
		call, body string
		plain      bool
	}{
		{"owner", `{"key":"k"}`, true},
		{"owner", " {\t\"key\" :\r\n\"k\" } ", true},
		{"owner", `{"key":"k","holder":"any thing","ttl_ms":0,"revision":7}`, true},
		{"owner", `{"key":"k","holder":null}`, false},
		{"owner", `{"key":"k","holder":"\u0061"}`, false},
		{"owner", `{"key":"k","key":"k"}`, false},
		{"owner", `{"key":"k",}`, false},
		{"owner", `{,"key":"k"}`, false},
		{"owner", `{"key":"k"`, false},
		{"owner", `{"key":"k`, false},
		{"owner", `{"key":"k"}}`, false},
		{"owner", `{"key":"k"} x`, false},
		{"owner", `{"key":""}`, false},
		{"owner", `{"key":"a.b"}`, false},
		{"owner", `{"nothing":"k"}`, false},
		{"owner", `{}`, false},
		{"owner", ``, false},
		{"renew", `{"key":"k","holder":"h","revision":18446744073709551615,"ttl_ms":1000}`, false},
		{"renew", `{"key":"k","holder":"h","revision":9999999999999999999,"ttl_ms":1000}`, true},
		{"renew", `{"key":"k","holder":"h","revision":0,"ttl_ms":1000}`, false},
		{"renew", `{"key":"k","holder":"h","revision":01,"ttl_ms":1000}`, false},
		{"renew", `{"key":"k","holder":"h","revision":1,"ttl_ms":1500}`, false},
		{"renew", `{"key":"k","holder":"h","revision":1,"ttl_ms":1000.0}`, false},
		{"renew", `{"key":"k","holder":"h","revision":-1,"ttl_ms":1000}`, false},
		{"forward", `{"key":"k","payload":"aGk="}`, true},
		{"forward", `{"key":"k","payload":""}`, true},
		{"forward", `{"key":"k","payload":"aGl="}`, false},
		{"forward", `{"key":"k","payload":"aG k="}`, false},
		{"list", `{}`, true},
		{"list", `{"prefix":""}`, true},
		{"renew_many", `{"holder":"h","ttl_ms":1000,"leases":[{"key":"a","revision":1},{"revision":2,"key":"b"}]}`, true},
		{"renew_many", `{"holder":"h","ttl_ms":1000,"leases":[]}`, false},
		{"renew_many", `{"holder":"h","ttl_ms":1000,"leases":[{"key":"a","revision":1},]}`, false},
		{"renew_many", `{"holder":"h","ttl_ms":1000,"leases":[{"key":"a"}]}`, false},
		{"renew_many", `{"holder":"h","ttl_ms":1000,"leases":[{"key":"a","revision":1,"holder":"h"}]}`, false},
	} {
		if _, ok := set.Request(c.call).form.decode([]byte(c.body)); ok != c.plain {
			t.Errorf("%s %s: plain %v, want %v", c.call, c.body, ok, c.plain)
		}
	}
}

func TestNewPlain(t *testing.T) {
	for property, want := range map[string]bool{
		`{"type":"string","pattern":"^[a-z]+$"}`:     true,
		`{"type":"string","pattern":"[a-z]+"}`:       false,
		`{"type":"string","pattern":"^[a-z]{2}$"}`:   false,
		`{"type":"string","pattern":"^[^a]*$"}`:      false,
		`{"type":"string","pattern":"^\"*$"}`:        false,
		`{"type":"string","enum":["a"]}`:             false,
		`{"type":"string","minimum":4}`:              false,
		`{"type":["string","null"]}`:                 false,
		`{"type":"integer","exclusiveMinimum":1}`:    false,
		`{"type":"integer","minimum":-1}`:            false,
		`{"type":"integer","minimum":1,"default":2}`: true,
		`{"type":"number"}`:                          false,
		`{"const":1}`:                                false,
		`{"description":"any"}`:                      true,
		`{"type":"array","maxItems":2}`:              false,
	} {
		js, err := compile("x.json", `{"type":"object","additionalProperties":false,"properties":{"x":`+property+`}}`)
		if err != nil {
			t.Fatal(err)
		}
		if got := newForm(js, nil).plain; got != want {
			t.Errorf("%s: plain %v, want %v", property, got, want)
		}
	}
}
