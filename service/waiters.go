package service

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// MaxWaiters bounds the acquires that wait for a key, over all keys.
const MaxWaiters = 10_000

const (
	// keepPlace is how long the place of a waiter that ran out of time is kept
	// for the same holder: clients wait in slices.
	keepPlace = time.Second
	// wakeBlur is added to what is left of a lease before the first waiter looks
	// again: what is left is a lower bound.
	wakeBlur = 2 * time.Millisecond
	// wakeRetry is when the next waiter is woken after one failed to find out.
	wakeRetry = 100 * time.Millisecond
)

// waiters are the acquires that wait for keys, first come first served. A key's
// first waiter is woken when the key becomes free or its lease's end has come;
// the others sleep on and cost nothing.
type waiters struct {
	view *view

	mu    sync.Mutex
	lines map[string]*line
	most  int // lines there were since the map was made
	count int
}

// line is the queue of one key.
type line struct {
	places []*place
	timer  *time.Timer // fires at the end of the lease that is waited for
	trying bool        // a woken waiter has not reported yet
	again  bool        // the key became free while one was trying
}

// place is one holder's position in a line.
type place struct {
	holder string
	wake   chan struct{} // capacity 1; nil while the holder is away
	until  time.Time     // away: when the place is lost
}

func newWaiters(v *view) *waiters { return &waiters{view: v, lines: make(map[string]*line)} }

// join gives holder a place in key's line: its old one if it comes back in
// time. first says that nobody is before it: the caller tries at once, and
// reports.
func (w *waiters) join(key, holder string) (p *place, first bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.count >= MaxWaiters {
		return nil, false, kinds.Errorf(kinds.Busy, "the limit of %d waiting acquires is reached", MaxWaiters)
	}
	l := w.lines[key]
	if l == nil {
		l = &line{}
		w.lines[key] = l
		w.most = max(w.most, len(w.lines))
	}
	l.forgetLost(time.Now())
	for _, old := range l.places {
		if old.holder == holder && old.wake == nil {
			p = old
			break
		}
	}
	if p == nil {
		p = &place{holder: holder}
		l.places = append(l.places, p)
	}
	p.wake = make(chan struct{}, 1)
	w.count++
	if first = l.next() == p && !l.trying; first {
		l.trying, l.again = true, false
	}
	return p, first, nil
}

// leave gives up p; keep holds the place for a holder that may come back.
func (w *waiters) leave(key string, p *place, keep bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count--
	l := w.lines[key]
	woken := len(p.wake) > 0
	p.wake = nil
	if keep {
		p.until = time.Now().Add(keepPlace)
	} else {
		l.places = slices.DeleteFunc(l.places, func(o *place) bool { return o == p })
	}
	if woken { // the wake-up is the next one's
		l.trying = false
		w.wakeLocked(key, l)
	}
	w.tidyLocked(key, l)
}

// tidyLocked drops a line that nobody stands in, at once or when the last kept
// place is lost.
func (w *waiters) tidyLocked(key string, l *line) {
	l.forgetLost(time.Now())
	if len(l.places) == 0 {
		if l.timer != nil {
			l.timer.Stop()
		}
		delete(w.lines, key)
		if roomy(len(w.lines), w.most) { // a map keeps the room it once needed
			w.lines, w.most = maps.Collect(maps.All(w.lines)), len(w.lines)
		}
		return
	}
	if l.next() == nil { // only kept places
		time.AfterFunc(keepPlace+10*time.Millisecond, func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.lines[key] == l && l.next() == nil {
				w.tidyLocked(key, l)
			}
		})
	}
}

func (l *line) forgetLost(now time.Time) {
	l.places = slices.DeleteFunc(l.places, func(p *place) bool { return p.wake == nil && now.After(p.until) })
}

// next is the first waiter that is present.
func (l *line) next() *place {
	for _, p := range l.places {
		if p.wake != nil {
			return p
		}
	}
	return nil
}

// changed is told of every change of a key.
func (w *waiters) changed(key string, free bool) {
	if !free {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if l := w.lines[key]; l != nil {
		w.wakeLocked(key, l)
	}
}

// wakeLocked wakes the first waiter, one at a time.
func (w *waiters) wakeLocked(key string, l *line) {
	if l.trying {
		l.again = true
		return
	}
	if p := l.next(); p != nil {
		l.trying, l.again = true, false
		p.wake <- struct{}{} // empty: only the one that is trying has been woken
	}
}

// report ends the turn of a waiter that was woken: left is what is left of the
// lease that now stands, its own or another's.
func (w *waiters) report(key string, left time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.lines[key]
	if l == nil {
		return
	}
	l.trying = false
	if l.again {
		w.wakeLocked(key, l)
		return
	}
	w.armLocked(key, l, left)
}

// armLocked sets the line's timer to the end of the present lease.
func (w *waiters) armLocked(key string, l *line, left time.Duration) {
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer = time.AfterFunc(left+wakeBlur, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.lines[key] != l {
			return
		}
		// Renewed meanwhile, as far as the view knows? Then it is not worth a read.
		if _, left := w.view.last(key, time.Now()); left > 0 {
			w.armLocked(key, l, left)
			return
		}
		w.wakeLocked(key, l)
	})
}

// AcquireWait is Do for the acquire c that, while another holds the key, waits until
// it is free or until is reached; it then says who holds it (denied). parked is
// called once if the call has to wait. At the end of ctx it answers as at until.
func (l *Leases) AcquireWait(ctx context.Context, c Command, until time.Time, parked func()) (Result, error) {
	if !time.Now().Before(until) {
		return l.Do(ctx, c)
	}
	p, first, err := l.waiters.join(c.Key, c.Holder)
	if err != nil {
		return Result{}, err
	}
	keep := false
	defer func() { l.waiters.leave(c.Key, p, keep) }()

	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	try := func() (Result, error) {
		left := wakeRetry
		defer func() { l.waiters.report(c.Key, left) }() // also of a panic: others wait for it
		res, err := l.Do(ctx, c)
		if err == nil {
			left = res.Lease.Left
		}
		return res, err
	}
	if first {
		if res, err := try(); err != nil || res.Kind != kinds.Denied {
			return res, err
		}
	}
	parked()
	for {
		select {
		case <-p.wake:
			if res, err := try(); err != nil || res.Kind != kinds.Denied {
				return res, err
			}
		case <-timer.C:
			keep = true
			return l.Do(ctx, c)
		case <-l.leaving:
			return l.Do(ctx, c)
		}
	}
}

// Leaving makes every waiting acquire answer now.
func (l *Leases) Leaving() { l.leave.Do(func() { close(l.leaving) }) }

// Waiting is how many acquires wait.
func (l *Leases) Waiting() int {
	l.waiters.mu.Lock()
	defer l.waiters.mu.Unlock()
	return l.waiters.count
}
