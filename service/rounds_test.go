package service

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/leased/leased/test/fault"
)

// countedStore counts what comes to a store, and may do something else with a write.
type countedStore struct {
	*faultyStore
	puts, gets atomic.Int64
	instead    func(w *Write, done func(uint64, error)) bool
}

func (s *countedStore) StartPut(w *Write, deadline time.Time, done func(uint64, error)) {
	s.puts.Add(1)
	if s.instead == nil || !s.instead(w, done) {
		s.faultyStore.StartPut(w, deadline, done)
	}
}

func (s *countedStore) StartGet(key string, wait time.Duration, known Known, done func(Entry, error)) {
	s.gets.Add(1)
	s.faultyStore.StartGet(key, wait, known, done)
}

// onCounted runs f in fake time with an instance on a store without trouble.
func onCounted(t *testing.T, f func(t *testing.T, l *Leases, s *countedStore)) {
	synctest.Test(t, func(t *testing.T) {
		rng := &lockedRand{r: rand.New(rand.NewPCG(1, 1))}
		s := &countedStore{faultyStore: newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)}
		ctx, stop := context.WithCancel(t.Context())
		var background sync.WaitGroup
		l := newScheduled(ctx, &background, rng, s.faultyStore, s)
		time.Sleep(2 * time.Second) // the view has heard something
		f(t, l, s)
		time.Sleep(6 * time.Second)
		stop()
		background.Wait()
	})
}

type answered struct {
	Result
	err error
}

// crowd asks for key as n holders at once, every other one as who waits for it does.
func crowd(l *Leases, key string, n int) []answered {
	out := make([]answered, n)
	var all sync.WaitGroup
	for i := range n {
		c := Command{Op: OpAcquire, Key: key, Holder: fmt.Sprintf("h%d", i), TTL: time.Minute}
		all.Go(func() {
			if i%2 == 0 {
				out[i].Result, out[i].err = do(l, c)
			} else {
				out[i].Result, out[i].err = l.Do(context.Background(), c)
			}
		})
	}
	all.Wait()
	return out
}

// TestOneRound: acquires that meet share one write, and one read where they came
// after it.
func TestOneRound(t *testing.T) {
	onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
		granted := func(as []answered) (winner Lease) {
			t.Helper()
			n := 0
			for _, a := range as {
				switch {
				case a.err != nil:
					t.Error(a.err)
				case a.Kind == kinds.Granted:
					n, winner = n+1, a.Lease
				}
			}
			for _, a := range as {
				if a.Lease.Holder != winner.Holder || a.Lease.Revision != winner.Revision || a.Lease.Left <= 0 {
					t.Errorf("told %v %+v, and %+v was granted", a.Kind, a.Lease, winner)
				}
			}
			if n != 1 {
				t.Errorf("%d were granted", n)
			}
			return winner
		}
		won := granted(crowd(l, "k", 64))
		if puts, gets := s.puts.Load(), s.gets.Load(); puts != 1 || gets != 0 {
			t.Errorf("64 acquires of a free key: %d writes, %d reads", puts, gets)
		}
		s.gets.Store(0)
		for _, a := range crowd(l, "k", 64) {
			if a.err != nil || a.Lease.Revision != won.Revision || (a.Kind == kinds.Granted) != (a.Lease.Holder == won.Holder && a.Kind != kinds.Denied) {
				t.Errorf("told %v %+v, %v", a.Kind, a.Lease, a.err)
			}
		}
		if puts, gets := s.puts.Load(), s.gets.Load(); puts != 1 || gets > 2 {
			t.Errorf("64 acquires of a held key: %d writes, %d reads", puts-1, gets)
		}

		// Those that come while it is released get it with one more write.
		s.puts.Store(0)
		s.gets.Store(0)
		released := make(chan answered, 1)
		l.Start(Command{Op: OpRelease, Key: "k", Holder: won.Holder, Revision: won.Revision}, func(c *Call) {
			res, err := c.Finish(context.Background())
			released <- answered{res, err}
		})
		granted(crowd(l, "k", 64))
		if a := <-released; a.err != nil {
			t.Error(a.err)
		}
		if puts, gets := s.puts.Load(), s.gets.Load(); puts != 2 || gets != 0 {
			t.Errorf("64 acquires of a key that is being released: %d writes besides that, %d reads", puts-1, gets)
		}
	})
}

// TestRest: a crowd that asks for a held key without a pause makes a read now and then,
// nobody waits long for it, and the key is taken as soon as it is free, whoever freed it.
func TestRest(t *testing.T) {
	onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
		won := crowd(l, "k", 16)[0].Lease
		began := time.Now()
		s.gets.Store(0)
		s.puts.Store(0)
		var all sync.WaitGroup
		var taken atomic.Int64 // when, since began
		for i := range 16 {
			all.Go(func() {
				for taken.Load() == 0 {
					asked := time.Now()
					res, err := do(l, Command{Op: OpAcquire, Key: "k", Holder: fmt.Sprint("w", i), TTL: time.Minute})
					if took := time.Since(asked); err != nil || took > 4*rest {
						t.Errorf("%v, %v after %v", res.Kind, err, took)
					}
					if err == nil && res.Kind == kinds.Granted {
						taken.Store(int64(time.Since(began)))
					}
				}
			})
		}
		time.Sleep(200 * time.Millisecond)
		if gets := s.gets.Load(); gets < 10 || gets > 45 {
			t.Errorf("%d reads in 200 ms", gets)
		}
		// Another instance frees it.
		e := Entry{Key: "k", Revision: won.Revision, At: time.Now(), Record: &Record{Holder: won.Holder, TTLMillis: 60_000, AcquiredAt: 1}}
		_, freed := l.compose("k", tombstone(&e, won.Revision, Released))
		if _, err := s.apply(freed); err != nil {
			t.Fatal(err)
		}
		all.Wait()
		if at := time.Duration(taken.Load()); at > 200*time.Millisecond+4*rest {
			t.Errorf("it was taken %v after it was freed", at-200*time.Millisecond)
		}
		if puts := s.puts.Load(); puts > 2 {
			t.Errorf("%d writes", puts)
		}

		// One that comes alone later waits for nothing but its read.
		time.Sleep(time.Second)
		asked := time.Now()
		if res, err := do(l, Command{Op: OpAcquire, Key: "k", Holder: "alone", TTL: time.Minute}); err != nil || res.Kind != kinds.Denied || time.Since(asked) > 7*time.Millisecond {
			t.Errorf("%v, %v after %v", res.Kind, err, time.Since(asked))
		}
	})
}

// TestSameHolderInLine: a holder that asks twice gets its own lease both times.
func TestSameHolderInLine(t *testing.T) {
	onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
		c := Command{Op: OpAcquire, Key: "k", Holder: "h", TTL: time.Minute}
		var all sync.WaitGroup
		var revisions sync.Map
		for i := range 8 {
			all.Go(func() {
				ask := func() (Result, error) { return do(l, c) }
				if i%2 == 0 {
					ask = func() (Result, error) { return l.Do(context.Background(), c) }
				}
				res, err := ask()
				if err != nil || res.Kind != kinds.Granted {
					t.Errorf("%v, %v", res.Kind, err)
				}
				revisions.Store(res.Lease.Revision, true)
			})
		}
		all.Wait()
		n := 0
		revisions.Range(func(any, any) bool { n++; return true })
		if n != 1 || s.puts.Load() != 1 {
			t.Errorf("one holder got %d leases with %d writes", n, s.puts.Load())
		}
	})
}

// TestRoundEnds: nobody in line sleeps on, whatever becomes of the write before it.
func TestRoundEnds(t *testing.T) {
	for name, fate := range map[string]struct {
		instead func(w *Write, done func(uint64, error)) bool
		within  time.Duration
	}{
		"no verdict": {func(w *Write, done func(uint64, error)) bool {
			time.AfterFunc(callBudget, func() { done(0, ErrNoVerdict) })
			return true
		}, tryTimeout + time.Second/2},
		"not stored": {func(w *Write, done func(uint64, error)) bool { go done(0, notStored(errTooLate)); return true }, time.Second},
		"conflict":   {func(w *Write, done func(uint64, error)) bool { go done(0, ErrConflict); return true }, time.Second},
		"panic": {func(w *Write, done func(uint64, error)) bool {
			go done(0, &panicked{value: "of the test"})
			return true
		}, time.Second},
		"stored": {nil, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
				var once atomic.Bool
				s.instead = func(w *Write, done func(uint64, error)) bool {
					return fate.instead != nil && once.CompareAndSwap(false, true) && fate.instead(w, done)
				}
				began := time.Now()
				first := make(chan answered, 1)
				l.Start(Command{Op: OpAcquire, Key: "k", Holder: "first", TTL: time.Minute}, func(c *Call) {
					go func() {
						defer func() {
							if p := recover(); p != nil {
								first <- answered{}
							}
						}()
						res, err := c.Finish(context.Background())
						first <- answered{res, err}
					}()
				})
				// One of those in line gives up: it takes nobody with it.
				ctx, cancel := context.WithCancelCause(context.Background())
				gone := make(chan answered, 1)
				go func() {
					res, err := l.Do(ctx, Command{Op: OpAcquire, Key: "k", Holder: "gone", TTL: time.Minute})
					gone <- answered{res, err}
				}()
				synctest.Wait()
				cancel(errors.New("of the test"))
				held := 0
				for _, a := range crowd(l, "k", 16) {
					if a.err != nil {
						t.Error(a.err)
					}
					if a.Kind == kinds.Granted {
						held++
					}
				}
				if took := time.Since(began); took > fate.within {
					t.Errorf("those in line were answered after %v", took)
				}
				for _, a := range []answered{<-gone, <-first} {
					if a.Kind == kinds.Granted {
						held++
					}
				}
				if held != 1 {
					t.Errorf("%d were granted", held)
				}
			})
		})
	}
}

// TestFirstInLineFirst: of those in line the one that came first gets the key.
func TestFirstInLineFirst(t *testing.T) {
	onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
		won, err := do(l, Command{Op: OpAcquire, Key: "k", Holder: "h", TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		var release func()
		s.instead = func(w *Write, done func(uint64, error)) bool {
			if w.Tombstone {
				release = func() { s.faultyStore.StartPut(w, time.Now().Add(callBudget), done) }
			}
			return w.Tombstone
		}
		l.Start(Command{Op: OpRelease, Key: "k", Holder: "h", Revision: won.Lease.Revision}, func(c *Call) {
			if _, err := c.Finish(context.Background()); err != nil {
				t.Error(err)
			}
		})
		var mu sync.Mutex
		granted := ""
		var all sync.WaitGroup
		for i := range 10 {
			all.Add(1)
			holder := fmt.Sprintf("h%d", i)
			l.Start(Command{Op: OpAcquire, Key: "k", Holder: holder, TTL: time.Minute}, func(c *Call) {
				defer all.Done()
				res, err := c.Finish(context.Background())
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				}
				if res.Kind == kinds.Granted {
					granted += holder
				}
			})
			time.Sleep(time.Millisecond)
		}
		release()
		all.Wait()
		if granted != "h0" {
			t.Errorf("granted to %q, want the first that came", granted)
		}
	})
}

// TestAnswersAreNotOlder: who comes after a key was taken and freed again is not told
// that it is held, though the ack of the taking is still on its way.
func TestAnswersAreNotOlder(t *testing.T) {
	onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
		acked := make(chan func(), 1)
		var once atomic.Bool
		s.instead = func(w *Write, done func(uint64, error)) bool {
			if !once.CompareAndSwap(false, true) {
				return false
			}
			rev, err := s.apply(w)
			if err != nil {
				t.Error(err)
			}
			e := Entry{Key: "k", Revision: rev, At: time.Now(), Record: &Record{Holder: "early", TTLMillis: 60_000}}
			_, evicted := l.compose("k", tombstone(&e, rev, Released))
			if _, err := s.apply(evicted); err != nil {
				t.Error(err)
			}
			acked <- func() { done(rev, nil) }
			return true
		}
		var all sync.WaitGroup
		all.Go(func() {
			if res, err := do(l, Command{Op: OpAcquire, Key: "k", Holder: "early", TTL: time.Minute}); err != nil || res.Kind != kinds.Granted {
				t.Errorf("early: %v, %v", res.Kind, err)
			}
		})
		ack := <-acked
		for _, holder := range []string{"late", "later"} {
			time.Sleep(time.Millisecond)
			all.Go(func() {
				ask := func() (Result, error) {
					return do(l, Command{Op: OpAcquire, Key: "k", Holder: holder, TTL: time.Minute})
				}
				if holder == "later" {
					ask = func() (Result, error) {
						return l.Do(context.Background(), Command{Op: OpAcquire, Key: "k", Holder: holder, TTL: time.Minute})
					}
				}
				res, err := ask()
				if err != nil || res.Lease.Holder != "late" && res.Lease.Holder != "later" {
					t.Errorf("%s is told %v %s, %v", holder, res.Kind, res.Lease.Holder, err)
				}
			})
		}
		time.Sleep(time.Millisecond)
		ack()
		all.Wait()
	})
}

// countingObserver counts writes without a verdict.
type countingObserver struct {
	openGuard
	doubts atomic.Int64
}

func (o *countingObserver) NoVerdict() { o.doubts.Add(1) }

// TestVerdictOfThatTime: a refusal is judged by what was known when the write was
// sent. What the view learns meanwhile is no reason to doubt it.
func TestVerdictOfThatTime(t *testing.T) {
	for name, c := range map[string]struct {
		before, meanwhile []Event // of another's, as the view sees them
		last              uint64  // that the refusal names
		doubt             bool
	}{
		"taken and freed meanwhile":         {nil, []Event{Acquired, Released}, 101, false},
		"taken, freed and taken meanwhile":  {[]Event{Acquired, Released}, []Event{Acquired, Released, Acquired}, 103, false},
		"refused by one who knows less":     {[]Event{Acquired, Released}, []Event{Acquired}, 101, true},
		"refused by one who has a past one": {nil, []Event{Acquired}, 50, true},
		"refused by one who knows nothing":  {[]Event{Acquired}, nil, 0, true},
		"nothing left, and it was released": {[]Event{Acquired, Released}, nil, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
				o := &countingObserver{}
				l.obs = o
				rev := uint64(100)
				l.view.position.Store(rev)
				learn := func(events []Event) {
					for _, ev := range events {
						rev++
						rec := &Record{V: recordVersion, Key: "k", Holder: "other", TTLMillis: 60_000, Event: ev, AcquiredAt: TimestampOf(time.Now()), WrittenAt: TimestampOf(time.Now())}
						l.view.delivered(Entry{Key: "k", Revision: rev, At: time.Now(), Record: rec, Tombstone: ev == Released}, time.Minute, l.view.epoch.Load(), time.Now())
						l.view.position.Store(rev)
					}
				}
				learn(c.before)
				expect, seen := rev, rev
				if len(c.before) == 0 {
					expect = 0
				}
				a := l.prepare("k", Decision{Write: &Next{Expect: expect, Event: Renewed, Holder: "h", TTL: time.Minute}}, seen)
				learn(c.meanwhile)
				err := l.verdict(a, &conflict{&c.last, errors.New("of the test")})
				if doubt := errors.Is(err, ErrNoVerdict); doubt != c.doubt {
					t.Errorf("doubt is %v: %v", doubt, err)
				}
			})
		})
	}
}

// TestCrowdWithoutDoubt: a crowd that takes and frees keys on a healthy server has
// no doubt, from one instance and from two.
func TestCrowdWithoutDoubt(t *testing.T) {
	for instances := 1; instances <= 2; instances++ {
		synctest.Test(t, func(t *testing.T) {
			rng := &lockedRand{r: rand.New(rand.NewPCG(7, uint64(instances)))}
			s := newFaultyStore(rng, fault.NewLog(fault.NewRecorder().Clock), 0)
			s.names = true
			ctx, stop := context.WithCancel(t.Context())
			var background, all sync.WaitGroup
			o := &countingObserver{}
			var ls []*Leases
			for range instances {
				l := newScheduled(ctx, &background, rng, s, s)
				l.obs = o
				ls = append(ls, l)
			}
			time.Sleep(2 * time.Second)
			var calls atomic.Int64
			for w := range 64 {
				l := ls[w%instances]
				all.Go(func() {
					for round := range 20 {
						key := fmt.Sprintf("k-%d-%d", round, w%8)
						for until := time.Now().Add(100 * time.Millisecond); time.Now().Before(until); {
							res, err := do(l, Command{Op: OpAcquire, Key: key, Holder: fmt.Sprint("h", w), TTL: time.Minute})
							calls.Add(1)
							if err == nil && res.Kind == kinds.Granted {
								_, err = do(l, Command{Op: OpRelease, Key: key, Holder: fmt.Sprint("h", w), Revision: res.Lease.Revision})
							}
							if err != nil {
								t.Error(err)
							}
							time.Sleep(rng.dur(5 * time.Millisecond))
						}
					}
				})
			}
			all.Wait()
			if n := o.doubts.Load(); n > 0 {
				t.Errorf("%d instances: %d of %d acquires met a doubt", instances, n, calls.Load())
			}
			time.Sleep(6 * time.Second)
			stop()
			background.Wait()
		})
	}
}
