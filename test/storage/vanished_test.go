package storage

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// edited changes settings of the bucket as `nats stream edit` does.
func edited(t *testing.T, nc *nats.Conn, change map[string]any) {
	t.Helper()
	config := bucketOf(t, nc).Config
	for name, v := range change {
		config[name] = v
	}
	if err := api(nc, "STREAM.UPDATE.KV_leases", config, nil); err != nil {
		t.Fatal(err)
	}
}

// TestLeasesVanish: what somebody does to the bucket by hand ends leases of which their
// holders know nothing. No key of theirs is granted to others before they would
// have been over, at any instance; their holders are told that they lost them; and
// nothing else is granted either, until then.
func TestLeasesVanish(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(t *testing.T, nc *nats.Conn){
		"purge": func(t *testing.T, nc *nats.Conn) {
			if err := api(nc, "STREAM.PURGE.KV_leases", nil, nil); err != nil {
				t.Fatal(err)
			}
		},
		"purge of one key": func(t *testing.T, nc *nats.Conn) {
			if err := api(nc, "STREAM.PURGE.KV_leases", map[string]any{"filter": "$KV.leases.held-0"}, nil); err != nil {
				t.Fatal(err)
			}
		},
		"max_age": func(t *testing.T, nc *nats.Conn) {
			edited(t, nc, map[string]any{"max_age": int64(time.Second), "duplicate_window": int64(time.Second)})
			testnats.Eventually(t, 10*time.Second, func() bool { return lastOf(t, nc, "held-0") == nil }, "max_age ends nothing")
			edited(t, nc, map[string]any{"max_age": 0, "duplicate_window": int64(2 * time.Minute)})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			var sides []at
			var ins []*instance
			c := callerOn(t, n.URL)
			for _, prefix := range []string{"one", "two"} {
				in, stop := serveUntil(t, n.URL, apiPrefix(prefix))
				defer stop()
				ins = append(ins, in.waitReady(t))
				sides = append(sides, at{t, c.nc, prefix})
			}
			const ttl = 9 * time.Second
			var held []reply
			for i := range 6 {
				held = append(held, sides[i%2].grant(fmt.Sprintf("held-%d", i), "A", ttl))
			}
			over := held[0].sent.Add(ttl)
			last := held[len(held)-1].Revision
			for _, in := range ins {
				testnats.Eventually(t, 5*time.Second, func() bool { return in.highest() >= last }, "an instance does not see it")
			}
			end(t, c.nc)

			var grants sync.Map
			var wg sync.WaitGroup
			for _, a := range sides {
				for i := range 2 {
					wg.Go(func() {
						for j := 0; time.Now().Before(over); j++ {
							if r := a.acquire("held-0", fmt.Sprintf("B%d", i), time.Second); r.Kind == "granted" && r.got.Before(over) {
								t.Errorf("%s granted a key %v before the end of its lease", a.prefix, over.Sub(r.got))
								return
							}
							key := fmt.Sprintf("new-%d-%d", i, j)
							if r := a.acquire(key, "C", time.Second); r.Kind == "granted" {
								grants.Store(r.got, a.prefix)
							}
							time.Sleep(5 * time.Millisecond)
						}
					})
				}
			}
			noticed := time.Now()
			for _, in := range ins {
				testnats.Eventually(t, 5*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, late(in.bucket))
			}
			t.Logf("noticed after %v", time.Since(noticed))
			if why := ins[0].bucket(); !strings.Contains(why, "purge") {
				t.Errorf("it does not say why: %s", why)
			}
			noticed = time.Now()
			// A third one that starts now learns of it from the others.
			young, stop := serveUntil(t, n.URL, apiPrefix("young"))
			defer stop()
			testnats.Eventually(t, 5*time.Second, func() bool { return strings.HasPrefix(young.bucket(), "waiting") }, late(young.bucket))
			if r := sides[0].renew(held[0], ttl); r.Kind != "lost" {
				t.Errorf("the holder of what is gone renews: %s: %s", r.Kind, r.Error)
			}
			if name == "purge of one key" { // the others are there, and go on
				for i, l := range held[1:] {
					if r := sides[i%2].renew(l, ttl); r.Kind != "renewed" {
						t.Errorf("a holder of what is there renews: %s: %s", r.Kind, r.Error)
					}
				}
			}
			wg.Wait()
			grants.Range(func(k, v any) bool {
				if got := k.(time.Time); got.After(noticed) && got.Before(over) {
					t.Errorf("%v granted another key %v before the end", v, over.Sub(got))
				}
				return true
			})
			for _, a := range append(sides, at{t, c.nc, "young"}) {
				var r reply
				testnats.Eventually(t, 15*time.Second, func() bool { r = a.acquire("fresh-"+a.prefix, "D", time.Second); return r.Kind == "granted" }, late(func() string { return r.Kind + " " + r.Error }))
			}
		})
	}
}
