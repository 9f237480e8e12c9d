package service

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// Call is a lease call whose first request to the store is under way, or done:
// nearly every call needs no other one. No goroutine waits for it.
type Call struct {
	l      *Leases
	c      Command
	bucket int64
	began  time.Time
	ready  func(*Call)
	told   atomic.Bool // ready was called

	round    round // of its write
	answered bool  // res and err are the answer
	res      Result
	err      error
	try      *attempt // the first write
	first    *attempt // the same, with its verdict
}

// Start begins c. ready is called once, perhaps before Start returns and on
// whatever goroutine, when the first request is answered; it must not block.
// Finish gives the answer then.
func (l *Leases) Start(c Command, ready func(*Call)) {
	call := &Call{l: l, c: c, began: time.Now(), ready: ready}
	call.step(call.start)
}

// step does f and then, unless there is something to wait for, tells that the
// call is ready. A panic in f is Finish's.
func (c *Call) step(f func() (waits bool)) {
	waits, err := caught(func() (bool, error) { return f(), nil })
	if err != nil {
		c.fail(err)
	}
	if !waits && c.told.CompareAndSwap(false, true) {
		c.ready(c)
	}
}

func (c *Call) fail(err error) { c.answered, c.err = true, err }

func (c *Call) start() (waits bool) {
	l := c.l
	c.bucket = l.Bucket() // before Allow, as in Do
	if err := l.Allow(c.c.Op); err != nil {
		c.fail(err)
		return false
	}
	if c.c.Op == OpAcquire && !l.enter(c.c.Key, nil, c) {
		return true
	}
	if st, ok := l.guess(c.c); ok {
		return c.decide(st, true)
	}
	seen := l.view.position.Load()
	l.startRead(c.c.Key, func(e Entry, err error) {
		c.step(func() bool { return c.looked(e, seen, err) })
	})
	return true
}

// looked goes on with what was read, if that is all that has to be known. seen is how
// far the bucket had been seen before.
func (c *Call) looked(e Entry, seen uint64, err error) (waits bool) {
	rethrow(err)
	if err != nil {
		c.l.Suspect(err)
		return false
	}
	st, ask, err := c.l.judge(c.c, e, seen)
	if ask || err != nil {
		return false
	}
	return c.decide(st, false)
}

func (c *Call) decide(st State, guessed bool) (waits bool) {
	l := c.l
	d := Decide(st, c.c)
	switch {
	case d.Write == nil && guessed:
		return false // only the leader may answer
	case d.Write == nil:
		c.answered = true
		c.res, c.err = l.answer(c.c, st, d)
		return false
	case l.lags(c.c, d):
		return false
	}
	leads := false
	switch c.c.Op {
	case OpAcquire:
		if leads = l.enter(c.c.Key, &c.round, c); !leads {
			return true
		}
	case OpRelease, OpEvict: // they wait for nobody
		leads = l.enter(c.c.Key, &c.round, nil)
	}
	a := l.prepare(c.c.Key, d, st.Seen)
	if err := l.quota.take(a); err != nil {
		if leads {
			l.endRound(c.c.Key, &c.round, nil)
		}
		c.fail(err)
		return false
	}
	c.try = a
	a.sent = time.Now()
	l.store.StartPut(a.w, a.deadline(c.began.Add(callBudget)), func(rev uint64, err error) {
		var won *attempt
		if leads {
			defer func() { l.endRound(c.c.Key, &c.round, won) }()
		}
		c.step(func() bool {
			c.wrote(a, rev, err)
			if c.c.Op == OpAcquire && a.sure {
				won = a
			}
			return false
		})
	})
	return true
}

// came implements sitter.
func (c *Call) came() time.Time { return c.began }

// next implements sitter.
func (c *Call) next(o outcome) {
	c.step(func() bool {
		res, ok := beaten(c.c, o.won)
		switch {
		case ok:
			c.answered, c.res = true, res
		case time.Since(c.began) >= callBudget: // Finish says so
		case o.read:
			return c.looked(o.Entry, o.seen, o.err)
		default:
			return c.start()
		}
		return false
	})
}

// wrote takes the verdict on the first write.
func (c *Call) wrote(a *attempt, rev uint64, err error) {
	if _, ok := errors.AsType[*panicked](err); ok {
		c.fail(err)
		return
	}
	a.rev, a.err = rev, c.l.verdict(a, err)
	a.sure = err == nil && c.l.Sure(c.bucket, a.before, rev)
	c.first = a
}

// Waits says that Finish has to wait for something: the call takes more than one
// request.
func (c *Call) Waits() bool { return !c.answered && (c.first == nil || !c.first.sure) }

// Finish takes the call to its answer: a Result, or an error that is a
// *kinds.Error.
func (c *Call) Finish(ctx context.Context) (Result, error) {
	defer c.l.quota.leave(c.try)
	if c.answered {
		rethrow(c.err)
		return c.res, c.err
	}
	if c.first == nil && ctx.Err() != nil {
		return Result{}, callError(ctx, context.Cause(ctx))
	}
	return c.l.runFrom(ctx, c.c, c.bucket, c.began, c.first)
}

// KeyRevision is a lease as its holder knows it.
type KeyRevision struct {
	Key      string
	Revision uint64
}

// StartRenewals writes those renewals of holder's leases that the view knows to
// be current, all at once, and waits for the verdicts. Finish must follow for
// each. The keys must differ.
func (l *Leases) StartRenewals(holder string, ttl time.Duration, leases []KeyRevision) []Call {
	bucket := l.Bucket() // before Allow, as in Do
	err := l.Allow(OpRenew)
	calls := make([]Call, len(leases))
	var sent []*Call
	var tries []*attempt
	var writes []*Write
	at := time.Now()
	for i, k := range leases {
		c := &calls[i]
		c.l, c.bucket, c.began = l, bucket, at
		c.c = Command{Op: OpRenew, Key: k.Key, Holder: holder, Revision: k.Revision, TTL: ttl}
		if err != nil {
			c.fail(err)
			continue
		}
		st, ok := l.guess(c.c)
		if !ok {
			continue
		}
		if d := Decide(st, c.c); d.Write != nil {
			a := l.prepare(k.Key, d, st.Seen)
			a.sent = at
			sent, tries, writes = append(sent, c), append(tries, a), append(writes, a.w)
		}
	}
	for i, v := range l.store.PutMany(writes, at.Add(min(ttl, callBudget))) {
		sent[i].wrote(tries[i], v.Revision, v.Err)
	}
	return calls
}
