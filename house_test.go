package leased

import (
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/metrics"
	"github.com/leased/leased/schemas"
	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

const module = "github.com/leased/leased"

// deps lists what a package of this module depends on, itself aside.
func deps(t *testing.T, pkg string) []string {
	t.Helper()
	out, err := exec.Command("go", "list", "-deps", pkg).Output()
	if err != nil {
		t.Fatalf("go list -deps %s: %v", pkg, err)
	}
	return slices.DeleteFunc(strings.Fields(string(out)), func(d string) bool { return d == pkg })
}

// TestImports holds the arrows of docs/ARCHITECTURE.md.
func TestImports(t *testing.T) {
	server := "github.com/nats-io/nats-server/v2"
	for _, c := range []struct {
		pkg  string
		ours []string // all of this module that it may depend on
		not  []string
	}{
		{"service/kinds", nil, []string{"github.com/nats-io"}},
		{"service", []string{"service/kinds"}, []string{server, "github.com/prometheus", "github.com/santhosh-tekuri"}},
		{"schemas", nil, []string{"github.com/nats-io", "github.com/prometheus"}},
		{"metrics", []string{"service/kinds"}, []string{"github.com/nats-io", "github.com/santhosh-tekuri"}},
		{"client", []string{"service/kinds"}, []string{server, "github.com/prometheus", "github.com/santhosh-tekuri"}},
		{"", []string{"service/kinds", "service", "schemas", "metrics"}, []string{server}},
	} {
		pkg := strings.TrimSuffix(module+"/"+c.pkg, "/")
		for _, d := range deps(t, pkg) {
			if own, ok := strings.CutPrefix(d, module+"/"); ok && !slices.Contains(c.ours, own) {
				t.Errorf("%s depends on %s", pkg, d)
			}
			for _, not := range c.not {
				if strings.HasPrefix(d, not) {
					t.Errorf("%s depends on %s", pkg, d)
				}
			}
		}
	}
}

// TestTableAgreesWithItsNeighbours holds rows, kinds, schemas and series to each
// other.
func TestTableAgreesWithItsNeighbours(t *testing.T) {
	rows, err := contracts()
	if err != nil {
		t.Fatal(err)
	}
	used := map[kinds.Kind]bool{kinds.NoReply: true}
	for _, row := range rows {
		seen := map[kinds.Kind]bool{}
		for _, k := range row.Kinds {
			if _, ok := kinds.Lookup(k); !ok || seen[k] {
				t.Errorf("%s: kind %q is unknown or stands twice", row.Name, k)
			}
			seen[k], used[k] = true, true
		}
		// An error of each kind of the row keeps the reply schema, and of no other.
		for _, k := range kinds.All() {
			if !k.Kind.IsError() {
				continue
			}
			body := errorAnswer(&kinds.Error{Kind: k.Kind, Text: "x"})
			valid := row.reply.Validate(body.body) == nil
			many := row.Name == "renew_many" && (k.Kind == kinds.Lost || k.Kind == kinds.Unknown) // in its list only
			if valid != (seen[k.Kind] && !many) {
				t.Errorf("%s: an error of kind %s keeps its reply schema: %v", row.Name, k.Kind, valid)
			}
		}
	}
	for _, k := range kinds.All() {
		if !used[k.Kind] {
			t.Errorf("no call answers %s", k.Kind)
		}
	}
	var verdicts []string
	for _, v := range service.Verdicts() {
		verdicts = append(verdicts, string(v))
	}
	var states []string
	for _, s := range metrics.BucketStates() {
		states = append(states, string(s))
	}
	slices.Sort(verdicts)
	slices.Sort(states)
	if !slices.Equal(verdicts, states) {
		t.Errorf("verdicts %v, states in metrics %v", verdicts, states)
	}
	for _, a := range service.Attempts() {
		if !slices.Contains(metrics.Outcomes(), metrics.Outcome(a)) {
			t.Errorf("metrics do not know the attempt %q", a)
		}
	}
	for _, w := range metrics.Warnings() {
		if service.WarningText(string(w)) == "" {
			t.Errorf("nobody explains the warning %q", w)
		}
	}
	for _, e := range []service.Event{service.Acquired, service.Renewed, service.Released, service.Expired} {
		if !slices.Contains(metrics.Events(), metrics.Event(e)) {
			t.Errorf("metrics do not know the event %q", e)
		}
	}
}

// TestRecordsKeepTheEventSchema: what the service stores is what it publishes.
func TestRecordsKeepTheEventSchema(t *testing.T) {
	set, err := schemas.Load()
	if err != nil {
		t.Fatal(err)
	}
	base := service.Record{V: 1, Key: "k", Holder: "A", TTLMillis: 5000, AcquiredAt: 1_800_000_000_001, WrittenAt: 1_800_000_000_002, Nonce: "n"}
	for name, change := range map[string]func(*service.Record){
		"acquired": func(r *service.Record) { r.Event, r.Meta = service.Acquired, "m" },
		"previous": func(r *service.Record) {
			r.Event = service.Acquired
			r.Previous = &service.Previous{Holder: "B", Revision: 4, Ended: service.EndedEvicted}
		},
		"renewed":  func(r *service.Record) { r.Event, r.Horizon = service.Renewed, 1_800_000_000_003 },
		"released": func(r *service.Record) { r.Event, r.Revision = service.Released, 7 },
		"evicted":  func(r *service.Record) { r.Event, r.Revision, r.Evicted = service.Released, 7, true },
		"foreigner": func(r *service.Record) {
			*r = service.Record{V: 1, Key: "k", WrittenAt: 1, Nonce: "n", Event: service.Released, Revision: 7, Evicted: true}
		},
		"expired": func(r *service.Record) { r.Event, r.Revision = service.Expired, 7 },
	} {
		r := base
		change(&r)
		body, err := json.Marshal(&r)
		if err != nil {
			t.Fatal(err)
		}
		if err := set.Event().Validate(body); err != nil {
			t.Errorf("%s: %s: %v", name, body, err)
		}
	}
}

func TestSentence(t *testing.T) {
	for in, want := range map[string]string{
		"plain":                  "plain",
		"a\r\nb\tc\u0085d":       "a  b c d",
		"bad \xff byte":          "bad ? byte",
		" \n ":                   "the call failed",
		strings.Repeat("é", 400): strings.Repeat("é", 250),
	} {
		if got := sentence(in); got != want {
			t.Errorf("sentence(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestLeaseBody holds the hand-made encoding of leases to encoding/json's.
func TestLeaseBody(t *testing.T) {
	for _, meta := range []string{"", "plain", "<a href=\"é\">\u2028\n"} {
		l := service.Lease{Key: "k-1", Holder: "A_b", Revision: 1<<64 - 1, AcquiredAt: 1_800_000_000_001, ExpiresAt: 1_800_000_005_000, TTL: 5 * time.Second, Left: 4999 * time.Millisecond, Meta: meta}
		want := marshal(struct {
			Key        string            `json:"key"`
			Holder     string            `json:"holder"`
			Revision   uint64            `json:"revision"`
			AcquiredAt service.Timestamp `json:"acquired_at"`
			ExpiresAt  service.Timestamp `json:"expires_at"`
			TTL        int64             `json:"ttl_ms"`
			Left       int64             `json:"left_ms"`
			Meta       string            `json:"meta,omitempty"`
		}{l.Key, l.Holder, l.Revision, l.AcquiredAt, l.ExpiresAt, 5000, 4999, meta})
		if got := appendLease([]byte("{"), l); string(got) != string(want) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestRulesAreNamed: each rule of docs/wire-protocol.md is named by its number in a comment of the
// code that carries it out and in one of a test, so that grep finds both.
func TestRulesAreNamed(t *testing.T) {
	protocol, err := os.ReadFile("docs/wire-protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	code, tests := map[string]bool{}, map[string]bool{}
	named := regexp.MustCompile(`\b[PHFE][0-9]{1,2}\b`)
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			_, comment, _ := strings.Cut(line, "//")
			for _, rule := range named.FindAllString(comment, -1) {
				if strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, "test/") {
					tests[rule] = true
				} else {
					code[rule] = true
				}
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	rules := regexp.MustCompile(`(?m)^- \*\*([PHFE][0-9]+)\*\*`).FindAllStringSubmatch(string(protocol), -1)
	if len(rules) < 40 {
		t.Errorf("%d rules are too few: the document has another form", len(rules))
	}
	for _, rule := range rules {
		if !code[rule[1]] || !tests[rule[1]] {
			t.Errorf("%s: named in code: %v, in a test: %v", rule[1], code[rule[1]], tests[rule[1]])
		}
	}
}
