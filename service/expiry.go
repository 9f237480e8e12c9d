package service

import (
	"context"
	"errors"
	"sync"
	"time"
)

const (
	// expiryTick is how often the view is asked which leases ended.
	expiryTick = 50 * time.Millisecond
	// expiryWriters bounds the expired events being written at a time, so that
	// many ends at once do not delay the calls.
	expiryWriters = 32
)

// expirer tells the ends of leases: nothing in NATS announces that a TTL ran
// out, and a lease whose message outlives it has to be ended by somebody.
type expirer struct {
	leases *Leases
	guard  Guard
}

// run tells ends until ctx is done.
func (x *expirer) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, expiryWriters)
	tick := time.NewTicker(expiryTick)
	defer tick.Stop()
	last := time.Now()
	var quiet time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		if gap := now.Sub(last); gap > 10*expiryTick {
			// This process stood still. What happened meanwhile is still on its
			// way to the view; let it arrive before ends are told from it.
			x.leases.view.alive.Store(x.leases.view.local(now) - int64(viewStale))
			quiet = now.Add(10 * expiryTick)
		}
		last = now
		if now.Before(quiet) {
			continue
		}
		for _, e := range x.leases.view.expire(now) {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return
			}
			wg.Go(func() {
				defer func() { <-slots }()
				x.leases.view.told(e.Key, e.Revision, x.tell(ctx, e))
			})
		}
	}
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
