package service

import "sync"

// window lets so many writes be under way at a time; those of one call come after those
// of the calls before it. More of them would wait in the server instead, where none
// can be taken back, and those that waited too long there would be sent a second time.
type window struct {
	mu      sync.Mutex
	free    int
	turns   []turn
	serving bool
}

// turn is what one call has in line.
type turn struct {
	next, n int
	begin   func(from, to int)
}

// enter calls begin, now or when there is room, for the numbers from 0 to n, in pieces
// from and before to. For each of them leave must follow, at any time.
func (w *window) enter(n int, begin func(from, to int)) {
	if n == 0 {
		return
	}
	w.mu.Lock()
	w.turns = append(w.turns, turn{0, n, begin})
	w.mu.Unlock()
	w.serve()
}

// leave makes room for one.
func (w *window) leave() {
	w.mu.Lock()
	w.free++
	w.mu.Unlock()
	w.serve()
}

// queued is how many wait.
func (w *window) queued() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.turns {
		n += t.n - t.next
	}
	return n
}

// serve lets in as many as there is room for, on one goroutine at a time.
func (w *window) serve() {
	for {
		w.mu.Lock()
		if w.serving || w.free == 0 || len(w.turns) == 0 {
			w.mu.Unlock()
			return
		}
		w.serving = true
		t := &w.turns[0]
		begin, from := t.begin, t.next
		t.next += min(w.free, t.n-t.next)
		to := t.next
		w.free -= to - from
		if t.next == t.n {
			w.turns[0] = turn{}
			w.turns = w.turns[1:]
		}
		w.mu.Unlock()
		w.let(begin, from, to)
	}
}

// let calls begin; who leaves meanwhile is seen to afterwards.
func (w *window) let(begin func(from, to int), from, to int) {
	defer func() {
		w.mu.Lock()
		w.serving = false
		w.mu.Unlock()
	}()
	begin(from, to)
}
