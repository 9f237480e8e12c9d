package service

import (
	"context"
	"sync"
	"time"
)

// budget is a context with a deadline whose timer is made when somebody first
// waits for it. A call that goes well asks only for the deadline, and a timer
// and a place among its parent's children cost more than much of the rest of it.
type budget struct {
	context.Context // the parent
	deadline        time.Time

	mu    sync.Mutex
	inner context.Context // once needed
	end   context.CancelFunc
}

// withDeadline gives ctx the deadline at, with cause errBudget. end must be called.
func withDeadline(ctx context.Context, at time.Time) (_ context.Context, end func()) {
	if sooner, ok := ctx.Deadline(); ok && sooner.Before(at) {
		at = sooner
	}
	b := &budget{Context: ctx, deadline: at}
	return b, b.close
}

func (b *budget) real() context.Context {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inner == nil {
		b.inner, b.end = context.WithDeadlineCause(b.Context, b.deadline, errBudget)
	}
	return b.inner
}

func (b *budget) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end != nil {
		b.end()
	}
}

// Deadline implements context.Context.
func (b *budget) Deadline() (time.Time, bool) { return b.deadline, true }

// Done implements context.Context.
func (b *budget) Done() <-chan struct{} { return b.real().Done() }

// Err implements context.Context.
func (b *budget) Err() error { return b.real().Err() }

// Value implements context.Context; context.Cause goes through it.
func (b *budget) Value(key any) any { return b.real().Value(key) }
