package service

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/leased/leased/test/fault"
)

// losesExpired loses the first expired events on their way to the store, or
// their acks.
type losesExpired struct {
	*faultyStore
	stored bool // only the ack is lost

	mu   sync.Mutex
	left int
}

func (s *losesExpired) StartPut(w *Write, deadline time.Time, done func(uint64, error)) {
	s.mu.Lock()
	lose := w.Event == Expired && s.left > 0
	if lose {
		s.left--
	}
	s.mu.Unlock()
	if !lose {
		s.faultyStore.StartPut(w, deadline, done)
		return
	}
	if s.stored {
		_, _ = s.apply(w)
	}
	time.AfterFunc(tryTime(deadline), func() { done(0, ErrNoVerdict) })
}

// TestExpiredIsNotLate: an expired event whose first write was lost does not land
// when its key was taken and freed again meanwhile, in the place of that
// lease's; and no end is lost over it.
func TestExpiredIsNotLate(t *testing.T) {
	for _, c := range []struct {
		lost   int
		stored bool
		taken  bool // B has the key meanwhile
		want   string
	}{
		{1, false, true, "[acquired A, acquired B after A, expired B]"},
		{3, false, true, "[acquired A, acquired B after A, expired B]"},
		{1, false, false, "[acquired A, expired A]"},
		{3, false, false, "[acquired A, expired A]"},
		{1, true, false, "[acquired A, expired A]"},
		{0, false, true, "[acquired A, expired A, acquired B, expired B]"},
	} {
		t.Run(fmt.Sprint(c.lost, " lost, stored ", c.stored, ", taken ", c.taken), func(t *testing.T) {
			for seed := range uint64(40) {
				var log []string
				synctest.Test(t, func(t *testing.T) {
					rng := &lockedRand{r: rand.New(rand.NewPCG(seed, 2))}
					store := newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)
					ctx, stop := context.WithCancel(t.Context())
					var background sync.WaitGroup
					// A's instance tells ends; B's is killed when it has written.
					first := newScheduled(ctx, &background, rng, store, &losesExpired{faultyStore: store, left: c.lost, stored: c.stored})
					second := newScheduled(ctx, &background, rng, store, store)
					x := &expirer{leases: first, guard: openGuard{}}
					background.Go(func() { x.run(ctx) })
					if res, err := first.Acquire(ctx, "k", "A", time.Second, ""); err != nil || res.Kind != kinds.Granted {
						t.Fatal(res, err)
					}
					// While the event is under way, or just after it.
					time.Sleep(time.Second + tellOwn + expiryTick + 10*time.Millisecond + rng.dur(200*time.Millisecond))
					if c.taken {
						if res, err := second.Acquire(ctx, "k", "B", time.Second, ""); err != nil || res.Kind != kinds.Granted {
							t.Fatal(res, err)
						}
					}
					time.Sleep(12 * time.Second)
					stop()
					background.Wait()
					for _, m := range store.msgs["k"] {
						r := m.entry.Record
						line := fmt.Sprint(r.Event, " ", r.Holder)
						if r.Previous != nil && r.Previous.Ended == EndedExpired {
							line += " after " + r.Previous.Holder
						}
						log = append(log, line)
					}
				})
				if got := fmt.Sprint("[", strings.Join(log, ", "), "]"); got != c.want {
					t.Fatalf("seed %d: %s, want %s", seed, got, c.want)
				}
			}
		})
	}
}

// TestPreviousIsTheLast: an instance whose consumer lags for longer than a lease
// lasts, and does not notice, takes a key that lapsed and names the revision that
// ended: a renewal it has not seen yet.
func TestPreviousIsTheLast(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			rng := &lockedRand{r: rand.New(rand.NewPCG(seed, 3))}
			store := newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)
			ctx, stop := context.WithCancel(t.Context())
			var background sync.WaitGroup
			first := newScheduled(ctx, &background, rng, store, store)
			second := newScheduled(ctx, &background, rng, store, store)
			lagging := store.feeds[1]
			store.feeds[1] = func(e Entry, ttl time.Duration) {
				if e.Record.Event != Renewed {
					lagging(e, ttl)
					return
				}
				store.held++
				time.AfterFunc(2200*time.Millisecond, func() {
					lagging(e, ttl)
					store.mu.Lock()
					defer store.mu.Unlock()
					store.held--
				})
			}
			// Its heartbeats seem to be those of a consumer that has nothing to deliver.
			background.Go(func() {
				for store.wait(ctx, 100*time.Millisecond) == nil {
					now := time.Now()
					second.view.alive.Store(second.view.local(now))
					second.view.heard.Store(now.UnixNano())
				}
			})
			res, err := first.Acquire(ctx, "k", "A", time.Second, "")
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(700 * time.Millisecond)
			if res, err = first.Renew(ctx, "k", "A", res.Lease.Revision, time.Second); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1400 * time.Millisecond) // past its end, and the sweep
			got, err := second.Acquire(ctx, "k", "B", time.Second, "")
			if err != nil || got.Kind != kinds.Granted {
				t.Fatal(got, err)
			}
			msgs := store.msgs["k"]
			if p := msgs[len(msgs)-1].entry.Record.Previous; p == nil || p.Revision != res.Lease.Revision {
				t.Errorf("seed %d: previous is %+v, the last revision was %d", seed, p, res.Lease.Revision)
			}
			stop()
			background.Wait()
			time.Sleep(5 * time.Second)
		})
	}
}
