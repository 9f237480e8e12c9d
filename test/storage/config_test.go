package storage

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
)

// ours is the configuration of the bucket as the service makes it: what is set
// by name only, so that another server's defaults are its own.
func ours() map[string]any {
	return map[string]any{
		"name": "KV_leases", "subjects": []string{"$KV.leases.>"}, "storage": "file", "retention": "limits", "discard": "new",
		"max_msgs_per_subject": 1, "max_msgs": -1, "max_bytes": -1, "max_msg_size": -1, "max_consumers": -1, "max_age": 0,
		"duplicate_window": int64(2 * time.Minute), "num_replicas": 1, "deny_delete": true, "allow_rollup_hdrs": true, "allow_msg_ttl": true,
		"allow_direct": false, "allow_atomic": true, "first_seq": time.Now().UnixMicro(),
		"republish": map[string]any{"src": "$KV.leases.>", "dest": "dagnats.lease.changed.>"},
	}
}

// with is ours with some members changed; a nil value takes one away.
func with(change map[string]any) map[string]any {
	c := ours()
	for name, v := range change {
		if c[name] = v; v == nil {
			delete(c, name)
		}
	}
	return c
}

func create(t *testing.T, nc *nats.Conn, config map[string]any) {
	t.Helper()
	if err := api(nc, "STREAM.CREATE."+config["name"].(string), config, nil); err != nil {
		t.Fatal(err)
	}
}

// update changes members of the bucket's present configuration.
func update(nc *nats.Conn, change map[string]any) error {
	var s stream
	if err := api(nc, "STREAM.INFO.KV_leases", nil, &s); err != nil {
		return err
	}
	maps.Copy(s.Config, change)
	return api(nc, "STREAM.UPDATE.KV_leases", s.Config, nil)
}

// TestBucketAsOurs proves that the table tests below start from a bucket that
// the service takes, and that it makes just that one.
func TestBucketAsOurs(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	create(t, c.nc, ours())
	in := serve(t, n.URL).waitReady(t)
	if w := in.warnings(); len(w) > 0 {
		t.Errorf("warnings: %v", w)
	}
	c.grant("k", "A", 5*time.Second)
	given := bucketOf(t, c.nc).Config

	n2 := testnats.Server(t)
	serve(t, n2.URL).waitReady(t)
	made := bucketOf(t, testnats.Connect(t, n2.URL)).Config
	for _, name := range []string{"description", "metadata", "first_seq"} {
		delete(given, name)
		delete(made, name)
	}
	for name := range maps.Keys(made) {
		if !equalJSON(given[name], made[name]) {
			t.Errorf("%s: the service makes %v, this test %v", name, made[name], given[name])
		}
	}
	if len(given) != len(made) {
		t.Errorf("the service makes %v, this test %v", made, given)
	}
}

func equalJSON(a, b any) bool { return mustJSON(a) == mustJSON(b) }

// TestForbiddenBucket is row 16's table: each field that would end leases, or
// keep them from ending, is refused by name, and nothing is granted.
func TestForbiddenBucket(t *testing.T) {
	t.Parallel()
	other := func(nc *nats.Conn, t *testing.T) {
		create(t, nc, map[string]any{"name": "other", "subjects": []string{"other.>"}, "num_replicas": 1})
	}
	for _, c := range []struct {
		name   string
		field  string // as it is named to people
		change map[string]any
		before func(*nats.Conn, *testing.T)
	}{
		{"history", "max_msgs_per_subject", map[string]any{"max_msgs_per_subject": 5}, nil},
		{"no history", "max_msgs_per_subject", map[string]any{"max_msgs_per_subject": -1}, nil},
		{"markers", "subject_delete_marker_ttl", map[string]any{"subject_delete_marker_ttl": int64(5 * time.Second)}, nil},
		{"memory", "storage", map[string]any{"storage": "memory"}, nil},
		{"max age", "max_age", map[string]any{"max_age": int64(time.Hour)}, nil},
		{"discard old", "discard", map[string]any{"discard": "old"}, nil},
		{"discard per subject", "discard_new_per_subject", map[string]any{"discard_new_per_subject": true}, nil},
		{"messages", "max_msgs", map[string]any{"max_msgs": 1000}, nil},
		{"bytes", "max_bytes", map[string]any{"max_bytes": 1 << 20}, nil},
		{"message size", "max_msg_size", map[string]any{"max_msg_size": 4096}, nil},
		{"consumers", "max_consumers", map[string]any{"max_consumers": 3}, nil},
		{"mirror", "mirror", map[string]any{"mirror": map[string]any{"name": "other"}, "subjects": nil, "first_seq": nil, "republish": nil, "allow_atomic": nil}, other},
		{"source", "sources", map[string]any{"sources": []any{map[string]any{"name": "other"}}, "first_seq": nil}, other},
		{"transform", "subject_transform", map[string]any{"subject_transform": map[string]any{"src": "$KV.leases.>", "dest": "$KV.others.>"}}, nil},
		{"persist async", "persist_mode", map[string]any{"persist_mode": "async", "allow_atomic": nil}, nil},
		{"one more subject", "subjects", map[string]any{"subjects": []string{"$KV.leases.>", "more"}}, nil},
		{"one level", "subjects", map[string]any{"subjects": []string{"$KV.leases.*"}}, nil},
		{"no ttl", "allow_msg_ttl", map[string]any{"allow_msg_ttl": nil}, nil},
		{"deletes", "deny_delete", map[string]any{"deny_delete": nil}, nil},
		{"no roll-up", "allow_rollup_hdrs", map[string]any{"allow_rollup_hdrs": nil}, nil},
		{"no purge", "deny_purge", map[string]any{"deny_purge": true, "allow_rollup_hdrs": nil}, nil},
		{"no ack", "no_ack", map[string]any{"no_ack": true, "allow_atomic": nil}, nil},
		{"interest", "retention", map[string]any{"retention": "interest"}, nil},
		{"work queue", "retention", map[string]any{"retention": "workqueue"}, nil},
		{"duplicates", "duplicate_window", map[string]any{"duplicate_window": int64(time.Minute)}, nil},
		{"inactive consumers", "consumer_limits", map[string]any{"consumer_limits": map[string]any{"inactive_threshold": int64(5 * time.Second)}}, nil},
		{"fast ingest", "allow_batched", map[string]any{"allow_batched": true}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			call := callerOn(t, n.URL)
			if c.before != nil {
				c.before(call.nc, t)
			}
			create(t, call.nc, with(c.change))
			last := bucketOf(t, call.nc).State.LastSeq
			in := serve(t, n.URL)
			for _, r := range callAll(t, call) {
				if r.Kind != "unavailable" || !strings.Contains(r.Error, c.field) {
					t.Errorf("%s: got %s: %s; want unavailable, with %s named", r.Key, r.Kind, r.Error, c.field)
				}
			}
			if !strings.Contains(in.bucket(), c.field) {
				t.Errorf("readiness says %q, and not %s", in.bucket(), c.field)
			}
			if s := bucketOf(t, call.nc); s.State.LastSeq != last || s.State.Messages != 0 {
				t.Errorf("something was written: %+v", s.State)
			}
		})
	}
	t.Run("sealed", func(t *testing.T) {
		t.Parallel()
		n := testnats.Server(t)
		call := callerOn(t, n.URL)
		create(t, call.nc, ours())
		if err := update(call.nc, map[string]any{"sealed": true}); err != nil {
			t.Fatal(err)
		}
		in := serve(t, n.URL)
		for _, r := range callAll(t, call) {
			if r.Kind != "unavailable" || !strings.Contains(r.Error, "sealed") {
				t.Errorf("%s: got %s: %s", r.Key, r.Kind, r.Error)
			}
		}
		if !strings.Contains(in.bucket(), "sealed") {
			t.Errorf("readiness says %q", in.bucket())
		}
	})
}

// TestNoPlaceForTheBucket: where another stream has the subjects, none is made
// and the reason is told.
func TestNoPlaceForTheBucket(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	create(t, c.nc, map[string]any{"name": "other", "subjects": []string{"$KV.>"}, "num_replicas": 1})
	in := serve(t, n.URL)
	for _, r := range callAll(t, c) {
		if r.Kind != "unavailable" || !strings.Contains(r.Error, "overlap") {
			t.Errorf("%s: %s: %s", r.Key, r.Kind, r.Error)
		}
	}
	var s stream
	if err := api(c.nc, "STREAM.INFO.other", nil, &s); err != nil || s.State.Messages != 0 {
		t.Errorf("written to the other stream: %+v %v", s.State, err)
	}
	// Once there is place it is taken.
	if err := api(c.nc, "STREAM.DELETE.other", nil, nil); err != nil {
		t.Fatal(err)
	}
	in.waitReady(t)
	c.grant("k", "A", time.Second)
}

// callAll makes one call of each endpoint; the name of the endpoint is in Key.
func callAll(t *testing.T, c *caller) []reply {
	t.Helper()
	bodies := map[string]map[string]any{
		"acquire": {"key": "k", "holder": "A", "ttl_ms": 5000},
		"renew":   {"key": "k", "holder": "A", "revision": 7, "ttl_ms": 5000},
		"release": {"key": "k", "holder": "A", "revision": 7},
		"owner":   {"key": "k"},
		"forward": {"key": "k", "timeout_ms": 1000},
	}
	// The micro service is there a moment after its start.
	testnats.Eventually(t, 10*time.Second, func() bool { return c.call("owner", bodies["owner"]).Kind != noResponders }, "nobody serves")
	var all []reply
	for _, name := range slices.Sorted(maps.Keys(bodies)) {
		r := c.call(name, bodies[name])
		r.Key = name
		all = append(all, r)
	}
	return all
}

// TestForbiddenEdit: a forbidden edit under the running service is noticed
// within a few seconds and by its name, leases outlive it, and once it is taken
// back grants go on with higher fences.
func TestForbiddenEdit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		field     string
		bad, good any
	}{
		{"max_msgs_per_subject", 5, 1},
		{"max_age", int64(time.Hour), 0},
		{"discard", "old", "new"},
		{"max_bytes", 1 << 20, -1},
		{"subject_delete_marker_ttl", int64(5 * time.Second), 0},
	} {
		t.Run(c.field, func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			call := callerOn(t, n.URL)
			in := serve(t, n.URL).waitReady(t)
			held := call.grant("held", "A", time.Minute)
			if err := update(call.nc, map[string]any{c.field: c.bad}); err != nil {
				t.Fatal(err)
			}
			edited := time.Now()
			var refused reply
			testnats.Eventually(t, 10*time.Second, func() bool {
				refused = call.acquire("k", "A", time.Second)
				return refused.Kind != "granted"
			}, "still grants")
			if refused.Kind != "unavailable" || !strings.Contains(refused.Error, c.field) || !strings.Contains(in.bucket(), c.field) {
				t.Errorf("got %s: %s; readiness %q", refused.Kind, refused.Error, in.bucket())
			}
			if took := time.Since(edited); took > 6*time.Second {
				t.Errorf("noticed after %v", took)
			}
			last := bucketOf(t, call.nc).State.LastSeq
			if r := call.renew(held, time.Minute); r.Kind != "unavailable" {
				t.Errorf("renew: %s", r.Kind)
			}
			if now := bucketOf(t, call.nc).State.LastSeq; now != last {
				t.Errorf("written to: last revision %d, then %d", last, now)
			}
			if err := update(call.nc, map[string]any{c.field: c.good}); err != nil {
				t.Fatal(err)
			}
			in.waitReady(t)
			if r := call.owner("held"); r.Kind != "held" || r.Revision != held.Revision {
				t.Errorf("the lease from before: %s %d, was %d", r.Kind, r.Revision, held.Revision)
			}
			renewed := call.want(call.renew(held, time.Minute), "renewed")
			if after := call.grant("k2", "B", time.Second); after.Revision <= renewed.Revision || renewed.Revision <= last {
				t.Errorf("revisions %d, %d after %d", renewed.Revision, after.Revision, last)
			}
		})
	}
}

// TestHarmlessEdit: what costs nothing is taken without a word, what costs
// something is named, and leases go on in both cases.
func TestHarmlessEdit(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change map[string]any
		warn   []string
	}{
		{"description", map[string]any{"description": "mine"}, nil},
		{"metadata", map[string]any{"metadata": map[string]string{"team": "mine"}}, nil},
		{"compression", map[string]any{"compression": "s2"}, nil},
		{"no atomic batches", map[string]any{"allow_atomic": false}, nil},
		{"direct gets", map[string]any{"allow_direct": true}, []string{"allow_direct"}},
		{"no events", map[string]any{"republish": nil}, []string{"republish"}},
		{"events elsewhere", map[string]any{"republish": map[string]any{"src": "$KV.leases.>", "dest": "elsewhere.>"}}, []string{"republish"}},
		{"events without bodies", map[string]any{"republish": map[string]any{"src": "$KV.leases.>", "dest": "dagnats.lease.changed.>", "headers_only": true}}, []string{"republish"}},
		{"direct gets and no events", map[string]any{"allow_direct": true, "republish": nil}, []string{"allow_direct", "republish"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			call := callerOn(t, n.URL)
			in := serve(t, n.URL).waitReady(t)
			held := call.grant("held", "A", time.Minute)
			if err := update(call.nc, c.change); err != nil {
				t.Fatal(err)
			}
			testnats.Eventually(t, 10*time.Second, func() bool { return slices.Equal(in.warnings(), c.warn) },
				"warnings: ", late(func() string { return strings.Join(in.warnings(), " ") }))
			if len(in.failing()) > 0 {
				t.Errorf("not ready: %v", in.failing())
			}
			call.want(call.renew(held, time.Minute), "renewed")
			// An instance that starts on it says the same.
			young := serve(t, n.URL).waitReady(t)
			if w := young.warnings(); !slices.Equal(w, c.warn) {
				t.Errorf("a new instance warns of %v", w)
			}
			call.grant("k", "A", time.Second)
		})
	}
	t.Run("replicas", func(t *testing.T) {
		t.Parallel()
		n := testnats.Server(t)
		call := callerOn(t, n.URL)
		serve(t, n.URL).waitReady(t)
		in := serve(t, n.URL, replicas(3)).waitReady(t)
		if w := in.warnings(); !slices.Equal(w, []string{"replicas"}) {
			t.Errorf("warnings: %v", w)
		}
		call.grant("k", "A", time.Second)
	})
	t.Run("an application's CreateOrUpdateKeyValue", func(t *testing.T) {
		t.Parallel()
		n := testnats.Server(t)
		call := callerOn(t, n.URL)
		in := serve(t, n.URL).waitReady(t)
		held := call.grant("held", "A", time.Minute)
		js, err := jetstream.New(call.nc)
		if err != nil {
			t.Fatal(err)
		}
		// The server refuses it, because it would take the TTLs away.
		if _, err := js.CreateOrUpdateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "leases"}); err == nil {
			t.Log("the server took it")
		}
		in.Look()
		call.want(call.renew(held, time.Minute), "renewed")
		in.waitReady(t)
	})
}
