package client

import (
	"context"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// batcher collects the renewals of one holder that fall due together and sends
// them as one RenewMany.
type batcher struct {
	client *Client
	holder string
	ttl    time.Duration
	start  time.Time // of the beat: a random instant, so that processes differ

	mu      sync.Mutex
	waiting []*renewal
}

type renewal struct {
	lease   Lease
	outcome chan Renewal
}

// batchMost is the limit of the contract.
const batchMost = 1000

// batchWindow is how long the first renewal waits for others.
const batchWindow = 10 * time.Millisecond

func newBatcher(c *Client, holder string, ttl time.Duration) *batcher {
	return &batcher{client: c, holder: holder, ttl: ttl, start: time.Now().Add(-jitter(ttl, 1))}
}

// due is when to renew what was sent at sent: a third of the TTL later, or at the
// beat before. There are two beats in that time, so there are at most two batches.
func (b *batcher) due(sent time.Time) time.Time {
	beat := b.ttl / 6
	at := sent.Add(b.ttl / 3)
	return at.Add(-(at.Sub(b.start) % beat))
}

// renew does what Client.Renew does.
func (b *batcher) renew(ctx context.Context, l Lease) (Result, error) {
	r := &renewal{lease: l, outcome: make(chan Renewal, 1)}
	asked := time.Now() // not after the sending
	b.mu.Lock()
	b.waiting = append(b.waiting, r)
	switch len(b.waiting) {
	case 1:
		time.AfterFunc(batchWindow, b.flush)
	case batchMost:
		go b.flush()
	}
	b.mu.Unlock()
	select {
	case o := <-r.outcome:
		return o.Result, o.Err
	case <-ctx.Done():
		return Result{SentAt: asked}, kinds.Errorf(kinds.Unknown, "renew_many: no reply: %w", ctx.Err())
	}
}

func (b *batcher) flush() {
	b.mu.Lock()
	batch := b.waiting
	if len(batch) > batchMost {
		batch = batch[:batchMost]
	}
	b.waiting = b.waiting[len(batch):]
	if len(b.waiting) > 0 {
		time.AfterFunc(0, b.flush)
	}
	b.mu.Unlock()
	if len(batch) == 0 {
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), min(b.client.options.Timeout, b.ttl/4))
	defer cancel()
	leases := make([]Lease, len(batch))
	for i, r := range batch {
		leases[i] = r.lease
	}
	outcomes, _ := b.client.RenewMany(ctx, b.holder, b.ttl, leases)
	var single sync.WaitGroup
	for i, o := range outcomes {
		if o.whole && !mayBeApplied(o.Err) {
			// Not served here, or not now: one by one, as without the extension.
			single.Go(func() {
				l := leases[i]
				l.Holder, l.TTL = b.holder, b.ttl
				outcomes[i].Result, outcomes[i].Err = b.client.Renew(ctx, l)
			})
		}
	}
	single.Wait()
	for i, r := range batch {
		r.outcome <- outcomes[i]
	}
}
