package client

import "time"

// claim is what a holder knows of one tenure: no clock, no I/O. All instants are
// times of sending or count from one.
type claim struct {
	key, holder string
	ttl         time.Duration // of every call of this holder
	tenure      uint64        // the revision the acquire returned
	revision    uint64        // the highest known to be this tenure's
	acquiredAt  time.Time     // names the tenure; the server's clock, never compared with ours

	// until is when the lease may end: zero as long as no call of ours is known
	// to have written revision.
	until time.Time
	// doubt is the sending of the earliest renewal of revision without a verdict.
	doubt time.Time
}

func (c *claim) lease() Lease {
	return Lease{Key: c.key, Holder: c.holder, Revision: c.revision, TTL: c.ttl, AcquiredAt: c.acquiredAt}
}

// renewed takes the verdict of a renewal sent at sent. An earlier one in doubt can
// no longer be applied: it needs the revision that this one replaced.
func (c *claim) renewed(revision uint64, sent time.Time) {
	c.revision, c.until, c.doubt = revision, sent.Add(c.ttl), time.Time{}
}

// unanswered takes a renewal sent at sent that may have been applied.
func (c *claim) unanswered(sent time.Time) {
	if c.doubt.IsZero() {
		c.doubt = sent
	}
}

// owner takes Owner's answer, asked because a renewal is in doubt, and says
// whether the tenure still stands by it. moved tells that the renewal in doubt was
// applied; if the tenure stands without it, there is no news (H5).
func (c *claim) owner(r Result) (stands, moved bool) {
	if r.Holder != c.holder || !r.AcquiredAt.Equal(c.acquiredAt) {
		return false, false
	}
	if r.Revision <= c.revision || c.doubt.IsZero() {
		return true, false
	}
	// A read cannot tell which of the renewals wrote it: date it from the first.
	c.revision, c.until, c.doubt = r.Revision, c.doubt.Add(min(c.ttl, r.TTL)), time.Time{}
	return true, true
}
