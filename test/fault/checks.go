package fault

import (
	"fmt"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Run is everything a run recorded: what the checks judge.
type Run struct {
	Clock   *Clock
	Ops     []Op
	Log     *Snapshot
	Inbox   []Delivery
	Windows []Window
	End     int64 // when the last client had stopped

	// Healthy says that no fault was injected: promises that need a healthy
	// system are claimed too.
	Healthy bool
	// Counted are the service's own counts of replies, endpoint by kind, summed
	// over all instances; nil when an instance died and took its counts along.
	Counted map[Call]map[kinds.Kind]uint64
	// Foreign keys were written by a fault, not by the service.
	Foreign map[string]bool
}

// Violation is one broken promise.
type Violation struct {
	Invariant string
	Key       string
	Text      string
}

func (v Violation) String() string { return v.Invariant + " " + v.Key + ": " + v.Text }

// Check is one linear-time check over a whole run.
type Check struct {
	ID   string
	Says string
	run  func(*Run) []Violation
}

// Checks are all of them, in the order of their invariants. I1, I11 and I12 are
// the model's; I18 is asked of the living system by the runner.
var Checks = []Check{
	{"I2", "windows of different holders never overlap", checkExclusive},
	{"I3", "fences grow, and none is issued twice", checkFences},
	{"I4", "a grant sticks until its time is over", checkSticks},
	{"I5", "a release is final", checkReleases},
	{"I6", "a wrong pair changes nothing", checkHandsOff},
	{"I7", "a lease ends when it must", checkEnds},
	{"I8", "every stored message ends by itself, in exactly its time", checkTTL},
	{"I9", "ok is one stored message, a refusal is none; nothing lands late (I10)", checkStored},
	{"I12", "every reply about a revision says the same, and left_ms is true", checkReplies},
	{"I13", "a forward is processed at most once, under the current fence", checkForwards},
	{"I14", "a forward is bounded", checkBounded},
	{"I15", "events are ordered, and an expiry is told once", checkEvents},
	{"I20", "counts are true", checkCounts},
	{"wait", "a key that becomes free goes to one that waits for it", checkWaiters},
	{"kinds", "no internal, invalid or unsupported reply to a good request", checkKinds},
}

// Judge runs all checks.
func (r *Run) Judge() []Violation {
	var all []Violation
	for _, c := range Checks {
		all = append(all, c.run(r)...)
	}
	return all
}

// wallSlack is how far a server's message time, read as a time of the run's
// clock, can be off.
const wallSlack = 20 * time.Millisecond

// quiet says that no fault touched [start, end], the 5 s before included.
func (r *Run) quiet(start, end int64) bool {
	for _, w := range r.Windows {
		if w.Start <= end && w.End+int64(lands) >= start {
			return false
		}
	}
	return true
}

// sluggish is how slow the machine was around [start, end]: the longest that a
// plain read took. Promises of a time are held to what a loaded machine can keep.
func (r *Run) sluggish(start, end int64) (d time.Duration) {
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Call == Owner && op.End >= start-int64(time.Second) && op.Start <= end+int64(time.Second) {
			d = max(d, time.Duration(op.End-op.Start))
		}
	}
	return d
}

// clockFault says whether a server's clock was moved at all: leases that end by
// the server's clock are then not held to the test's.
func (r *Run) clockFault() bool {
	for _, w := range r.Windows {
		if w.Clock {
			return true
		}
	}
	return false
}

// holderKey names one holder on one key.
type holderKey struct{ key, holder string }

// window is the time in which a holder may act.
type window struct {
	holderKey
	from, until int64
	rev         uint64
	op          *Op
}

// windows gives, for every grant of a run, the time in which its holder may act
// by the contract's rule: from the reply until the sending of the earliest call
// that can have written the revision, plus its TTL, cut by the holder's own
// release, by an eviction and by a renewal that makes it shorter.
func (r *Run) windows() map[string][]window {
	type call struct {
		start int64
		ttl   time.Duration
	}
	firstOK := map[string]map[uint64]call{} // key, revision: the first call that was told of it
	lost := map[holderKey][]*Op{}           // acquires and renewals without a verdict
	ends := map[string][]*Op{}              // releases and evictions that may have worked
	renews := map[holderKey][]*Op{}         // renewals that may have worked
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Call == Renew && op.Outcome != Busy {
			k := holderKey{op.Key, op.Holder}
			renews[k] = append(renews[k], op)
		}
		switch {
		case op.Call == Acquire || op.Call == Renew:
			if op.Outcome == Unknown {
				k := holderKey{op.Key, op.Holder}
				lost[k] = append(lost[k], op)
			}
			if op.Outcome == OK {
				m := firstOK[op.Key]
				if m == nil {
					m = map[uint64]call{}
					firstOK[op.Key] = m
				}
				if c, ok := m[op.Got.Rev]; !ok || op.Start < c.start {
					m[op.Got.Rev] = call{op.Start, op.Got.TTL}
				}
			}
		case (op.Call == Release || op.Call == Evict) && (op.Outcome == OK || op.Outcome == Unknown || op.slow()):
			ends[op.Key] = append(ends[op.Key], op)
		}
	}
	all := map[string][]window{}
	add := func(op *Op, holder string, start int64, d time.Duration) {
		w := window{holderKey{op.Key, holder}, op.End, start + int64(d), op.Got.Rev, op}
		for _, e := range ends[op.Key] {
			if (e.Call == Evict || e.Holder == holder) && e.End >= start && e.Start < w.until {
				w.until = max(w.from, e.Start)
			}
		}
		// A renewal may make the lease shorter, as soon as it is sent; without a
		// verdict it may do so any time later.
		for _, n := range renews[w.holderKey] {
			if n.Start > start && (n.End >= w.from || n.Outcome == Unknown) {
				w.until = min(w.until, n.Start+int64(n.TTL))
			}
		}
		if w.from < w.until {
			all[op.Key] = append(all[op.Key], w)
		}
	}
	earliest := func(op *Op, holder string, start int64) (int64, bool) {
		found := false
		for _, l := range lost[holderKey{op.Key, holder}] {
			if l.Start < op.End && l.TTL == op.Got.TTL && (!found || l.Start < start) {
				start, found = min(start, l.Start), true
			}
		}
		return start, found
	}
	// unheard says whether op is told of a lease that an acquire may have got that waited
	// and had no reply: its holder must renew before it acts, for the grant may be on its
	// way back.
	unheard := func(op *Op) bool {
		e := r.Log.bySeq[op.Got.Rev]
		return e != nil && r.Clock.At(e.Time) < op.Start && slices.ContainsFunc(lost[holderKey{op.Key, op.Holder}], func(l *Op) bool {
			return l.Call == Acquire && l.Wait > 0 && l.Start < op.Start
		})
	}
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Got.Rev == 0 {
			continue
		}
		switch {
		case op.Call == Acquire && op.Outcome == OK && unheard(op):
		case op.Call == Acquire && op.Outcome == OK:
			// It may be told of its own renewal whose reply was lost.
			start, _ := earliest(op, op.Holder, firstOK[op.Key][op.Got.Rev].start)
			add(op, op.Holder, start, op.Got.TTL)
		case op.Call == Renew && op.Outcome == OK:
			add(op, op.Holder, op.Start, op.TTL)
		case op.Call == Owner && op.Outcome == OK && op.Got.Held && op.Holder == op.Got.Holder:
			// A holder that lost the reply of its renewal asks who owns the key.
			if _, known := firstOK[op.Key][op.Got.Rev]; !known {
				if start, ok := earliest(op, op.Holder, op.Start); ok {
					add(op, op.Holder, start, op.Got.TTL)
				}
			}
		}
	}
	return all
}

func checkExclusive(r *Run) (vs []Violation) {
	if r.clockFault() {
		return nil
	}
	for key, ws := range r.windows() {
		sort.Slice(ws, func(i, j int) bool { return ws[i].from < ws[j].from })
		// The two longest windows so far, of different holders: one of them is
		// not the next one's.
		var best, second *window
		for i := range ws {
			w := &ws[i]
			for _, o := range []*window{best, second} {
				if o != nil && o.holder != w.holder && o.until > w.from {
					vs = append(vs, Violation{"I2", key, fmt.Sprintf("%s may act until %.1f ms by %v, but %v", o.holder, float64(o.until)/1e6, o.op, w.op)})
				}
			}
			switch {
			case best == nil || w.holder == best.holder && w.until > best.until:
				best = w
			case w.holder == best.holder:
			case w.until > best.until:
				best, second = w, best
			case second == nil || w.until > second.until:
				second = w
			}
		}
	}
	return vs
}

// issues are the operations whose reply brought a fence that nobody can have
// been told before: every ok renewal, and every ok acquire whose holder had no
// acquire or renewal on the way.
func (r *Run) issues() []*Op {
	var ops []*Op
	told := map[holderKey]map[uint64]bool{}
	dirty := map[holderKey]bool{}
	byStart := make([]*Op, len(r.Ops))
	for i := range r.Ops {
		byStart[i] = &r.Ops[i]
	}
	sort.SliceStable(byStart, func(i, j int) bool { return byStart[i].Start < byStart[j].Start })
	for _, op := range byStart {
		if op.Call != Acquire && op.Call != Renew {
			continue
		}
		k := holderKey{op.Key, op.Holder}
		switch op.Outcome {
		case Unknown:
			dirty[k] = true
		case OK:
			if told[k] == nil {
				told[k] = map[uint64]bool{}
			}
			if op.Call == Renew || !dirty[k] && !told[k][op.Got.Rev] {
				ops = append(ops, op)
			}
			told[k][op.Got.Rev] = true
		}
	}
	return ops
}

func checkFences(r *Run) (vs []Violation) {
	owner := map[uint64]*Op{}
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Outcome != OK || op.Call != Acquire && op.Call != Renew {
			continue
		}
		if o := owner[op.Got.Rev]; o != nil && (o.Key != op.Key || o.Holder != op.Holder || o.Call == Renew && op.Call == Renew) {
			vs = append(vs, Violation{"I3", op.Key, fmt.Sprintf("fence issued twice: %v and %v", o, op)})
		}
		if o := owner[op.Got.Rev]; o == nil || op.Call == Renew {
			owner[op.Got.Rev] = op
		}
	}
	byStart := r.issues()
	byEnd := append([]*Op(nil), byStart...)
	sort.Slice(byEnd, func(i, j int) bool { return byEnd[i].End < byEnd[j].End })
	var top *Op
	for _, y := range byStart {
		for len(byEnd) > 0 && byEnd[0].End < y.Start {
			if top == nil || byEnd[0].Got.Rev > top.Got.Rev {
				top = byEnd[0]
			}
			byEnd = byEnd[1:]
		}
		if top != nil && y.Got.Rev <= top.Got.Rev {
			vs = append(vs, Violation{"I3", y.Key, fmt.Sprintf("%v has no higher fence than the earlier %v", y, top)})
		}
	}
	vs = append(vs, r.logClashes()...)
	return vs
}

// logClashes are sequences under which the stream showed two messages.
func (r *Run) logClashes() (vs []Violation) {
	for _, c := range r.Log.Clashes {
		vs = append(vs, Violation{"I3", "", c.Text})
	}
	return vs
}

// sight is one look at a key: what it showed at some instant of [from, to].
type sight struct {
	from, to int64
	held     bool
	holder   string
	rev      uint64
	what     fmt.Stringer
}

// sights are all looks at all keys that were not allowed to be stale.
func (r *Run) sights() map[string][]sight {
	all := map[string][]sight{}
	for i := range r.Ops {
		op := &r.Ops[i]
		var s sight
		switch {
		case op.Call == Owner && op.Outcome == OK,
			op.Call == Forward && (op.Got.Rev != 0 || op.Kind == kinds.NotHeld),
			op.Call == Acquire && op.Outcome == Refused:
			if isStale(op, r.Windows) {
				continue
			}
			s = sight{op.Start, op.End, op.Got.Held, op.Got.Holder, op.Got.Rev, op}
		case op.Call == Acquire && op.Outcome == OK:
			s = sight{op.Start, op.End, true, op.Holder, op.Got.Rev, op}
		default:
			continue
		}
		all[op.Key] = append(all[op.Key], s)
	}
	for _, e := range r.Log.Entries {
		if e.IsLease() && !r.clockFault() {
			t := r.Clock.At(e.Time)
			all[e.Key] = append(all[e.Key], sight{t - int64(wallSlack), t + int64(wallSlack), true, e.Record.Holder, e.Seq, e})
		}
	}
	return all
}

func checkSticks(r *Run) (vs []Violation) {
	if r.clockFault() {
		return nil
	}
	sights := r.sights()
	byKey := ByKey(r.Ops)
	for key, ws := range r.windows() {
		for _, w := range ws {
			if w.op.Call == Owner {
				continue
			}
			until := w.until
			for i := range byKey[key] {
				op := &byKey[key][i]
				if op.Call == Wipe && op.End >= w.from {
					until = min(until, op.Start)
				}
			}
			for _, s := range sights[key] {
				if s.from <= w.from || s.to >= until {
					continue
				}
				if !s.held || s.holder != w.holder || s.rev < w.rev {
					vs = append(vs, Violation{"I4", key, fmt.Sprintf("%v stands until %.1f ms, but %v", w.op, float64(until)/1e6, s.what)})
				}
			}
		}
	}
	return vs
}

func checkReleases(r *Run) (vs []Violation) {
	sights := r.sights()
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Call != Release || op.Outcome != OK {
			continue
		}
		for _, s := range sights[op.Key] {
			if s.from > op.End && s.held && s.holder == op.Holder && s.rev <= op.Revision {
				vs = append(vs, Violation{"I5", op.Key, fmt.Sprintf("%v, but later %v", op, s.what)})
			}
		}
	}
	return vs
}

func checkHandsOff(r *Run) (vs []Violation) {
	right := map[string]bool{} // key holder revision: named by a call that had every right to
	name := func(key, holder string, rev uint64) string { return fmt.Sprint(key, " ", holder, " ", rev) }
	for i := range r.Ops {
		op := &r.Ops[i]
		if !op.Bogus && (op.Call == Renew || op.Call == Release) {
			right[name(op.Key, op.Holder, op.Revision)] = true
		}
	}
	wrong := map[string]*Op{}
	for i := range r.Ops {
		op := &r.Ops[i]
		if !op.Bogus {
			continue
		}
		if op.Outcome == OK {
			vs = append(vs, Violation{"I6", op.Key, fmt.Sprintf("a pair that was never right: %v", op)})
		}
		wrong[name(op.Key, op.Holder, op.Revision)] = op
	}
	for _, e := range r.Log.Entries {
		if !e.Ours || e.Record.Event == evAcquired || e.Record.Event == evExpired || e.Record.Evicted {
			continue
		}
		rev, _ := e.Expected()
		n := name(e.Key, e.Record.Holder, rev)
		if op := wrong[n]; op != nil && !right[n] {
			vs = append(vs, Violation{"I6", e.Key, fmt.Sprintf("%v was stored: %v", op, e)})
		}
	}
	return vs
}

// checkEnds: a lease is over at its end, whatever the server has swept. The
// service proves it by the server's clock, so no fault but a clock's excuses an
// operation that began after the end and still found the lease.
func checkEnds(r *Run) (vs []Violation) {
	if r.clockFault() {
		return nil
	}
	latest := map[uint64]int64{} // revision: its end at the latest
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Outcome == OK && (op.Call == Renew || op.Call == Acquire) {
			end := op.End + int64(op.Got.TTL)
			if old, ok := latest[op.Got.Rev]; !ok || end < old {
				latest[op.Got.Rev] = end
			}
		}
	}
	for _, e := range r.Log.Entries {
		if e.IsLease() {
			end := r.Clock.At(e.Ends()) + int64(wallSlack)
			if old, ok := latest[e.Seq]; !ok || end < old {
				latest[e.Seq] = end
			}
		}
	}
	for i := range r.Ops {
		op := &r.Ops[i]
		rev := op.Got.Rev
		switch op.Call {
		case Renew, Release, Evict:
			if rev = op.Revision; op.Outcome != OK {
				continue
			}
		}
		if end, ok := latest[rev]; ok && rev != 0 && op.Start > end {
			vs = append(vs, Violation{"I7", op.Key, fmt.Sprintf("the lease ended by %.1f ms, but %v", float64(end)/1e6, op)})
		}
	}
	return vs
}

// headerTTL reads a Nats-TTL as the server does: a duration or whole seconds.
func headerTTL(s string) (time.Duration, bool) {
	if n, err := strconv.Atoi(s); err == nil {
		return time.Duration(n) * time.Second, true
	}
	d, err := time.ParseDuration(s)
	return d, err == nil && d > 0
}

const (
	// tombstoneLives is the least time a tombstone outlives its key's horizon.
	tombstoneLives = 32 * time.Second
	// ttlSlack covers the cut to whole seconds and the estimate of the clock.
	ttlSlack = 1500 * time.Millisecond
	// ttlExcess is how much longer than needed a message may live at most.
	ttlExcess = 90 * time.Second
	// horizonSlack is by how much an earlier revision may outlive a later one
	// unnoticed: the error of a clock read over the network.
	horizonSlack = 250 * time.Millisecond
)

// Wrong tells what in e alone is not as the service writes it.
func (e *Entry) Wrong() (why []string) {
	if !e.Ours {
		return []string{fmt.Sprintf("a message that is not ours (headers %v)", e.Header)}
	}
	if e.Header.Get(hdrEvent) != e.Record.Event {
		why = append(why, fmt.Sprintf("header says %q", e.Header.Get(hdrEvent)))
	}
	if _, ok := e.Expected(); !ok {
		why = append(why, "no expected sequence")
	}
	if e.Header.Get(hdrStream) != bucketStream {
		why = append(why, "no expected stream")
	}
	if e.Header.Get(hdrRollup) != "" || e.Header.Get(hdrMsgID) != "" || e.Header.Get(hdrReason) != "" {
		why = append(why, "rolls up, has a message id or is a marker")
	}
	switch ttl, ok := headerTTL(e.Header.Get(hdrTTL)); {
	case !ok:
		why = append(why, "no TTL: lives for ever")
	case e.IsLease() && ttl < e.TTL():
		why = append(why, "Nats-TTL is shorter than the lease")
	case !e.IsLease() && e.Header.Get(hdrKVOp) != "PURGE":
		why = append(why, "a tombstone without KV-Operation PURGE")
	}
	return why
}

func checkTTL(r *Run) (vs []Violation) {
	for key, entries := range r.Log.ByKey {
		if r.Foreign[key] {
			continue
		}
		var horizon time.Time // the latest end of all earlier revisions that were seen
		for _, e := range entries {
			bad := func(format string, args ...any) {
				vs = append(vs, Violation{"I8", key, fmt.Sprintf(format, args...) + ": " + e.String()})
			}
			for _, why := range e.Wrong() {
				bad("%s", why)
			}
			ttl, ok := headerTTL(e.Header.Get(hdrTTL))
			if !e.Ours || !ok || r.clockFault() {
				// Until it reads the moved clock again the service reckons with the old
				// one: what is left of a horizon is anything.
				continue
			}
			left := horizon.Sub(e.Time)
			switch {
			case e.IsLease() && ttl == e.TTL():
				if left > ttl+horizonSlack {
					bad("an earlier revision outlives it by %v and can come back", left-ttl)
				}
			case e.IsLease():
				own := left
				if !e.Record.Horizon.IsZero() {
					// As it was when the message was made: it can land long after.
					own = max(left, e.Record.Horizon.Sub(e.Record.WrittenAt))
				}
				switch {
				case ttl < e.TTL(): // said above
				case own < e.TTL():
					bad("Nats-TTL is not the lease's, and no horizon asks for it")
				case ttl < left || ttl > max(own, 0)+ttlExcess:
					bad("Nats-TTL does not fit what is left of the horizon, %v", own)
				}
			default:
				if own := max(left, 0); ttl < own+tombstoneLives-ttlSlack || ttl > max(own, e.Record.Horizon.Sub(e.Time))+tombstoneLives+ttlExcess {
					bad("a tombstone's TTL does not fit what is left of the horizon, %v", own)
				}
			}
			if e.IsLease() && e.Ends().After(horizon) {
				horizon = e.Ends()
			}
		}
	}
	return vs
}

func checkStored(r *Run) (vs []Violation) {
	// What an ok reply says must be there.
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Outcome != OK {
			continue
		}
		bad := func(format string, args ...any) {
			vs = append(vs, Violation{"I9", op.Key, fmt.Sprintf("%v: ", op) + fmt.Sprintf(format, args...)})
		}
		switch op.Call {
		case Acquire, Renew:
			if !r.Log.covers(op.Got.Rev) {
				continue
			}
			e := r.Log.bySeq[op.Got.Rev]
			switch {
			case e.Key != op.Key || !e.IsLease() || e.Record.Holder != op.Holder:
				bad("stored is %v", e)
			case op.Call == Renew:
				if exp, _ := e.Expected(); e.Record.Event != evRenewed || exp != op.Revision || e.TTL() != op.TTL {
					bad("stored is %v", e)
				}
			}
		case Release, Evict:
			n, upTo := 0, ^uint64(0)
			for _, e := range r.Log.ByKey[op.Key] {
				if exp, ok := e.Expected(); ok && exp == op.Revision && e.Ours && e.Record.Event == evReleased {
					n++
				}
				if e.Seq > op.Revision && e.Seq < upTo {
					upTo = e.Seq
				}
			}
			if n > 1 || n == 0 && r.Log.covers(op.Revision) && r.Log.complete(op.Revision, upTo) {
				bad("%d tombstones stored", n)
			}
		}
	}
	// What is there must be somebody's.
	_, bad := r.writers()
	return append(vs, bad...)
}

func checkReplies(r *Run) (vs []Violation) {
	type fact struct {
		lease Lease
		op    *Op
	}
	facts := map[uint64]fact{}
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Got.Rev == 0 || op.Got.Acquired.IsZero() {
			continue
		}
		l := op.Got
		l.Left = 0
		if f, ok := facts[l.Rev]; !ok {
			facts[l.Rev] = fact{l, op}
		} else if f.lease != l {
			vs = append(vs, Violation{"I12", op.Key, fmt.Sprintf("two stories of one revision: %v %+v and %v %+v", f.op, f.lease, op, l)})
		}
		if op.Got.Left > op.Got.TTL || op.Got.Left < 0 {
			vs = append(vs, Violation{"I12", op.Key, fmt.Sprintf("left_ms %v of %v: %v", op.Got.Left, op.Got.TTL, op)})
		}
		e := r.Log.bySeq[op.Got.Rev]
		if e == nil || !e.Ours {
			continue
		}
		if !e.Record.AcquiredAt.Equal(l.Acquired) || e.TTL() != l.TTL || e.Record.Holder != l.Holder {
			vs = append(vs, Violation{"I12", op.Key, fmt.Sprintf("%v %+v, but stored is %v", op, l, e)})
		}
		if truth := r.Clock.At(e.Ends()) - op.Start + int64(wallSlack); !r.clockFault() && int64(op.Got.Left) > max(truth, 0) {
			vs = append(vs, Violation{"I12", op.Key, fmt.Sprintf("left_ms %v, but no more than %v was left: %v", op.Got.Left, time.Duration(truth), op)})
		}
	}
	return vs
}

// Delivery is one request that reached a holder's inbox.
type Delivery struct {
	ForwardID string
	Key       string
	Holder    string
	Fence     string
	At        int64
	Processed bool
	Tag       string // what the handler answered with, if it answered
	Extra     string // headers that must not pass
}

func checkForwards(r *Run) (vs []Violation) {
	byID := map[string][]Delivery{}
	for _, d := range r.Inbox {
		byID[d.ForwardID] = append(byID[d.ForwardID], d)
	}
	ops := map[string]*Op{}
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Call != Forward {
			continue
		}
		ops[op.ForwardID] = op
		bad := func(format string, args ...any) {
			vs = append(vs, Violation{"I13", op.Key, fmt.Sprintf(format, args...) + ": " + op.String()})
		}
		ds := byID[op.ForwardID]
		sort.Slice(ds, func(i, j int) bool { return ds[i].At < ds[j].At })
		processed := 0
		for i, d := range ds {
			if processed > 0 {
				bad("sent again after an attempt that was processed, to %s", d.Holder)
			}
			if d.Processed {
				processed++
			}
			if d.Key != op.Key {
				bad("came under key %s", d.Key)
			}
			if d.Extra != "" {
				bad("headers of the caller passed: %s", d.Extra)
			}
			fence, err := strconv.ParseUint(d.Fence, 10, 64)
			if err != nil {
				bad("fence %q", d.Fence)
				continue
			}
			if i == len(ds)-1 && op.Kind == kinds.Forwarded && op.Got.Rev != fence {
				bad("reply names revision %d, the attempt had fence %d", op.Got.Rev, fence)
			}
			vs = append(vs, r.checkFence(op, d, fence)...)
			if by := op.Start + int64(op.Timeout) + int64(forwardSlack); d.At > by && r.quiet(op.Start, d.At) && d.At > by+2*int64(r.sluggish(op.Start, d.At)) {
				vs = append(vs, Violation{"I14", op.Key, fmt.Sprintf("an attempt %.1f ms after the call was over: %v", float64(d.At-by)/1e6, op)})
			}
		}
		if len(ds) > 3 || op.Attempts > 3 || op.Outcome == OK && op.Attempts < len(ds) {
			bad("%d attempts seen, %d told", len(ds), op.Attempts)
		}
		switch {
		case op.Kind == kinds.Forwarded:
			if processed != 1 || ds[len(ds)-1].Tag != op.AnswerOf {
				bad("answer %q is not that of the attempt that ran", op.AnswerOf)
			}
		case op.Outcome == Refused || op.Outcome == Busy:
			if processed > 0 {
				bad("processed in spite of the answer")
			}
		}
	}
	for id, ds := range byID {
		if ops[id] == nil {
			vs = append(vs, Violation{"I13", ds[0].Key, fmt.Sprintf("a request that nobody forwarded: %+v", ds[0])})
		}
	}
	return vs
}

// checkFence holds one attempt against the log: the fence must be a revision
// of that holder on that key, and must not have been superseded before the
// forward began.
func (r *Run) checkFence(op *Op, d Delivery, fence uint64) (vs []Violation) {
	if !r.Log.covers(fence) {
		return nil
	}
	e := r.Log.bySeq[fence]
	if e.Key != d.Key || !e.IsLease() || e.Record.Holder != d.Holder {
		return []Violation{{"I13", d.Key, fmt.Sprintf("sent to %s under fence %d, but stored is %v", d.Holder, fence, e)}}
	}
	if isStale(op, r.Windows) || r.clockFault() {
		return nil
	}
	// A message counts from when the test had seen it: a cluster stamps it before
	// it commits it.
	for _, n := range r.Log.ByKey[d.Key] {
		if n.Seq > fence && n.Seen < op.Start {
			return []Violation{{"I13", d.Key, fmt.Sprintf("sent to %s under fence %d, superseded before by %v: %v", d.Holder, fence, n, op)}}
		}
	}
	return nil
}

// forwardSlack is how long after its time-out a forward may answer.
const forwardSlack = 250 * time.Millisecond

func checkBounded(r *Run) (vs []Violation) {
	for i := range r.Ops {
		op := &r.Ops[i]
		if over := op.End - op.Start - int64(op.Timeout+forwardSlack); op.Call == Forward && over > 0 && r.quiet(op.Start, op.End) && over > 2*int64(r.sluggish(op.Start, op.End)) {
			vs = append(vs, Violation{"I14", op.Key, fmt.Sprintf("took %v of %v: %v", time.Duration(op.End-op.Start), op.Timeout, op)})
		}
	}
	return vs
}

// expiryTold is within which time after its end an expiry is told on a healthy
// system: 3 s, and what the machine needs to tell it.
const expiryTold = 3500 * time.Millisecond

func checkEvents(r *Run) (vs []Violation) {
	vs = append(vs, r.eventsOrdered()...)
	for key, entries := range r.Log.ByKey {
		if r.Foreign[key] {
			continue
		}
		leases := map[uint64]*Entry{}
		told := map[uint64]*Entry{} // by the revision whose expiry it tells
		var prev *Entry
		for _, e := range entries {
			bad := func(format string, args ...any) {
				vs = append(vs, Violation{"I15", key, fmt.Sprintf(format, args...) + ": " + e.String()})
			}
			if !e.Ours {
				prev = e
				continue
			}
			// lapse is the revision whose expiry e tells.
			var lapse uint64
			var by string
			switch {
			case e.Record.Event == evExpired:
				lapse, by = e.Record.Revision, e.Record.Holder
			case e.Record.Event == evAcquired && e.Record.Previous != nil && e.Record.Previous.Ended == "expired":
				lapse, by = e.Record.Previous.Revision, e.Record.Previous.Holder
			}
			if lapse != 0 {
				l := leases[lapse]
				switch {
				case l == nil && r.Log.covers(lapse):
					bad("tells the end of revision %d, which was no lease of this key", lapse)
				case l != nil && l.Record.Holder != by:
					bad("tells the end of %v for holder %s", l, by)
				case l != nil && e.Time.Before(l.Ends()) && !r.clockFault():
					bad("tells the end of %v %v before it", l, l.Ends().Sub(e.Time))
				}
				// What was made before the other was stored, and landed late, may
				// repeat it: a writer can be held up between its look and its write,
				// and under faults its look may be a second old, and as old as a
				// partition where its server is on the wrong side.
				late := func(after *Entry) bool {
					look := e.Record.WrittenAt
					if !r.Healthy {
						at := r.Clock.At(look)
						look = look.Add(-time.Second - 2*r.sluggish(at-int64(2*time.Second), at))
						if isStale(&Op{Start: at, End: at}, r.Windows) {
							return true
						}
					}
					return !look.After(after.Time)
				}
				if t := told[lapse]; t != nil && !late(t) {
					bad("tells an expiry that was told before by %v", t)
				}
				told[lapse] = e
				if prev != nil && prev.IsLease() && prev.Seq > lapse && !late(prev) {
					bad("tells the end of revision %d, which %v had replaced", lapse, prev)
				}
			}
			if p := e.Record.Previous; p != nil && p.Ended != "expired" && prev != nil && r.Log.complete(prev.Seq, e.Seq) && e.Record.WrittenAt.After(prev.Time) {
				ended := "released"
				if prev.Record.Evicted {
					ended = "evicted"
				}
				if prev.Record.Event != evReleased || prev.Record.Revision != p.Revision || p.Ended != ended {
					bad("previous is %+v, but stored before was %v", *p, prev)
				}
			}
			// The lease before e ended by e itself, or it lapsed.
			if prev != nil && prev.IsLease() && r.Healthy && r.Log.complete(prev.Seq, e.Seq) {
				exp, _ := e.Expected()
				ends := exp == prev.Seq && (e.Record.Event == evRenewed || e.Record.Event == evReleased)
				if !ends && told[prev.Seq] == nil {
					bad("the expiry of %v is told by nobody", prev)
				}
				if told[prev.Seq] == e && e.Record.Event == evExpired && e.Time.Sub(prev.Ends()) > expiryTold+2*r.sluggish(r.Clock.At(prev.Ends()), r.Clock.At(e.Time)) {
					bad("tells the expiry %v late", e.Time.Sub(prev.Ends()))
				}
			}
			if e.IsLease() {
				leases[e.Seq] = e
			}
			prev = e
		}
		if prev != nil && prev.IsLease() && r.Healthy && r.Clock.At(prev.Ends())+int64(expiryTold+time.Second) < r.End && r.Log.complete(prev.Seq, ^uint64(0)) {
			vs = append(vs, Violation{"I15", key, "the expiry was told by nobody: " + prev.String()})
		}
	}
	return vs
}

// eventsOrdered judges the change events as each subscriber got them.
func (r *Run) eventsOrdered() (vs []Violation) {
	type stream struct {
		subscriber int
		key        string
	}
	last := map[stream]*Event{}
	for i := range r.Log.Events {
		ev := &r.Log.Events[i]
		if r.Foreign[ev.Key] {
			continue
		}
		bad := func(format string, args ...any) {
			vs = append(vs, Violation{"I15", ev.Key, fmt.Sprintf(format, args...) + fmt.Sprintf(": event %d %s", ev.Seq, ev.Body)})
		}
		if ev.Seq == 0 || ev.Header.Get(hdrSubject) != bucketPrefix+ev.Key {
			bad("not from the stream (headers %v)", ev.Header)
			continue
		}
		s := stream{ev.Subscriber, ev.Key}
		prev := last[s]
		last[s] = ev
		if prev == nil {
			continue
		}
		switch {
		case ev.Seq == prev.Seq && string(ev.Body) == string(prev.Body) && !r.quiet(ev.Seen, ev.Seen):
			// Told twice across a change of leader; the same meaning.
		case ev.Seq < prev.Seq && isStale(&Op{Start: ev.Seen, End: ev.Seen}, r.Windows):
			// A leader that stood still tells what it had stored when it goes on.
			last[s] = prev
		case ev.Seq <= prev.Seq:
			bad("comes after %d", prev.Seq)
		case ev.Last > prev.Seq && r.Log.covers(ev.Last) && r.Log.bySeq[ev.Last].Key != ev.Key:
			bad("names %d as the one before, of another key", ev.Last)
		case ev.Last == prev.Seq:
			for _, e := range r.Log.ByKey[ev.Key] {
				if e.Seq > prev.Seq && e.Seq < ev.Seq {
					bad("hides %v", e)
				}
			}
		}
	}
	return vs
}

func checkCounts(r *Run) (vs []Violation) {
	if r.Counted == nil {
		return nil
	}
	seen := map[Call]map[kinds.Kind]uint64{}
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Kind == "" {
			if op.Outcome == Unknown {
				return nil // a reply nobody saw: nothing can be compared
			}
			continue
		}
		if seen[op.Call] == nil {
			seen[op.Call] = map[kinds.Kind]uint64{}
		}
		seen[op.Call][op.Kind]++
	}
	for call, of := range r.Counted {
		for kind, n := range of {
			if call == Renew {
				n += r.Counted["renew_many"][kind] // wire.go sends some renewals there
			}
			if call == "renew_many" {
				continue
			}
			if have := seen[call][kind]; have != n {
				vs = append(vs, Violation{"I20", "", fmt.Sprintf("%s %s: counted %d, seen %d", call, kind, n, have)})
			}
		}
	}
	for call, of := range seen {
		for kind, n := range of {
			if _, ok := r.Counted[call][kind]; !ok {
				vs = append(vs, Violation{"I20", "", fmt.Sprintf("%s %s: seen %d, never counted", call, kind, n)})
			}
		}
	}
	return vs
}

// wakeIn is the time in which a freed key goes to somebody who waits for it, on
// a healthy system.
const wakeIn = 700 * time.Millisecond

func checkWaiters(r *Run) (vs []Violation) {
	if !r.Healthy {
		return nil
	}
	waiting := map[string][]*Op{}
	for i := range r.Ops {
		if op := &r.Ops[i]; op.Call == Acquire && op.Wait > 0 {
			waiting[op.Key] = append(waiting[op.Key], op)
		}
	}
	for key, ops := range waiting {
		entries := r.Log.ByKey[key]
		for i, e := range entries {
			if !e.Ours {
				continue
			}
			// free is when nobody holds the key any more, taken when somebody does.
			free, taken := r.Clock.At(e.Time), int64(Never)
			if e.IsLease() {
				free = r.Clock.At(e.Ends())
			}
			if i+1 < len(entries) {
				next := entries[i+1]
				if taken = r.Clock.At(next.Time); next.Record.Event == evExpired {
					continue // judged from there
				}
				if !r.Log.complete(e.Seq, next.Seq) {
					continue
				}
			}
			for _, op := range ops {
				from, to := max(free, op.Start), min(taken, op.End)
				if time.Duration(to-from) > wakeIn && time.Duration(to-from) > wakeIn+2*r.sluggish(from, to) {
					vs = append(vs, Violation{"wait", key, fmt.Sprintf("free after %v for %v while %v waited", e, time.Duration(to-from).Round(time.Millisecond), op)})
				}
			}
		}
	}
	return vs
}

func checkKinds(r *Run) (vs []Violation) {
	for i := range r.Ops {
		op := &r.Ops[i]
		if r.Foreign[op.Key] {
			continue
		}
		switch op.Kind {
		case kinds.Internal:
			if strings.Contains(op.Text, "stopping") {
				continue
			}
		case kinds.Invalid, kinds.Unsupported:
			if op.Bogus {
				continue
			}
		default:
			continue
		}
		vs = append(vs, Violation{"kinds", op.Key, fmt.Sprintf("%v: %s", op, op.Text)})
	}
	return vs
}
