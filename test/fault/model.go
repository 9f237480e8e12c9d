package fault

import (
	"fmt"
	"hash/maphash"
	"math"
	"path/filepath"
	"sort"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/leased/leased/service/kinds"
)

// The model is one register per key, free or held, whose expiry is a step that
// it may take by itself: not before soonest, and by latest at the latest. Times
// are the run's clock and enter by the operations' own stamps, so a step stays
// a pure function.

// lease is a state of one key: held, free, or lapsed. Lapsed is free to all but
// the renewal (or release) that was on its way when the lease ended: until
// somebody else takes the key, the stream may still accept it, and the holder's
// tenure goes on.
type lease struct {
	held   bool
	lapsed bool
	holder string
	// rev is the revision held; 0 when the reply that named it was lost.
	rev uint64
	// soonest and latest bound the end of the lease if nobody touches it.
	soonest, latest int64
	// max is the highest revision anybody was told of this key.
	max uint64
}

func (l lease) free() lease { return lease{max: l.max} }

// lapse is l with its time over.
func (l lease) lapse() lease {
	l.held, l.lapsed, l.soonest = false, true, 0
	return l
}

// grant is the state after op took the key or extended it under revision rev.
func (l lease) grant(op *Op, holder string, rev uint64, late time.Duration) lease {
	g := lease{held: true, holder: holder, rev: rev, soonest: op.Start + int64(op.TTL) - int64(clockSlack), latest: Never, max: max(l.max, rev)}
	if op.Outcome == OK {
		g.latest = op.End + int64(op.TTL) + int64(late)
	}
	return g
}

// clockSlack is how far the wall clock that ends leases may run apart from the
// monotonic clock of the test over the life of one lease.
const clockSlack = 5 * time.Millisecond

// foundOut is the shortest time in which the service can have written, waited
// in vain for the verdict, and found that what it wrote is superseded.
const foundOut = 300 * time.Millisecond

// matches says whether l can be held by holder under rev, and returns l with
// its revision known.
func (l lease) matches(holder string, rev uint64) (lease, bool) {
	if !l.held || l.holder != holder {
		return l, false
	}
	return l.known(rev)
}

// catches says whether op, a renewal or release, can take effect in l: the pair
// is the current one, or was when op was sent and nobody came since.
func (l lease) catches(op *Op) (lease, bool) {
	if l.lapsed && l.holder == op.Holder && op.Start <= l.latest {
		return l.known(op.Revision)
	}
	return l.matches(op.Holder, op.Revision)
}

// known is l if its revision is or can be rev.
func (l lease) known(rev uint64) (lease, bool) {
	if l.rev != 0 {
		return l, l.rev == rev
	}
	if rev <= l.max {
		return l, false
	}
	l.rev, l.max = rev, rev
	return l, true
}

// Limits are the tunables of the model.
type Limits struct {
	// Late is how long after its end a lease may still be seen: 1 s on a
	// healthy server, plus the longest outage under faults.
	Late time.Duration
	// Windows are the faults of the run: they bound how late an unknown
	// operation may take effect, and when a read may be stale.
	Windows []Window
	// Timeout limits the search of one key.
	Timeout time.Duration
}

// step returns every state that s can be in after op, none if op is impossible.
func step(s lease, op *Op, late time.Duration) []lease {
	var next []lease
	if s.held && op.End >= s.soonest {
		next = apply(next, s.lapse(), op, late)
		if op.Start > s.latest {
			return next
		}
	}
	return apply(next, s, op, late)
}

// apply appends to next what op makes of s, expiry aside.
func apply(next []lease, s lease, op *Op, late time.Duration) []lease {
	slow := op.slow()
	switch {
	case op.Call == Wipe:
		next = append(next, s)
		if s.held {
			next = append(next, s.free())
		}
		return next

	case op.Outcome == Unknown && op.Call.writes():
		next = append(next, s)
		switch op.Call {
		case Acquire:
			if !s.held {
				next = append(next, s.grant(op, op.Holder, 0, late))
			}
		case Renew:
			if m, ok := s.catches(op); ok {
				next = append(next, m.grant(op, op.Holder, 0, late))
			}
		case Release:
			if m, ok := s.catches(op); ok {
				next = append(next, m.free())
			}
		case Evict:
			if m, ok := s.matches(s.holder, op.Revision); ok {
				next = append(next, m.free())
			}
		}
		return next
	}

	switch op.Call {
	case Acquire:
		if op.Outcome == OK {
			if !s.held && op.Got.Rev > s.max {
				next = append(next, s.grant(op, op.Holder, op.Got.Rev, late))
			}
			// The present holder gets its own lease back, unchanged.
			if m, ok := s.matches(op.Holder, op.Got.Rev); ok {
				next = append(next, m)
			}
			return next
		}
		if m, ok := s.matches(op.Got.Holder, op.Got.Rev); ok && op.Got.Holder != op.Holder {
			next = append(next, m)
		}
		if slow && !s.held {
			next = append(next, lease{held: true, holder: op.Holder, soonest: op.Start + int64(op.TTL) - int64(clockSlack), latest: Never, max: s.max})
		}

	case Renew:
		m, ok := s.catches(op)
		if op.Outcome == OK {
			if ok && op.Got.Rev > m.max {
				next = append(next, m.grant(op, op.Holder, op.Got.Rev, late))
			}
			return next
		}
		if !ok || s.lapsed || s.rev == 0 {
			next = append(next, s)
		}
		if ok && slow {
			next = append(next, lease{held: true, holder: op.Holder, soonest: op.Start + int64(op.TTL) - int64(clockSlack), latest: Never, max: m.max})
		}

	case Release, Evict:
		m, ok := s.catches(op)
		if op.Call == Evict {
			m, ok = s.matches(s.holder, op.Revision)
		}
		if op.Outcome == OK {
			if ok {
				next = append(next, m.free())
			}
			return next
		}
		if !ok || s.lapsed || s.rev == 0 {
			next = append(next, s)
		}
		if ok && slow {
			next = append(next, m.free())
		}

	case Owner, Forward:
		if !op.Got.Held {
			if !s.held {
				next = append(next, s)
			}
		} else if m, ok := s.matches(op.Got.Holder, op.Got.Rev); ok {
			next = append(next, m)
		}
	}
	return next
}

var seed = maphash.MakeSeed()

func model(late time.Duration) porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{lease{}} },
		Step: func(s, in, _ any) []any {
			var next []any
			for _, l := range step(s.(lease), in.(*Op), late) {
				next = append(next, l)
			}
			return next
		},
		Hash: func(s any) uint64 { return maphash.Comparable(seed, s.(lease)) },
		DescribeOperation: func(in, _ any) string {
			return in.(*Op).String()
		},
		DescribeState: func(s any) string {
			l := s.(lease)
			if !l.held {
				return fmt.Sprintf("free <=%d after %s@%d", l.max, l.holder, l.rev)
			}
			return fmt.Sprintf("%s@%d %.1f..%.1f", l.holder, l.rev, float64(l.soonest)/1e6, float64(l.latest)/1e6)
		},
	}
	return m.ToModel()
}

// register turns the operations of one key into a history for the model: what
// says nothing is left out, and an unknown operation returns when it must have
// landed if it ever does (I10).
func register(ops []Op, lim Limits) []porcupine.Operation {
	firstGrant := map[uint64]int64{}
	for i := range ops {
		op := &ops[i]
		if op.Outcome == OK && (op.Call == Acquire || op.Call == Renew) {
			if at, ok := firstGrant[op.Got.Rev]; !ok || op.Start < at {
				firstGrant[op.Got.Rev] = op.Start
			}
		}
	}
	var history []porcupine.Operation
	ghost := 1 << 20
	for i := range ops {
		op := &ops[i]
		ret := op.End
		client := op.Client
		switch {
		case op.Outcome == Busy:
			continue
		case op.Outcome == Unknown || op.Call == Forward:
			if op.Call == Owner || op.Call == Forward && op.Got.Rev == 0 && op.Kind != kinds.NotHeld {
				continue
			}
			if op.Call != Forward {
				ret = landsBy(op, lim.Windows)
				client, ghost = ghost, ghost+1
			}
		}
		if isRead(op, firstGrant) && isStale(op, lim.Windows) {
			continue
		}
		history = append(history, porcupine.Operation{ClientId: client, Input: withEnd(op, ret), Call: op.Start, Return: ret})
	}
	return history
}

// withEnd is op with the time of return that the model shall see.
func withEnd(op *Op, end int64) *Op {
	if op.End == end {
		return op
	}
	c := *op
	c.End = end
	return &c
}

// isRead says whether op's answer came from a read alone: the kinds of answer
// that the contract allows to be stale in a partition.
func isRead(op *Op, firstGrant map[uint64]int64) bool {
	switch op.Call {
	case Owner, Forward:
		return true
	case Renew, Release, Evict:
		return op.Outcome == Refused // lost, by a read
	case Acquire:
		return op.Outcome == Refused || op.Outcome == OK && firstGrant[op.Got.Rev] < op.Start
	}
	return false
}

// isStale says whether op overlaps a fault that can leave a deposed leader.
func isStale(op *Op, windows []Window) bool {
	for _, w := range windows {
		if w.Stale && op.End >= w.Start && op.Start <= w.End+int64(staleAfter) {
			return true
		}
	}
	return false
}

// lands is how long after the end of everything that held it up an operation
// without a verdict may still take effect.
const lands = 5 * time.Second

// landsBy is the latest time at which the unknown op may take effect: 5 s after
// its end or after the end of the last fault that touched it by then.
func landsBy(op *Op, windows []Window) int64 {
	by := op.End + int64(lands)
	for grown := true; grown; {
		grown = false
		for _, w := range windows {
			if w.Start <= by && w.End >= op.Start && w.End+int64(lands) > by {
				by, grown = w.End+int64(lands), true
			}
		}
	}
	return by
}

// Judgement is the checker's word on one key.
type Judgement struct {
	Key    string
	Result porcupine.CheckResult
	Ops    int
	Took   time.Duration

	history []porcupine.Operation
	info    porcupine.LinearizationInfo
	model   porcupine.Model
}

// CheckRegister judges the operations of one key (I1).
func CheckRegister(key string, ops []Op, lim Limits) Judgement {
	if lim.Timeout == 0 {
		lim.Timeout = time.Minute
	}
	j := Judgement{Key: key, Ops: len(ops), model: model(lim.Late), history: register(ops, lim)}
	start := time.Now()
	j.Result, j.info = porcupine.CheckOperationsVerbose(j.model, j.history, lim.Timeout)
	j.Took = time.Since(start)
	return j
}

// Picture writes porcupine's HTML of the judgement into dir and names the file.
func (j Judgement) Picture(dir string) (string, error) {
	path := filepath.Join(dir, j.Key+".html")
	return path, porcupine.VisualizePath(j.model, j.info, path)
}

// Stuck tells where the longest order that makes sense ends: its last
// operations, and those that fit in after none of them.
func (j Judgement) Stuck() string {
	var best []porcupine.Operation
	for _, part := range j.info.PartialLinearizationsOperations() {
		for _, order := range part {
			if len(order) > len(best) {
				best = order
			}
		}
	}
	in := map[*Op]bool{}
	s := fmt.Sprintf("%d of %d operations of %s can be ordered, ending in", len(best), len(j.history), j.Key)
	for i, o := range best {
		in[o.Input.(*Op)] = true
		if i >= len(best)-6 {
			s += "\n  " + o.Input.(*Op).String()
		}
	}
	s += "\n but then not"
	n := 0
	for _, o := range j.history {
		if op := o.Input.(*Op); !in[op] && n < 6 {
			s += "\n  " + op.String()
			n++
		}
	}
	return s
}

// ByKey splits operations by key, each key's in order of their start. A wipe
// names no key and goes to every key that was in use around it.
func ByKey(ops []Op) map[string][]Op {
	keys := map[string][]Op{}
	var wipes []Op
	for _, op := range ops {
		if op.Call == Wipe {
			wipes = append(wipes, op)
			continue
		}
		keys[op.Key] = append(keys[op.Key], op)
	}
	for key, of := range keys {
		first, last := int64(math.MaxInt64), int64(0)
		for _, op := range of {
			first, last = min(first, op.Start), max(last, op.End)
		}
		for _, w := range wipes {
			if w.End >= first && w.Start <= last {
				w.Key = key
				of = append(of, w)
			}
		}
		sort.SliceStable(of, func(i, j int) bool { return of[i].Start < of[j].Start })
		keys[key] = of
	}
	return keys
}
