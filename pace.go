package leased

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/leased/leased/service/kinds"
)

// pace lets calls that read a lot, and whose answer nobody's lease depends on, work
// one at a time and for no more than a share of one CPU: any number of them must leave
// the lease calls what those need. Who has asked for little lately is not slowed down.
type pace struct {
	turn    chan struct{} // taken by the one that works
	waiting atomic.Int64

	// Of the one that has the turn.
	credit time.Duration // what may be worked at once
	since  time.Time     // credit was counted
}

const (
	paceShare   = 20                     // a twentieth of the time
	paceBurst   = 200 * time.Millisecond // of work after a pause
	paceWait    = 3 * time.Second        // for one's turn
	paceWaiting = 256                    // calls that wait for it
)

func newPace() *pace {
	return &pace{turn: make(chan struct{}, 1), credit: paceBurst, since: time.Now()}
}

// run calls f when its turn has come; parked is called once if that is not at once.
func (p *pace) run(ctx context.Context, parked func(), f func() (answer, error)) (answer, error) {
	select {
	case p.turn <- struct{}{}:
	default:
		defer p.waiting.Add(-1)
		if p.waiting.Add(1) > paceWaiting {
			return answer{}, kinds.Errorf(kinds.Busy, "the limit of %d calls of this kind that wait is reached", paceWaiting)
		}
		parked()
		late := time.NewTimer(paceWait)
		defer late.Stop()
		select {
		case p.turn <- struct{}{}:
		case <-late.C:
			return answer{}, kinds.Errorf(kinds.Busy, "more calls of this kind come than are answered beside the others")
		case <-ctx.Done():
			return answer{}, kinds.Errorf(kinds.Internal, "%w", context.Cause(ctx))
		}
	}
	defer func() { <-p.turn }()
	if debt := -p.earned(time.Now()); debt > 0 {
		rest := time.NewTimer(debt * paceShare)
		defer rest.Stop()
		select {
		case <-rest.C:
		case <-ctx.Done():
			return answer{}, kinds.Errorf(kinds.Internal, "%w", context.Cause(ctx))
		}
	}
	began := time.Now()
	defer func() { p.credit -= time.Since(began) }()
	return f()
}

// earned brings the credit up to date.
func (p *pace) earned(now time.Time) time.Duration {
	p.credit = min(paceBurst, p.credit+now.Sub(p.since)/paceShare)
	p.since = now
	return p.credit
}
