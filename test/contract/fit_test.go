package contract

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// payloadOf sets the max_payload of a server.
func payloadOf(n int32) testnats.Option {
	return func(o *server.Options) { o.MaxPayload = n }
}

// acquireMany acquires n keys for one holder, with meta, and returns what renew_many needs.
func (r *rig) acquireMany(n int, holder, key, meta string) request {
	q := request{Holder: holder, TTL: 600000, Leases: make([]pair, n)}
	next := make(chan int)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for i := range next {
				name := fmt.Sprintf(key, i)
				got, err := r.ask("acquire", request{Key: name, Holder: holder, TTL: 600000, Meta: meta})
				if err != nil || got.kind != kinds.Granted || got.Meta != meta {
					r.t.Errorf("acquire: %v, %v", got, err)
					return
				}
				q.Leases[i] = pair{name, got.Revision}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	return q
}

// TestRenewManyFits: the reply to many renewals leaves out what need not be in it, and
// where it might still not fit nothing is renewed and the caller is told how many would.
func TestRenewManyFits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		payload int32
		leases  int
		holder  string
		key     string
		meta    string
		told    bool // meta is in the reply
		fit     int  // of the leases, 0: all
	}{
		{"500 with a meta of <", 1 << 20, 500, "A", "k-%d", strings.Repeat("<", 512), true, 0},
		{"500 with a meta of control characters", 1 << 20, 500, "A", "k-%d", strings.Repeat("\x01", 512), false, 0},
		{"200 at 64 KiB", 64 << 10, 200, "A", "%0100d", "", false, 0},
		{"200 with long keys at 64 KiB", 64 << 10, 200, strings.Repeat("h", 128), "%0128d", strings.Repeat("m", 400), false, 144},
		{"1000 at 64 KiB", 64 << 10, 1000, "A", "k-%d", "", false, 324},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, setup{nats: []testnats.Option{payloadOf(c.payload)}})
			q := r.acquireMany(c.leases, c.holder, c.key, c.meta)
			if c.fit > 0 {
				before := r.stream().LastSeq
				got := r.want(kinds.ReplyTooLarge, "renew_many", q)
				if !strings.Contains(got.Error, fmt.Sprintf("the first %d ", c.fit)) {
					t.Errorf("the sentence does not say that %d leases fit: %s", c.fit, got.Error)
				}
				if after := r.stream().LastSeq; after != before {
					t.Errorf("a refused request moved the stream from %d to %d", before, after)
				}
				q.Leases = q.Leases[:c.fit]
			}
			got := r.want(kinds.Renewed, "renew_many", q)
			for i, l := range *got.Leases {
				if l.Key != q.Leases[i].Key || l.Revision <= q.Leases[i].Revision || l.Meta != map[bool]string{true: c.meta}[c.told] {
					t.Fatalf("lease %d: %v", i, l)
				}
				q.Leases[i].Revision = 1
			}
			// Errors take less room: the same leases, all lost.
			r.want(kinds.Lost, "renew_many", q)
		})
	}
}

// TestRepliesFit: a server that takes less than it did is told leases without their meta, one
// a page if need be, and a reply that cannot be made to fit is an error, never silence (P18).
func TestRepliesFit(t *testing.T) {
	t.Parallel()
	for _, meta := range []string{strings.Repeat("\x1f", 512), strings.Repeat("\u2028", 170)} {
		var opts *server.Options
		r := newRig(t, setup{faulty: true, nats: []testnats.Option{func(o *server.Options) { opts = o }}})
		holder := strings.Repeat("h", 64)
		r.acquireMany(3, holder, "k-%d", meta)
		limit := func(n int32) {
			t.Helper()
			mended := *opts
			mended.MaxPayload = n
			if err := r.node.NS().ReloadOptions(&mended); err != nil {
				t.Fatal(err)
			}
			// Connections hear of it when they are made.
			for _, nc := range []*nats.Conn{r.all[0].front, r.nc} {
				if err := nc.ForceReconnect(); err != nil {
					t.Fatal(err)
				}
			}
			testnats.Eventually(t, 5*time.Second, func() bool {
				_, err := r.ask("owner", request{Key: "free"})
				return err == nil && r.all[0].front.MaxPayload() == int64(n) && r.nc.MaxPayload() == int64(n)
			}, "the connections do not come back")
		}
		limit(1000)
		for call, q := range map[string]request{"owner": {Key: "k-0"}, "acquire": {Key: "k-0", Holder: holder, TTL: 600000}} {
			if got := r.call(call, q); got.Key != "k-0" || got.Holder != holder || got.Meta != "" {
				t.Errorf("%s: %s", call, got.raw)
			}
		}
		if got := r.want(kinds.Denied, "acquire", request{Key: "k-0", Holder: "B", TTL: 1000}); got.Holder != holder {
			t.Errorf("denied: %s", got.raw)
		}
		body := "{}"
		for n := range 3 {
			got := r.want(kinds.Listed, "list", body)
			if len(*got.Leases) != 1 || (*got.Leases)[0].Key != fmt.Sprintf("k-%d", n) {
				t.Fatalf("page %d: %s", n, got.raw)
			}
			body = fmt.Sprintf(`{"after":"k-%d"}`, n)
		}
		limit(200)
		for call, kind := range map[string]kinds.Kind{"owner": kinds.Internal, "acquire": kinds.Unknown, "list": kinds.Internal} {
			q := request{Key: "k-0", Holder: holder, TTL: 600000}
			if call == "list" {
				q = request{Holder: holder}
			}
			r.want(kind, call, q)
		}
		limit(1 << 20) // or $SRV.STATS does not fit
	}
}
