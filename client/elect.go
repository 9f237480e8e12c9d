package client

import (
	"context"
	"errors"
	"time"
)

// ElectOptions say how to campaign and what to do with the office.
type ElectOptions struct {
	HoldOptions // Wait, NoWait and OnDenied are not used

	// OnElected is the leader's work. Its context ends before another can be
	// elected; the lease is released when it has returned, not before, so it should
	// return soon after its context has ended. Returning earlier resigns.
	OnElected func(ctx context.Context, h *Hold)
	// OnLost, if set, is called after OnElected has returned, with the reason for
	// which the office ended: a *kinds.Error of kind lost, ErrResigned when
	// OnElected returned by itself, or the cause of the campaign's own end.
	OnLost func(cause error)
	// OnNewOwner, if set, is told of each new tenure that is seen, this process'
	// own too; one that begins and ends between two looks is not seen.
	OnNewOwner func(Lease)
}

// Elect campaigns for key for ever: wait for the lease, lead, wait again. The
// callbacks are called one after another. Elect returns when ctx has ended and
// the lease is released, with the cause of ctx, or at once with an error that no
// waiting mends, of those that Hold lists.
func (c *Client) Elect(ctx context.Context, key string, o ElectOptions) error {
	fresh := o.Holder == ""
	if fresh {
		o.Holder = NewHolder(key)
	}
	if err := o.defaults(); err != nil {
		return err
	}
	var known Lease
	o.denied = func(l Lease) {
		if o.OnNewOwner != nil && (l.Holder != known.Holder || !l.AcquiredAt.Equal(known.AcquiredAt)) {
			o.OnNewOwner(l)
		}
		known = l
	}
	o.NoWait, o.Wait = false, 0
	for ctx.Err() == nil {
		h, err := c.hold(ctx, key, o.HoldOptions, fresh)
		fresh = false
		switch {
		case ctx.Err() != nil && err != nil:
			return context.Cause(ctx)
		case err != nil:
			return err
		}
		o.denied(h.lease())
		var cause error
		err = h.run(ctx, func(ctx context.Context, h *Hold) error {
			o.OnElected(ctx, h)
			cause = h.Check()
			return nil
		})
		if err != nil {
			o.OnError(err)
		}
		if cause == nil {
			cause = ErrResigned
		}
		if o.OnLost != nil {
			o.OnLost(cause)
		}
		if errors.Is(cause, ErrResigned) {
			sleep(ctx, jitter(time.Second, 0.5)) // the others' turn
		}
	}
	return context.Cause(ctx)
}
