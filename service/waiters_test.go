package service

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nuid"

	"github.com/leased/leased/service/kinds"
)

// held takes key for holder, for a minute.
func held(t *testing.T, l *Leases, key, holder string) Lease {
	t.Helper()
	res, err := l.Do(context.Background(), Command{Op: OpAcquire, Key: key, Holder: holder, TTL: time.Minute})
	if err != nil || res.Kind != kinds.Granted {
		t.Fatalf("%s by %s: %v, %v", key, holder, res.Kind, err)
	}
	return res.Lease
}

// waitingFor waits for key as holder, for so long.
func waitingFor(l *Leases, key, holder, from string, wait time.Duration) (Result, error) {
	c := Command{Op: OpAcquire, Key: key, Holder: holder, TTL: time.Minute}
	return l.AcquireWait(context.Background(), c, time.Now().Add(wait), from, func() {})
}

// count is how many lines there are.
func (w *waiters) count() (n int) {
	for i := range w.shards {
		sh := &w.shards[i]
		sh.mu.Lock()
		n += len(sh.lines)
		sh.mu.Unlock()
	}
	return n
}

// TestGoneWaiters: 10,000 acquires of one client that is gone wait for a key. Nobody
// else is busy for that, and a free key is granted whatever waits.
func TestGoneWaiters(t *testing.T) {
	for name, who := range map[string]struct {
		holder, from func(i int) string
		wait         int // of them may wait
		says         string
	}{
		"one client": {func(i int) string { return fmt.Sprint("gone-", i) }, func(int) string { return "_INBOX.gone" }, MaxCallerWaiters, "of one client"},
		"one holder": {func(int) string { return "gone" }, func(i int) string { return fmt.Sprint("_INBOX.", i) }, MaxCallerWaiters, "of one holder"},
		"one key":    {func(i int) string { return fmt.Sprint("gone-", i) }, func(i int) string { return fmt.Sprint("_INBOX.", i) }, MaxKeyWaiters, "of one key"},
	} {
		t.Run(name, func(t *testing.T) {
			onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
				held(t, l, "k", "h")
				held(t, l, "k2", "h")
				var all sync.WaitGroup
				var busy atomic.Int64
				for i := range MaxWaiters {
					all.Go(func() {
						_, err := waitingFor(l, "k", who.holder(i), who.from(i), 30*time.Second)
						if kinds.Of(err) == kinds.Busy && strings.Contains(err.Error(), who.says) {
							busy.Add(1)
						} else if err != nil {
							t.Error(err)
						}
					})
				}
				time.Sleep(5 * time.Second)
				if n, b := l.Waiting(), int(busy.Load()); n != who.wait || b != MaxWaiters-who.wait {
					t.Errorf("%d wait, %d were told that the limit %s is reached", n, b, who.says)
				}
				for _, c := range []struct{ key, holder, from string }{
					{"free", "other", "_INBOX.other"},
					{"free-2", who.holder(0), who.from(0)}, // a free key is nobody's share
				} {
					if res, err := waitingFor(l, c.key, c.holder, c.from, time.Second); err != nil || res.Kind != kinds.Granted {
						t.Errorf("%+v: %v, %v", c, res.Kind, err)
					}
				}
				if res, err := waitingFor(l, "k2", "other", "_INBOX.other", time.Second); err != nil || res.Kind != kinds.Denied {
					t.Errorf("another's wait: %v, %v", res.Kind, err)
				}
				all.Wait()
				if n := l.Waiting(); n != 0 {
					t.Errorf("%d wait still", n)
				}
				time.Sleep(2 * keepPlace)
				if n := l.waiters.count(); n != 0 {
					t.Errorf("%d lines stay", n)
				}
			})
		})
	}
}

// TestAllWaiters: the limit of all holds too.
func TestAllWaiters(t *testing.T) {
	var s shares
	for i := range MaxWaiters {
		if err := s.take(fmt.Sprint(i), ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.take("one more", ""); kinds.Of(err) != kinds.Busy || !strings.Contains(err.Error(), fmt.Sprint(MaxWaiters)) {
		t.Errorf("told %v", err)
	}
	s.give("0", "")
	if err := s.take("one more", ""); err != nil {
		t.Errorf("told %v", err)
	}
}

// TestCallerOf: requests of one client are known by the inbox that they share or by the
// ids of one process, and of no other form is a client guessed.
func TestCallerOf(t *testing.T) {
	id := nuid.Next()
	for reply, want := range map[string]string{
		"_INBOX." + id + ".AbCdEf12": "_INBOX." + id,
		"_INBOX.holder." + id + ".x": "_INBOX.holder." + id,
		"_INBOX." + id:               "_INBOX." + id[:12], // an inbox a request
		"_INBOX.holder." + id:        "_INBOX.holder." + id[:12],
		"_R_.kXgBkr.Fl5YvsBZ1gQnMV":  "", // a service import has one for all of its account
		"reply":                      "",
		"":                           "",
	} {
		if got := CallerOf(reply); got != want {
			t.Errorf("%q came from %q, want %q", reply, got, want)
		}
	}
}

// TestPlaces: who comes first is first, a place is kept for a second, and who comes
// back has it again.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaiters(newView(&clock{}, nil))
		join := func(holder string) *place {
			p, _, err := w.join("k", holder, "")
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
		first := func() string { return w.shard("k").lines["k"].present[0].holder }
		a, b, c := join("a"), join("b"), join("c")
		w.leave("k", a, true)
		if first() != "b" {
			t.Errorf("%s is first while a is away", first())
		}
		a = join("a")
		if first() != "a" {
			t.Errorf("%s is first after a came back", first())
		}
		w.leave("k", a, true)
		w.leave("k", b, false)
		time.Sleep(keepPlace / 2)
		a = join("a") // and leaves again: its place is kept from then on
		w.leave("k", a, true)
		time.Sleep(keepPlace * 3 / 4)
		a = join("a")
		if first() != "a" {
			t.Errorf("%s is first, though a was away for less than a second", first())
		}
		w.leave("k", a, true)
		time.Sleep(keepPlace + time.Millisecond)
		a = join("a")
		if first() != "c" {
			t.Errorf("%s is first after a stayed away", first())
		}
		w.leave("k", a, true)
		w.leave("k", c, true)
		time.Sleep(2 * keepPlace)
		if n := w.count(); n != 0 {
			t.Errorf("%d lines stay", n)
		}
	})
}

// BenchmarkPlaces is one that comes to a long line of kept places, and leaves.
func BenchmarkPlaces(b *testing.B) {
	for _, n := range []int{1000, 20_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			comes := amongPlaces(b, n)
			b.ResetTimer()
			for range b.N {
				comes()
			}
		})
	}
}

// amongPlaces gives what comes to a line with n places, present and kept by halves, and
// leaves again.
func amongPlaces(t testing.TB, n int) (comes func()) {
	w := newWaiters(newView(&clock{}, nil))
	i := 0
	join := func() *place {
		i++
		p, _, err := w.join("k", fmt.Sprint("h-", i), "")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	join()
	var away []*place
	for range n / 2 {
		away = append(away, join())
		if n/2 < MaxKeyWaiters-2 {
			join()
		}
		if len(away) == 100 { // the limit of those present is not what is looked for
			for _, p := range away {
				w.leave("k", p, true)
			}
			away = away[:0]
		}
	}
	return func() { w.leave("k", join(), true) }
}

// TestPlacesCost: coming to a line of 20,000 places costs about what coming to one of
// 1,000 does.
func TestPlacesCost(t *testing.T) {
	const times = 2000
	least := func(n int) time.Duration {
		least := time.Hour
		for range 5 {
			comes := amongPlaces(t, n)
			began := time.Now()
			for range times {
				comes()
			}
			least = min(least, time.Since(began))
		}
		return least / times
	}
	few, many := least(1000), least(20_000)
	t.Logf("%v among 1,000 places, %v among 20,000", few, many)
	if many > 8*few+10*time.Microsecond {
		t.Errorf("%v among 1,000 places, %v among 20,000: it grows with them", few, many)
	}
}

// TestNothingAfterTheWait: a key that is freed when the time of those who wait for it
// is over goes to none of them, however long their process stood still, and each is
// told the truth.
func TestNothingAfterTheWait(t *testing.T) {
	t.Run("woken late", func(t *testing.T) {
		onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
			lease := held(t, l, "k", "h")
			// The wake-up is on its way when the time is over: as after SIGSTOP, where
			// timer and wake-up are ready together.
			var all sync.WaitGroup
			s.instead = func(w *Write, done func(uint64, error)) bool {
				if !w.Tombstone {
					t.Errorf("%s was written after the wait", w.Event)
				}
				return false
			}
			for i := range 20 {
				all.Go(func() {
					c := Command{Op: OpAcquire, Key: "k", Holder: fmt.Sprint("w", i), TTL: time.Minute, Until: time.Now().Add(time.Second)}
					time.Sleep(31 * time.Second)
					switch res, err := l.Do(context.Background(), c); {
					case err == nil && res.Kind == kinds.Denied && res.Lease.Holder == "h":
					case kinds.Of(err) == kinds.Unavailable && errors.Is(err, errWaited):
					default:
						t.Errorf("told %v %+v, %v", res.Kind, res.Lease, err)
					}
				})
			}
			time.Sleep(31*time.Second - 2*time.Millisecond)
			if _, err := l.Release(context.Background(), "k", "h", lease.Revision); err != nil {
				t.Error(err)
			}
			all.Wait()
		})
	})
	t.Run("just before", func(t *testing.T) {
		onCounted(t, func(t *testing.T, l *Leases, s *countedStore) {
			for wait := 996 * time.Millisecond; wait <= 1004*time.Millisecond; wait += time.Millisecond {
				key := wait.String()
				lease := held(t, l, key, "h")
				until := time.Now().Add(wait)
				var late atomic.Bool
				s.instead = func(w *Write, _ func(uint64, error)) bool {
					if w.Key == key && !w.Tombstone && !time.Now().Before(until) {
						late.Store(true)
					}
					return false
				}
				done := make(chan answered, 1)
				go func() {
					res, err := waitingFor(l, key, "w", "", wait)
					done <- answered{res, err}
				}()
				time.Sleep(time.Second)
				if _, err := l.Release(context.Background(), key, "h", lease.Revision); err != nil {
					t.Error(err)
				}
				a := <-done
				if late.Load() {
					t.Errorf("waiting for %v: written after that", wait)
				}
				if a.err != nil && !errors.Is(a.err, errWaited) {
					t.Errorf("waiting for %v: %v", wait, a.err)
				}
			}
		})
	})
}
