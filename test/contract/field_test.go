package contract

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestL08LateCallsDoNotHarm: a holder that lost its lease cannot free or renew
// that of the next, and there is no revision that means any.
func TestL08LateCallsDoNotHarm(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	old := r.acquire("k", "A", 1000)
	r.watchEnd(old, old.sent, old.came, time.Second, "")
	b := r.acquire("k", "B", 60000)
	before := r.stream().LastSeq
	for _, call := range []string{"renew", "release"} {
		r.want(kinds.Lost, call, request{Key: "k", Holder: "A", Revision: old.Revision, TTL: 1000})
		r.want(kinds.Lost, call, request{Key: "k", Holder: "A", Revision: b.Revision, TTL: 1000})
		r.want(kinds.Lost, call, request{Key: "k", Holder: "B", Revision: old.Revision, TTL: 1000})
		for _, revision := range []string{"0", "-0", "null", `"5"`, fmt.Sprintf("%q", fmt.Sprint(b.Revision)), "-1", "true", "0.0", "0e5", fmt.Sprintf("%d.5", b.Revision)} {
			r.want(kinds.Invalid, call, fmt.Sprintf(`{"key":"k","holder":"B","revision":%s,"ttl_ms":5000}`, revision))
		}
		r.want(kinds.Invalid, call, `{"key":"k","holder":"B","ttl_ms":5000}`)
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("refused calls moved the stream from %d to %d", before, after)
	}
	if now := r.owner("k"); now.lease() != b.lease() {
		t.Errorf("refused calls changed the lease: %s", now.raw)
	}
}

// TestI01KeysAndHolders: [A-Za-z0-9_-], 1 to 128 bytes, for both, everywhere (P3).
func TestI01KeysAndHolders(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	for _, name := range []string{"a", "A-Z_09", "-", "_", "--", strings.Repeat("a", 128)} {
		r.acquire(name, name, 60000)
		if got := r.owner(name); got.Key != name || got.Holder != name {
			t.Errorf("owner of %q: %s", name, got.raw)
		}
	}
	before := r.stream().LastSeq
	for _, name := range []string{"", "a.b", "a..b", ".", "*", ">", "a*", "a b", " a", "a ", "a\n", "\na", "a\r\n", "a\t", "a\x00", "é", "e\u0301", "Ⅷ", "١", "a/b", "a:b", "$KV", "a\u200b", "𝒶",
		strings.Repeat("a", 129), strings.Repeat("é", 64), strings.Repeat("a", 100_000)} {
		r.want(kinds.Invalid, "acquire", request{Key: name, Holder: "A", TTL: 1000})
		r.want(kinds.Invalid, "acquire", request{Key: "k", Holder: name + " ", TTL: 1000})
		r.want(kinds.Invalid, "renew", request{Key: name, Holder: "A", Revision: 1, TTL: 1000})
		r.want(kinds.Invalid, "release", request{Key: name, Holder: "A", Revision: 1})
		r.want(kinds.Invalid, "owner", request{Key: name})
		r.want(kinds.Invalid, "forward", request{Key: name})
		if name != "" { // left out by this test's encoder, but not by the next
			r.want(kinds.Invalid, "acquire", request{Key: "k", Holder: name, TTL: 1000})
		}
	}
	r.want(kinds.Invalid, "acquire", `{"key":"k","holder":"","ttl_ms":1000}`)
	if after := r.stream().LastSeq; after != before {
		t.Errorf("invalid names moved the stream from %d to %d", before, after)
	}
}

// TestI03NamesOfMembers: twice, in other cases, or escaped, they are invalid (P1).
func TestI03NamesOfMembers(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	before := r.stream().LastSeq
	for _, body := range []string{
		`{"key":"a","key":"b","holder":"A","ttl_ms":1000}`,
		`{"key":"a","key":"a","holder":"A","ttl_ms":1000}`,
		`{"key":"a","Holder":"A","ttl_ms":1000}`,
		`{"key":"a","holder":"A","HOLDER":"B","ttl_ms":1000}`,
		`{"KEY":"a","holder":"A","ttl_ms":1000}`,
		`{"key":"a","holder":"A","ttl_ms":1000,"Ttl_ms":2000}`,
		`{"key":"a","\u006bey":"b","holder":"A","ttl_ms":1000}`,
		`{"key":"a","holder":"A","ttl_ms":1000,"payload":"","payload":""}`,
		`{"key":"a","holder":"A","ttl_ms":1000,"revision":1,"revision":2}`,
		`{"key":"a","holder":"A","ttl":1000}`,
		`{"key":"a","holder":"A","ttl_ms":1000,"extra":1}`,
		`{"\u212aey":"a","holder":"A","ttl_ms":1000}`,
	} {
		r.want(kinds.Invalid, "acquire", body)
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("invalid members moved the stream from %d to %d", before, after)
	}
	r.want(kinds.Granted, "acquire", `{"\u006bey":"a","holder":"A","ttl_ms":1000}`)
	// One struct may serve all calls: members of the others are not looked at.
	r.want(kinds.Held, "owner", `{"key":"a","holder":null,"ttl_ms":-1,"revision":"x","payload":"==","timeout_ms":true}`)
}

// TestI05Numbers: exact over all of uint64, in whatever form, here in a bucket
// whose revisions are above 2^53, where floating point numbers have gaps (P4).
func TestI05Numbers(t *testing.T) {
	t.Parallel()
	const first = 9007199254740993 // 2^53 + 1
	r := newRig(t, setup{instances: -1})
	r.bucketFrom(first)
	r.ready(r.start())
	l := r.acquire("k", "A", 60000)
	if l.Revision != first || !strings.Contains(l.raw, `"revision":9007199254740993,`) {
		t.Fatalf("the first lease is %s", l.raw)
	}
	body := func(revision string) string {
		return fmt.Sprintf(`{"key":"k","holder":"A","revision":%s,"ttl_ms":60000}`, revision)
	}
	for _, other := range []string{"9007199254740992", "9007199254740994", "9007199254740992.0", "9.007199254740992e15", "9007199254740995", "18446744073709551615", "1", "5.0", "5e0", "1.8446744073709551615e19"} {
		r.want(kinds.Lost, "renew", body(other))
		r.want(kinds.Lost, "release", body(other))
	}
	for _, never := range []string{"18446744073709551616", "1e20", "1.8446744073709551616e19", "5.5", `"9007199254740993"`, "null", "true", "[9007199254740993]", "0", "-9007199254740993", "09007199254740993", "+1", "0x10", "NaN"} {
		r.want(kinds.Invalid, "renew", body(never))
		r.want(kinds.Invalid, "release", body(never))
	}
	want := uint64(first)
	for _, same := range []string{"9007199254740993", "9007199254740994.0", "9.007199254740995e15", "900719925474099600e-2"} {
		got := r.want(kinds.Renewed, "renew", body(same))
		if want++; got.Revision != want || !strings.Contains(got.raw, fmt.Sprintf(`"revision":%d,`, want)) {
			t.Errorf("renewed to %s, want revision %d", got.raw, want)
		}
	}
	r.hold("A", func(m *nats.Msg) { m.Respond([]byte(m.Header.Get(fenceHeader))) })
	if f := r.want(kinds.Forwarded, "forward", request{Key: "k"}); string(*f.Payload) != fmt.Sprint(want) {
		t.Errorf("the fence at the owner is %s, want %d", *f.Payload, want)
	}
	for _, c := range []struct {
		ttl string
		ok  bool
	}{{"1500.0", false}, {"1e3", true}, {"2000.0", true}, {"2000.00000000000000000", true}, {"20e2", true}, {"2e+3", true}, {"200000e-2", true}, {"0.2e4", true}, {"2000.000000000000000000000000000001", false}, {"2e0003", false}} {
		got := r.call("acquire", fmt.Sprintf(`{"key":"k","holder":"A","ttl_ms":%s}`, c.ttl))
		if (got.kind == kinds.Granted) != c.ok || got.kind != kinds.Granted && got.kind != kinds.Invalid {
			t.Errorf("ttl_ms %s: %s", c.ttl, got.raw)
		}
	}
}

// bucketFrom makes the bucket as the service would, but with another first
// revision: what it would make is read from one that it made.
func (r *rig) bucketFrom(first uint64) {
	r.t.Helper()
	model := newRig(r.t, setup{})
	s, err := model.js.Stream(r.t.Context(), bucketStream)
	if err != nil {
		r.t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.FirstSeq, cfg.Metadata = first, nil
	if _, err := r.js.CreateStream(r.t.Context(), cfg); err != nil {
		r.t.Fatal(err)
	}
}

// TestI07Texts: what is not one JSON object in UTF-8 is invalid, whatever its size.
func TestI07Texts(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{nats: []testnats.Option{large}})
	good := `{"key":"k","holder":"A","ttl_ms":1000}`
	before := r.stream().LastSeq
	for name, body := range map[string]string{
		"nested a million times": strings.Repeat("[", 1_000_000), "objects": strings.Repeat(`{"key":`, 200_000), "twice": good + good, "more": good + " x",
		"byte order mark": "\xef\xbb\xbf" + good, "bad bytes": `{"key":"` + "\xff" + `","holder":"A","ttl_ms":1000}`, "lone surrogate": `{"key":"\ud800","holder":"A","ttl_ms":1000}`,
		"null": "null", "list": "[]", "empty": "", "1 MiB of spaces": strings.Repeat(" ", 1<<20), "string": `"k"`, "number": "1", "cut": good[:20], "no quotes": "{key:1}",
		"comment": good + "//", "nul": good + "\x00", "UTF-16": "\xff\xfe{\x00}\x00", "nested in a member": `{"key":{"a":[1]},"holder":"A","ttl_ms":1000}`,
		"bad UTF-8 in a member not used": `{"key":"k","holder":"A","ttl_ms":1000,"payload":"` + "\xc3\x28" + `"}`,
	} {
		for _, call := range calls {
			if got := r.call(call, body); got.kind != kinds.Invalid {
				t.Errorf("%s, %s: %s", name, call, got.raw)
			}
		}
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("invalid texts moved the stream from %d to %d", before, after)
	}
	r.want(kinds.Granted, "acquire", " \t\r\n"+good+strings.Repeat(" ", 1<<20))
}

// TestI08OnePayloadText: one canonical form, and its bytes reach the holder.
func TestI08OnePayloadText(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("k", "A", 60000)
	var got inboxTap
	r.hold("A", func(m *nats.Msg) { got.add(m); m.Respond(m.Data) })
	for _, text := range []string{`YQ`, `YR==`, `YQ==\n`, `\nYQ==`, `Y\nQ==`, `YQ==\r\n`, `Y Q==`, ` YQ==`, `_-8=`, `====`, `=`, `YQ=`, `YQ===`, `YQ==YQ==`, `Y===`, `YWI`, `YWI=YWI=`, `YW\u00e9=`, `YQ==\u0000`} {
		r.want(kinds.Invalid, "forward", fmt.Sprintf(`{"key":"k","payload":"%s"}`, text))
	}
	for _, value := range []string{"null", "1", "[]", "true"} {
		r.want(kinds.Invalid, "forward", fmt.Sprintf(`{"key":"k","payload":%s}`, value))
	}
	if n := len(got.all()); n != 0 {
		t.Fatalf("the holder saw %d invalid payloads", n)
	}
	for n, text := range []string{"", "YQ==", "YWI=", "YWJj", "/+8=", "AAAA", `Y\u0051==`, base64.StdEncoding.EncodeToString(noise(300))} {
		f := r.want(kinds.Forwarded, "forward", fmt.Sprintf(`{"key":"k","payload":"%s"}`, text))
		want, err := base64.StdEncoding.Strict().DecodeString(strings.ReplaceAll(text, `\u0051`, "Q"))
		if err != nil {
			t.Fatal(err)
		}
		if seen := got.all()[n].Data; !bytes.Equal(seen, want) || !bytes.Equal(*f.Payload, want) {
			t.Errorf("%s: the holder saw %q, back came %s", text, seen, f.raw)
		}
	}
}

// scrape counts the series of an instance.
func (r *rig) series(i *instance) int {
	r.t.Helper()
	families, err := i.metrics.Gatherer().Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	n := 0
	for _, f := range families {
		n += len(f.GetMetric())
	}
	return n
}

// TestO01SeriesDoNotGrow with keys, holders or what is wrong with requests. The
// 100,000 keys are those of TestNothingIsLeftOf100000Keys.
func TestO01SeriesDoNotGrow(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	before := r.series(r.all[0])
	for n := range 1000 {
		r.acquire(fmt.Sprintf("key-%d", n), fmt.Sprintf("holder-%d", n), 60000)
		bad := []string{"\xff", `{"key":"` + "\xff" + `"}`, fmt.Sprintf(`{"bad%d":1}`, n), fmt.Sprintf(`{"key":"%d%s"}`, n, strings.Repeat("x", 128)), `{"key":"\ud800"}`}
		r.want(kinds.Invalid, calls[n%5], bad[n/5%len(bad)])
	}
	if after := r.series(r.all[0]); after != before {
		t.Errorf("%d series, before %d", after, before)
	}
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Log("promtool is not installed: /metrics is not linted here")
		return
	}
	w := &body{header: http.Header{}}
	r.all[0].metrics.Handler(nil).ServeHTTP(w, &http.Request{Method: http.MethodGet, Header: http.Header{}})
	lint := exec.Command(promtool, "check", "metrics")
	lint.Stdin = &w.Buffer
	if out, err := lint.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

// body takes the answer of an HTTP handler.
type body struct {
	bytes.Buffer
	header http.Header
}

func (b *body) Header() http.Header { return b.header }
func (b *body) WriteHeader(int)     {}

// TestO03StatsAreTrue: micro's own num_errors and processing_time see only the
// hand-over of a request, so data has the counts and the times.
func TestO03StatsAreTrue(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("k", "A", 60000)
	r.hold("A", func(m *nats.Msg) { time.AfterFunc(time.Second, func() { m.Respond(nil) }) })
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if f, err := r.ask("forward", request{Key: "k"}); err != nil || f.kind != kinds.Forwarded {
				t.Errorf("%v, %v", f, err)
			}
		})
	}
	for n := range 10 {
		if n > 0 {
			r.acquire(fmt.Sprint("ok", n), "A", 60000)
		}
		r.want(kinds.Invalid, "acquire", `{}`)
		r.want(kinds.Denied, "acquire", request{Key: "k", Holder: "B", TTL: 1000})
	}
	wg.Wait()
	stats := r.stats(1)
	var requests uint64
	for _, e := range stats {
		requests += e.NumRequests
		switch e.Name {
		case "acquire":
			if e.Data.Replies[kinds.Granted] != 10 || e.Data.Replies[kinds.Invalid] != 10 || e.Data.Replies[kinds.Denied] != 10 || e.Data.Errors != 10 {
				t.Errorf("acquire: %+v", e.Data)
			}
		case "forward":
			if e.Data.Replies[kinds.Forwarded] != 5 || e.Data.Errors != 0 || e.Data.P50 < 900 || e.Data.P50 > 2500 || e.Data.P99 < e.Data.P50 {
				t.Errorf("forward: %+v", e.Data)
			}
			if e.ProcessingTime > time.Second {
				t.Errorf("micro's own processing time of 5 hand-overs is %v", e.ProcessingTime)
			}
		}
	}
	if requests != 35 {
		t.Errorf("num_requests adds up to %d, want 35", requests)
	}
}

// TestO04RequestsAreShared: an instance beside each of three servers, clients
// of each server; each instance serves a part, and when one is taken away only
// what it had in hand is lost.
func TestO04RequestsAreShared(t *testing.T) {
	t.Parallel()
	const each = 3000 / slowness
	cluster := testnats.Cluster(t, 3)
	r := newRig(t, setup{node: cluster.Servers[0], instances: 3, uncounted: true, faulty: true, replicas: 3, dial: func(n int, _ string) string { return cluster.Servers[n].URL }})
	r.acquire("k", "A", 600000)
	var mu sync.Mutex
	var lost []error
	ask := func() {
		var wg sync.WaitGroup
		for _, node := range cluster.Servers {
			nc := node.Connect()
			sub := r.repliesOn(nc)
			for range 10 {
				wg.Go(func() {
					for range each / 10 {
						got, err := sub("owner", request{Key: "k"})
						if err == nil && got.kind != kinds.Held {
							err = fmt.Errorf("%v", got)
						}
						if err != nil {
							mu.Lock()
							lost = append(lost, err)
							mu.Unlock()
						}
					}
				})
			}
		}
		wg.Wait()
	}
	served := func() (n []uint64, sum uint64) {
		for _, i := range r.all {
			c := i.metrics.Endpoint("owner").Snapshot().Replies[kinds.Held]
			n, sum = append(n, c), sum+c
		}
		return n, sum
	}
	ask()
	if len(lost) > 0 {
		t.Fatalf("%d requests failed: %v", len(lost), lost[0])
	}
	n, sum := served()
	t.Logf("three instances served %v", n)
	if sum != 3*each {
		t.Errorf("%d requests, %d served", 3*each, sum)
	}
	for i, c := range n {
		if c < sum/10 {
			t.Errorf("instance %d served %d of %d", i, c, sum)
		}
	}

	// One goes away, as if killed, while requests come.
	var wg sync.WaitGroup
	wg.Go(ask)
	testnats.Eventually(t, 20*time.Second, func() bool { _, now := served(); return now > sum+each/2 }, "no requests")
	inHand := len(lost)
	r.kill(r.all[2])
	killed, _ := served()
	wg.Wait()
	after, _ := served()
	t.Logf("then they served %v, %d requests failed", after, len(lost)-inHand)
	if len(lost) > 30 { // so many clients ask at a time
		t.Errorf("%d requests failed: %v", len(lost), lost[0])
	}
	if after[2] > killed[2] {
		t.Error("the instance that is gone went on serving")
	}
	alive := after[0] + after[1]
	for i := range 2 {
		if after[i] < alive/10 {
			t.Errorf("instance %d served %d of %d", i, after[i], alive)
		}
	}
	lost = nil
	ask()
	if len(lost) > 0 {
		t.Errorf("after the kill %d requests failed: %v", len(lost), lost[0])
	}
}

// repliesOn lets a connection ask and get its own replies.
func (r *rig) repliesOn(nc *nats.Conn) func(endpoint string, body any) (*reply, error) {
	return func(endpoint string, body any) (*reply, error) {
		sent := time.Now()
		m, err := nc.Request(api+endpoint, raw(body), patience)
		if err != nil {
			return nil, err
		}
		return r.read(endpoint, m, sent, time.Now())
	}
}

// TestStoredMessagesAreReadable by the KV tools of NATS, key by key (E4).
func TestStoredMessagesAreReadable(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("held", "A", 60000)
	r.release(r.acquire("freed", "A", 60000))
	kv, err := r.js.KeyValue(t.Context(), "leases")
	if err != nil {
		t.Fatal(err)
	}
	e, err := kv.Get(t.Context(), "held")
	if err != nil || e.Revision() != r.owner("held").Revision {
		t.Errorf("held: %v, %v", e, err)
	}
	if _, err := kv.Get(t.Context(), "freed"); err != jetstream.ErrKeyNotFound {
		t.Errorf("freed: %v", err)
	}
	keys, err := kv.Keys(t.Context())
	if err != nil || !slices.Equal(keys, []string{"held"}) {
		t.Errorf("keys: %v, %v", keys, err)
	}
}
