package leased

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
)

// TestPace: any number of callers together get their share of one CPU and no more,
// one after the other, and nobody goes without.
func TestPace(t *testing.T) {
	for _, callers := range []int{1, 64} {
		synctest.Test(t, func(t *testing.T) {
			const work, length = 2 * time.Millisecond, 20 * time.Second
			p := newPace()
			ctx, cancel := context.WithTimeout(t.Context(), length)
			defer cancel()
			var working, over atomic.Int64
			done := make([]int, callers)
			var all sync.WaitGroup
			for i := range callers {
				all.Go(func() {
					for ctx.Err() == nil {
						_, err := p.run(ctx, func() {}, func() (answer, error) {
							if working.Add(1) != 1 {
								over.Add(1)
							}
							time.Sleep(work)
							working.Add(-1)
							return answer{}, nil
						})
						if err == nil {
							done[i]++
						} else if ctx.Err() == nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			total := 0
			for i, n := range done {
				if total += n; n == 0 {
					t.Errorf("caller %d of %d got no turn", i, callers)
				}
			}
			worked := time.Duration(total) * work
			if most := length/paceShare + paceBurst + work; worked > most || worked < length/paceShare-work {
				t.Errorf("%d callers worked for %v in %v, want %v at most and about %v", callers, worked, length, most, length/paceShare)
			}
			if over.Load() > 0 {
				t.Error("two worked at a time")
			}
		})
	}
}

// TestPaceTurnsAway: calls that would wait too long, or are too many, are busy at a
// known time, and give their place among the calls in flight to others meanwhile.
func TestPaceTurnsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPace()
		hold, parked := make(chan struct{}), atomic.Int64{}
		var all sync.WaitGroup
		wait := func(ctx context.Context) error {
			_, err := p.run(ctx, func() { parked.Add(1) }, func() (answer, error) { <-hold; return answer{}, nil })
			return err
		}
		all.Go(func() { _ = wait(t.Context()) })
		synctest.Wait()
		stopping, stop := context.WithCancelCause(t.Context())
		ends := make(chan error, paceWaiting)
		for i := range paceWaiting {
			all.Go(func() {
				if i == 0 {
					ends <- wait(stopping)
				} else {
					ends <- wait(t.Context())
				}
			})
		}
		synctest.Wait()
		if n := parked.Load(); n != paceWaiting {
			t.Errorf("%d of %d that wait gave up their place", n, paceWaiting)
		}
		began := time.Now()
		if err := wait(t.Context()); kinds.Of(err) != kinds.Busy || time.Since(began) != 0 {
			t.Errorf("one too many: %v after %v", err, time.Since(began))
		}
		stop(errors.New("leaving"))
		if err := <-ends; kinds.Of(err) != kinds.Internal || time.Since(began) != 0 {
			t.Errorf("a call of a service that leaves: %v after %v", err, time.Since(began))
		}
		for range paceWaiting - 1 {
			if err := <-ends; kinds.Of(err) != kinds.Busy {
				t.Errorf("one whose turn did not come: %v", err)
			}
		}
		if waited := time.Since(began); waited != paceWait {
			t.Errorf("they waited %v, want %v", waited, paceWait)
		}
		close(hold)
		all.Wait()
	})
}
