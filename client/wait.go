package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

const (
	// slice is how long one acquire waits in the service: short, so that giving up
	// is quick and leaves nothing behind. A waiter that comes back at once keeps
	// its place.
	slice = 750 * time.Millisecond
	// lastWord is how long after giving up the answer of the acquire under way is
	// still waited for, so that a lease granted meanwhile can be released.
	lastWord = slice + 250*time.Millisecond
)

// acquire asks until the lease is granted and fills the claim, dated if it can be.
func (h *Hold) acquire(ctx context.Context, fresh bool) error {
	o := h.options
	w := waiter{h: h}
	defer w.stop()
	var last error
	for tries := 1; ; tries++ {
		if ctx.Err() != nil {
			if h.loose {
				h.abandon(ctx)
			}
			return h.notAcquired(ctx, last)
		}
		wait := slice
		if end, ok := ctx.Deadline(); ok {
			wait = max(0, min(wait, time.Until(end).Truncate(time.Millisecond)))
		}
		if o.NoWait || w.poll {
			wait = 0
		}
		r, err := h.acquireOnce(ctx, wait)
		switch {
		case err == nil && r.Kind == kinds.Granted:
			h.claim = claim{key: r.Key, holder: r.Holder, ttl: o.TTL, tenure: r.Revision, revision: r.Revision, acquiredAt: r.AcquiredAt}
			if fresh && !h.loose && r.TTL == o.TTL && time.Since(r.SentAt) < o.TTL/3 {
				h.claim.until = r.SentAt.Add(o.TTL)
				if r.Left > 0 { // never more than the truth: no reason to believe more
					h.claim.until = r.SentAt.Add(min(o.TTL, r.Left))
				}
			}
			h.loose = false
			return nil
		case err == nil && o.NoWait:
			return &DeniedError{r.Lease}
		case err == nil:
			last = &DeniedError{r.Lease}
			o.denied(r.Lease)
			w.after(ctx, r, wait)
			tries = 0
			continue
		case wait > 0 && namesUnknownMember(err, "wait_ms"):
			w.poll = true
			continue
		case mayBeApplied(err):
			h.loose = true
		}
		if lasting(err) || o.NoWait && (!h.loose || tries == 2) {
			if h.loose {
				h.abandon(ctx)
			}
			return err
		}
		last = err
		o.OnError(err)
		sleep(ctx, jitter(min(50*time.Millisecond<<min(tries, 10), time.Second), 0.5))
	}
}

// acquireOnce makes one call, whose answer is awaited even if ctx ends meanwhile.
func (h *Hold) acquireOnce(ctx context.Context, wait time.Duration) (Result, error) {
	call, done := h.lastWords(ctx)
	defer done()
	return h.client.Acquire(call, AcquireRequest{
		Key: h.claim.key, Holder: h.options.Holder, TTL: h.options.TTL, Wait: wait, Meta: h.options.Meta,
	})
}

// lastWords is the context of calls whose answers are of use for a while after ctx
// has ended.
func (h *Hold) lastWords(ctx context.Context) (calls context.Context, done func()) {
	calls, cancel := context.WithCancel(h.calls)
	stop := context.AfterFunc(ctx, func() {
		if sleep(calls, lastWord) {
			cancel()
		}
	})
	return calls, func() { stop(); cancel() }
}

// errWaited ends a wait that Wait limits.
var errWaited = errors.New("the wait is over")

// notAcquired is the error of giving up; last is what kept from acquiring.
func (h *Hold) notAcquired(ctx context.Context, last error) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, errWaited) && last != nil {
		return last
	}
	return fmt.Errorf("lease %s was not acquired: %w", h.claim.key, cause)
}

// abandon frees what an acquire without a verdict, or one that came too late, may
// have left behind. What cannot be freed runs out by itself.
func (h *Hold) abandon(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastWord-slice)
	defer cancel()
	if h.claim.revision > 0 {
		if _, err := h.client.Release(ctx, h.claim.lease()); kinds.Of(err) != kinds.Lost {
			return
		}
	}
	r, err := h.client.Owner(ctx, h.claim.key)
	if err == nil && r.Kind == kinds.Held && r.Holder == h.options.Holder {
		_, _ = h.client.Release(ctx, r.Lease)
	}
}

// waiter is the state of waiting for one lease.
type waiter struct {
	h *Hold
	// poll is set when the service does not know wait_ms: then the waiter asks
	// again at the end of the present lease, when an event hints at it, and now
	// and then.
	poll   bool
	hints  chan struct{}
	cancel func()
}

// after waits for a reason to ask again after a denial.
func (w *waiter) after(ctx context.Context, r Result, waited time.Duration) {
	if !w.poll {
		if waited == 0 || time.Since(r.SentAt) < waited/2 {
			// The service has no room for a waiter, or is stopping, or less than the
			// millisecond is left that it could wait.
			sleep(ctx, jitter(300*time.Millisecond, 0.7))
		}
		return
	}
	if w.hints == nil {
		w.hints = make(chan struct{}, 1)
		var err error
		w.cancel, err = w.h.client.hints(w.h.claim.key, w.hints)
		if err != nil {
			w.h.options.OnError(err)
		}
	}
	wait := jitter(1500*time.Millisecond, 0.5)
	if r.Left > 0 {
		wait = min(wait, r.Left+jitter(300*time.Millisecond, 1))
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	case <-w.hints:
		sleep(ctx, jitter(50*time.Millisecond, 1)) // all waiters got it
	}
}

func (w *waiter) stop() {
	if w.cancel != nil {
		w.cancel()
	}
}

// hints sends to c when an event says that key may have become free. Events can
// be lost and forged: they only are a reason to ask.
func (c *Client) hints(key string, ch chan<- struct{}) (cancel func(), err error) {
	return c.wire.subscribe(c.options.EventPrefix+".changed."+key, func(m *nats.Msg) {
		switch m.Header.Get("Dagnats-Lease-Event") {
		case "acquired", "renewed":
			return
		}
		select {
		case ch <- struct{}{}:
		default:
		}
	}, func(error) {}) // without events the regular look will do
}
