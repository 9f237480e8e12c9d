package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// ErrResigned is the cause of a Context that ended because its Hold was resigned.
var ErrResigned = errors.New("the lease was resigned")

// DeniedError says that another holder has the key.
type DeniedError struct{ Lease Lease }

func (e *DeniedError) Error() string {
	return fmt.Sprintf("lease %s is held by %s", e.Lease.Key, e.Lease.Holder)
}

// HoldOptions say how to hold a lease. The zero value waits for the lease and
// holds it for 15 s at a time.
type HoldOptions struct {
	// Holder is the id of this process; two processes with one id are one holder
	// to the service. Empty makes a new one. Within a process, a second Hold of a
	// key under one id is refused with a *HeldHereError, over other connections to
	// the same servers too.
	Holder string
	TTL    time.Duration // whole seconds, 1 s to 10 min; 15 s if 0
	Meta   string        // returned in every lease and event (extension)
	// Wait limits how long to wait for the lease, and for a service that answers;
	// 0 waits for as long as the context lives. What then is returned is a
	// *DeniedError or the last error. NoWait does not wait at all.
	Wait   time.Duration
	NoWait bool
	// Margin is how long before the deadline the Context ends; a tenth of TTL if
	// 0. It covers clocks of different speed and the time until work has stopped.
	Margin time.Duration

	// OnRenew, if set, is told each new revision and its deadline, the first one
	// before Hold returns. It must not block.
	OnRenew func(revision uint64, deadline time.Time)
	// OnError, if set, is told of errors that are being retried, and once for a
	// Client if events cannot be followed. It must not block.
	OnError func(error)
	// OnDenied, if set, is told the lease of whoever has the key, at each look while
	// waiting. It must not block.
	OnDenied func(Lease)

	denied func(Lease) // is told who has the key, while waiting
	batch  *batcher    // sends the renewals together with others'
}

// Hold is one tenure of one lease. Its renewals go on until it is lost or
// resigned, also after its Context has ended with the context it was made from:
// work that is still winding down keeps its lease. So Resign must be called.
type Hold struct {
	client  *Client
	options HoldOptions

	ctx    context.Context // ends with the right to act
	cancel context.CancelCauseFunc
	calls  context.Context // of calls to the service
	abort  context.CancelFunc
	quit   chan struct{} // closed when ended
	hint   chan struct{} // has one when an event says that the lease may be gone
	done   chan struct{} // closed when renewals have stopped

	mu      sync.Mutex
	claim   claim
	loose   bool  // an acquire without a verdict may have left a lease
	ended   error // why the right to act ended: lost, or ErrResigned
	gone    bool  // the service said that it was lost: there is nothing to release
	trouble error // of the renewals since the last one that was granted
	evicted bool  // an event said so
	timer   *time.Timer
	drains  []func(context.Context) error

	resign   sync.Mutex
	resigned bool
}

// Hold waits until it holds key, or ctx ends, or Wait is over. Errors are
// *DeniedError, *HeldHereError, *kinds.Error, or wrap the cause of ctx; then no
// lease is left behind that could be found, and it takes at most 1.25 s to look.
// What no waiting mends ends it at once: a request of kind invalid, a call that the
// server does not permit (nats.ErrPermissionViolation) and a connection that is
// closed for good (nats.ErrConnectionClosed: by default nats.go closes it after 60
// attempts to reconnect; nats.MaxReconnects(-1) goes on for ever). ctx also bounds
// the Context of the Hold: to limit only the waiting, use Wait.
func (c *Client) Hold(ctx context.Context, key string, o HoldOptions) (*Hold, error) {
	fresh := o.Holder == ""
	if fresh {
		o.Holder = NewHolder(key)
	}
	return c.hold(ctx, key, o, fresh)
}

// Run holds key while work runs: work's context ends when ctx does or when the
// lease is lost, and the lease is released when work has returned, within the
// Client's Timeout. Run returns work's error, else why the lease was lost, if it
// was.
func (c *Client) Run(ctx context.Context, key string, o HoldOptions, work func(context.Context, *Hold) error) error {
	h, err := c.Hold(ctx, key, o)
	if err != nil {
		return err
	}
	return h.run(ctx, work)
}

func (h *Hold) run(ctx context.Context, work func(context.Context, *Hold) error) (err error) {
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.client.options.Timeout)
		defer cancel()
		lost := h.lost()
		resigned := h.Resign(ctx)
		if err == nil {
			err = lost
		}
		if err == nil {
			err = resigned
		}
	}()
	return work(h.ctx, h)
}

// NewHolder makes a holder id that no other process has: name, as far as it can
// stand in an id, and 16 random hexadecimal digits.
func NewHolder(name string) string {
	ok := func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '_', r == '-':
			return r
		}
		return '-'
	}
	name = strings.Map(ok, name)
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return name[:min(len(name), 111)] + "-" + hex.EncodeToString(b[:])
}

func (o *HoldOptions) defaults() error {
	if o.TTL == 0 {
		o.TTL = 15 * time.Second
	}
	if o.TTL < time.Second || o.TTL > 10*time.Minute || o.TTL%time.Second != 0 {
		return kinds.Errorf(kinds.Invalid, "TTL %v: a lease lasts whole seconds from 1 s to 10 min", o.TTL)
	}
	if o.Margin == 0 {
		o.Margin = o.TTL / 10
	}
	if o.Margin < 0 || o.Margin > o.TTL/2 {
		return kinds.Errorf(kinds.Invalid, "Margin %v: it is at most half of the TTL, %v", o.Margin, o.TTL)
	}
	if o.OnRenew == nil {
		o.OnRenew = func(uint64, time.Time) {}
	}
	if o.OnError == nil {
		o.OnError = func(error) {}
	}
	if o.OnDenied == nil {
		o.OnDenied = func(Lease) {}
	}
	if o.denied == nil {
		o.denied = o.OnDenied
	}
	return nil
}

// hold does what Hold does. fresh says that no call with this holder id was ever
// made for key.
func (c *Client) hold(ctx context.Context, key string, o HoldOptions, fresh bool) (*Hold, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	h := &Hold{client: c, options: o, quit: make(chan struct{}), done: make(chan struct{}), hint: make(chan struct{}, 1)}
	h.claim = claim{key: key, holder: o.Holder, ttl: o.TTL}
	if err := h.enter(); err != nil {
		return nil, err
	}
	h.calls, h.abort = context.WithCancel(context.WithoutCancel(ctx))
	if err := h.begin(ctx, fresh); err != nil {
		h.abort()
		h.leave()
		return nil, err
	}
	h.ctx, h.cancel = context.WithCancelCause(ctx)
	h.mu.Lock()
	h.timer = time.AfterFunc(time.Until(h.limit()), h.expire)
	h.mu.Unlock()
	h.options.OnRenew(h.claim.revision, h.claim.until)
	go h.keep(h.follow())
	return h, nil
}

// begin acquires the lease and makes sure of its date.
func (h *Hold) begin(ctx context.Context, fresh bool) error {
	if h.options.Wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, h.options.Wait, errWaited)
		defer cancel()
	}
	for {
		if err := h.acquire(ctx, fresh); err != nil {
			return err
		}
		fresh = false
		err := h.confirm(ctx)
		if ctx.Err() != nil {
			h.abandon(ctx)
			return h.notAcquired(ctx, err)
		}
		if err == nil {
			return nil
		}
		if lasting(err) {
			h.abandon(ctx)
			return err
		}
		h.options.OnError(err)
	}
}

// confirm renews a claim until it is datable: only then may anybody act on it. An
// error means that it has to be acquired again (H3).
func (h *Hold) confirm(ctx context.Context) error {
	calls, done := h.lastWords(ctx)
	defer done()
	var err error
	for start := time.Now(); !time.Now().Before(h.limit()); {
		if err != nil {
			h.options.OnError(err)
			sleep(ctx, h.pause())
		}
		if ctx.Err() != nil || time.Since(start) > h.options.TTL {
			h.loose = true
			return kinds.Errorf(kinds.Unknown, "lease %s: granted, but it is not known until when", h.claim.key)
		}
		if err = h.attempt(calls, h.client.Renew); kinds.Of(err) == kinds.Lost || lasting(err) {
			return err
		}
	}
	return nil
}

// Context ends, with a cause, before the lease can belong to another: Margin
// before Deadline, at once when it is known to be lost (the cause is a
// *kinds.Error of kind lost), when resigned (ErrResigned), or with the context
// given to Hold.
func (h *Hold) Context() context.Context { return h.ctx }

// Check says whether the holder may act now: nil, or why not. It looks at the
// clock itself, so it is right also when the process was paused and no timer has
// fired yet.
func (h *Hold) Check() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.expireLocked()
	if h.ended != nil {
		return h.ended
	}
	return context.Cause(h.ctx)
}

// Key of the lease.
func (h *Hold) Key() string { return h.claim.key }

// Holder is the id under which the lease is held.
func (h *Hold) Holder() string { return h.claim.holder }

// Tenure is the revision that acquire returned, the same for as long as the lease
// is held, and the fence: send it with every write. It is higher than every revision
// of the holders before, and lower than those of the holders after.
func (h *Hold) Tenure() uint64 { return h.claim.tenure }

// Revision is the highest revision known: what Renew and Release need. It is not
// the fence: a write that began before a renewal would be refused after one that
// began later, though the lease was held all the time.
func (h *Hold) Revision() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claim.revision
}

// Deadline is the first instant at which the lease can belong to another unless
// it is renewed before: the sending of the call that wrote the revision, plus
// the TTL. It has a monotonic reading (H2).
func (h *Hold) Deadline() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claim.until
}

// Resign gives the lease up; call it when the work has ended, for a release is
// the last thing a holder does. Inboxes that serve the Hold stop taking requests
// and answer what they have, then the Context ends, then the key is released. If
// ctx ends before the inboxes are done, the lease is left to run out instead. An
// error means that it may have been.
func (h *Hold) Resign(ctx context.Context) error {
	h.resign.Lock()
	defer h.resign.Unlock()
	if h.resigned {
		return nil
	}
	h.resigned = true
	defer h.leave()

	drained, busy := h.drain(ctx, 0)
	h.end(ErrResigned)
	if _, err := h.drain(ctx, drained); err != nil { // of an inbox that came to serve meanwhile
		busy = errors.Join(busy, err)
	}
	stop := context.AfterFunc(ctx, h.abort)
	<-h.done
	stop()
	h.abort()
	switch {
	case h.gone:
		return nil
	case busy != nil:
		return fmt.Errorf("lease %s is left to run out: %w", h.claim.key, busy)
	case h.enter() != nil: // it was lost, and the lease may be a later Hold's now
		return nil
	}
	return h.release(ctx)
}

// drain drains the inboxes from the nth on and returns how many there are.
func (h *Hold) drain(ctx context.Context, n int) (int, error) {
	h.mu.Lock()
	drains := h.drains
	h.mu.Unlock()
	var busy error
	for _, drain := range drains[n:] {
		busy = errors.Join(busy, drain(ctx))
	}
	return len(drains), busy
}

// lease is the tenure as it is known now.
func (h *Hold) lease() Lease {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.claim.lease()
}

// limit is when the Context ends. The caller has the mutex or is alone.
func (h *Hold) limit() time.Time { return h.claim.until.Add(-h.options.Margin) }

// lost is why the lease was lost, nil if it was not.
func (h *Hold) lost() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if errors.Is(h.ended, ErrResigned) {
		return nil
	}
	return h.ended
}

func (h *Hold) end(cause error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endLocked(cause)
}

func (h *Hold) endLocked(cause error) {
	if h.ended != nil {
		return
	}
	h.ended = cause
	h.timer.Stop()
	h.cancel(cause)
	close(h.quit)
	if !errors.Is(cause, ErrResigned) {
		h.abort()
		h.leave()
	}
}

// expire runs when the timer fires.
func (h *Hold) expire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.expireLocked()
	if h.ended == nil {
		h.timer.Reset(time.Until(h.limit()))
	}
}

func (h *Hold) expireLocked() {
	if h.ended != nil || time.Now().Before(h.limit()) {
		return
	}
	why := h.trouble
	if why == nil {
		why = context.DeadlineExceeded // this process was paused
	}
	h.endLocked(kinds.Errorf(kinds.Lost, "lease %s was not renewed in time: %w", h.claim.key, why))
}

// keep renews until the Hold has ended: when it is due, and at once when an event
// hints that the lease is gone and the owner that the service names is not us.
func (h *Hold) keep(unfollow func()) {
	defer close(h.done)
	defer unfollow()
	renew := h.client.Renew
	if h.options.batch != nil {
		renew = h.options.batch.renew
	}
	timer := time.NewTimer(h.untilDue())
	defer timer.Stop()
	hint, calm := h.hint, (<-chan time.Time)(nil)
	for {
		select {
		case <-timer.C:
		case <-hint:
			// Anybody may be able to send events: no more than one look in a while.
			hint, calm = nil, time.After(h.pause())
			if h.stands() {
				continue
			}
		case <-calm:
			hint, calm = h.hint, nil
			continue
		case <-h.quit:
			return
		}
		err := h.attempt(h.calls, renew)

		h.mu.Lock()
		h.trouble = err
		if kinds.Of(err) == kinds.Lost && h.ended == nil {
			h.gone = true
			if h.evicted {
				err = kinds.Errorf(kinds.Lost, "lease %s was evicted: %w", h.claim.key, err)
			}
			h.endLocked(err)
		}
		revision, until, ended := h.claim.revision, h.claim.until, h.ended
		h.mu.Unlock()

		switch {
		case ended != nil:
			return
		case err != nil:
			h.options.OnError(err)
			timer.Reset(h.pause())
		default:
			h.options.OnRenew(revision, until)
			timer.Reset(h.untilDue())
		}
	}
}

// untilDue is how long to wait before the next renewal: a third of the TTL after
// the sending of the last (H4).
func (h *Hold) untilDue() time.Duration {
	h.mu.Lock()
	sent := h.claim.until.Add(-h.options.TTL)
	h.mu.Unlock()
	if h.options.batch != nil {
		return time.Until(h.options.batch.due(sent))
	}
	return time.Until(sent.Add(jitter(h.options.TTL/3, 0.1)))
}

// attempt renews once and, when there is no verdict, asks the owner, in calls that
// end with calls. An error of kind lost is final; after any other the claim stands
// as it was.
func (h *Hold) attempt(calls context.Context, renew func(context.Context, Lease) (Result, error)) error {
	l := h.lease()
	ctx, cancel := context.WithTimeout(calls, h.patience())
	r, err := renew(ctx, l)
	cancel()

	h.mu.Lock()
	switch {
	case err == nil:
		h.claim.renewed(r.Revision, r.SentAt)
	case mayBeApplied(err):
		h.claim.unanswered(r.SentAt)
	}
	doubt := !h.claim.doubt.IsZero()
	h.mu.Unlock()

	if err == nil || !doubt || !mayBeApplied(err) && kinds.Of(err) != kinds.Lost {
		return err
	}
	ctx, cancel = context.WithTimeout(calls, h.patience())
	defer cancel()
	o, ownerErr := h.client.Owner(ctx, l.Key)
	if ownerErr != nil {
		return ownerErr
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	stands, moved := h.claim.owner(o)
	switch {
	case !stands:
		return kinds.Errorf(kinds.Lost, "lease %s: after a renewal without a verdict it is not ours: %w", l.Key, err)
	case !moved:
		return kinds.Errorf(kinds.Unknown, "lease %s: a renewal without a verdict is not to be seen yet: %w", l.Key, err)
	}
	return nil
}

// release frees the key. No renewal is sent any more, but one may be in doubt.
func (h *Hold) release(ctx context.Context) error {
	if ctx.Err() != nil {
		// Whoever resigns with a context that has ended still gets one try.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), min(time.Second, h.client.options.Timeout))
		defer cancel()
	}
	for end := time.Now().Add(h.options.TTL); ; {
		err := h.releaseOnce(ctx)
		if err == nil {
			return nil
		}
		if lasting(err) || !sleep(ctx, h.pause()) || time.Now().After(end) {
			return err
		}
	}
}

// releaseOnce returns nil when the lease is certainly not ours any more.
func (h *Hold) releaseOnce(ctx context.Context) error {
	for {
		h.mu.Lock()
		l, doubt := h.claim.lease(), !h.claim.doubt.IsZero()
		h.mu.Unlock()
		if _, err := h.client.Release(ctx, l); kinds.Of(err) != kinds.Lost {
			return err
		}
		if !doubt {
			return nil
		}
		o, err := h.client.Owner(ctx, l.Key)
		if err != nil {
			return err
		}
		h.mu.Lock()
		stands, moved := h.claim.owner(o)
		h.mu.Unlock()
		if !stands {
			return nil
		}
		if !moved {
			return kinds.Errorf(kinds.Unknown, "lease %s: a renewal without a verdict is not to be seen yet", l.Key)
		}
	}
}

// patience is how long one call may take: two must fit between the first renewal
// and the deadline.
func (h *Hold) patience() time.Duration { return min(h.client.options.Timeout, h.options.TTL/4) }

// pause is how long to wait after a failed call.
func (h *Hold) pause() time.Duration { return jitter(min(h.options.TTL/20, time.Second), 0.5) }

// jitter returns d less up to the given part of it.
func jitter(d time.Duration, part float64) time.Duration {
	return d - time.Duration(math.Floor(float64(d)*part*mathrand.Float64()))
}

// sleep returns false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
