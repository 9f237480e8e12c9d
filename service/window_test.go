package service

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func never(int, int) { panic("there was time enough") }

// TestWindow: no more than so many are under way, in the order they came, and each
// is let in once.
func TestWindow(t *testing.T) {
	const room, calls, each = windowLeast, 50, 20
	w := window{size: room}
	by := time.Now().Add(time.Hour)
	var mu sync.Mutex
	under, most := 0, 0
	begun := make(map[[2]int]int)
	var order []int
	var out []func()
	for call := range calls {
		w.enter(each, by, func(from, to int) {
			mu.Lock()
			defer mu.Unlock()
			for i := from; i < to; i++ {
				under++
				most = max(most, under)
				begun[[2]int{call, i}]++
				order = append(order, call*each+i)
				out = append(out, func() {
					mu.Lock()
					under--
					mu.Unlock()
					w.leave(time.Now().Add(-time.Second), ErrConflict) // so slow that the window stays
				})
			}
		}, never)
	}
	if got := w.queued(); got != calls*each-room {
		t.Errorf("%d are queued", got)
	}
	for {
		mu.Lock()
		if len(out) == 0 {
			mu.Unlock()
			break
		}
		now := out
		out = nil
		mu.Unlock()
		var all sync.WaitGroup
		for _, leave := range now {
			all.Go(leave)
		}
		all.Wait()
	}
	if most != room || len(begun) != calls*each || under != 0 {
		t.Errorf("at most %d under way, %d begun, %d left", most, len(begun), under)
	}
	for i, n := range order {
		if n != i {
			t.Fatalf("number %d was let in as number %d", n, i)
		}
	}
	if w.under != 0 || len(w.turns) != 0 || w.queued() != 0 {
		t.Errorf("%d are under way, %d in line", w.under, len(w.turns))
	}
}

// TestWindowWithoutWaiting: who leaves at once, as all do whose connection is closed,
// does not make the next one's stack deeper.
func TestWindowWithoutWaiting(t *testing.T) {
	w := window{size: 1}
	n, depth, deepest := 0, 0, 0
	w.enter(100_000, time.Now().Add(time.Hour), func(from, to int) {
		depth++
		deepest = max(deepest, depth)
		for range to - from {
			n++
			w.leave(time.Now(), nil)
		}
		depth--
	}, never)
	if n != 100_000 || deepest != 1 {
		t.Errorf("%d begun, %d deep", n, deepest)
	}
}

// TestWindowLate: who found no room in time is told then, not when there is room, and
// is not let in any more.
func TestWindowLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := window{size: 2}
		began := time.Now()
		var mu sync.Mutex
		var late []time.Duration
		begun := 0
		begin := func(from, to int) { begun += to - from }
		w.enter(2, began.Add(time.Second), begin, never)
		for i := range 3 {
			w.enter(5, began.Add(time.Duration(3-i)*time.Second), begin, func(from, to int) {
				mu.Lock()
				defer mu.Unlock()
				for range to - from {
					late = append(late, time.Since(began))
				}
			})
		}
		time.Sleep(1500 * time.Millisecond)
		w.leave(time.Now(), nil) // one of the five that wait for three seconds
		time.Sleep(3 * time.Second)
		w.leave(time.Now(), nil)
		w.leave(time.Now(), nil)
		mu.Lock()
		defer mu.Unlock()
		if begun != 3 || len(late) != 14 || w.under != 0 || w.queued() != 0 {
			t.Errorf("%d begun, %d late, %d under way, %d queued", begun, len(late), w.under, w.queued())
		}
		for i, at := range late {
			want := time.Second
			if i >= 5 {
				want = 2 * time.Second
			}
			if i >= 10 {
				want = 3 * time.Second
			}
			if at != want {
				t.Errorf("number %d was told after %v", i, at)
			}
		}
	})
}

// TestWindowSize: it doubles while verdicts come soon, is narrower where they are slow,
// and half as wide where none come, once a second.
func TestWindowSize(t *testing.T) {
	w := newWindow()
	now := time.Now()
	silent := errors.Join(ErrNoVerdict, errors.New("a timeout"))
	step := func(n int, took time.Duration, err error, want int) {
		t.Helper()
		for range n {
			w.judge(now, took, err)
		}
		if w.size != want {
			t.Fatalf("size %d, want %d", w.size, want)
		}
	}
	step(127, time.Millisecond, nil, 128)
	step(1, time.Millisecond, nil, 256)
	step(255, time.Millisecond, ErrConflict, 256)
	step(1, time.Millisecond, nil, 512)
	step(512, 300*time.Millisecond, nil, 512)
	step(5000, time.Millisecond, nil, windowMost)
	w.resize(windowMost)
	step(windowMost, 600*time.Millisecond, nil, windowMost*3/4)
	step(1000, time.Second, silent, windowMost*3/8)
	now = now.Add(999 * time.Millisecond)
	step(1000, time.Second, silent, windowMost*3/8)
	now = now.Add(time.Millisecond)
	step(1000, time.Second, silent, windowMost*3/16)
	for range 10 {
		now = now.Add(time.Second)
		w.judge(now, time.Second, silent)
	}
	step(0, 0, nil, windowLeast)
	w.resize(windowLeast)
	step(100*windowLeast, 600*time.Millisecond, nil, windowLeast)
	step(100_000, time.Millisecond, nil, windowMost)
}
