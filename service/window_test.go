package service

import (
	"sync"
	"testing"
)

// TestWindow: no more than so many are under way, in the order they came, and each
// is let in once.
func TestWindow(t *testing.T) {
	const room, calls, each = 7, 50, 20
	w := window{free: room}
	var mu sync.Mutex
	under, most := 0, 0
	begun := make(map[[2]int]int)
	var order []int
	var out []func()
	for call := range calls {
		w.enter(each, func(from, to int) {
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
					w.leave()
				})
			}
		})
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
	if w.free != room || len(w.turns) != 0 {
		t.Errorf("%d are free, %d in line", w.free, len(w.turns))
	}
}

// TestWindowWithoutWaiting: who leaves at once, as all do whose connection is closed,
// does not make the next one's stack deeper.
func TestWindowWithoutWaiting(t *testing.T) {
	w := window{free: 1}
	n, depth, deepest := 0, 0, 0
	w.enter(100_000, func(from, to int) {
		depth++
		deepest = max(deepest, depth)
		for range to - from {
			n++
			w.leave()
		}
		depth--
	})
	if n != 100_000 || deepest != 1 {
		t.Errorf("%d begun, %d deep", n, deepest)
	}
}
