package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
)

// What others do to the bucket, with the tools that everybody has.

func keyValue(t *testing.T, nc *nats.Conn) jetstream.KeyValue {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(t.Context(), "leases")
	if err != nil {
		t.Fatal(err)
	}
	return kv
}

// foreignRecord proves that nothing is made of a record that is not ours, and
// nothing is written over it.
func foreignRecord(t *testing.T, c *caller, key string) {
	t.Helper()
	before := lastOf(t, c.nc, key)
	for _, r := range []reply{
		c.acquire(key, "A", time.Second),
		c.owner(key),
		c.forward(key, "x", time.Second),
		c.call("renew", map[string]any{"key": key, "holder": "A", "revision": before.Seq, "ttl_ms": 1000}),
		c.call("release", map[string]any{"key": key, "holder": "A", "revision": before.Seq}),
	} {
		if r.Kind != "internal" {
			t.Errorf("%s: got %s: %s", key, r.Kind, r.Error)
		}
	}
	if after := lastOf(t, c.nc, key); after == nil || after.Seq != before.Seq {
		t.Errorf("%s: written over", key)
	}
}

// TestForeignPut: a value put by the nats CLI is nobody's lease until it is
// taken away, wherever it lands (P16).
func TestForeignPut(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	kv := keyValue(t, c.nc)
	put := func(key, value string) uint64 {
		t.Helper()
		rev, err := kv.Put(t.Context(), key, []byte(value))
		if err != nil {
			t.Fatal(err)
		}
		return rev
	}
	put("free", "v")
	foreignRecord(t, c, "free")

	lease := c.grant("leased", "A", time.Minute)
	put("leased", "v")
	foreignRecord(t, c, "leased")
	if r := c.renew(lease, time.Minute); r.Kind != "internal" {
		t.Errorf("the holder before: %s: %s", r.Kind, r.Error)
	}

	released := c.grant("released", "A", time.Minute)
	c.want(c.release(released), "released")
	put("released", "v")
	foreignRecord(t, c, "released")

	// `nats kv del` leaves something that is read as free.
	for _, key := range []string{"free", "leased", "released"} {
		last := lastOf(t, c.nc, key).Seq
		if err := kv.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		c.want(c.owner(key), "free")
		if r := c.grant(key, "B", time.Second); r.Revision <= last {
			t.Errorf("%s: revision %d after %d", key, r.Revision, last)
		}
	}
	// Other keys never noticed, nor does an instance that starts now.
	c.grant("other", "A", time.Second)
	put("stays", "v")
	young := serve(t, n.URL, apiPrefix("young")).waitReady(t)
	if r, err := callAt(c.nc, "young", "owner", map[string]any{"key": "stays"}); err != nil || r.Kind != "internal" {
		t.Errorf("to a new instance: %s %v; %v", r.Kind, err, young.failing())
	}
	foreignRecord(t, c, "stays")
}

// TestAlmostOurs: records that look like ours and are not.
func TestAlmostOurs(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	c.grant("model", "A", time.Minute)
	model := lastOf(t, c.nc, "model")
	var record map[string]any
	if err := json.Unmarshal(model.Data, &record); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(r map[string]any, h nats.Header){
		"another-key":      func(r map[string]any, h nats.Header) { r["key"] = "model" },
		"newer-version":    func(r map[string]any, h nats.Header) { r["v"] = 99 },
		"no-version":       func(r map[string]any, h nats.Header) { delete(r, "v") },
		"no-holder":        func(r map[string]any, h nats.Header) { delete(r, "holder") },
		"quote-in-holder":  func(r map[string]any, h nats.Header) { r["holder"] = `A","granted":true,"x":"` },
		"dot-in-holder":    func(r map[string]any, h nats.Header) { r["holder"] = "A.B" },
		"wild-holder":      func(r map[string]any, h nats.Header) { r["holder"] = ">" },
		"space-in-holder":  func(r map[string]any, h nats.Header) { r["holder"] = "A B\r\nPUB x 0\r\n" },
		"long-holder":      func(r map[string]any, h nats.Header) { r["holder"] = strings.Repeat("a", 129) },
		"no-nonce":         func(r map[string]any, h nats.Header) { delete(r, "nonce") },
		"no-ttl":           func(r map[string]any, h nats.Header) { delete(r, "ttl_ms") },
		"ttl-over-limit":   func(r map[string]any, h nats.Header) { r["ttl_ms"] = 600001 },
		"ttl-negative":     func(r map[string]any, h nats.Header) { r["ttl_ms"] = -1000 },
		"ttl-text":         func(r map[string]any, h nats.Header) { r["ttl_ms"] = "1000" },
		"unknown-event":    func(r map[string]any, h nats.Header) { r["event"] = "stolen" },
		"no-event-header":  func(r map[string]any, h nats.Header) { delete(h, "Dagnats-Lease-Event") },
		"event-and-no-end": func(r map[string]any, h nats.Header) { r["event"] = "released" },
		"end-and-no-event": func(r map[string]any, h nats.Header) { h["KV-Operation"] = []string{"PURGE"} },
		"no-time":          func(r map[string]any, h nats.Header) { delete(r, "written_at") },
		"odd-time":         func(r map[string]any, h nats.Header) { r["acquired_at"] = "yesterday" },
		"other-revision":   func(r map[string]any, h nats.Header) { r["revision"] = -1 },
	} {
		r := map[string]any{}
		for k, v := range record {
			r[k] = v
		}
		r["key"] = name
		h := nats.Header{}
		for k, v := range model.header {
			h[k] = v
		}
		change(r, h)
		body, _ := json.Marshal(r)
		ack, err := c.nc.RequestMsg(&nats.Msg{Subject: "$KV.leases." + name, Header: h, Data: body}, 2*time.Second)
		if err != nil || lastOf(t, c.nc, name) == nil {
			t.Fatalf("%s: %v %s", name, err, ack.Data)
		}
		// An end that cannot be read ends whatever it ends.
		if name == "end-and-no-event" {
			c.want(c.owner(name), "free")
			c.grant(name, "B", time.Second)
			continue
		}
		foreignRecord(t, c, name)
		last := lastOf(t, c.nc, name).Seq
		if r := c.call("evict", map[string]any{"key": name, "revision": last}); r.Kind != "released" || r.Revision != last {
			t.Errorf("%s: evict: %s %s, revision %d", name, r.Kind, r.Error, r.Revision)
		}
		if r := c.grant(name, "B", time.Second); r.Revision <= last {
			t.Errorf("%s: revision %d after %d", name, r.Revision, last)
		}
	}
	for name, body := range map[string]string{"empty": "", "not-json": "{", "list": "[]", "null": "null", "not-utf8": "\xff\xfe"} {
		h := nats.Header{"Dagnats-Lease-Event": []string{"acquired"}}
		if _, err := c.nc.RequestMsg(&nats.Msg{Subject: "$KV.leases." + name, Header: h, Data: []byte(body)}, 2*time.Second); err != nil {
			t.Fatal(err)
		}
		foreignRecord(t, c, name)
	}
	// A subject that is no key of ours hurts nobody.
	if _, err := c.nc.Request("$KV.leases.a.b.c", []byte("x"), 2*time.Second); err != nil {
		t.Fatal(err)
	}
	c.grant("a", "A", time.Second)
}

// TestDeletedByAStranger: `nats kv del` and `nats kv purge` of a live lease end
// it, the next one cannot be shadowed by the old one even after a crash, and it
// ends when it should although its message has to stay longer.
func TestDeletedByAStranger(t *testing.T) {
	t.Parallel()
	port := testnats.FreePort(t)
	s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", port), "--store-dir", t.TempDir(), "--http-listen", "")
	c := callerOn(t, s.NATS())
	c.grant("warm-up", "A", time.Second)
	kv := keyValue(t, c.nc)
	for name, end := range map[string]func(context.Context, string) error{
		"del":   func(ctx context.Context, key string) error { return kv.Delete(ctx, key) },
		"purge": func(ctx context.Context, key string) error { return kv.Purge(ctx, key) },
	} {
		old := c.grant(name, "A", 10*time.Minute)
		if err := end(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		c.want(c.owner(name), "free")
		if r := c.renew(old, time.Minute); r.Kind != "lost" {
			t.Errorf("%s: the old holder renews: %s", name, r.Kind)
		}
		if r := c.release(old); r.Kind != "lost" {
			t.Errorf("%s: the old holder releases: %s", name, r.Kind)
		}
		young := c.grant(name, "B", time.Second)
		m := lastOf(t, c.nc, name)
		if ttl := seconds(t, m); ttl < 599*time.Second {
			t.Errorf("%s: a lease of 1 s that replaces one of 600 s is stored with Nats-TTL %v", name, ttl)
		}
		time.Sleep(time.Until(young.got.Add(time.Second)))
		c.want(c.owner(name), "free")
		testnats.Eventually(t, 3*time.Second, func() bool {
			m = lastOf(t, c.nc, name)
			return m != nil && m.header.Get("Dagnats-Lease-Event") == "expired"
		}, "nobody ended it")
		if ttl := seconds(t, m); ttl < 599*time.Second {
			t.Errorf("%s: its tombstone lives %v only", name, ttl)
		}
	}
	// Evicted: what a stranger put has no end, so the longest lease is waited for.
	rev, err := kv.Put(t.Context(), "put", []byte("v"))
	if err != nil {
		t.Fatal(err)
	}
	if r := c.call("evict", map[string]any{"key": "put", "revision": rev}); r.Kind != "released" || r.Revision != rev {
		t.Errorf("evict: %s %s, revision %d", r.Kind, r.Error, r.Revision)
	}
	c.want(c.owner("put"), "free")
	if ttl := seconds(t, lastOf(t, c.nc, "put")); ttl < 599*time.Second {
		t.Errorf("its tombstone lives %v only", ttl)
	}
	s.Kill()
	s.Restart()
	stayGone(c, []ended{{key: "del"}, {key: "purge"}, {key: "put"}}, time.Second)
}

func seconds(t *testing.T, m *stored) time.Duration {
	t.Helper()
	ttl := m.header.Get("Nats-TTL")
	d, err := time.ParseDuration(ttl)
	if err != nil {
		n, err := strconv.Atoi(ttl)
		if err != nil {
			t.Fatalf("Nats-TTL %q", ttl)
		}
		d = time.Duration(n) * time.Second
	}
	return d
}

// TestPurgedStream: an operator who purges the whole bucket ends all leases;
// holders find out at once, fences go on, and nobody else is granted a key before its
// lease would have been over.
func TestPurgedStream(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	in := serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	var held []reply
	for i := range 20 {
		held = append(held, c.grant(fmt.Sprintf("k-%d", i), "A", 8*time.Second))
	}
	if err := api(c.nc, "STREAM.PURGE.KV_leases", nil, nil); err != nil {
		t.Fatal(err)
	}
	for i, l := range held {
		switch i % 4 {
		case 0:
			if r := c.renew(l, time.Minute); r.Kind != "lost" {
				t.Errorf("renew: %s: %s", r.Kind, r.Error)
			}
		case 1:
			if r := c.release(l); r.Kind != "lost" {
				t.Errorf("release: %s: %s", r.Kind, r.Error)
			}
		case 2:
			if r := c.owner(l.Key); r.Kind != "free" {
				t.Errorf("owner: %s: %s", r.Kind, r.Error)
			}
		}
		if r := c.acquire(l.Key, "B", time.Second); r.Kind != "unavailable" && r.got.Before(l.sent.Add(8*time.Second)) {
			t.Errorf("acquire: %s %s, revision %d", r.Kind, r.Error, r.Revision)
		}
	}
	for _, l := range held {
		var r reply
		testnats.Eventually(t, 15*time.Second, func() bool { r = c.acquire(l.Key, "B", time.Second); return r.Kind == "granted" }, late(func() string { return r.Kind + " " + r.Error }))
		if r.Revision <= held[len(held)-1].Revision {
			t.Errorf("acquire: revision %d", r.Revision)
		}
	}
	if err := api(c.nc, "STREAM.MSG.DELETE.KV_leases", map[string]any{"seq": held[0].Revision}, nil); err == nil {
		t.Error("single messages can be deleted")
	}
	in.waitReady(t)
}

// TestMessagesOnTheEventSubject: whatever is published where the change events
// are, no answer of the service comes from it (E5).
func TestMessagesOnTheEventSubject(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	held := c.grant("k", "A", time.Minute)
	m := lastOf(t, c.nc, "k")
	for _, event := range []string{"released", "expired", "acquired"} {
		for _, seq := range []uint64{held.Revision, held.Revision + 1000, 1} {
			msg := &nats.Msg{Subject: "dagnats.lease.changed.k", Data: m.Data, Header: nats.Header{
				"Dagnats-Lease-Event": {event}, "Nats-Sequence": {strconv.FormatUint(seq, 10)}, "Nats-Subject": {"$KV.leases.k"}, "KV-Operation": {"PURGE"},
			}}
			if err := c.nc.PublishMsg(msg); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if r := c.acquire("k", "B", time.Second); r.Kind != "denied" || r.Revision != held.Revision {
		t.Errorf("acquire: %s, revision %d", r.Kind, r.Revision)
	}
	renewed := c.want(c.renew(held, time.Minute), "renewed")
	if r := c.owner("k"); r.Kind != "held" || r.Revision != renewed.Revision {
		t.Errorf("owner: %s, revision %d", r.Kind, r.Revision)
	}
}

// TestForgedAdvisories: anybody may say that the bucket was deleted; it costs a
// look, and the calls go on.
func TestForgedAdvisories(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	in := serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
			for _, what := range []string{"DELETED", "CREATED", "RESTORE_CREATE"} {
				_ = c.nc.Publish("$JS.EVENT.ADVISORY.STREAM."+what+".KV_leases", []byte("{}"))
			}
		}
	})
	var count tally
	for i, end := 0, time.Now().Add(3*time.Second); time.Now().Before(end); i++ {
		count.add(c.acquire(fmt.Sprintf("k-%d", i), "A", time.Second).Kind)
		time.Sleep(5 * time.Millisecond)
	}
	close(done)
	wg.Wait()
	t.Log(&count)
	if granted, refused := count.get("granted"), count.get("unavailable"); refused > granted/5 {
		t.Errorf("%d granted, %d refused", granted, refused)
	}
	in.waitReady(t)
}
