package service

import (
	"container/heap"
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Limits of the acquires that wait at one instance. One caller must not take all the
// places: those of one holder and of one client are limited beside the whole, and
// one key has no more than half.
const (
	MaxWaiters       = 10_000
	MaxKeyWaiters    = MaxWaiters / 2
	MaxCallerWaiters = MaxWaiters / 10
)

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
// the others sleep on and cost nothing. Coming and leaving cost no more than the
// logarithm of the length of the line.
type waiters struct {
	view   *view
	sup    *supervisor
	shares shares
	shards [64]waiterShard
}

// waiterShard is the lines of some keys.
type waiterShard struct {
	mu    sync.Mutex
	lines map[string]*line
	most  int // lines there were since the map was made
}

// line is the queue of one key.
type line struct {
	present placeHeap         // those who wait
	away    map[string]*place // by holder: those whose place is kept
	lost    []*place          // those of away, the next to be lost first, and some that came back
	next    uint64            // number of the next place

	timer  *time.Timer // fires at the end of the lease that is waited for
	sweep  *time.Timer // fires when kept places are lost, if nobody is present
	trying bool        // a woken waiter has not reported yet
	again  bool        // the key became free while one was trying
}

// place is one holder's position in a line.
type place struct {
	number uint64 // in the order of coming
	holder string
	from   string
	wake   chan struct{} // capacity 1
	at     int           // in present; -1 while the holder is away
	until  time.Time     // away: when the place is lost
}

// placeHeap has the place with the smallest number first.
type placeHeap []*place

func (h placeHeap) Len() int           { return len(h) }
func (h placeHeap) Less(i, j int) bool { return h[i].number < h[j].number }
func (h placeHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}
func (h *placeHeap) Push(x any) {
	p := x.(*place)
	p.at = len(*h)
	*h = append(*h, p)
}
func (h *placeHeap) Pop() any {
	old := *h
	n := len(old) - 1
	p := old[n]
	old[n] = nil
	*h = old[:n]
	p.at = -1
	return p
}

// shares count the waiters, in all and of each caller.
type shares struct {
	mu            sync.Mutex
	all           int
	holders, from map[string]int
}

// take makes room for one more, or says which limit is reached.
func (s *shares) take(holder, from string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.all >= MaxWaiters:
		return kinds.Errorf(kinds.Busy, "the limit of %d waiting acquires is reached", MaxWaiters)
	case s.holders[holder] >= MaxCallerWaiters:
		return kinds.Errorf(kinds.Busy, "the limit of %d waiting acquires of one holder is reached", MaxCallerWaiters)
	case from != "" && s.from[from] >= MaxCallerWaiters:
		return kinds.Errorf(kinds.Busy, "the limit of %d waiting acquires of one client is reached", MaxCallerWaiters)
	}
	if s.holders == nil {
		s.holders, s.from = map[string]int{}, map[string]int{}
	}
	s.all++
	s.holders[holder]++
	if from != "" {
		s.from[from]++
	}
	return nil
}

func (s *shares) give(holder, from string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	less := func(m map[string]int, name string) {
		if m[name]--; m[name] <= 0 {
			delete(m, name)
		}
	}
	less(s.holders, holder)
	if from != "" {
		less(s.from, from)
	}
	if s.all == 0 { // maps keep the room they once needed
		s.holders, s.from = nil, nil
	}
}

// CallerOf names the client that a request came from, "" where its reply subject does
// not tell. The ids that clients of NATS put there have 22 characters, the first 12 of
// which are the process's: one is the connection's, before a token for the request, or
// there is one for each request.
func CallerOf(reply string) string {
	const id, own = 22, 12
	last := strings.LastIndexByte(reply, '.')
	if last < 0 {
		return ""
	}
	before := strings.LastIndexByte(reply[:last], '.')
	switch id {
	case last - before - 1:
		return reply[:last]
	case len(reply) - last - 1:
		return reply[:last+1+own]
	}
	return ""
}

func newWaiters(v *view) *waiters {
	w := &waiters{view: v}
	for i := range w.shards {
		w.shards[i].lines = make(map[string]*line)
	}
	return w
}

func (w *waiters) shard(key string) *waiterShard {
	i, _ := w.view.place(key)
	return &w.shards[i]
}

// join gives holder a place in key's line: its old one if it comes back in
// time. first says that nobody is before it: the caller tries at once, and
// reports.
func (w *waiters) join(key, holder, from string) (p *place, first bool, err error) {
	sh := w.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	l := sh.lines[key]
	if l != nil && len(l.present) >= MaxKeyWaiters {
		return nil, false, kinds.Errorf(kinds.Busy, "the limit of %d waiting acquires of one key is reached", MaxKeyWaiters)
	}
	if err := w.shares.take(holder, from); err != nil {
		return nil, false, err
	}
	if l == nil {
		l = &line{away: map[string]*place{}}
		sh.lines[key] = l
		sh.most = max(sh.most, len(sh.lines))
	}
	l.forgetLost(time.Now())
	p = &place{number: l.next, holder: holder, from: from, wake: make(chan struct{}, 1)}
	if old := l.away[holder]; old != nil {
		p.number = old.number
		delete(l.away, holder)
	} else {
		l.next++
	}
	heap.Push(&l.present, p)
	if first = l.present[0] == p && !l.trying; first {
		l.trying, l.again = true, false
	}
	return p, first, nil
}

// leave gives up p; keep holds the place for a holder that may come back.
func (w *waiters) leave(key string, p *place, keep bool) {
	sh := w.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	w.shares.give(p.holder, p.from)
	l := sh.lines[key]
	heap.Remove(&l.present, p.at)
	if keep {
		l.keep(p)
	}
	if len(p.wake) > 0 { // the wake-up is the next one's
		l.trying = false
		l.wakeNext()
	}
	sh.tidy(key, l)
}

// keep holds p's place for a while. A line keeps as many as may wait in it.
func (l *line) keep(p *place) {
	p.until = time.Now().Add(keepPlace)
	if old := l.away[p.holder]; old != nil {
		p.number = min(p.number, old.number)
	}
	l.away[p.holder] = p
	l.lost = append(l.lost, p)
	if len(l.lost) > MaxKeyWaiters {
		l.lose()
	}
}

// lose takes the first off lost, and its place if it did not come back.
func (l *line) lose() {
	p := l.lost[0]
	l.lost[0] = nil
	l.lost = l.lost[1:]
	if l.away[p.holder] == p {
		delete(l.away, p.holder)
	}
}

func (l *line) forgetLost(now time.Time) {
	for len(l.lost) > 0 && now.After(l.lost[0].until) {
		l.lose()
	}
}

// tidy drops a line that nobody stands in, at once or when the last kept place is lost.
func (sh *waiterShard) tidy(key string, l *line) {
	l.forgetLost(time.Now())
	switch {
	case len(l.present) > 0:
	case len(l.away) == 0:
		for _, t := range []*time.Timer{l.timer, l.sweep} {
			if t != nil {
				t.Stop()
			}
		}
		delete(sh.lines, key)
		if roomy(len(sh.lines), sh.most) { // a map keeps the room it once needed
			sh.lines, sh.most = maps.Collect(maps.All(sh.lines)), len(sh.lines)
		}
	case l.sweep == nil:
		l.sweep = time.AfterFunc(keepPlace+10*time.Millisecond, func() {
			sh.mu.Lock()
			defer sh.mu.Unlock()
			if l.sweep = nil; sh.lines[key] == l {
				sh.tidy(key, l)
			}
		})
	}
}

// changed is told of every change of a key.
func (w *waiters) changed(key string, free bool) {
	if !free {
		return
	}
	sh := w.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if l := sh.lines[key]; l != nil {
		l.wakeNext()
	}
}

// wakeNext wakes the first waiter, one at a time.
func (l *line) wakeNext() {
	if l.trying {
		l.again = true
		return
	}
	if len(l.present) > 0 {
		l.trying, l.again = true, false
		l.present[0].wake <- struct{}{} // empty: only the one that is trying has been woken
	}
}

// report ends the turn of a waiter that was woken: left is what is left of the
// lease that now stands, its own or another's.
func (w *waiters) report(key string, left time.Duration) {
	sh := w.shard(key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	l := sh.lines[key]
	if l == nil {
		return
	}
	l.trying = false
	if l.again {
		l.wakeNext()
		return
	}
	w.arm(sh, key, l, left)
}

// arm sets l's timer to the end of the present lease. sh is locked.
func (w *waiters) arm(sh *waiterShard, key string, l *line, left time.Duration) {
	if l.timer != nil {
		l.timer.Stop()
	}
	l.timer = time.AfterFunc(left+wakeBlur, func() {
		defer w.sup.rescue("waiters", nil)
		sh.mu.Lock()
		defer sh.mu.Unlock()
		if sh.lines[key] != l {
			return
		}
		// Renewed meanwhile, as far as the view knows? Then it is not worth a read.
		if _, left := w.view.last(key, time.Now()); left > 0 {
			w.arm(sh, key, l, left)
			return
		}
		l.wakeNext()
	})
}

// AcquireWait is Do for the acquire c that, while another holds the key, waits until
// it is free or until is reached; it then says who holds it (denied). from is the
// client it came from, "" if that is not known. parked is called once if the call
// has to wait. At the end of ctx it answers as at until.
//
// Nothing is granted to a call that had to wait once its time is over, however late
// this process gets to it (P15).
func (l *Leases) AcquireWait(ctx context.Context, c Command, until time.Time, from string, parked func()) (Result, error) {
	if !time.Now().Before(until) {
		return l.Do(ctx, c)
	}
	p, first, err := l.waiters.join(c.Key, c.Holder, from)
	if err != nil {
		// It may not wait. If the key is free it need not.
		if res, tried := l.Do(ctx, c); tried == nil && res.Kind == kinds.Granted {
			return res, nil
		}
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
	c.Until = until
	for {
		select {
		case <-p.wake:
			res, err := try()
			if err != nil && c.over(time.Now()) {
				keep = true
			}
			if err != nil || res.Kind != kinds.Denied {
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
	l.waiters.shares.mu.Lock()
	defer l.waiters.shares.mu.Unlock()
	return l.waiters.shares.all
}
