package storage

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service"
)

// liar answers each question for the statistics of the service's instances with
// claims of its own, as anybody can who may subscribe there. It returns how often it
// was asked.
func liar(t *testing.T, nc *nats.Conn, claims map[string]any) *atomic.Int64 {
	t.Helper()
	asked := new(atomic.Int64)
	claims["instance"] = "liar"
	body, err := json.Marshal(map[string]any{"name": leased.MicroName, "id": "forged", "version": "0.0.0", "type": "io.nats.micro.v1.stats_response",
		"endpoints": []any{map[string]any{"name": "acquire", "subject": "api.leases.acquire", "data": claims}}})
	if err != nil {
		t.Fatal(err)
	}
	sub, err := nc.Subscribe("$SRV.STATS."+leased.MicroName, func(m *nats.Msg) {
		asked.Add(1)
		m.Respond(body)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sub.Unsubscribe() })
	return asked
}

// ofPeers is what the instances other than the liar show of themselves.
func ofPeers(t *testing.T, nc *nats.Conn) (all []service.PeerStats) {
	t.Helper()
	sub, err := nc.SubscribeSync(nc.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	if err := nc.PublishRequest("$SRV.STATS."+leased.MicroName, sub.Subject, nil); err != nil {
		t.Fatal(err)
	}
	for {
		m, err := sub.NextMsg(500 * time.Millisecond)
		if err != nil {
			return all
		}
		var stats struct {
			Endpoints []struct {
				Data service.PeerStats `json:"data"`
			} `json:"endpoints"`
		}
		if err := json.Unmarshal(m.Data, &stats); err != nil {
			t.Fatal(err)
		}
		for _, e := range stats.Endpoints {
			if e.Data.Instance != "liar" {
				all = append(all, e.Data)
			}
		}
	}
}

// TestPeerClaimsTooMuch: a revision that cannot have been issued, claimed by whoever
// answers for an instance, changes nothing: not for the instance that asks, not for
// one that asks that one, and not for who lifts the bucket.
func TestPeerClaimsTooMuch(t *testing.T) {
	t.Parallel()
	for name, fence := range map[string]uint64{
		"the last of all": math.MaxUint64, "the last but one": math.MaxUint64 - 1, "half of all": 1 << 63,
		"two days from now": uint64(time.Now().Add(48 * time.Hour).UnixMicro()),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			c := callerOn(t, n.URL)
			_, stop := serveUntil(t, n.URL)
			before := at{t, c.nc, leased.DefaultAPIPrefix}.grant("before", "A", time.Second)
			stop()
			nc := n.Connect()
			asked := liar(t, nc, map[string]any{"fence": fence})

			in, stop := serveUntil(t, n.URL)
			defer stop()
			testnats.Eventually(t, 10*time.Second, func() bool { return len(in.failing()) == 0 }, late(func() string { return fmt.Sprint(in.failing()) }))
			if asked.Load() == 0 {
				t.Fatal("nobody asked the liar")
			}
			if r := c.grant("k", "A", time.Second); r.Revision < before.Revision || r.Revision > before.Revision+10 {
				t.Errorf("revision %d after %d", r.Revision, before.Revision)
			}
			for _, p := range ofPeers(t, c.nc) {
				if p.Fence >= fence {
					t.Errorf("the instance repeats the claim: %d", p.Fence)
				}
			}
			if log := in.log.String(); !strings.Contains(log, "liar") || !strings.Contains(log, fmt.Sprint(fence)) {
				t.Errorf("the log does not say who claimed what:\n%s", log)
			}

			done, err := service.Lift(t.Context(), nc, "", "", leased.MicroName)
			if most := uint64(time.Now().Add(time.Second).UnixMicro()); err != nil || done.Next > most {
				t.Fatalf("lifted to %d, by now %d at most can have been issued: %v", done.Next, most, err)
			}
			var r reply
			testnats.Eventually(t, 15*time.Second, func() bool { r = c.acquire("k2", "A", time.Second); return r.Kind == "granted" }, late(func() string { return r.Kind + " " + r.Error }))
			if r.Revision < done.Next || r.Revision > done.Next+10 {
				t.Errorf("lifted to %d, granted with %d", done.Next, r.Revision)
			}
		})
	}
}

// TestPeerClaimsWhatCanBe: a revision that may have been issued is believed by who
// starts, because the bucket may be a backup; it says who said so, does not pass
// it on, and a lift cures it.
func TestPeerClaimsWhatCanBe(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	c := callerOn(t, n.URL)
	_, stop := serveUntil(t, n.URL)
	before := at{t, c.nc, leased.DefaultAPIPrefix}.grant("before", "A", time.Second)
	stop()
	claimed := before.Revision + 1000
	liar(t, n.Connect(), map[string]any{"fence": claimed})
	in, stop := serveUntil(t, n.URL)
	defer stop()
	testnats.Eventually(t, 15*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "distrusted") }, late(in.bucket))
	if why := in.bucket(); !strings.Contains(why, "liar") || !strings.Contains(why, fmt.Sprint(claimed)) {
		t.Errorf("it does not say who claimed what: %s", why)
	}
	for _, p := range ofPeers(t, c.nc) {
		if p.Fence >= claimed {
			t.Errorf("the instance repeats the claim: %d", p.Fence)
		}
	}
	if _, err := service.Lift(t.Context(), c.nc, "", "", leased.MicroName); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 15*time.Second, func() bool { return len(in.failing()) == 0 }, late(func() string { return fmt.Sprint(in.failing()) }))
	if r := c.grant("k", "A", time.Second); r.Revision <= claimed {
		t.Errorf("granted with %d", r.Revision)
	}
}

// TestPeerHoldsForEver: while the bucket is made again somebody claims a lease of
// centuries. Nothing is put off for longer than a lease can last, in the bucket's own
// note neither, and a note that somebody writes there counts as little.
func TestPeerHoldsForEver(t *testing.T) {
	t.Parallel()
	for _, held := range []int64{9_000_000_000_000, math.MaxInt64} {
		t.Run(fmt.Sprint(held), func(t *testing.T) {
			t.Parallel()
			n := testnats.Server(t)
			c := callerOn(t, n.URL)
			in, stop := serveUntil(t, n.URL)
			in.waitReady(t)
			asked := liar(t, n.Connect(), map[string]any{"fence": 1, "held_ms": held})
			deleteBucket(t, c.nc)
			testnats.Eventually(t, 10*time.Second, func() bool {
				return asked.Load() > 0 && api(c.nc, "STREAM.INFO.KV_leases", nil, nil) == nil
			}, "not made again")
			s := bucketOf(t, c.nc)
			meta, _ := s.Config["metadata"].(map[string]any)
			until, err := time.Parse(time.RFC3339Nano, fmt.Sprint(meta["leased_hold_until"]))
			if err == nil && until.After(s.Created.Add(service.MaxTTL+time.Second)) {
				t.Errorf("the bucket made at %v says to grant nothing until %v", s.Created, until)
			}
			stop()

			// A bucket with a note of centuries, as an older instance or a stranger wrote it.
			s.Config["metadata"] = map[string]any{"leased_hold_until": "2312-01-01T00:00:00Z"}
			deleteBucket(t, c.nc)
			if err := api(c.nc, "STREAM.CREATE.KV_leases", s.Config, nil); err != nil {
				t.Fatal(err)
			}
			young, stop := serveUntil(t, n.URL, apiPrefix("young"))
			defer stop()
			testnats.Eventually(t, 10*time.Second, func() bool { return strings.HasPrefix(young.bucket(), "waiting") }, late(young.bucket))
			for _, p := range ofPeers(t, c.nc) {
				if most := (service.MaxTTL + time.Second).Milliseconds(); p.HeldMillis > most {
					t.Errorf("an instance says to wait %d ms, a lease lasts %d at most", p.HeldMillis, most)
				}
			}
		})
	}
}
