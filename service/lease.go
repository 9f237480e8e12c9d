package service

import (
	"fmt"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Entry is the last stored message of a key, as a reader of the store sees it.
// The zero Entry of a key says that nothing is stored.
type Entry struct {
	Key      string
	Revision uint64 // sequence in the bucket = the fence; 0: nothing stored
	// At is the message time on the server's clock. When only bounds are known
	// it is the upper one, which makes every end computed from it late, never early.
	At        time.Time
	Record    *Record // nil when absent or foreign
	Tombstone bool    // released, expired, or deleted by a stranger
	Foreign   string  // why the message is not ours; "" when it is
}

// End is when the lease in e runs out on the server's clock.
func (e *Entry) End() time.Time { return e.At.Add(e.Record.TTL()) }

// isLease says that e holds a readable lease, over or not.
func (e *Entry) isLease() bool { return e.Record != nil && !e.Tombstone }

// horizon is the latest end of e's own lease and of every revision before it.
func (e *Entry) horizon() time.Time {
	switch {
	case e.Revision == 0:
		return time.Time{}
	case e.Record == nil:
		// Foreign: nobody knows what it replaced, so the longest lease that can
		// have been there.
		return e.At.Add(MaxTTL)
	}
	h := e.Record.Horizon.Time()
	if e.Record.Horizon.IsZero() {
		h = time.Time{}
	}
	if !e.Tombstone && e.End().After(h) {
		h = e.End()
	}
	return h
}

// State is what is known of a key when a command is decided.
type State struct {
	Entry
	// Past says that the lease in Entry is over, by proof and not by guess:
	// the server's clock was read after the entry was.
	Past bool
	// Superseded says that a higher revision of the key has been seen: a server
	// that came back from a crash shows what was replaced before it.
	Superseded bool
	// Prior is the last lease of the key this instance saw, for a key that holds
	// nothing now or something older: the server removed it at its end. Nil when
	// unknown.
	Prior *Entry
	// Seen is how far the bucket had been seen when this was found out: what the key
	// got later has a higher revision. 0: it is not known.
	Seen uint64
}

// Op is what a command wants.
type Op int

// The commands, and the kinds that say that they succeeded.
const (
	// OpAcquire grants the key to the holder if nobody holds it (granted), says who
	// does (denied), or repeats the caller's own lease unchanged (granted).
	OpAcquire Op = iota
	// OpRenew extends the lease to TTL from now (renewed) if holder and revision are
	// the current pair; else the error's kind is lost.
	OpRenew
	// OpRelease frees the key (released) under the same check as OpRenew.
	OpRelease
	// OpOwner reads who holds the key (held) or that nobody does (free).
	OpOwner
	// OpEvict frees the key whoever holds it (evicted) if revision is the current
	// one, records that this service did not write included.
	OpEvict
	// OpExpire tells the end of a lease that ran out. Nobody calls it.
	OpExpire
)

// Command is one wish about one key.
type Command struct {
	Op       Op
	Key      string
	Holder   string        // acquire, renew, release
	Revision uint64        // renew, release, evict, expire: the fence the caller knows
	TTL      time.Duration // acquire, renew
	Meta     string        // acquire: a text of the holder's that is shown with the lease
	// Until is when the time of an acquire that waits in line is over: no lease is
	// written for it then. Zero: it does not wait.
	Until time.Time
}

// over says that the time to wait is over.
func (c *Command) over(now time.Time) bool { return !c.Until.IsZero() && !now.Before(c.Until) }

// Next is the one write a decision asks for. The store fills in times and nonce.
type Next struct {
	Expect   uint64 // the key's last sequence the write is conditional on
	Event    Event
	Holder   string
	TTL      time.Duration
	Meta     string
	Tenure   Timestamp // acquired_at to carry over; 0: the tenure starts with this write
	Previous *Previous
	Ended    uint64 // tombstones: the revision that ends
	Evicted  bool
	// Horizon is the latest end of everything this write replaces.
	Horizon time.Time
	// Outlives says that the horizon may pass this lease's own end: what it
	// replaces was written with a longer TTL or already had a later horizon.
	Outlives bool
}

// Decision is the outcome of Decide: an answer, or a write that, once it is
// stored, makes Kind the answer.
type Decision struct {
	Kind  kinds.Kind
	Write *Next
	Text  string // for error kinds: one sentence for a person
}

// Decide says what command c means in state s. It is the whole of the lease
// protocol and pure: no clock, no I/O, no NATS.
func Decide(s State, c Command) Decision {
	live := s.isLease() && !s.Past && !s.Superseded
	current := live && s.Record.Holder == c.Holder && s.Revision == c.Revision
	foreign := s.Revision != 0 && !s.Tombstone && s.Record == nil

	if foreign && c.Op != OpEvict && c.Op != OpExpire {
		return Decision{Kind: kinds.Internal, Text: fmt.Sprintf("the record of this key, revision %d, was not written by this service (%s); evict that revision", s.Revision, s.Foreign)}
	}
	switch c.Op {
	case OpAcquire:
		switch {
		case !live:
			n := &Next{Expect: s.Revision, Event: Acquired, Holder: c.Holder, TTL: c.TTL, Meta: c.Meta, Previous: previous(s)} // P10
			n.inherit(s)
			return Decision{Kind: kinds.Granted, Write: n}
		case s.Record.Holder == c.Holder:
			return Decision{Kind: kinds.Granted}
		default:
			return Decision{Kind: kinds.Denied}
		}

	case OpRenew:
		if !current {
			return lost(s, live)
		}
		n := &Next{Expect: s.Revision, Event: Renewed, Holder: c.Holder, TTL: c.TTL, Meta: s.Record.Meta, Tenure: s.Record.AcquiredAt} // P11
		n.inherit(s)
		return Decision{Kind: kinds.Renewed, Write: n}

	case OpRelease:
		if !current {
			return lost(s, live)
		}
		return Decision{Kind: kinds.Released, Write: tombstone(&s.Entry, s.Revision, Released)}

	case OpEvict:
		if s.Revision == 0 || s.Revision != c.Revision || !live && !foreign {
			return lost(s, live)
		}
		n := tombstone(&s.Entry, s.Revision, Released)
		n.Evicted = true // P16, E4
		return Decision{Kind: kinds.Evicted, Write: n}

	case OpExpire:
		switch {
		case s.isLease() && s.Past && !s.Superseded && s.Revision == c.Revision:
			return Decision{Kind: kinds.Free, Write: tombstone(&s.Entry, s.Revision, Expired)}
		case (s.Revision == 0 || s.Superseded) && s.Prior != nil && s.Prior.isLease() && s.Prior.Revision == c.Revision:
			n := tombstone(s.Prior, s.Revision, Expired)
			if h := s.horizon(); h.After(n.Horizon) {
				n.Horizon = h
			}
			return Decision{Kind: kinds.Free, Write: n}
		}
		return Decision{Kind: kinds.Lost}

	default: // OpOwner
		if live {
			return Decision{Kind: kinds.Held}
		}
		return Decision{Kind: kinds.Free}
	}
}

// lost explains why holder and revision are not the current pair.
func lost(s State, live bool) Decision {
	text := "nobody holds this key: the lease expired or was released"
	switch {
	case live:
		text = "holder and revision are not the key's current pair: the lease was taken, superseded or renewed"
	case s.Tombstone && s.Record != nil && s.Record.Evicted:
		text = "nobody holds this key: the lease was evicted"
	}
	return Decision{Kind: kinds.Lost, Text: text}
}

// inherit carries the horizon of what n replaces.
func (n *Next) inherit(s State) {
	n.Horizon = s.horizon()
	switch {
	case s.Revision == 0:
		// Nothing stored: the server removed the last message at its end, and no
		// message goes before the horizon of its key has passed.
	case s.isLease():
		// An equal or longer TTL written later ends later: only a shorter one or
		// a horizon carried from before can be outlived.
		n.Outlives = s.Record.TTL() > n.TTL || !s.Record.Horizon.IsZero()
	default:
		n.Outlives = true
	}
}

// tombstone ends lease e with event ev, on condition that the key's last
// sequence is expect (E4).
func tombstone(e *Entry, expect uint64, ev Event) *Next {
	n := &Next{Expect: expect, Event: ev, Ended: e.Revision, Horizon: e.horizon()}
	if e.Record != nil {
		n.Holder, n.TTL, n.Meta, n.Tenure = e.Record.Holder, e.Record.TTL(), e.Record.Meta, e.Record.AcquiredAt
	}
	return n
}

// previous tells how the lease before an acquire ended, when s shows it. An
// expiry is told once: by its tombstone or, if the key was taken first, here.
func previous(s State) *Previous {
	switch {
	case s.Revision == 0 || s.Superseded:
		if s.Prior != nil && s.Prior.isLease() {
			return &Previous{Holder: s.Prior.Record.Holder, Revision: s.Prior.Revision, Ended: EndedExpired}
		}
	case s.Record == nil:
	case !s.Tombstone:
		return &Previous{Holder: s.Record.Holder, Revision: s.Revision, Ended: EndedExpired}
	case s.Record.Event == Released && s.Record.Holder != "":
		ended := EndedReleased
		if s.Record.Evicted {
			ended = EndedEvicted
		}
		return &Previous{Holder: s.Record.Holder, Revision: s.Record.Revision, Ended: ended}
	}
	return nil
}
