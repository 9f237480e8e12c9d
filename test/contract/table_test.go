package contract

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/leased/leased"
	"github.com/leased/leased/service/kinds"
)

// info is the reply of $SRV.INFO.
type info struct {
	Name        string            `json:"name"`
	Description string            `json:"description"`
	Metadata    map[string]string `json:"metadata"`
	Endpoints   []struct {
		Name       string            `json:"name"`
		Subject    string            `json:"subject"`
		QueueGroup string            `json:"queue_group"`
		Metadata   map[string]string `json:"metadata"`
	} `json:"endpoints"`
}

// TestTableSchemasAndDiscoveryAgree: the table, the schemas, $SRV.INFO, the
// series and the contract's own lists say one thing.
func TestTableSchemasAndDiscoveryAgree(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})

	// The table against the contract.
	table := leased.Endpoints()
	for n, call := range calls {
		if len(table) <= n || table[n].Name != call {
			t.Fatalf("row %d of the table is not %s", n, call)
		}
		if !sameSet(table[n].Kinds, answerable[call]) {
			t.Errorf("%s: the table lists %v, the contract %v", call, table[n].Kinds, answerable[call])
		}
	}
	for k, code := range codes {
		if got := k.Code(); got != code {
			t.Errorf("code of %s is %q, the contract says %q", k, got, code)
		}
	}
	for _, i := range kinds.All() {
		if codes[i.Kind] != i.Code {
			t.Errorf("kind %s has code %q, which the contract does not know", i.Kind, i.Code)
		}
	}

	// $SRV.INFO against table and schemas.
	var in info
	if err := json.Unmarshal(r.discover("INFO", 1)[0], &in); err != nil {
		t.Fatal(err)
	}
	if in.Name != microName || in.Description == "" {
		t.Errorf("service %q, %q", in.Name, in.Description)
	}
	wantMeta := map[string]string{"bucket": "leases", "events": "dagnats.lease.changed.<key>", "inbox": "dagnats.lease.inbox.<holder>.<key>", "server_version": r.nc.ConnectedServerVersion()}
	if diff := cmp.Diff(wantMeta, in.Metadata); diff != "" {
		t.Errorf("service metadata: %s", diff)
	}
	if len(in.Endpoints) != len(table) {
		t.Errorf("$SRV.INFO shows %d endpoints, the table has %d", len(in.Endpoints), len(table))
	}
	for n, e := range in.Endpoints {
		row := table[n]
		if e.Name != row.Name || e.Subject != api+row.Name || e.QueueGroup != queueGroup {
			t.Errorf("endpoint %d is %s on %s in %s, the table says %s", n, e.Name, e.Subject, e.QueueGroup, row.Name)
		}
		request, reply := r.set.Request(row.Name), r.set.Reply(row.Name)
		if request == nil || reply == nil {
			t.Fatalf("%s has no schemas", row.Name)
		}
		want := map[string]string{"description": row.Does, "request_schema": request.Text(), "reply_schema": reply.Text(), "kinds": joined(row.Kinds)}
		if diff := cmp.Diff(want, e.Metadata); diff != "" {
			t.Errorf("metadata of %s: %s", row.Name, diff)
		}
		if strings.Count(row.Does, ".") != 1 || !strings.HasSuffix(row.Does, ".") {
			t.Errorf("%s: %q is not one sentence", row.Name, row.Does)
		}
		// What the reply schema allows as kinds are the row's error kinds.
		if got, want := schemaKinds(t, reply.Text()), errorKinds(row); !sameSet(got, want) {
			t.Errorf("%s: the reply schema allows the kinds %v, the row lists %v", row.Name, got, want)
		}
		var schema struct {
			Schema string `json:"$schema"`
			Title  string `json:"title"`
			ID     string `json:"$id"`
		}
		for _, text := range []string{request.Text(), reply.Text()} {
			if err := json.Unmarshal([]byte(text), &schema); err != nil || schema.Schema == "" || schema.ID == "" {
				t.Errorf("%s: a published schema says %+v, %v", row.Name, schema, err)
			}
			if strings.Contains(text, "\n") || regexp.MustCompile(`"\$ref":"[^#]`).MatchString(text) {
				t.Errorf("%s: a published schema is not compact or refers to another file", row.Name)
			}
		}
	}

	// The series: one for each kind of the row and no_reply, at 0.
	families, err := r.all[0].metrics.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	series := map[string][]kinds.Kind{}
	for _, f := range families {
		if f.GetName() != "leased_replies_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			label := map[string]string{}
			for _, l := range m.GetLabel() {
				label[l.GetName()] = l.GetValue()
			}
			if len(label) != 2 || m.GetCounter().GetValue() != 0 {
				t.Errorf("series %v is at %v before any request", label, m.GetCounter().GetValue())
			}
			series[label["endpoint"]] = append(series[label["endpoint"]], kinds.Kind(label["kind"]))
		}
	}
	for _, row := range table {
		if want := append(slices.Clone(row.Kinds), kinds.NoReply); !sameSet(series[row.Name], want) {
			t.Errorf("%s has series for %v, want %v", row.Name, series[row.Name], want)
		}
	}
	if len(series) != len(table) {
		t.Errorf("there are series for %d endpoints", len(series))
	}
}

func joined(ks []kinds.Kind) string {
	var names []string
	for _, k := range ks {
		names = append(names, string(k))
	}
	return strings.Join(names, ",")
}

func errorKinds(row leased.Row) (ks []kinds.Kind) {
	for _, k := range row.Kinds {
		if codes[k] != "" {
			ks = append(ks, k)
		}
	}
	return ks
}

// schemaKinds finds every kind that a reply schema allows.
func schemaKinds(t *testing.T, text string) (ks []kinds.Kind) {
	t.Helper()
	var doc any
	if err := json.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	found := map[kinds.Kind]bool{}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, item := range v {
				walk(item)
			}
		case map[string]any:
			if kind, ok := v["kind"].(map[string]any); ok {
				if enum, ok := kind["enum"].([]any); ok {
					for _, k := range enum {
						found[kinds.Kind(k.(string))] = true
					}
				}
			}
			for _, item := range v {
				walk(item)
			}
		}
	}
	walk(doc)
	return slices.Collect(maps.Keys(found))
}

// TestDocsNameEveryCallAndKind: docs/wire-protocol.md is normative, so what the
// table has, it has.
func TestDocsNameEveryCallAndKind(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/wire-protocol.md")
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("docs/wire-protocol.md is not written yet")
	}
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	word := func(w string) bool {
		return regexp.MustCompile(`(^|[^A-Za-z0-9_])` + regexp.QuoteMeta(w) + `($|[^A-Za-z0-9_])`).MatchString(doc)
	}
	if !strings.Contains(doc, api+"<call>") {
		t.Errorf("docs/wire-protocol.md does not name the subject %s<call>", api)
	}
	for _, row := range leased.Endpoints() {
		// The row of the call in the table of calls has the kinds of its own.
		line := regexp.MustCompile("(?m)^\\| `" + row.Name + "` \\|.*$").FindString(doc)
		if line == "" {
			t.Errorf("docs/wire-protocol.md has no row of the call %s", row.Name)
		}
		for _, k := range row.Kinds {
			common := slices.Contains(answerable["list"], k) && k != kinds.Listed
			if !common && !strings.Contains(line, "`"+string(k)+"`") {
				t.Errorf("docs/wire-protocol.md: the row of %s does not name the kind %s", row.Name, k)
			}
		}
		for _, k := range row.Kinds {
			if !word(string(k)) {
				t.Errorf("docs/wire-protocol.md does not name the kind %s, which %s can answer", k, row.Name)
			}
		}
	}
	for k, code := range codes {
		line := regexp.MustCompile(`(?m)^.*\b` + string(k) + `\b.*\b` + code + `\b.*$`)
		if !line.MatchString(doc) {
			t.Errorf("docs/wire-protocol.md has no line with kind %s and its code %s", k, code)
		}
	}
	for _, name := range []string{microName, queueGroup, bucketStream, events + "<key>", inbox + "<holder>.<key>", fenceHeader, rejectHeader, eventHeader,
		errorHeader, errorCodeHeader, "Nats-Sequence", "Nats-Last-Sequence", "Nats-Subject", "no_reply"} {
		if !strings.Contains(doc, name) {
			t.Errorf("docs/wire-protocol.md does not name %s", name)
		}
	}
}

// TestDiscovery: $SRV finds the service by its name, and each instance by its id.
func TestDiscovery(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	ids := map[string]bool{}
	for _, body := range r.discover("PING", 2) {
		var p struct{ Name, ID, Version, Type string }
		if err := json.Unmarshal(body, &p); err != nil {
			t.Fatal(err)
		}
		if p.Name != microName || p.Version == "" {
			t.Errorf("$SRV.PING: %s", body)
		}
		ids[p.ID] = true
		if _, err := r.nc.Request("$SRV.INFO."+microName+"."+p.ID, nil, patience); err != nil {
			t.Errorf("$SRV.INFO of instance %s: %v", p.ID, err)
		}
	}
	if len(ids) != 2 {
		t.Errorf("two instances have %d ids", len(ids))
	}
}
