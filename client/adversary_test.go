package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestNoTwoHoldersActAtOnce runs processes that hold, work, crash, restart and
// resign on a network that loses, delays and repeats, under a server whose clock is
// fast, and whose writes land after it gave up on them. Whenever the key passes to
// a holder, and whenever a Hold begins, every Hold of another holder must have
// ended. LEASED_SEEDS sets the number of seeds.
func TestNoTwoHoldersActAtOnce(t *testing.T) {
	seeds := 600
	if testing.Short() {
		seeds = 200
	}
	if n, err := strconv.Atoi(os.Getenv("LEASED_SEEDS")); err == nil {
		seeds = n
	}
	var mu sync.Mutex
	total := map[string]int{}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			}()
			w, stats := adversary(t, uint64(seed))
			mu.Lock()
			defer mu.Unlock()
			w.mu.Lock()
			defer w.mu.Unlock()
			for name, n := range w.faults {
				total[name] += n
			}
			for name, n := range stats {
				total[name] += n
			}
		})
		if t.Failed() {
			return
		}
	}
	t.Logf("%d seeds: %v", seeds, total)
	for _, name := range []string{
		"request lost", "reply lost", "request late", "reply late", "request twice", "unavailable", "busy", "unknown, lands",
		"unknown, does not land", "tenures", "tenures of a restarted holder", "lost", "resigned", "crashed", "cured by owner",
	} {
		if total[name] < seeds/10 {
			t.Errorf("only %d of %q: the test did not test", total[name], name)
		}
	}
}

func adversary(t *testing.T, seed uint64) (*world, map[string]int) {
	w := newWorld(t)
	w.rng = rand.New(rand.NewPCG(seed, 3))
	w.random, w.noWait, w.noLeft = true, seed%4 == 0, seed%3 == 0
	w.shift = time.Duration(w.rng.Int64N(int64(48*time.Hour))) - 24*time.Hour
	w.fast = 0.05 * w.rng.Float64()

	var mu sync.Mutex
	stats := map[string]int{}
	count := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		stats[what]++
	}
	var acting []*Hold
	// alone fails the test if anybody but holder acts on the key.
	alone := func(when, holder string) {
		mu.Lock()
		defer mu.Unlock()
		for _, h := range acting {
			if h.Holder() != holder && (h.ctx.Err() == nil || h.Check() == nil) {
				t.Errorf("seed %d: at %s of %s, %s still acts, until %v, now %v", seed, when, holder, h.Holder(), h.Deadline(), time.Now())
			}
		}
	}
	w.passing = func(_, holder string) { alone("grant", holder) }

	end := time.Now().Add(90 * time.Second)
	var all sync.WaitGroup
	for i := range 3 {
		rng := rand.New(rand.NewPCG(seed, uint64(10+i)))
		all.Go(func() {
			p := w.process()
			restarted := false
			for time.Now().Before(end) {
				o := HoldOptions{TTL: time.Duration(1+rng.IntN(5)) * time.Second, NoWait: rng.IntN(4) == 0}
				if i > 0 {
					o.Holder = fmt.Sprint("p", i)
				}
				var known uint64
				o.OnRenew = func(revision uint64, _ time.Time) {
					w.mu.Lock()
					same := known == 0 || w.written[known].Equal(w.written[revision])
					w.mu.Unlock()
					if revision <= known || !same {
						t.Errorf("seed %d: revision %d after %d, of the same tenure: %v", seed, revision, known, same)
					}
					known = revision
					p.mu.Lock()
					defer p.mu.Unlock()
					if p.last == "owner" {
						count("cured by owner")
					}
				}
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rng.Int64N(int64(20*time.Second))))
				h, err := newClient(p, Options{Timeout: 2 * time.Second}).Hold(ctx, "k", o)
				if err != nil {
					cancel()
					time.Sleep(time.Duration(rng.IntN(500)) * time.Millisecond)
					continue
				}
				mu.Lock()
				acting = append(acting, h)
				mu.Unlock()
				alone("start", h.Holder())
				count("tenures")
				if restarted && i > 0 {
					count("tenures of a restarted holder")
				}
				select {
				case <-h.Context().Done():
				case <-time.After(time.Duration(rng.Int64N(int64(15 * time.Second)))):
				}
				if h.lost() != nil {
					count("lost")
				}
				restarted = rng.IntN(3) == 0
				if restarted {
					count("crashed")
					p.kill()
					p = w.process()
					cancel()
					continue
				}
				rctx, done := context.WithTimeout(context.Background(), time.Duration(rng.Int64N(int64(8*time.Second))))
				if err := h.Resign(rctx); err == nil {
					count("resigned")
				}
				if cause := context.Cause(h.Context()); cause == nil || !errors.Is(cause, ErrResigned) && h.lost() == nil && ctx.Err() == nil {
					t.Errorf("after Resign the cause is %v", cause)
				}
				done()
				cancel()
			}
		})
	}
	all.Wait()
	time.Sleep(time.Minute) // every crashed Hold has ended by itself
	mu.Lock()
	defer mu.Unlock()
	for _, h := range acting {
		if h.ctx.Err() == nil {
			t.Errorf("seed %d: a Hold of %s never ended", seed, h.Holder())
		}
	}
	return w, stats
}
