package service

import (
	"sync"
	"time"
)

// clock estimates the wall clock of the NATS server that leads the bucket, as
// an interval that holds the true value: a server time read with a request lies
// between the sending and the receiving. Nothing ends by it: it dates records,
// says how much of a lease is left, and says when it is worth asking the server.
type clock struct {
	mu   sync.RWMutex
	sent time.Time // local, monotonic
	recv time.Time
	ts   time.Time // the server's clock somewhere between the two
}

// keepSample is how long a narrow sample is preferred to wider, newer ones.
const keepSample = 30 * time.Second

// sample takes a reading ts of the server's clock, asked for at sent and
// received at recv.
func (c *clock) sample(sent, recv, ts time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ts.IsZero() {
		old, fresh := c.recv.Sub(c.sent), recv.Sub(sent)
		lo, hi := ts.Add(-fresh), ts.Add(fresh)
		stepped := c.loAt(recv).After(hi) || c.hiAt(recv).Before(lo)
		if !stepped && fresh > old && recv.Sub(c.recv) < keepSample {
			return
		}
	}
	c.sent, c.recv, c.ts = sent, recv, ts
}

func (c *clock) loAt(now time.Time) time.Time { return c.ts.Add(now.Sub(c.recv)) }
func (c *clock) hiAt(now time.Time) time.Time { return c.ts.Add(now.Sub(c.sent)) }

// bounds gives the earliest and the latest that the server's clock can show at
// now. Before the first sample both are the local clock.
func (c *clock) bounds(now time.Time) (lo, hi time.Time) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.ts.IsZero() {
		return now.Round(0), now.Round(0)
	}
	return c.loAt(now), c.hiAt(now)
}

// offset is how far the server's clock is ahead of the local one, for metrics.
func (c *clock) offset() time.Duration {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.ts.IsZero() {
		return 0
	}
	return c.ts.Sub(c.recv.Round(0))
}
