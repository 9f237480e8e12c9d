package service

import (
	"cmp"
	"fmt"
	"sync"
	"time"
)

// clock estimates the wall clock of the NATS server that leads the bucket, as
// an interval that holds the true value: a server time read with a request lies
// between the sending and the receiving. Nothing ends by it: it dates records,
// says how much of a lease is left, and says when it is worth asking the server.
//
// It also notices that a server's clock was set, which this machine's monotonic clock
// shows, and that the clocks of the servers that lead in turn differ.
type clock struct {
	mu      sync.RWMutex
	best    reading
	newest  reading
	servers map[string]reading // the newest of each server
	step    clockStep          // the last one

	// stepped is called after a server's clock was set; by is how far.
	stepped func(server string, by time.Duration)
}

// reading is what the clock of a server showed at some time between sent and recv,
// both local and monotonic.
type reading struct {
	server     string // "" for one that is alone
	sent, recv time.Time
	ts         time.Time
}

// lo and hi are the earliest and the latest that the clock of r can show at now.
func (r reading) lo(now time.Time) time.Time { return r.ts.Add(now.Sub(r.recv)) }
func (r reading) hi(now time.Time) time.Time { return r.ts.Add(now.Sub(r.sent)) }

// clockStep is a setting of a server's clock.
type clockStep struct {
	server string
	by     time.Duration
	at     time.Time
}

const (
	// keepSample is how long a narrow sample is preferred to wider, newer ones.
	keepSample = 30 * time.Second
	// clockSlack is how far clocks may be apart, or a clock may jump, before it is told.
	// One that is slewed moves by less between two readings: a tenth of the time at most.
	clockSlack = time.Second
	// clockKept is how long a reading of a server that does not lead counts, and for how
	// long a step is told.
	clockKept = time.Hour
)

// sample takes a reading ts of server's clock, asked for at sent and received at recv.
func (c *clock) sample(server string, sent, recv, ts time.Time) {
	c.mu.Lock()
	r := reading{server, sent, recv, ts}
	by := c.stepTo(r)
	if by != 0 {
		c.step = clockStep{server, by, recv}
	}
	if c.newest.ts.IsZero() || !recv.Before(c.newest.recv) {
		c.newest = r
		if c.servers == nil {
			c.servers = map[string]reading{}
		}
		for name, old := range c.servers {
			if recv.Sub(old.recv) > clockKept {
				delete(c.servers, name)
			}
		}
		c.servers[server] = r
	}
	another := c.best.lo(recv).After(ts.Add(recv.Sub(sent))) || c.best.hi(recv).Before(ts.Add(sent.Sub(recv)))
	if c.best.ts.IsZero() || another || recv.Sub(sent) <= c.best.recv.Sub(c.best.sent) || recv.Sub(c.best.recv) >= keepSample {
		c.best = r
	}
	told := c.stepped
	c.mu.Unlock()
	if by != 0 && told != nil {
		told(server, by)
	}
}

// stepTo is how far the clock of r's server was set since it was read last, 0 if it was
// not, as far as the two readings prove it.
func (c *clock) stepTo(r reading) time.Duration {
	last := c.newest
	if last.ts.IsZero() || last.server != r.server || r.recv.Before(last.recv) {
		return 0
	}
	slack := max(clockSlack, r.recv.Sub(last.recv)/10)
	if by := r.ts.Sub(last.hi(r.recv)); by > slack {
		return by
	}
	if by := r.ts.Add(r.recv.Sub(r.sent)).Sub(last.lo(r.recv)); by < -slack {
		return by
	}
	return 0
}

// bounds gives the earliest and the latest that the server's clock can show at
// now. Before the first sample both are the local clock.
func (c *clock) bounds(now time.Time) (lo, hi time.Time) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.best.ts.IsZero() {
		return now.Round(0), now.Round(0)
	}
	return c.best.lo(now), c.best.hi(now)
}

// offset is how far the server's clock is ahead of the local one, for metrics.
func (c *clock) offset() time.Duration {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if c.best.ts.IsZero() {
		return 0
	}
	return c.best.ts.Sub(c.best.recv.Round(0))
}

// spread is by how much the clocks of the servers that led lately and this machine's are
// apart, at least, and which two are farthest.
func (c *clock) spread(now time.Time) (most time.Duration, ahead, behind string) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	type shown struct {
		who    string
		lo, hi time.Time
	}
	all := []shown{{"this machine", now.Round(0), now.Round(0)}}
	for _, r := range c.servers {
		if now.Sub(r.recv) <= clockKept {
			all = append(all, shown{cmp.Or(r.server, "the NATS server"), r.lo(now), r.hi(now)})
		}
	}
	for _, a := range all {
		for _, b := range all {
			if d := a.lo.Sub(b.hi); d > most {
				most, ahead, behind = d, a.who, b.who
			}
		}
	}
	return most, ahead, behind
}

// trouble says what somebody should know of the clocks, "" if there is nothing.
func (c *clock) trouble(now time.Time) string {
	c.mu.RLock()
	s := c.step
	c.mu.RUnlock()
	if !s.at.IsZero() && now.Sub(s.at) < clockKept {
		return stepText(s.server, s.by) + fmt.Sprintf(", %v ago", now.Sub(s.at).Round(time.Second))
	}
	if d, ahead, behind := c.spread(now); d > clockSlack {
		return fmt.Sprintf("the clock of %s is %v ahead of that of %s: leases are exclusive up to the difference of the servers' clocks", ahead, d.Round(time.Millisecond), behind)
	}
	return ""
}

// stepText tells a step.
func stepText(server string, by time.Duration) string {
	way := "forward"
	if by < 0 {
		way = "back"
	}
	return fmt.Sprintf("the clock of %s was set %s by %v", cmp.Or(server, "the NATS server"), way, by.Abs().Round(time.Millisecond))
}
