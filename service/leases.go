package service

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	mrand "math/rand/v2"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Lease is what a reply says of a lease.
type Lease struct {
	Key        string
	Holder     string
	Revision   uint64 // the fence
	AcquiredAt Timestamp
	ExpiresAt  Timestamp // advisory: the server's TTL frees the key
	TTL        time.Duration
	Left       time.Duration // what is left now, never more than the truth
	Meta       string
}

// Result is a call's answer: its kind and the lease (or, for a free key, only
// the key) it is about. For released and evicted Lease.Revision is the revision
// that was freed.
type Result struct {
	Kind  kinds.Kind
	Lease Lease
	// Waited says that the lease was written for an acquire that had to wait, whose
	// caller may be gone.
	Waited bool
}

// Guard says what the bucket allows at the moment.
type Guard interface {
	// Allow returns a *kinds.Error of kind unsupported or unavailable if
	// commands like op may not be tried now.
	Allow(op Op) error
	// Bucket names the bucket that Allow spoke of: another one after it was
	// deleted and made again.
	Bucket() int64
	// Acked judges a revision issued to a write of op that was allowed for bucket
	// and sent when before was the highest fence seen. An error means that it was
	// stored in another bucket, or in one that went back in time: nothing may be
	// granted on this revision. It may ask the server.
	Acked(op Op, bucket int64, before, revision uint64) error
	// Sure says that Acked would find nothing, without asking anybody.
	Sure(bucket int64, before, revision uint64) bool
	// Suspect is told of a failure that a look at the bucket may explain.
	Suspect(err error)
}

// Observer hears what the service does, for metrics. Its methods must not block.
type Observer interface {
	Conflict()             // a write lost a race and the key is looked at again
	NoVerdict()            // a write got no verdict and is sent again
	TakenBack()            // a grant that nobody heard was taken back
	ForwardAttempt(string) // outcome of one attempt, one of the Attempt constants
	Change(event string)   // a change the view saw: an Event, or "foreign"
	Refused()              // JetStream refused a write for a reason that lasts
	ClockStep()            // the clock of the server that leads the bucket was set
	UnknownAnswer()        // JetStream answered an error that the service does not know
	Panic()                // a part of the service panicked and starts again
}

// Limits on the time one lease call may take.
const (
	callBudget = 4 * time.Second // all tries together (P12)
	tryTimeout = time.Second     // one request to JetStream
)

// Leases answers the lease calls on one Store.
type Leases struct {
	store Store
	Guard
	view  *view
	clock *clock
	sup   *supervisor
	obs   Observer
	log   *slog.Logger
	told  *handovers

	reads  [64]shared[Entry]
	heads  shared[Head]
	rounds rounds
	quota  *quota

	waiters *waiters
	leave   sync.Once
	leaving chan struct{} // closed when the service leaves
}

func newLeases(store Store, guard Guard, v *view, obs Observer, log *slog.Logger) *Leases {
	w, sup := newWaiters(v), &supervisor{obs, log}
	w.sup = sup
	l := &Leases{sup: sup, store: store, Guard: guard, view: v, clock: v.clock, obs: obs, log: log, told: &handovers{log: log}, waiters: w, leaving: make(chan struct{})}
	v.changed = func(key string, free bool) {
		w.changed(key, free)
		if free {
			l.endRest(key)
		}
	}
	return l
}

// Do takes one command to its answer: look, decide, write once, and look again
// if the write lost a race, until there is a true answer or the time is over.
func (l *Leases) Do(ctx context.Context, c Command) (Result, error) {
	bucket := l.Bucket() // before Allow, so that it is not newer than the permission
	if err := l.Allow(c.Op); err != nil {
		return Result{}, err
	}
	return l.runFrom(ctx, c, bucket, time.Now(), nil)
}

// runFrom is Do in a bucket that allowed it, for a call that began at that time.
// first, if it is there, is the first write, tried already.
func (l *Leases) runFrom(ctx context.Context, c Command, bucket int64, began time.Time, first *attempt) (Result, error) {
	ctx, end := withDeadline(ctx, began.Add(callBudget))
	defer end()

	guess, caught := first == nil, false
	doubt := noDoubt
	var refused []*attempt // of this call
	var shown outcome      // of the round it waited for
	for {
		a, conclude := first, l.conclude
		first = nil
		if a == nil {
			if res, ok := beaten(c, shown.won); ok {
				if res.Kind == kinds.Denied && doubt == mayStillLand {
					return Result{}, doubt.fail(errDenied)
				}
				return res, nil
			}
			if !shown.read {
				leads, out, err := l.lineUp(ctx, c, began, nil)
				if err != nil {
					return Result{}, doubt.fail(err)
				}
				if shown = out; !leads {
					guess = refused == nil
					continue
				}
			}
			st, guessed, err := l.state(ctx, c, guess && !c.over(time.Now()), refused != nil, shown)
			guess, shown = false, outcome{}
			if err != nil {
				return Result{}, doubt.fail(err)
			}
			// Where a deposed leader comes back, it may refuse what the new one stores,
			// and be the first to answer.
			for _, mine := range refused {
				if st.Record != nil && st.Record.Nonce == mine.w.Nonce {
					return l.settle(ctx, c, mine, bucket, committed{st.Revision, mine.sent, time.Now()})
				}
			}
			d := Decide(st, c)
			if !caught && l.lags(c, d) {
				caught, guess = true, true
				l.catchUp(ctx, func(now time.Time) bool { return !l.view.behind(now) })
				continue
			}
			switch {
			case d.Write == nil && guessed:
				continue // only the leader may answer (P13)
			case d.Write == nil && d.Kind == kinds.Denied && doubt == mayStillLand:
				return Result{}, doubt.fail(errDenied)
			case d.Write == nil:
				return l.answer(c, st, d)
			case c.over(time.Now()):
				return Result{}, doubt.fail(errWaited)
			}
			t := &round{}
			leads, out, err := l.lineUp(ctx, c, began, t)
			if err != nil {
				return Result{}, doubt.fail(err)
			}
			if !leads {
				guess, shown = refused == nil, out
				continue
			}
			a = l.prepare(c.Key, d, st.Seen)
			if err := l.quota.take(a); err != nil {
				l.endRound(c.Key, t, nil)
				return Result{}, doubt.fail(err)
			}
			conclude = func(ctx context.Context, c Command, a *attempt, bucket int64) (Result, error) {
				defer l.quota.leave(a)
				return l.concludeRound(ctx, c, a, bucket, t)
			}
		}
		res, err := conclude(ctx, c, a, bucket)
		if !errors.Is(err, ErrConflict) {
			return res, doubt.fail(err)
		}
		doubt = doubt.after(err, a.w)
		refused = append(refused, a)
		late, isLate := errors.AsType[*anew](err)
		if !isLate {
			l.obs.Conflict()
		}
		if err := pause(ctx, len(refused)-1); err != nil {
			if isLate {
				err = late.cause
			}
			return Result{}, doubt.fail(callError(ctx, err))
		}
	}
}

// verdict is err as a verdict on a. A leader that was deposed and does not know it
// yet refuses what the new one stores, and may be the first to answer when it comes
// back. One who leads refuses by a message that came after what the write was decided
// on: a refuser that names an older one proves nothing. What this instance has seen
// since then does not count, for a key may have moved on meanwhile.
func (l *Leases) verdict(a *attempt, err error) error {
	var c *conflict
	if !errors.As(err, &c) || c.last == nil {
		return err
	}
	behind := *c.last <= max(a.w.Expect, a.seen)
	if *c.last == 0 { // it has nothing, as it should once the lease is over, or was found to be gone
		_, known := l.view.get(a.w.Key, time.Now())
		behind = known && time.Now().Before(a.live)
	}
	if !behind {
		return err
	}
	return fmt.Errorf("%w: %w: %w", ErrNoVerdict, errDeposed, c.cause)
}

// errDeposed says that a refusal came from a leader that knows less than this instance.
var errDeposed = errors.New("a leader that is behind refused it")

// state is what c's key holds: as the view has it, if c may go by that and guess
// says so, or as the leader shows it, whole with its nonce if it is asked for. shown
// may have what was read already.
func (l *Leases) state(ctx context.Context, c Command, guess, whole bool, shown outcome) (st State, guessed bool, err error) {
	if guess {
		if st, ok := l.guess(c); ok {
			return st, true, nil
		}
	}
	if shown.read && shown.err == nil && !whole {
		if st, err := l.weigh(ctx, c, shown.Entry, shown.seen); err == nil {
			return st, false, nil
		}
	}
	st, err = l.look(ctx, c, whole)
	return st, false, err
}

// anew is the ErrConflict of a write that is certainly not stored, and whose decision
// is too old to send it any more.
type anew struct{ cause error }

func (e *anew) Error() string   { return e.cause.Error() }
func (e *anew) Unwrap() []error { return []error{ErrConflict, e.cause} }

// lags says that d takes a key that holds nothing while the view is behind.
func (l *Leases) lags(c Command, d Decision) bool {
	return c.Op == OpAcquire && d.Write != nil && d.Write.Expect == 0 && l.view.behind(time.Now())
}

// catchUp gives a view that lags a moment, so that an acquire of a key that holds
// nothing tells the end of the lease before it, if there was one: else nobody does.
// It reports whether the view is done.
func (l *Leases) catchUp(ctx context.Context, done func(now time.Time) bool) bool {
	for until := time.Now().Add(watchHeartbeat); !done(time.Now()); {
		if ctx.Err() != nil || time.Now().After(until) {
			return false
		}
		time.Sleep(2 * time.Millisecond)
	}
	return true
}

// doubt is what a call remembers of its own tries without a verdict, once it
// has seen the key move on.
type doubt int

const (
	noDoubt doubt = iota
	// wasInDoubt: a try may have been stored and superseded since. It cannot be
	// stored any more: its condition never comes true again.
	wasInDoubt
	// mayStillLand: the try's condition was that the key holds nothing, which
	// can come true again when the present lease runs out.
	mayStillLand
)

var (
	// errInDoubt goes with ErrConflict when an earlier try got no verdict.
	errInDoubt = errors.New("an earlier try got no verdict")
	errDenied  = errors.New("another holds the key now")
)

// after is what is left to remember of a write that met a conflict.
func (d doubt) after(conflict error, w *Write) doubt {
	switch {
	case !errors.Is(conflict, errInDoubt):
		return d
	case w.Expect == 0:
		return mayStillLand
	default:
		return max(d, wasInDoubt)
	}
}

// fail turns a failure that means "not applied" into unknown where that cannot
// be promised.
func (d doubt) fail(err error) error {
	if d == noDoubt || err == nil {
		return err
	}
	var e *kinds.Error
	if errors.As(err, &e) && e.Kind != kinds.Unavailable && e.Kind != kinds.OverQuota && e.Kind != kinds.Internal {
		return err
	}
	return &kinds.Error{Kind: kinds.Unknown, Text: "a write of this call got no verdict and may have been stored; send the same call again", Cause: err}
}

// guess proposes the state of c's key from the view, if a write decided on it
// is as good as one decided on a read: its condition proves the guess right.
func (l *Leases) guess(c Command) (State, bool) {
	now := time.Now()
	seen := l.view.position.Load()
	s, ok := l.view.get(c.Key, now)
	switch c.Op {
	case OpAcquire:
		if !l.view.fresh(now) {
			return State{}, false
		}
		// Nothing seen: what is not a lease may be older than what the view keeps.
		if !ok {
			return State{Entry: Entry{Key: c.Key}}, l.Allow(c.Op) == nil // as in judge
		}
		if s.Tombstone && s.Unbroken && s.Record != nil {
			return State{Entry: s.Entry, Seen: seen}, true
		}
	case OpRenew, OpRelease:
		if ok && s.Live && s.Revision == c.Revision && s.Record.Holder == c.Holder {
			return State{Entry: s.Entry, Seen: seen}, true
		}
	}
	return State{}, false
}

var (
	// errStale says that a read showed less than this instance has already seen,
	// errBehind that the instance has not seen all there is.
	errStale  = errors.New("the stream leader shows an older state than was seen before")
	errBehind = errors.New("this instance is behind the bucket")
	// errEarly says that a lease is gone, or over by the server's clock, that by this
	// instance's own cannot be over: it was purged, or a clock was set. Its holder
	// still believes in it.
	errEarly = errors.New("the lease there ended before it can be over; its holder may still believe in it")
)

// look reads c's key through the leader and finds out whether the lease there
// is over.
func (l *Leases) look(ctx context.Context, c Command, whole bool) (State, error) {
	for try := 0; ; try++ {
		st, err := l.lookOnce(ctx, c, whole)
		if err == nil {
			return st, nil
		}
		if !errors.Is(err, errEarly) {
			l.Suspect(err)
		} else if _, left := l.view.last(c.Key, time.Now()); try > 0 && left > clockSlack {
			l.Suspect(err) // another lease may have come while the first read was under way
		}
		if errors.Is(err, ErrNoBucket) {
			return State{}, kinds.Errorf(kinds.Unavailable, "%w", err)
		}
		if refused, ok := errors.AsType[*kinds.Error](err); ok { // by the guard
			return State{}, refused
		}
		if pause(ctx, try) != nil {
			return State{}, callError(ctx, err)
		}
	}
}

func (l *Leases) lookOnce(ctx context.Context, c Command, whole bool) (State, error) {
	read := l.read
	if whole {
		read = l.readWhole
	}
	seen := l.view.position.Load()
	e, err := read(ctx, c.Key)
	if err != nil {
		return State{}, err
	}
	return l.weigh(ctx, c, e, seen)
}

// weigh makes a state for c of what was read when the bucket had been seen up to
// seen, and finds out whether the lease there is over.
func (l *Leases) weigh(ctx context.Context, c Command, e Entry, seen uint64) (State, error) {
	st, ask, err := l.judge(c, e, seen)
	if !ask || err != nil {
		return st, err
	}
	head, err := l.head(ctx)
	switch {
	case err != nil:
		return State{}, err
	case st.Prior != nil:
		// What the view shows as the lease before may have been renewed since.
		if !l.catchUp(ctx, func(time.Time) bool { return l.view.position.Load() >= head.Last }) {
			return State{}, errBehind
		}
		st.Prior = l.prior(c)
	default:
		st.Past = !head.Now.Before(e.End()) // P14
		if known, ok := l.view.get(e.Key, time.Now()); st.Past && c.Op == OpAcquire && ok && known.Live && known.Revision == e.Revision {
			return State{}, errEarly
		}
	}
	return st, nil
}

// judge makes a state for c of what was read, as weigh does. ask says that the leader has to
// be asked where the bucket stands: the lease there may be over, or c would tell the
// end of the one before and the view may not have seen the last of it.
func (l *Leases) judge(c Command, e Entry, seen uint64) (st State, ask bool, err error) {
	st.Entry, st.Seen = e, seen
	now := time.Now()
	known, ok := l.view.get(e.Key, now)
	switch {
	case e.Revision == 0 && c.Op == OpAcquire && ok && known.Live:
		return State{}, false, errEarly
	case e.Revision == 0:
		if c.Op == OpAcquire { // what the view has forgotten, because it was found to be gone, the guard knows
			if err := l.Allow(c.Op); err != nil {
				return State{}, false, err
			}
		}
		st.Prior = l.prior(c)
	case ok && known.Revision > e.Revision:
		if known.Live {
			return State{}, false, errStale
		}
		st.Superseded = true
		st.Prior = l.prior(c)
	case !e.isLease():
	default:
		_, hi := l.clock.bounds(now)
		ask = !hi.Before(e.End())
	}
	return st, ask || st.Prior != nil, nil
}

// prior is the lease that c's key held last, as the view has it, if c tells how that
// ended; nil if there was none or the view is not sure.
func (l *Leases) prior(c Command) *Entry {
	if c.Op != OpAcquire && c.Op != OpExpire {
		return nil
	}
	now := time.Now()
	if known, ok := l.view.get(c.Key, now); ok && known.MayBePast && known.Unbroken && l.view.fresh(now) {
		return &known.Entry
	}
	return nil
}

// startRead and head share one request to the leader among callers that ask at the
// same time; the request begins after each of them asked.
func (l *Leases) startRead(key string, done func(Entry, error)) {
	shard, _ := l.view.place(key)
	l.reads[shard].start(key, func(done func(Entry, error)) { l.store.StartGet(key, tryTimeout, l.view.known, done) }, done)
}

func (l *Leases) read(ctx context.Context, key string) (Entry, error) {
	return within(ctx, func(done func(Entry, error)) { l.startRead(key, done) })
}

// readWhole is a read of its own, of all that is stored.
func (l *Leases) readWhole(ctx context.Context, key string) (Entry, error) {
	return within(ctx, func(done func(Entry, error)) { l.store.StartGet(key, limit(ctx), nil, done) })
}

func (l *Leases) head(ctx context.Context) (Head, error) {
	return l.heads.ask(ctx, func() (Head, error) {
		ctx, cancel := context.WithTimeout(context.Background(), tryTimeout)
		defer cancel()
		return l.store.Head(ctx)
	})
}

// within is await for as long as one request of ctx's call may take.
func within[T any](ctx context.Context, start func(done func(T, error))) (T, error) {
	return await(func(done func(T, error)) {
		var once sync.Once
		tell := func(v T, err error) { once.Do(func() { done(v, err) }) }
		t := time.AfterFunc(limit(ctx), func() {
			var zero T
			tell(zero, fmt.Errorf("%w: %w", ErrNoAnswer, errTooLate))
		})
		start(func(v T, err error) {
			t.Stop()
			tell(v, err)
		})
	})
}

// attempt is one write, ready to be stored.
type attempt struct {
	d      Decision
	rec    *Record
	w      *Write
	before uint64    // the highest fence seen before it was sent
	seen   uint64    // State.Seen of its decision
	live   time.Time // until when the lease it replaces is certainly not over

	sent time.Time // not zero: tried once, with this verdict
	rev  uint64
	err  error
	sure bool // and the Guard has nothing against it
}

// deadline is when the first verdict on a is too late for a call that has until end:
// the lease would be over for its holder, or a key that holds nothing may have held
// another lease meanwhile, whose end a would have to tell.
func (a *attempt) deadline(end time.Time) time.Time {
	enough := callBudget
	if a.w.Expect == 0 {
		enough = tryTimeout // no lease is shorter
	}
	if !a.w.Tombstone {
		enough = min(enough, a.rec.TTL())
	}
	if at := a.sent.Add(enough); at.Before(end) {
		return at
	}
	return end
}

// prepare makes the write that d asks for, decided when the bucket had been seen up
// to seen.
func (l *Leases) prepare(key string, d Decision, seen uint64) *attempt {
	rec, w := l.compose(key, d.Write)
	a := &attempt{d: d, rec: rec, w: w, before: l.view.highest.Load(), seen: seen}
	now := time.Now()
	if known, left := l.view.last(key, now); known == w.Expect {
		a.live = now.Add(left)
	}
	return a
}

// write prepares and concludes.
func (l *Leases) write(ctx context.Context, c Command, d Decision, bucket int64) (Result, error) {
	return l.conclude(ctx, c, l.prepare(c.Key, d, 0), bucket)
}

// conclude stores the write and makes the reply. ErrConflict means that nothing
// of it is stored and the key must be looked at again.
func (l *Leases) conclude(ctx context.Context, c Command, a *attempt, bucket int64) (Result, error) {
	done, err := l.commit(ctx, c.Op, a)
	if err != nil {
		return Result{}, err
	}
	return l.settle(ctx, c, a, bucket, done)
}

// concludeRound is conclude in the round t.
func (l *Leases) concludeRound(ctx context.Context, c Command, a *attempt, bucket int64, t *round) (Result, error) {
	var won *attempt
	defer func() { l.endRound(c.Key, t, won) }() // also after a panic
	res, err := l.conclude(ctx, c, a, bucket)
	if err == nil && c.Op == OpAcquire {
		a.rev, won = res.Lease.Revision, a
	}
	return res, err
}

// settle makes the reply of a write that is stored, if the Guard lets it stand.
func (l *Leases) settle(ctx context.Context, c Command, a *attempt, bucket int64, done committed) (Result, error) {
	d, rec, w, before := a.d, a.rec, a.w, a.before
	if !a.sure {
		if err := l.Acked(c.Op, bucket, before, done.revision); err != nil && !w.Tombstone {
			return Result{}, l.undo(ctx, c, rec, done, err)
		}
	}
	l.view.wrote(c.Key, done.revision, rec, w.Tombstone, w.TTL, done.sent, done.acked)
	if d.Write.Event != Renewed {
		l.told.note(d.Write.Event, c.Key, rec.Holder, done.revision, c.Op)
	}
	if w.Tombstone {
		return Result{Kind: d.Kind, Lease: Lease{Key: c.Key, Holder: rec.Holder, Revision: rec.Revision}}, nil
	}
	left := rec.TTL() - time.Since(done.sent)
	if left <= 0 {
		return Result{}, kinds.Errorf(kinds.Unknown, "the lease was written but its time was over before the verdict came back")
	}
	return Result{Kind: d.Kind, Lease: leaseOf(rec, done.revision, left), Waited: !c.Until.IsZero()}, nil
}

// Slack of stored TTLs, beyond what has to be outlived.
const (
	// horizonSlack keeps a message that must outlive its key's horizon a little
	// longer than that.
	horizonSlack = 2 * time.Second
	// tombstoneLife keeps a tombstone in sight of every instance, so that an
	// expiry is told once and a consumer that was away for a moment sees it.
	tombstoneLife = 30 * time.Second
	// horizonBlur is how much later than the new end an old horizon may seem
	// before it counts: the horizon is an upper bound and the new end a lower
	// one, and no server comes back from a crash within this time.
	horizonBlur = 25 * time.Millisecond
)

// compose makes the record and the conditional message of n.
func (l *Leases) compose(key string, n *Next) (*Record, *Write) {
	lo, hi := l.clock.bounds(time.Now())
	rec := &Record{V: recordVersion, Key: key, Holder: n.Holder, TTLMillis: n.TTL.Milliseconds(), AcquiredAt: n.Tenure, WrittenAt: TimestampOf(lo),
		Event: n.Event, Nonce: newNonce(), Meta: n.Meta, Previous: n.Previous, Revision: n.Ended, Evicted: n.Evicted}
	if n.Event == Acquired {
		rec.AcquiredAt = rec.WrittenAt
	}
	w := &Write{Key: key, Expect: n.Expect, Event: n.Event, Nonce: rec.Nonce, TTL: n.TTL}
	left := n.Horizon.Sub(lo)
	switch n.Event {
	case Released, Expired:
		w.Tombstone = true
		w.TTL = ceilSecond(max(left, 0) + horizonSlack + tombstoneLife)
		if left > 0 {
			rec.Horizon = TimestampOf(n.Horizon.Add(time.Millisecond))
		}
	default:
		if n.Outlives && left > n.TTL+horizonBlur+hi.Sub(lo) {
			rec.Horizon = TimestampOf(n.Horizon.Add(time.Millisecond))
			w.TTL = ceilSecond(left + horizonSlack)
		}
	}
	w.Body = rec.encode()
	return rec, w
}

// committed is a stored write: when it was first sent and when it was known.
type committed struct {
	revision    uint64
	sent, acked time.Time
}

// commit stores w once. After a try without a verdict it repeats the same
// condition with the same body: success is ours, and a conflict is resolved by
// reading the key and comparing the nonce. A lease is not asked for again after
// its own time is over: that could only make one that nobody may act on.
func (l *Leases) commit(ctx context.Context, op Op, a *attempt) (committed, error) {
	w := a.w
	tried := !a.sent.IsZero()
	if tried && a.err == nil {
		return committed{a.rev, a.sent, time.Now()}, nil
	}
	if !tried {
		a.sent = time.Now()
	}
	open := false // a try without a verdict is out
	var last error
	whole := ctx
	if !w.Tombstone {
		var end func()
		ctx, end = withDeadline(ctx, a.sent.Add(a.rec.TTL()))
		defer end()
	}
	for try := 0; ; try++ {
		rev, err := a.rev, a.err
		if try > 0 || !tried {
			deadline := deadlineOf(ctx)
			if !open {
				deadline = a.deadline(deadline)
			}
			if !open && try > 0 && time.Now().After(sendBy(deadline)) {
				err = notStored(errTooLate) // it would most likely end as unknown
			} else {
				rev, err = await(func(done func(uint64, error)) { l.store.StartPut(w, deadline, done) })
				err = l.verdict(a, err)
			}
		}
		switch {
		case err == nil:
			return committed{rev, a.sent, time.Now()}, nil
		case errors.Is(err, ErrConflict) && !open:
			return committed{}, ErrConflict
		case errors.Is(err, ErrConflict):
			e, err := l.readWhole(ctx, w.Key)
			switch {
			case err != nil:
				last = err
			case e.Record != nil && e.Record.Nonce == w.Nonce:
				return committed{e.Revision, a.sent, time.Now()}, nil
			case e.Revision != w.Expect:
				return committed{}, fmt.Errorf("%w: %w", ErrConflict, errInDoubt)
			}
		case errors.Is(err, ErrNoVerdict):
			open, last = true, err
			l.obs.NoVerdict()
		case lasts(err) && !open:
			return committed{}, callError(ctx, err)
		case last == nil || !errors.Is(err, errTooLate): // else what came before says more
			last = err
		}
		l.Suspect(last)
		over := pause(ctx, try) != nil
		if err := l.Allow(op); err != nil && !open {
			return committed{}, err // it was deleted, say
		}
		stale := w.Expect == 0 && time.Since(a.sent) >= tryTimeout/2 // the key may have held another lease meanwhile
		if !open && (over || stale) && whole.Err() == nil {
			return committed{}, &anew{last}
		}
		if over {
			if open {
				return committed{}, &kinds.Error{Kind: kinds.Unknown, Text: "the write was sent and no verdict came back in time; send the same call again", Cause: last}
			}
			return committed{}, callError(ctx, last)
		}
	}
}

// undo takes back a lease that was written into a bucket that went back in
// time, so that nobody is shown a holder that was never told.
func (l *Leases) undo(ctx context.Context, c Command, rec *Record, done committed, cause error) error {
	e := Entry{Key: c.Key, Revision: done.revision, At: done.acked, Record: rec}
	if c.Op == OpAcquire {
		back := l.prepare(c.Key, Decision{Write: tombstone(&e, done.revision, Released)}, 0)
		if _, err := l.commit(ctx, OpRelease, back); err != nil {
			return kinds.Errorf(kinds.Unknown, "%w, and the write could not be taken back", cause)
		}
		return kinds.Errorf(kinds.Unavailable, "%w", cause)
	}
	return kinds.Errorf(kinds.Unknown, "%w", cause)
}

// answer makes the reply of a decision that needs no write.
func (l *Leases) answer(c Command, st State, d Decision) (Result, error) {
	if d.Kind.IsError() {
		return Result{}, &kinds.Error{Kind: d.Kind, Text: d.Text}
	}
	if d.Kind == kinds.Free {
		return Result{Kind: d.Kind, Lease: Lease{Key: c.Key}}, nil
	}
	_, hi := l.clock.bounds(time.Now())
	// A server's clock that was put back makes its leases last longer, but what
	// was promised is the TTL.
	left := min(max(0, st.End().Sub(hi)), st.Record.TTL())
	return Result{Kind: d.Kind, Lease: leaseOf(st.Record, st.Revision, left)}, nil
}

func leaseOf(r *Record, rev uint64, left time.Duration) Lease {
	return Lease{Key: r.Key, Holder: r.Holder, Revision: rev, AcquiredAt: r.AcquiredAt, ExpiresAt: r.WrittenAt + Timestamp(r.TTLMillis),
		TTL: r.TTL(), Left: left, Meta: r.Meta}
}

// errWaited is the answer of an acquire that waited and found nobody on the key when
// its time was over.
var errWaited = &kinds.Error{Kind: kinds.Unavailable, Text: "the time to wait was over when the key became free; send the same call again"}

// errBudget is the cause of a context whose call took too long, errStopping of
// one that ended because the service leaves.
var (
	errBudget   = errors.New("the time for this call is over")
	ErrStopping = errors.New("the service is stopping")
)

// callError is what a call answers when it gave up on err, before it wrote
// anything.
func callError(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), ErrStopping) {
		return kinds.Errorf(kinds.Internal, "%w", ErrStopping)
	}
	return kinds.Errorf(kinds.Unavailable, "%w", err)
}

// pause waits a moment before try+1, longer each time and never the same for
// two callers; it returns the context's cause once that is over.
func pause(ctx context.Context, try int) error {
	limit := time.Millisecond << min(try, 8)
	t := time.NewTimer(limit/2 + mrand.N(limit/2+1))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// newNonce is 96 random bits.
func newNonce() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails, by its documentation
	return base64.RawURLEncoding.EncodeToString(b[:])
}

func ceilSecond(d time.Duration) time.Duration {
	return (d + time.Second - 1).Truncate(time.Second)
}

func (o Op) String() string {
	return [...]string{"acquire", "renew", "release", "owner", "evict", "expire"}[o]
}
