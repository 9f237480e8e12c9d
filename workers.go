package leased

import (
	"sync/atomic"
	"time"
)

const (
	// maxIdle is how many workers wait for the next call; more end when theirs is
	// done.
	maxIdle = 128
	// idleFor is how long a worker waits: nothing stays of a busy time.
	idleFor = 5 * time.Second
)

// workers run calls on goroutines that have run one before: a new goroutine
// would have to grow its stack for each call again, step by step.
type workers struct {
	next chan func()
	idle atomic.Int64
	quit chan struct{}
}

func newWorkers() *workers {
	return &workers{next: make(chan func()), quit: make(chan struct{})}
}

// run runs f on a goroutine of its own and returns at once.
func (w *workers) run(f func()) {
	select {
	case w.next <- f:
	default:
		go w.work(f)
	}
}

func (w *workers) work(f func()) {
	t := time.NewTimer(idleFor)
	defer t.Stop()
	for {
		f()
		if w.idle.Add(1) > maxIdle {
			w.idle.Add(-1)
			return
		}
		t.Reset(idleFor)
		select {
		case f = <-w.next:
			w.idle.Add(-1)
		case <-t.C:
			w.idle.Add(-1)
			return
		case <-w.quit:
			return
		}
	}
}

// close ends the idle workers; the others end when their call is done.
func (w *workers) close() { close(w.quit) }
