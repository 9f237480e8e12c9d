package fault

import (
	"fmt"
	"time"

	"github.com/leased/leased/service/kinds"
)

// writers finds for every message of the log the operation that wrote it, and
// says what is wrong where there is none, or where it came too late. Only one
// kind of operation may write twice: an acquire that the service sent again,
// after the lease that it had written without a verdict was over. Each such
// second write is an echo: an operation of unknown outcome that nobody called,
// but that the model must know of.
func (r *Run) writers() (echoes []Op, vs []Violation) {
	for key, ops := range ByKey(r.Ops) {
		if r.Foreign[key] {
			continue
		}
		wrote := map[*Op]*Entry{}   // the last message of each
		nonces := map[string]*Op{}  // writer of each nonce
		before := map[string]bool{} // nonces that were seen
		for _, e := range r.Log.ByKey[key] {
			if !e.Ours || e.Record.Event == evExpired {
				continue
			}
			bad := func(inv, format string, args ...any) {
				vs = append(vs, Violation{inv, key, fmt.Sprintf(format, args...) + ": " + e.String()})
			}
			if e.Record.Nonce == "" {
				bad("I9", "no nonce")
			}
			w := nonces[e.Record.Nonce]
			if before[e.Record.Nonce] {
				if f := wrote[w]; w == nil || w.Call != Acquire || e.Time.Before(f.Ends()) {
					bad("I9", "a nonce again, last in %v", f)
				}
			} else {
				w = r.writer(e, ops, wrote)
			}
			before[e.Record.Nonce] = true
			nonces[e.Record.Nonce] = w
			if back := r.takenBack(e, ops); w == nil && back != nil {
				echoes = append(echoes, back...)
				continue
			}
			if w == nil {
				bad("I9", "no operation can have written this")
				continue
			}
			if w.Outcome != OK && !r.clockFault() {
				if late := r.Clock.At(e.Time) - landsBy(w, r.Windows) - int64(wallSlack); late > 0 {
					bad("I10", "landed %v after it had to, written by %v", time.Duration(late), w)
				}
			}
			if w.Outcome == Refused && !r.superseded(e, w.End) {
				bad("I9", "it stood when %v was refused", w)
			}
			if wrote[w] != nil || w.Outcome == OK && w.Call == Acquire && w.Got.Rev != e.Seq {
				echo := *w
				echo.Outcome, echo.Kind, echo.Got = Unknown, "", Lease{}
				echoes = append(echoes, echo)
			}
			wrote[w] = e
		}
	}
	return echoes, vs
}

// superseded says whether e was not the last word on its key at a time: it was
// replaced, or its lease was over. Of a tombstone only the next message is proof.
func (r *Run) superseded(e *Entry, at int64) bool {
	if r.clockFault() {
		return true
	}
	if e.IsLease() && r.Clock.At(e.Ends()) <= at+int64(wallSlack) {
		return true
	}
	for _, n := range r.Log.ByKey[e.Key] {
		if n.Seq > e.Seq {
			return r.Clock.At(n.Time) <= at+int64(wallSlack) || !r.Log.complete(e.Seq, n.Seq)
		}
	}
	return !r.Log.complete(e.Seq, ^uint64(0))
}

// writer picks the likeliest writer of e: who was told so, or else the latest of
// those that do not know, or else one that wrote before.
func (r *Run) writer(e *Entry, ops []Op, wrote map[*Op]*Entry) (best *Op) {
	rank := 0
	exp, _ := e.Expected()
	at := r.Clock.At(e.Time)
	for i := range ops {
		op := &ops[i]
		told, mine := false, false
		switch e.Record.Event {
		case evAcquired:
			mine = op.Call == Acquire && op.Holder == e.Record.Holder && op.TTL == e.TTL()
			told = op.Call == Acquire && op.Holder == e.Record.Holder && op.Got.Rev == e.Seq && op.Got.TTL == e.TTL()
		case evRenewed:
			mine = op.Call == Renew && op.Holder == e.Record.Holder && op.Revision == exp && op.TTL == e.TTL()
			told = mine && op.Got.Rev == e.Seq
		case evReleased:
			mine = (op.Call == Release && !e.Record.Evicted && op.Holder == e.Record.Holder || op.Call == Evict && e.Record.Evicted) && op.Revision == exp
			told = mine
		}
		told = told && op.Outcome == OK
		slow := op.slow()
		// A leader that was deposed may refuse at once what the new one stores.
		unsure := op.Outcome == Unknown || op.Outcome == Refused && (slow || isStale(op, r.Windows))
		mine = mine && (r.clockFault() || at > op.Start-int64(wallSlack))
		by := op.End // a refusal is final
		if op.Outcome == Unknown {
			by = landsBy(op, r.Windows)
		}
		inTime := r.clockFault() || at <= by+int64(wallSlack)
		n := 0
		switch last := wrote[op]; {
		case told:
			n = 6
		case !mine || op.Bogus:
		case unsure && last == nil && inTime && op.Outcome == Unknown:
			n = 5
		case unsure && last == nil && inTime:
			n = 4
		case unsure && last != nil && op.Call == Acquire && !e.Time.Before(last.Ends()):
			n = 3
		case op.Outcome == OK && op.Call == Acquire && slow && e.Seq < op.Got.Rev && (last == nil || !e.Time.Before(last.Ends())):
			// The lease it was told of came after this one was over.
			if final := r.Log.bySeq[op.Got.Rev]; final == nil || !final.Time.Before(r.ended(e)) {
				n = 2
			}
		case op.Outcome == OK && op.Call == Acquire && slow && e.Seq > op.Got.Rev && exp == 0 && last != nil && !e.Time.Before(last.Ends()):
			// An earlier try was held up until the key held nothing again.
			if r.clockFault() || at <= landsBy(op, r.Windows)+int64(wallSlack) {
				n = 2
			}
		case op.Outcome == Unknown && last == nil:
			n = 1
		}
		if n > 0 && n >= rank {
			best, rank = op, n
		}
	}
	return best
}

// ended is when the lease in e was over: it ran out, or was freed before that.
func (r *Run) ended(e *Entry) time.Time {
	for _, n := range r.Log.ByKey[e.Key] {
		if exp, _ := n.Expected(); n.Ours && !n.IsLease() && exp == e.Seq && n.Time.Before(e.Ends()) {
			return n.Time
		}
	}
	return e.Ends()
}

// takenBack finds the acquire that wrote e, or the lease that e released, and was
// answered unavailable: the service could not make sure that the bucket was still
// the one it knew and took the lease back before it answered. Others may have
// seen it meanwhile, which the operations returned stand for. Or the acquire waited and
// its caller heard nothing: then the service may have released what nobody took.
func (r *Run) takenBack(e *Entry, ops []Op) []Op {
	lease := e.Seq
	if e.Record.Event == evReleased {
		lease = e.Record.Revision
	}
	var pair []*Entry
	for _, o := range r.Log.ByKey[e.Key] {
		if exp, _ := o.Expected(); o.Seq == lease && o.Record.Event == evAcquired || o.Record.Event == evReleased && exp == lease && o.Record.Revision == lease {
			pair = append(pair, o)
		}
	}
	if len(pair) != 2 {
		return nil
	}
	for _, op := range ops {
		in := func(o *Entry) bool {
			at := r.Clock.At(o.Time)
			return o.Record.Holder == op.Holder && at > op.Start-int64(wallSlack) && at < op.End+int64(wallSlack)
		}
		if op.Call == Acquire && op.Wait > 0 && op.Outcome == Unknown && pair[1] == e &&
			e.Record.Holder == op.Holder && r.Clock.At(pair[0].Time) > op.Start-int64(wallSlack) {
			gave := op
			gave.Call, gave.Revision, gave.End = Release, lease, max(op.End, r.Clock.At(e.Time)+int64(wallSlack))
			return []Op{gave}
		}
		if op.Call == Acquire && op.Kind == kinds.Unavailable && in(pair[0]) && in(pair[1]) {
			took, gave := op, op
			took.Outcome, took.Kind = Unknown, ""
			gave.Call, gave.Revision, gave.Outcome, gave.Kind = Release, lease, Unknown, ""
			if o := pair[1]; o == e {
				return []Op{} // told with the first
			}
			return []Op{took, gave}
		}
	}
	return nil
}
