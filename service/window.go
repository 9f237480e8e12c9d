package service

import (
	"errors"
	"sync"
	"time"
)

// Bounds of a window: how many writes may be under way in it. It begins in between and
// doubles while verdicts come soon, up to the most, which keeps any server busy; it is
// narrower where a server is so slow that it would not tell the verdict on that many
// within tryTimeout.
const (
	windowMost  = 1024
	windowStart = 128
	windowLeast = 16

	soonVerdict = tryTimeout / 4
	slowVerdict = tryTimeout / 2
)

// window lets a bounded number of writes be under way at a time; those of one call
// come after those of the calls before it. More of them would wait in the server
// instead, where none can be taken back, and those that waited too long there would
// be sent a second time.
type window struct {
	mu      sync.Mutex
	turns   []*turn
	serving bool

	size  int
	under int // way

	told   int           // verdicts since size was looked at
	took   time.Duration // until these, all together
	halved time.Time
}

// turn is what one call has in line: the numbers from next to n.
type turn struct {
	next, n int
	begin   func(from, to int)
	late    *time.Timer // nil while it has not had to wait
}

func newWindow() *window { return &window{size: windowStart} }

// enter calls begin, now or when there is room, for the numbers from 0 to n, in pieces
// from and before to; for each of them leave must follow, at any time. For those that
// found no room until by it calls late instead.
func (w *window) enter(n int, by time.Time, begin, late func(from, to int)) {
	if n == 0 {
		return
	}
	t := &turn{n: n, begin: begin}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turns = append(w.turns, t)
	w.serve()
	if t.next < t.n {
		t.late = time.AfterFunc(time.Until(by), func() {
			w.mu.Lock()
			from := t.next
			t.next = t.n // serve passes over it
			w.mu.Unlock()
			if from < t.n {
				late(from, t.n)
			}
		})
	}
}

// leave makes room for one, which began at that time and whose verdict was err.
func (w *window) leave(began time.Time, err error) {
	now := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.under--
	w.judge(now, now.Sub(began), err)
	w.serve()
}

// judge changes the size by what a verdict shows that took so long, each time that as
// many as it allows were told; and halves it where one did not come at all, at most
// once in the time in which all of them fail. w.mu is held.
func (w *window) judge(now time.Time, took time.Duration, err error) {
	if errors.Is(err, ErrNoVerdict) {
		if now.Sub(w.halved) >= tryTimeout {
			w.resize(w.size / 2)
			w.halved = now
		}
		return
	}
	w.took += took
	if w.told++; w.told < w.size {
		return
	}
	switch mean := w.took / time.Duration(w.told); {
	case mean < soonVerdict:
		w.resize(w.size * 2)
	case mean > slowVerdict:
		w.resize(w.size - w.size/4)
	default:
		w.resize(w.size)
	}
}

func (w *window) resize(n int) {
	w.size, w.told, w.took = min(max(n, windowLeast), windowMost), 0, 0
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

// serve lets in as many as there is room for, on one goroutine at a time; who enters or
// leaves meanwhile is seen to by that one. w.mu is held, but not while they begin.
func (w *window) serve() {
	if w.serving {
		return
	}
	w.serving = true
	defer func() { w.serving = false }()
	for len(w.turns) > 0 {
		t := w.turns[0]
		if t.next == t.n {
			w.turns[0] = nil
			w.turns = w.turns[1:]
			continue
		}
		room := w.size - w.under
		if room <= 0 {
			return
		}
		from := t.next
		t.next = min(from+room, t.n)
		w.under += t.next - from
		if t.next == t.n && t.late != nil {
			t.late.Stop()
		}
		w.let(t.begin, from, t.next)
	}
}

// let calls begin without w.mu.
func (w *window) let(begin func(from, to int), from, to int) {
	w.mu.Unlock()
	defer w.mu.Lock()
	begin(from, to)
}
