package service

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
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

// slowEnds takes a while for each expired event, or never tells a verdict on one.
type slowEnds struct {
	*faultyStore
	takes time.Duration
	mute  atomic.Bool
}

func (s *slowEnds) StartPut(w *Write, deadline time.Time, done func(uint64, error)) {
	if w.Event != Expired {
		s.faultyStore.StartPut(w, deadline, done)
		return
	}
	go func() { r := s.end(w, deadline); done(r.Revision, r.Err) }()
}

func (s *slowEnds) PutMany(ws []*Write, deadline time.Time) []PutResult {
	results := make([]PutResult, len(ws))
	var wg sync.WaitGroup
	for i, w := range ws {
		wg.Go(func() { results[i] = s.end(w, deadline) })
	}
	wg.Wait()
	return results
}

func (s *slowEnds) end(w *Write, deadline time.Time) PutResult {
	if s.mute.Load() {
		time.Sleep(tryTime(deadline))
		return PutResult{Err: ErrNoVerdict}
	}
	time.Sleep(s.takes)
	rev, err := s.apply(w)
	return PutResult{rev, err}
}

// acquireAll takes n keys at once, for ttl.
func acquireAll(t *testing.T, l *Leases, prefix string, n int, ttl time.Duration) {
	t.Helper()
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			if res, err := l.Acquire(t.Context(), fmt.Sprint(prefix, i), "A", ttl, ""); err != nil || res.Kind != kinds.Granted {
				t.Error(res, err)
			}
		})
	}
	all.Wait()
}

// TestManyEnds: of many leases that end at once, beside one that has nothing to do with
// them, every end is told in time, once, by a store that takes a while for each.
func TestManyEnds(t *testing.T) {
	for _, instances := range []int{1, 2} {
		synctest.Test(t, func(t *testing.T) {
			const leases = 4000
			rng := &lockedRand{r: rand.New(rand.NewPCG(1, 4))}
			store := &slowEnds{faultyStore: newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0), takes: 50 * time.Millisecond}
			ctx, stop := context.WithCancel(t.Context())
			var background sync.WaitGroup
			var first *Leases
			for range instances {
				l := newScheduled(ctx, &background, rng, store.faultyStore, store)
				x := &expirer{leases: l, guard: openGuard{}}
				background.Go(func() { x.run(ctx) })
				if first == nil {
					first = l
				}
			}
			const early = 20 // at a tick of its own each: what the store takes for few is not known from one
			for i := range early {
				acquireAll(t, first, fmt.Sprint("early-", i), 1, time.Second)
				time.Sleep(2 * expiryTick)
			}
			time.Sleep(2 * time.Second)
			acquireAll(t, first, "many-", leases, 2*time.Second)
			acquireAll(t, first, "other-", 1, 2*time.Second)
			time.Sleep(2*time.Second + 3*time.Second)
			told := map[Event]int{}
			store.mu.Lock()
			for _, msgs := range store.msgs {
				for _, m := range msgs {
					told[m.entry.Record.Event]++
				}
			}
			other := store.msgs["other-0"]
			store.mu.Unlock()
			if told[Expired] != leases+1+early || len(other) != 2 {
				t.Errorf("%d instances: %d of %d ends are told in 3 s, %d messages of the other lease", instances, told[Expired], leases+1+early, len(other))
			}
			stop()
			background.Wait()
		})
	}
}

// TestEndsWaitForNobody: what is held is right while no end can be written.
func TestEndsWaitForNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rng := &lockedRand{r: rand.New(rand.NewPCG(1, 5))}
		store := &slowEnds{faultyStore: newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)}
		store.mute.Store(true)
		ctx, stop := context.WithCancel(t.Context())
		var background sync.WaitGroup
		l := newScheduled(ctx, &background, rng, store.faultyStore, store)
		x := &expirer{leases: l, guard: openGuard{}}
		background.Go(func() { x.run(ctx) })
		acquireAll(t, l, "first-", 400, time.Second)
		acquireAll(t, l, "later-", 400, 2*time.Second)
		acquireAll(t, l, "stays-", 1, 10*time.Second)
		for at, want := range []int64{801, 401, 1, 1} {
			if got := l.view.held.Load(); got != want {
				t.Errorf("%d held after %d s, want %d", got, at, want)
			}
			time.Sleep(time.Second + 2*expiryTick)
		}
		stop()
		background.Wait()
	})
}

// TestEndsToldByNobody: an end that could not be told in time is counted, and told by
// who takes the key next.
func TestEndsToldByNobody(t *testing.T) {
	for _, c := range []struct {
		silence, taken time.Duration // how long no end can be written; when the key is taken
		late           uint64
		want           string
	}{
		{time.Minute, 50 * time.Second, 1, "[acquired A, acquired B after A]"},
		{time.Minute, 21 * time.Second, 0, "[acquired A, acquired B after A]"},
		{time.Minute, 2 * time.Minute, 1, "[acquired A, acquired B after A]"},
		{time.Minute, 5 * time.Minute, 1, "[acquired A, acquired B]"},
		{15 * time.Second, 50 * time.Second, 0, "[acquired A, expired A, acquired B]"},
		{0, 4 * time.Second, 0, "[acquired A, expired A, acquired B]"},
	} {
		t.Run(fmt.Sprint("silent for ", c.silence, ", taken after ", c.taken), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rng := &lockedRand{r: rand.New(rand.NewPCG(1, 6))}
				store := &slowEnds{faultyStore: newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)}
				store.mute.Store(c.silence > 0)
				ctx, stop := context.WithCancel(t.Context())
				var background sync.WaitGroup
				var xs []*expirer
				for range 2 {
					x := &expirer{leases: newScheduled(ctx, &background, rng, store.faultyStore, store), guard: openGuard{}}
					background.Go(func() { x.run(ctx) })
					xs = append(xs, x)
				}
				acquireAll(t, xs[0].leases, "k", 1, time.Second)
				time.AfterFunc(c.silence, func() { store.mute.Store(false) })
				time.Sleep(time.Second + c.taken)
				for i, x := range xs {
					if e := x.ends(); e.Late != c.late || e.Unseen != 0 || (e.Waiting == 1) != (c.late == 0 && c.silence == time.Minute) {
						t.Errorf("instance %d: %+v, want %d too late", i, e, c.late)
					}
				}
				if res, err := xs[1].leases.Acquire(ctx, "k0", "B", 10*time.Minute, ""); err != nil || res.Kind != kinds.Granted {
					t.Fatal(res, err)
				}
				time.Sleep(time.Second)
				if w := xs[0].leases.view.waits.Load() + xs[1].leases.view.waits.Load(); w != 0 {
					t.Errorf("%d ends wait when nothing is left to tell", w)
				}
				stop()
				background.Wait()
				var log []string
				for _, m := range store.msgs["k0"] {
					r := m.entry.Record
					line := fmt.Sprint(r.Event, " ", r.Holder)
					if r.Previous != nil {
						line += " after " + r.Previous.Holder
					}
					log = append(log, line)
				}
				if got := fmt.Sprint("[", strings.Join(log, ", "), "]"); got != c.want {
					t.Errorf("%s, want %s", got, c.want)
				}
			})
		})
	}
}

// TestEndsUnseen: an end that came while the view did not follow the bucket is counted,
// unless its event is shown afterwards.
func TestEndsUnseen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v, now := newView(&clock{}, nil), time.Now()
		for i, key := range []string{"untold", "told", "held"} {
			r := &Record{V: recordVersion, Key: key, Holder: "h", TTLMillis: 2000, AcquiredAt: 1, WrittenAt: 1, Event: Acquired}
			if key == "held" {
				r.TTLMillis = 60_000
			}
			v.wrote(key, uint64(i+1), r, false, r.TTL(), now, now)
		}
		epoch := v.restart()
		time.Sleep(5 * time.Second)
		now = time.Now()
		tomb := &Record{V: recordVersion, Key: "told", Holder: "h", TTLMillis: 2000, AcquiredAt: 1, WrittenAt: 1, Event: Expired, Revision: 2}
		v.delivered(Entry{Key: "told", Revision: 9, At: now, Record: tomb, Tombstone: true}, 32*time.Second, epoch, now)
		v.confirm("held", 3, now.Add(-5*time.Second), epoch)
		v.completed(epoch)
		if got := v.unseen.Load(); got != 1 || v.late.Load() != 0 || v.waits.Load() != 0 {
			t.Errorf("%d unseen, %d late, %d wait; want 1, 0, 0", got, v.late.Load(), v.waits.Load())
		}
	})
}
