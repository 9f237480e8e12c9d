package service

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// expiryTick is how often the view is asked which leases ended.
	expiryTick = 50 * time.Millisecond
	// tellers write ends, each so many of them at a time that the verdicts take soonTold
	// to slowTold longer than those of tellLeast: so much longer do calls wait that are
	// written at the same time, however many leases end at once.
	tellers   = 2
	tellLeast = 16
	tellMost  = maxBatch
	soonTold  = 5 * time.Millisecond
	usualMost = 50 * time.Millisecond // for tellLeast: more is due to others' writes, or to a server that is far away
	slowTold  = 20 * time.Millisecond
	// expiryWriters bounds the ends that are written by themselves at a time.
	expiryWriters = 32
)

// expirer tells the ends of leases: nothing in NATS announces that a TTL ran
// out, and a lease whose message outlives it has to be ended by somebody. What has
// ended is found out apart from the telling, which waits for the store (E3).
type expirer struct {
	leases *Leases
	guard  Guard
	sup    *supervisor

	quiet atomic.Int64 // local time before which nothing is told
	delay delays
}

// run tells ends until ctx is done.
func (x *expirer) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	wake := make(chan struct{}, tellers)
	alone := make(chan struct{}, expiryWriters)
	for range tellers {
		wg.Go(func() {
			x.sup.keep(ctx, "expirer", func(ctx context.Context) { x.teller(ctx, wake, alone, &wg) }, nil)
		})
	}
	v := x.leases.view
	tick := time.NewTicker(expiryTick)
	defer tick.Stop()
	last, said := time.Now(), time.Now()
	var late, unseen uint64
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for i := range v.shards {
			for more := true; more; {
				now := time.Now()
				if now.Sub(last) > 10*expiryTick {
					// This process stood still. What happened meanwhile is still on its
					// way to the view; let it arrive before ends are told from it.
					v.alive.Store(v.local(now) - int64(viewStale))
					x.quiet.Store(v.local(now.Add(10 * expiryTick)))
				}
				last = now
				more = v.expire(i, now)
			}
		}
		for range tellers {
			select {
			case wake <- struct{}{}:
			default:
			}
		}
		if l, u := v.late.Load(), v.unseen.Load(); (l > late || u > unseen) && last.Sub(said) >= time.Second {
			x.leases.log.Warn("ends of leases were told by no event", "too_late", l-late, "perhaps", u-unseen)
			late, unseen, said = l, u, last
		}
	}
}

// teller tells what is ready, each time that it is woken.
func (x *expirer) teller(ctx context.Context, wake <-chan struct{}, alone chan struct{}, wg *sync.WaitGroup) {
	v, n := x.leases.view, tellLeast
	usual := usualMost // for tellLeast
	var ends []ended
	defer func() { // a panic leaves some
		for _, e := range ends {
			v.told(e.Key, e.Revision, false, false)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		for ctx.Err() == nil {
			now := time.Now()
			if v.local(now) < x.quiet.Load() {
				break
			}
			ends = v.take(now, n)
			if len(ends) == 0 {
				break
			}
			var together, extended, single []ended
			for _, e := range ends {
				switch {
				case e.Alone || len(ends) < minBatch:
					single = append(single, e)
				case e.Extended:
					extended = append(extended, e)
				default:
					together = append(together, e)
				}
			}
			took := x.tellMany(ctx, together, now.Add(tellWithin)) + x.tellMany(ctx, extended, time.Now().Add(tryTimeout))
			if n == tellLeast && took > 0 {
				usual = min(took, usualMost, usual+usual/1024) // what it was when least was to do, of late
			}
			switch {
			case took > usual+slowTold:
				n = max(tellLeast, n-n/4)
			case len(ends) == n && took < usual+soonTold:
				n = min(2*n, tellMost)
			}
			for _, e := range single {
				select {
				case alone <- struct{}{}:
				case <-ctx.Done():
					return
				}
				wg.Go(func() {
					defer func() { <-alone }()
					done := false
					defer func() { v.told(e.Key, e.Revision, done, false) }()
					defer x.sup.rescue("expirer", nil)
					done = x.tell(ctx, e)
				})
			}
			ends = nil
		}
	}
}

// tellMany is tell for many leases, all Extended or none, whose events are to be
// written by deadline: all at once, without a look at what the view does not show. It
// returns how long the store took for them.
func (x *expirer) tellMany(ctx context.Context, ends []ended, deadline time.Time) (took time.Duration) {
	if len(ends) == 0 {
		return 0
	}
	l := x.leases
	done := make([]bool, len(ends))
	alone := make([]bool, len(ends))
	defer func() {
		for i, e := range ends {
			l.view.told(e.Key, e.Revision, done[i], alone[i])
		}
	}()
	bucket := l.Bucket()
	if l.Allow(OpExpire) != nil {
		return 0
	}
	var head Head
	if ends[0].Extended {
		var err error
		if head, err = l.head(ctx); err != nil {
			return 0
		}
	}
	var of []int // the number in ends of each write
	var tries []*attempt
	var writes []*Write
	at := time.Now()
	for i, e := range ends {
		st := State{Entry: Entry{Key: e.Key}, Prior: &e.Entry}
		if e.Extended {
			st = State{Entry: e.Entry, Past: !head.Now.Before(e.End())}
		}
		d := Decide(st, Command{Op: OpExpire, Key: e.Key, Revision: e.Revision})
		if d.Write == nil { // it is not over yet by the server's clock
			continue
		}
		a := l.prepare(e.Key, d, 0)
		a.sent = at
		of, tries, writes = append(of, i), append(tries, a), append(writes, a.w)
	}
	results := l.store.PutMany(writes, deadline)
	acked := time.Now()
	judged := false
	for n, r := range results {
		i, a := of[n], tries[n]
		switch err := l.verdict(a, r.Err); {
		case err == nil:
			// A tombstone stands whatever the Guard finds: it only has to hear of it.
			if !judged && !l.Sure(bucket, a.before, r.Revision) {
				_ = l.Acked(OpExpire, bucket, a.before, r.Revision)
				judged = true
			}
			a.sure = true
			_, _ = l.settle(ctx, Command{Op: OpExpire, Key: ends[i].Key}, a, bucket, committed{r.Revision, at, acked})
			x.delay.add(l.view.since(acked, ends[i].over))
			done[i] = true
		case errors.Is(err, ErrConflict):
			alone[i] = true
		}
	}
	return acked.Sub(at)
}

// tell writes the expired event of one lease that is over, unless something
// else has been written for its key. It reports whether nothing is left to do.
func (x *expirer) tell(ctx context.Context, e ended) bool {
	l := x.leases
	bucket := l.Bucket()
	if l.Allow(OpExpire) != nil {
		return false
	}
	ctx, end := withDeadline(ctx, time.Now().Add(callBudget))
	defer end()
	c := Command{Op: OpExpire, Key: e.Key, Revision: e.Revision}

	// First by what the view says: the server has removed the message, or it
	// still stands because it outlives its lease. The condition of the write
	// proves it.
	st := State{Entry: Entry{Key: e.Key}, Prior: &e.Entry}
	if e.Extended {
		head, err := l.head(ctx)
		if err != nil {
			return false
		}
		st = State{Entry: e.Entry, Past: !head.Now.Before(e.End())}
	}
	for range 3 {
		d := Decide(st, c)
		if d.Write == nil {
			// Somebody took or freed the key first, or it is not over yet by the
			// server's clock: only then it comes up again.
			return st.Revision != e.Revision || st.Past
		}
		_, err := x.write(ctx, e, c, d, bucket)
		if err == nil {
			x.delay.add(l.view.since(time.Now(), e.over))
			return true
		}
		if !errors.Is(err, ErrConflict) {
			return false
		}
		if st, err = l.look(ctx, c, false); err != nil {
			return false
		}
		if (st.Revision == 0 || st.Superseded) && st.Prior == nil {
			return false // the view is not sure any more
		}
	}
	return false
}

// write writes the event. One that is conditional on an empty key is not tried
// for longer than the proof holds that the key was not held in between: without
// a verdict the end comes up again, if the view has not seen the event by then.
func (x *expirer) write(ctx context.Context, e ended, c Command, d Decision, bucket int64) (Result, error) {
	if d.Write.Expect == 0 {
		now := time.Now()
		var end func()
		ctx, end = withDeadline(ctx, now.Add(tellWithin))
		defer end()
		if !x.leases.view.hasSeen(e.Key, e.Revision, tellHeard, now) {
			return Result{}, errUnseen
		}
	}
	return x.leases.write(ctx, c, d, bucket)
}

var errUnseen = errors.New("the view has not caught up")

// delays counts how long after a lease was over its end was told by this instance.
type delays struct {
	upTo [len(DelayBounds) + 1]atomic.Uint64 // the last: more than all bounds
	sum  atomic.Int64
}

// DelayBounds are the bounds of the histogram of how late ends are told, in seconds.
var DelayBounds = [...]float64{0.5, 1, 2, 3, 5, 10, 20}

func (d *delays) add(late time.Duration) {
	i := 0
	for i < len(DelayBounds) && late.Seconds() > DelayBounds[i] {
		i++
	}
	d.upTo[i].Add(1)
	d.sum.Add(int64(late))
}

// Ends is what has become of the ends of leases.
type Ends struct {
	Waiting int    // leases that are over and whose end is not told yet
	Late    uint64 // ends that no event tells, because it took too long
	Unseen  uint64 // ends that perhaps no event tells: this instance did not follow the bucket then
	// Told is how many ends this instance told, Delay how late all together, and
	// Within how many of them by each of DelayBounds.
	Told   uint64
	Delay  time.Duration
	Within [len(DelayBounds)]uint64
}

func (x *expirer) ends() Ends {
	v := x.leases.view
	e := Ends{Waiting: int(v.waits.Load()), Late: v.late.Load(), Unseen: v.unseen.Load(), Delay: time.Duration(x.delay.sum.Load())}
	for i := range x.delay.upTo {
		e.Told += x.delay.upTo[i].Load()
		if i < len(e.Within) {
			e.Within[i] = e.Told
		}
	}
	return e
}
