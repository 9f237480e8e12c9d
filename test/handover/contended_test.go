package handover

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/client"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestContended: 64 workers on 8 keys get grants from the service, and 64 clients
// that poll a JetStream KV bucket on the same NATS, the one inside the service, get
// theirs, turn by turn. A grant is released at once.
//
// Against clients that ask again at once, as who waits in line does, the service is
// to have twice the grants. Who polls with a pause gets more of them, but passes
// nothing on: who has just released is the first to ask again. So hand-overs are
// counted too, grants to another than the one before, and of these the service is to
// have more than polling at whatever pause is best for it.
func TestContended(t *testing.T) {
	rounds, length := size(1, 5), time.Duration(size(1, 3))*time.Second
	polls := []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond}
	url := testnats.Leased(t, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+t.TempDir(), "--sync=2m").NATS()
	js, err := jetstream.New(testnats.Connect(t, url))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "locks", LimitMarkerTTL: time.Minute}); err != nil {
		t.Fatal(err)
	}

	ours, theirs := leasedWorkers(t, url), kvWorkers(t, url)
	var granted, passed []float64
	for range rounds {
		service := work(t, length, ours)
		var all []rate
		var best float64
		for _, poll := range polls {
			r := work(t, length, theirs(poll))
			best = max(best, r.handovers)
			all = append(all, r)
		}
		t.Logf("grants/s (hand-overs/s): %v; polling every %v: %v", service, polls, all)
		granted, passed = append(granted, service.grants/all[0].grants), append(passed, service.handovers/best)
	}
	for _, c := range []struct {
		what   string
		ratios []float64
		want   float64
	}{{"grants of polling at once", granted, 2}, {"hand-overs of polling at its best", passed, 1}} {
		slices.Sort(c.ratios)
		median := c.ratios[len(c.ratios)/2]
		t.Logf("least %.2f, median %.2f, most %.2f times the %s", c.ratios[0], median, c.ratios[len(c.ratios)-1], c.what)
		if long && median < c.want {
			t.Errorf("%.2f times the %s, want %.0f", median, c.what, c.want)
		}
	}
}

const (
	workers       = 64
	contendedKeys = 8
)

// cycle tries to take a key, tells when it is granted, and gives it back.
type cycle func(ctx context.Context, worker int, granted func()) error

// rate is what the workers got in a second.
type rate struct{ grants, handovers float64 }

func (r rate) String() string { return fmt.Sprintf("%.0f (%.0f)", r.grants, r.handovers) }

// work runs the workers for a time.
func work(t *testing.T, length time.Duration, do cycle) rate {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var n, passed atomic.Int64
	var last [contendedKeys]atomic.Int64
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				err := do(ctx, i, func() {
					n.Add(1)
					if last[i%contendedKeys].Swap(int64(i+1)) != int64(i+1) {
						passed.Add(1)
					}
				})
				if err != nil {
					t.Errorf("worker %d: %v", i, err)
					return
				}
			}
		})
	}
	began := time.Now()
	all.Wait()
	took := time.Since(began).Seconds()
	return rate{float64(n.Load()) / took, float64(passed.Load()) / took}
}

func leasedWorkers(t *testing.T, url string) cycle {
	c := caller(t, url)
	return func(ctx context.Context, worker int, granted func()) error {
		// Not broken off when time is over: a waiter that is gone would be granted the
		// key and keep it.
		ctx = context.WithoutCancel(ctx)
		g, err := c.Acquire(ctx, client.AcquireRequest{
			Key: fmt.Sprintf("contended-%d", worker%contendedKeys), Holder: fmt.Sprintf("worker-%d", worker), TTL: time.Minute, Wait: time.Second,
		})
		if err != nil || g.Kind != kinds.Granted {
			return err
		}
		granted()
		_, err = c.Release(ctx, g.Lease)
		return err
	}
}

// kvWorkers create and purge keys with the KV API of nats.go, as a careful user
// would: with a TTL, by revision, and with jitter between two polls.
func kvWorkers(t *testing.T, url string) func(time.Duration) cycle {
	js, err := jetstream.New(testnats.Connect(t, url))
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.KeyValue(t.Context(), "locks")
	if err != nil {
		t.Fatal(err)
	}
	return func(poll time.Duration) cycle {
		return func(ctx context.Context, worker int, granted func()) error {
			ctx = context.WithoutCancel(ctx)
			key := fmt.Sprintf("contended-%d", worker%contendedKeys)
			revision, err := kv.Create(ctx, key, fmt.Appendf(nil, "worker-%d", worker), jetstream.KeyTTL(time.Minute))
			if errors.Is(err, jetstream.ErrKeyExists) {
				if poll > 0 {
					time.Sleep(poll/2 + rand.N(poll))
				}
				return nil
			}
			if err != nil {
				return err
			}
			granted()
			return kv.Purge(ctx, key, jetstream.LastRevision(revision), jetstream.PurgeTTL(time.Minute))
		}
	}
}
