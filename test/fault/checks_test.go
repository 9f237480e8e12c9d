package fault

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// stored makes a message of the stream as the service must write it.
func stored(seq uint64, at int64, event, holder string, expect uint64, opts ...func(*Entry)) *Entry {
	e := &Entry{Seq: seq, Key: "k", Ours: true, Header: nats.Header{}}
	e.Record = Record{V: 1, Key: "k", Holder: holder, TTLMillis: 1000, Event: event, Nonce: fmt.Sprint("n", seq)}
	e.Seen = at * ms
	e.Header.Set(hdrEvent, event)
	e.Header.Set(hdrExpect, fmt.Sprint(expect))
	e.Header.Set(hdrStream, bucketStream)
	e.Header.Set(hdrTTL, "1s")
	if event == evReleased || event == evExpired {
		e.Header.Set(hdrKVOp, "PURGE")
		e.Header.Set(hdrTTL, "33s")
		e.Record.Revision = expect
	}
	for _, f := range opts {
		f(e)
	}
	return e
}

func header(name, value string) func(*Entry) {
	return func(e *Entry) {
		if value == "" {
			e.Header.Del(name)
		} else {
			e.Header.Set(name, value)
		}
	}
}

func ends(rev uint64) func(*Entry)        { return func(e *Entry) { e.Record.Revision = rev } }
func nonce(n string) func(*Entry)         { return func(e *Entry) { e.Record.Nonce = n } }
func ttlMillis(n int64) func(*Entry)      { return func(e *Entry) { e.Record.TTLMillis = n } }
func acquiredAt(t time.Time) func(*Entry) { return func(e *Entry) { e.Record.AcquiredAt = t } }
func horizonAt(at int64) func(*Entry) {
	return func(e *Entry) { e.Record.Horizon, e.Record.WrittenAt = wall(at), wall(e.Seen/ms) }
}
func writtenAt(at int64) func(*Entry)  { return func(e *Entry) { e.Record.WrittenAt = wall(at) } }
func replyAcquired(t time.Time) option { return func(o *Op) { o.Got.Acquired = t } }
func left(d time.Duration) option      { return func(o *Op) { o.Got.Left = d } }
func onKey(k string, o Op) Op          { o.Key = k; return o }
func bogus(o Op) Op                    { o.Bogus = true; return o }
func longTTL(d time.Duration, o Op) Op { o.TTL, o.Got.TTL = d, d; return o }
func waits(d time.Duration, o Op) Op   { o.Wait = d; return o }
func with(o Op, opts ...option) Op {
	for _, f := range opts {
		f(&o)
	}
	return o
}
func slow(d int64, o Op) Op { o.End = o.Start + d*ms; return o }

func prev(holder string, rev uint64, ended string) func(*Entry) {
	return func(e *Entry) {
		b, _ := json.Marshal(map[string]any{"previous": map[string]any{"holder": holder, "revision": rev, "ended": ended}})
		if err := json.Unmarshal(b, &e.Record); err != nil {
			panic(err)
		}
	}
}

var epoch = time.Now()

func wall(at int64) time.Time { return epoch.Round(0).Add(time.Duration(at * ms)) }

// runOf makes a run of operations and of a stream; its entries were stored when
// Seen says.
func runOf(ops []Op, entries ...*Entry) *Run {
	for i := range ops {
		ops[i].ID = i + 1
	}
	clock := &Clock{start: epoch}
	l := NewLog(clock)
	for _, e := range entries {
		e.Time = wall(e.Seen / ms)
		if e.Record.WrittenAt.IsZero() {
			e.Record.WrittenAt = e.Time
		}
		if e.Body == nil {
			e.Body = []byte(e.String())
		}
		seen, rec, ours := e.Seen, e.Record, e.Ours
		h := e.Header
		e.Header = nats.Header{}
		l.add(e)
		e.Seen, e.Record, e.Ours, e.Header = seen, rec, ours, h
	}
	return &Run{Clock: clock, Ops: ops, Log: l.Snapshot(), End: 60_000 * ms}
}

func forwarded(start, end int64, id, holder string, rev uint64, kind kinds.Kind, answer string) Op {
	o := op(Forward, "", 0, kind, at(start, end))
	o.ForwardID, o.Timeout, o.AnswerOf = id, time.Second, answer
	o.Got = Lease{Held: holder != "", Holder: holder, Rev: rev}
	if kind == kinds.Forwarded {
		o.Attempts = 1
	}
	return o
}

func event(seq, last uint64, sub int, body string) Event {
	return Event{Key: "k", Seq: seq, Last: last, Subscriber: sub, Seen: int64(seq) * ms, Body: []byte(body),
		Header: nats.Header{hdrSubject: {bucketPrefix + "k"}, hdrSeq: {fmt.Sprint(seq)}, hdrLast: {fmt.Sprint(last)}}}
}

// Every check is held against a run that keeps the promise (want "") and
// against runs that break it.
func TestChecks(t *testing.T) {
	aLife := []*Entry{stored(5, 5, evAcquired, "a", 0), stored(6, 105, evRenewed, "a", 5), stored(7, 205, evReleased, "a", 6), stored(8, 305, evAcquired, "b", 7)}
	aLifeOps := func() []Op {
		return []Op{granted(0, 10, "a", 5), renewed(100, 110, "a", 5, 6), released(200, 210, "a", 6), granted(300, 310, "b", 8)}
	}
	inbox := func(r *Run, ds ...Delivery) *Run { r.Inbox = ds; return r }
	healthy := func(r *Run) *Run { r.Healthy = true; return r }
	faulty := func(r *Run, ws ...Window) *Run { r.Windows = ws; return r }
	delivery := func(id string, at int64, processed bool, fence string) Delivery {
		return Delivery{ForwardID: id, Key: "k", Holder: "a", Fence: fence, At: at * ms, Processed: processed, Tag: "t" + id}
	}
	events := func(r *Run, evs ...Event) *Run { r.Log.Events = evs; return r }
	clash := func(r *Run) *Run { r.Log.Clashes = []Clash{{Text: "two stories"}}; return r }
	counted := func(r *Run, n uint64) *Run {
		r.Counted = map[Call]map[kinds.Kind]uint64{Acquire: {kinds.Granted: n, kinds.Denied: 0}}
		return r
	}

	for _, c := range []struct {
		name string
		want string // invariant that must be broken
		run  *Run
	}{
		{"a life in order", "", runOf(aLifeOps(), aLife...)},

		{"windows overlap", "I2", runOf([]Op{granted(0, 10, "a", 5), granted(900, 910, "b", 6)})},
		{"windows touch", "", runOf([]Op{granted(0, 10, "a", 5), granted(995, 1000, "b", 6)})},
		{"overlap by a renewal", "I2", runOf([]Op{granted(0, 10, "a", 5), renewed(900, 950, "a", 5, 6), granted(1500, 1510, "b", 7)})},
		{"released before", "", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), granted(25, 40, "b", 7)})},
		{"release without reply", "", runOf([]Op{granted(0, 10, "a", 5), noReply(20, Release, "a", 5), granted(40, 50, "b", 7)})},
		{"evicted before", "", runOf([]Op{granted(0, 10, "a", 5), op(Evict, "", 5, kinds.Evicted, at(20, 30)), granted(40, 50, "b", 8)})},
		{"shorter by a renewal that lands late", "", runOf([]Op{longTTL(3*time.Second, granted(0, 10, "a", 5)), noReply(500, Renew, "a", 5), longTTL(3*time.Second, granted(700, 710, "a", 5)), granted(1800, 1810, "b", 8)})},
		{"acquire tells its own lost renewal", "", runOf([]Op{longTTL(2*time.Second, granted(0, 10, "a", 5)), noReply(500, Renew, "a", 5), granted(1400, 1410, "a", 7), granted(1600, 1610, "b", 8)})},
		{"made shorter before", "", runOf([]Op{longTTL(5*time.Second, granted(0, 10, "a", 5)), renewed(20, 30, "a", 5, 6), granted(1100, 1110, "b", 7)})},
		{"counted from the call that wrote it", "", runOf([]Op{noReply(0, Acquire, "a", 0), granted(500, 510, "a", 5), granted(1005, 1010, "b", 6)})},
		{"renewal found by asking", "I2", runOf([]Op{granted(0, 10, "a", 5), noReply(800, Renew, "a", 5), with(held(950, 960, "a", 7), func(o *Op) { o.Holder = "a" }), granted(1500, 1510, "b", 8)})},

		{"fence lower than an earlier one of another key", "I3", runOf([]Op{granted(0, 10, "a", 50), onKey("other", granted(20, 30, "b", 49))})},
		{"fences of calls that overlap", "", runOf([]Op{granted(0, 10, "a", 50), onKey("other", granted(5, 30, "b", 49))})},
		{"fence twice", "I3", runOf([]Op{granted(0, 30, "a", 50), onKey("other", granted(20, 40, "b", 50))})},
		{"fence twice by one holder's renewals", "I3", runOf([]Op{renewed(0, 30, "a", 4, 50), renewed(10, 40, "a", 5, 50)})},
		{"idempotent acquire tells an old fence", "", runOf([]Op{granted(0, 10, "a", 50), onKey("other", granted(20, 30, "b", 60)), granted(40, 50, "a", 50)})},
		{"acquire tells an older write of its own", "", runOf([]Op{noReply(0, Acquire, "a", 0), onKey("other", granted(200, 230, "b", 60)), granted(340, 350, "a", 50)})},
		{"one sequence, two messages", "I3", clash(runOf(nil))},

		{"renewal wiped", "I4", runOf([]Op{granted(0, 10, "a", 5), renewed(900, 910, "a", 5, 6), isFree(1500, 1510)})},
		{"renewal goes back", "I4", runOf([]Op{granted(0, 10, "a", 5), renewed(900, 910, "a", 5, 6), held(915, 920, "a", 5)})},
		{"refusal names another", "I4", runOf([]Op{granted(0, 10, "a", 5), denied(500, 510, "c", "b", 7)})},
		{"stored for another", "I4", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 400, evAcquired, "b", 5))},
		{"made shorter by itself", "", runOf([]Op{longTTL(5*time.Second, granted(0, 10, "a", 5)), renewed(20, 30, "a", 5, 6), isFree(1500, 1510)})},
		{"bucket wiped", "", runOf([]Op{granted(0, 10, "a", 5), {Call: Wipe, Outcome: OK, Start: 20 * ms, End: 30 * ms}, isFree(40, 45)})},
		{"stale look in a partition", "", faulty(runOf([]Op{granted(0, 10, "a", 5), renewed(900, 910, "a", 5, 6), held(915, 920, "a", 5)}), Window{Start: 0, End: 950 * ms, Stale: true})},

		{"released lease shows again", "I5", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), held(5000, 5010, "a", 5)})},
		{"earlier revision shows again", "I5", runOf([]Op{renewed(0, 10, "a", 5, 6), released(20, 30, "a", 6), denied(5000, 5010, "b", "a", 5)})},
		{"acquired anew after its release", "", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), granted(40, 50, "a", 8), held(60, 61, "a", 8)})},

		{"wrong pair accepted", "I6", runOf([]Op{bogus(released(0, 10, "x", 5))})},
		{"wrong pair stored", "I6", runOf([]Op{granted(0, 10, "a", 5), bogus(releaseLost(20, 30, "a", 4))}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 4))},
		{"wrong pair refused", "", runOf([]Op{bogus(releaseLost(0, 10, "x", 5))})},

		{"held after its end", "I7", runOf([]Op{granted(0, 10, "a", 5), held(2100, 2110, "a", 5)})},
		{"denied by a lease that is over", "I7", runOf([]Op{denied(2200, 2210, "b", "a", 5)}, stored(5, 100, evAcquired, "a", 0))},
		{"held after its end, in an outage", "I7", faulty(runOf([]Op{granted(0, 10, "a", 5), held(1500, 1510, "a", 5)}), Window{Start: 900 * ms, End: 2000 * ms})},
		{"renewed after its end", "I7", runOf([]Op{granted(0, 10, "a", 5), renewed(1100, 1110, "a", 5, 6)})},
		{"released after its end", "I7", runOf([]Op{granted(0, 10, "a", 5), released(1100, 1110, "a", 5)})},
		{"own lease handed back after its end", "I7", runOf([]Op{granted(0, 10, "a", 5), granted(1100, 1110, "a", 5)})},
		{"asked before its end", "", runOf([]Op{granted(0, 10, "a", 5), renewed(1000, 1110, "a", 5, 6)})},

		{"no TTL", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrTTL, "")))},
		{"TTL too long", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrTTL, "2s")))},
		{"TTL too short", "I8", runOf([]Op{longTTL(5*time.Second, granted(0, 10, "a", 5))}, stored(5, 5, evAcquired, "a", 0, ttlMillis(5000)))},
		{"short lease over a long one", "I8", runOf([]Op{longTTL(5*time.Second, granted(0, 10, "a", 5)), renewed(20, 30, "a", 5, 6)}, stored(5, 5, evAcquired, "a", 0, ttlMillis(5000), header(hdrTTL, "5s")), stored(6, 25, evRenewed, "a", 5))},
		{"short lease that lives past the horizon", "", runOf([]Op{longTTL(5*time.Second, granted(0, 10, "a", 5)), renewed(20, 30, "a", 5, 6)}, stored(5, 5, evAcquired, "a", 0, ttlMillis(5000), header(hdrTTL, "5s")), stored(6, 25, evRenewed, "a", 5, header(hdrTTL, "10s"), horizonAt(5005)), stored(7, 1200, evExpired, "a", 6, header(hdrTTL, "36s")))},
		{"short tombstone", "I8", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 5, header(hdrTTL, "1s")))},
		{"tombstone shorter than the horizon", "I8", runOf([]Op{longTTL(600*time.Second, granted(0, 10, "a", 5)), released(20, 30, "a", 5)}, stored(5, 5, evAcquired, "a", 0, ttlMillis(600_000), header(hdrTTL, "600s")), stored(6, 25, evReleased, "a", 5))},
		{"tombstone that is no purge", "I8", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 5, header(hdrKVOp, "DEL")))},
		{"rolls up", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrRollup, "sub")))},
		{"message id", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrMsgID, "x")))},
		{"no condition", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrExpect, "")))},
		{"not ours", "I8", runOf(nil, stored(5, 5, evAcquired, "a", 0, func(e *Entry) { e.Ours = false }))},
		{"header and record differ", "I8", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, header(hdrEvent, evRenewed)))},

		{"ok, but another's stored", "I9", runOf([]Op{granted(0, 10, "a", 5), noReply(0, Acquire, "b", 0)}, stored(5, 5, evAcquired, "b", 0))},
		{"ok release, nothing stored", "I9", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5)}, stored(5, 5, evAcquired, "a", 0))},
		{"refused, but stored", "I9", runOf([]Op{denied(0, 10, "a", "x", 2)}, stored(5, 5, evAcquired, "a", 0))},
		{"busy, but stored", "I9", runOf([]Op{op(Acquire, "a", 0, kinds.Busy, at(0, 10))}, stored(5, 5, evAcquired, "a", 0))},
		{"unavailable, and taken back", "", runOf([]Op{op(Acquire, "a", 0, kinds.Unavailable, at(0, 30))}, stored(5, 5, evAcquired, "a", 0), stored(6, 20, evReleased, "a", 5))},
		{"unavailable, and taken back too late", "I9", runOf([]Op{op(Acquire, "a", 0, kinds.Unavailable, at(0, 30))}, stored(5, 5, evAcquired, "a", 0), stored(6, 80, evReleased, "a", 5))},
		{"waited, heard nothing, and taken back", "", runOf([]Op{waits(30*time.Second, noReply(0, Acquire, "a", 0)), granted(40, 50, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 20, evReleased, "a", 5), stored(7, 45, evAcquired, "b", 6))},
		{"waited, told by another acquire, and taken back", "", runOf([]Op{waits(30*time.Second, noReply(0, Acquire, "a", 0)), granted(12, 14, "a", 5), granted(40, 50, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 20, evReleased, "a", 5), stored(7, 45, evAcquired, "b", 6))},
		{"did not wait, heard nothing, and taken back", "I9", runOf([]Op{noReply(0, Acquire, "a", 0), granted(40, 50, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 20, evReleased, "a", 5), stored(7, 45, evAcquired, "b", 6))},
		{"unavailable, and not taken back", "I9", runOf([]Op{op(Acquire, "a", 0, kinds.Unavailable, at(0, 30))}, stored(5, 5, evAcquired, "a", 0))},
		{"one unknown, two stored", "I9", runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 5, evAcquired, "a", 0), stored(6, 50, evAcquired, "a", 5))},
		{"one unknown, one stored", "", runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 5, evAcquired, "a", 0))},
		{"sent again, landed again after its end", "", runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 5, evAcquired, "a", 0, nonce("same")), stored(6, 1100, evAcquired, "a", 0, nonce("same")))},
		{"sent again, written again after its end", "", runOf([]Op{slow(2500, granted(0, 0, "a", 7))}, stored(5, 5, evAcquired, "a", 0), stored(7, 2100, evAcquired, "a", 0))},
		{"written again before its end", "I9", runOf([]Op{slow(2500, granted(0, 0, "a", 7))}, stored(5, 1500, evAcquired, "a", 0), stored(7, 2100, evAcquired, "a", 5))},
		{"landed again before its end", "I9", runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 5, evAcquired, "a", 0, nonce("same")), stored(6, 800, evAcquired, "a", 5, nonce("same")))},
		{"no nonce", "I9", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0, nonce("")))},
		{"another TTL stored", "I9", runOf([]Op{longTTL(2*time.Second, granted(0, 10, "a", 5))}, stored(5, 5, evAcquired, "a", 0))},
		{"renewed on another revision", "I9", runOf([]Op{granted(0, 10, "a", 5), renewed(20, 30, "a", 5, 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 15, evRenewed, "a", 5), stored(7, 25, evRenewed, "a", 6))},
		{"superseded write found out", "", runOf([]Op{granted(0, 10, "a", 5), slow(1500, renewLost(100, 0, "a", 5)), granted(1300, 1310, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 120, evRenewed, "a", 5), stored(7, 1305, evAcquired, "b", 6, prev("a", 6, "expired")))},
		{"lands too late", "I10", runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 5300, evAcquired, "a", 0))},
		{"lands late after a fault", "", faulty(runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(5, 8000, evAcquired, "a", 0)), Window{Start: 50 * ms, End: 4000 * ms})},

		{"two stories of one revision", "I12", runOf([]Op{with(granted(0, 10, "a", 5), replyAcquired(wall(1))), with(held(20, 30, "a", 5), replyAcquired(wall(2)))})},
		{"reply and record differ", "I12", runOf([]Op{with(granted(0, 10, "a", 5), replyAcquired(wall(1)))}, stored(5, 5, evAcquired, "a", 0, acquiredAt(wall(2))))},
		{"more left than there is", "I12", runOf([]Op{granted(0, 10, "a", 5), with(held(800, 810, "a", 5), replyAcquired(wall(1)), left(900*time.Millisecond))}, stored(5, 5, evAcquired, "a", 0, acquiredAt(wall(1))))},
		{"what is left", "", runOf([]Op{granted(0, 10, "a", 5), with(held(800, 810, "a", 5), replyAcquired(wall(1)), left(190*time.Millisecond))}, stored(5, 5, evAcquired, "a", 0, acquiredAt(wall(1))))},

		{"forward", "", inbox(runOf([]Op{forwarded(20, 30, "f", "a", 5, kinds.Forwarded, "tf"), granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0)), delivery("f", 25, true, "5"))},
		{"sent again after silence", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerTimeout, "")}), delivery("f", 25, true, "5"), delivery("f", 525, false, "5"))},
		{"processed twice", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerTimeout, "")}), delivery("f", 25, true, "5"), delivery("f", 525, true, "5"))},
		{"sent again after a reject", "", inbox(runOf([]Op{with(forwarded(20, 930, "f", "a", 7, kinds.Forwarded, "tf"), func(o *Op) { o.Attempts = 2 })}), delivery("f", 25, false, "5"), delivery("f", 525, true, "7"))},
		{"processed in spite of the answer", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerUnavailable, "")}), delivery("f", 25, true, "5"))},
		{"another's answer", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.Forwarded, "other")}), delivery("f", 25, true, "5"))},
		{"no fence", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerTimeout, "")}), delivery("f", 25, true, ""))},
		{"old fence", "I13", inbox(runOf([]Op{granted(0, 10, "a", 5), renewed(20, 30, "a", 5, 6), forwarded(100, 930, "f", "a", 5, kinds.OwnerTimeout, "")}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evRenewed, "a", 5)), delivery("f", 125, true, "5"))},
		{"nobody's forward", "I13", inbox(runOf(nil), delivery("f", 125, true, "5"))},
		{"four attempts", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerRejected, "")}), delivery("f", 25, false, "5"), delivery("f", 26, false, "5"), delivery("f", 27, false, "5"), delivery("f", 28, false, "5"))},
		{"caller's headers pass", "I13", inbox(runOf([]Op{forwarded(20, 930, "f", "a", 5, kinds.OwnerTimeout, "")}), func() Delivery { d := delivery("f", 25, true, "5"); d.Extra = "X-Secret"; return d }())},
		{"attempt after the call was over", "I14", inbox(runOf([]Op{forwarded(20, 1030, "f", "a", 5, kinds.OwnerTimeout, "")}), delivery("f", 1400, true, "5"))},
		{"answer too late", "I14", runOf([]Op{forwarded(20, 1400, "f", "a", 5, kinds.OwnerTimeout, "")})},

		{"expiry told", "", healthy(runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1200, evExpired, "a", 0, ends(5))))},
		{"expiry told by the next", "", healthy(runOf([]Op{granted(0, 10, "a", 5), granted(1100, 1110, "b", 6)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1105, evAcquired, "b", 5, prev("a", 5, "expired")), stored(7, 2300, evExpired, "b", 0, ends(6))))},
		{"expiry told twice", "I15", healthy(runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1200, evExpired, "a", 0, ends(5)), stored(7, 1300, evExpired, "a", 6, ends(5))))},
		{"expiry told by event and by the next", "I15", healthy(runOf([]Op{granted(0, 10, "a", 5), granted(1100, 1400, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1200, evExpired, "a", 0, ends(5)), stored(7, 1300, evAcquired, "b", 6, prev("a", 5, "expired"))))},
		{"expiry told twice by a writer that was held up", "", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1200, evExpired, "a", 0, ends(5)), stored(7, 1300, evExpired, "a", 6, ends(5), writtenAt(1190)))},
		{"expiry told by nobody", "I15", healthy(runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0)))},
		{"expiry told late", "I15", healthy(runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 6000, evExpired, "a", 0, ends(5))))},
		{"expiry told early", "I15", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 800, evExpired, "a", 5, ends(5)))},
		{"expiry of what was renewed", "I15", healthy(runOf([]Op{granted(0, 10, "a", 5), renewed(900, 910, "a", 5, 6)}, stored(5, 5, evAcquired, "a", 0), stored(6, 905, evRenewed, "a", 5), stored(7, 1200, evExpired, "a", 6, ends(5))))},
		{"expiry in another's name", "I15", runOf([]Op{granted(0, 10, "a", 5)}, stored(5, 5, evAcquired, "a", 0), stored(6, 1200, evExpired, "b", 0, ends(5)))},
		{"wrong previous", "I15", runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), granted(40, 50, "b", 7)}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 5), stored(7, 45, evAcquired, "b", 6, prev("a", 4, "released")))},
		{"events in order", "", events(runOf(nil), event(5, 0, 0, "x"), event(6, 5, 0, "y"), event(5, 0, 1, "x"))},
		{"events out of order", "I15", events(runOf(nil), event(6, 0, 0, "x"), event(5, 0, 0, "y"))},
		{"event twice", "I15", events(runOf(nil), event(6, 0, 0, "x"), event(6, 0, 0, "x"))},
		{"event not from the stream", "I15", events(runOf(nil), Event{Key: "k"})},
		{"event hides a change", "I15", events(runOf([]Op{noReply(0, Acquire, "a", 0)}, stored(6, 5, evAcquired, "a", 0)), event(5, 0, 0, "x"), event(7, 5, 0, "y"))},

		{"counted", "", counted(runOf([]Op{granted(0, 10, "a", 5)}), 1)},
		{"counted too many", "I20", counted(runOf([]Op{granted(0, 10, "a", 5)}), 2)},
		{"not counted", "I20", counted(runOf([]Op{granted(0, 10, "a", 5), denied(20, 30, "b", "a", 5)}), 1)},
		{"kind without a counter", "I20", counted(runOf([]Op{granted(0, 10, "a", 5), held(20, 30, "a", 5)}), 1)},

		{"waiter sleeps on", "wait", healthy(runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), waits(2*time.Second, denied(15, 2015, "b", "a", 5))}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 5)))},
		{"waiter is woken", "", healthy(runOf([]Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), waits(2*time.Second, granted(15, 65, "b", 7))}, stored(5, 5, evAcquired, "a", 0), stored(6, 25, evReleased, "a", 5), stored(7, 60, evAcquired, "b", 6), stored(8, 1400, evExpired, "b", 0, ends(7))))},

		{"refused, but what it wrote stands", "I9", runOf([]Op{granted(0, 10, "a", 5), slow(1500, renewLost(100, 0, "a", 5)), held(1700, 1705, "a", 6)}, stored(5, 5, evAcquired, "a", 0), stored(6, 900, evRenewed, "a", 5))},

		{"internal", "kinds", runOf([]Op{op(Acquire, "a", 0, kinds.Internal, at(0, 10))})},
		{"invalid", "kinds", runOf([]Op{op(Acquire, "a", 0, kinds.Invalid, at(0, 10))})},
	} {
		t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			got := map[string]bool{}
			for _, v := range c.run.Judge() {
				got[v.Invariant] = true
				if c.want == "" || c.want != v.Invariant && testing.Verbose() {
					t.Log(v)
				}
			}
			if c.want == "" && len(got) > 0 || c.want != "" && !got[c.want] {
				t.Errorf("broken: %v, want %q", got, c.want)
			}
		})
	}
}

// No check may be without a run that breaks it.
func TestEveryCheckIsTested(t *testing.T) {
	if len(Checks) != 15 {
		t.Errorf("%d checks: add the new one to TestChecks", len(Checks))
	}
}

func TestLogKnowsItsHoles(t *testing.T) {
	r := runOf(nil, stored(5, 1, evAcquired, "a", 0), stored(8, 2, evAcquired, "a", 0), stored(5_000_000, 3, evAcquired, "a", 0))
	if got := r.Log.Missed(); got != 2 {
		t.Errorf("missed %d, want 2", got)
	}
	for _, c := range []struct {
		from, to uint64
		want     bool
	}{{5, 5, true}, {5, 6, false}, {6, 6, false}, {8, 8, true}, {9, 9, false}, {5_000_000, 6_000_000, true}} {
		if got := r.Log.complete(c.from, c.to); got != c.want {
			t.Errorf("complete(%d, %d) = %v", c.from, c.to, got)
		}
	}
}
