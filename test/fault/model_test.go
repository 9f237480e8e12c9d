package fault

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/go-cmp/cmp"

	"github.com/leased/leased/service/kinds"
)

// The histories below are written in milliseconds on key "k" with leases of
// 1000 ms unless an option says otherwise.
const ms = int64(time.Millisecond)

type option func(*Op)

func at(start, end int64) option {
	return func(o *Op) { o.Start, o.End = start*ms, end*ms }
}

func got(holder string, rev uint64) option {
	return func(o *Op) {
		o.Got = Lease{Held: holder != "", Holder: holder, Rev: rev, TTL: time.Second}
	}
}

func ttl(d time.Duration) option { return func(o *Op) { o.TTL, o.Got.TTL = d, d } }

func op(call Call, holder string, rev uint64, kind kinds.Kind, opts ...option) Op {
	o := Op{Call: call, Key: "k", Holder: holder, Revision: rev, Kind: kind, Outcome: OutcomeOf(call, kind)}
	if call == Acquire || call == Renew {
		o.TTL = time.Second
	}
	for _, f := range opts {
		f(&o)
	}
	return o
}

func granted(start, end int64, holder string, rev uint64) Op {
	return op(Acquire, holder, 0, kinds.Granted, at(start, end), got(holder, rev))
}
func denied(start, end int64, holder, by string, rev uint64) Op {
	return op(Acquire, holder, 0, kinds.Denied, at(start, end), got(by, rev))
}
func renewed(start, end int64, holder string, old, rev uint64) Op {
	return op(Renew, holder, old, kinds.Renewed, at(start, end), got(holder, rev))
}
func renewLost(start, end int64, holder string, old uint64) Op {
	return op(Renew, holder, old, kinds.Lost, at(start, end))
}
func released(start, end int64, holder string, rev uint64) Op {
	return op(Release, holder, rev, kinds.Released, at(start, end))
}
func releaseLost(start, end int64, holder string, rev uint64) Op {
	return op(Release, holder, rev, kinds.Lost, at(start, end))
}
func held(start, end int64, by string, rev uint64) Op {
	return op(Owner, "", 0, kinds.Held, at(start, end), got(by, rev))
}
func isFree(start, end int64) Op { return op(Owner, "", 0, kinds.Free, at(start, end)) }
func noReply(start int64, call Call, holder string, rev uint64) Op {
	return op(call, holder, rev, "", at(start, start+100))
}

func TestModel(t *testing.T) {
	for _, c := range []struct {
		name  string
		legal bool
		ops   []Op
		lim   Limits
	}{
		// The normal life of a lease.
		{"hand over after the end", true, []Op{granted(0, 10, "a", 5), denied(500, 510, "b", "a", 5), granted(1020, 1030, "b", 6), held(1100, 1110, "b", 6)}, Limits{}},
		{"hand over by release", true, []Op{granted(0, 10, "a", 5), released(100, 110, "a", 5), isFree(120, 121), granted(130, 140, "b", 7)}, Limits{}},
		{"renewals carry on", true, []Op{granted(0, 10, "a", 5), renewed(800, 810, "a", 5, 6), renewed(1600, 1610, "a", 6, 9), held(2500, 2510, "a", 9), granted(2601, 2640, "b", 12)}, Limits{}},
		{"renewal that shortens", true, []Op{op(Acquire, "a", 0, kinds.Granted, ttl(5*time.Second), at(0, 10), got("a", 5)), renewed(100, 110, "a", 5, 6), granted(1200, 1210, "b", 8)}, Limits{}},
		{"idempotent acquire opens no new time", true, []Op{granted(0, 10, "a", 5), granted(900, 910, "a", 5), granted(1005, 1020, "b", 6)}, Limits{}},
		{"own record taken over after its end", true, []Op{granted(0, 10, "a", 5), granted(1005, 1015, "a", 6), held(1500, 1501, "a", 6)}, Limits{}},
		{"evict", true, []Op{granted(0, 10, "a", 5), op(Evict, "", 5, kinds.Evicted, at(100, 110)), renewLost(120, 130, "a", 5), granted(140, 150, "b", 8)}, Limits{}},
		{"evict of an old revision", true, []Op{granted(0, 10, "a", 5), renewed(20, 30, "a", 5, 6), op(Evict, "", 5, kinds.Lost, at(100, 110)), held(120, 130, "a", 6)}, Limits{}},
		{"concurrent acquires, one wins", true, []Op{granted(0, 50, "a", 5), denied(0, 50, "b", "a", 5), denied(10, 60, "c", "a", 5)}, Limits{}},
		{"forward names the owner", true, []Op{granted(0, 10, "a", 5), op(Forward, "", 0, kinds.Forwarded, at(20, 90), got("a", 5)), op(Forward, "", 0, kinds.NotHeld, at(1100, 1110))}, Limits{Late: time.Second}},

		{"renewal on its way at the end", true, []Op{granted(0, 10, "a", 5), isFree(1100, 1110), renewed(980, 1200, "a", 5, 6), held(1300, 1310, "a", 6)}, Limits{}},
		{"release on its way at the end", true, []Op{granted(0, 10, "a", 5), isFree(1100, 1110), released(980, 1200, "a", 5)}, Limits{}},

		// Lost replies.
		{"lost reply, applied", true, []Op{noReply(0, Acquire, "a", 0), denied(200, 210, "b", "a", 5), granted(300, 310, "a", 5)}, Limits{}},
		{"lost reply, not applied", true, []Op{noReply(0, Acquire, "a", 0), granted(200, 210, "b", 5)}, Limits{}},
		{"lost reply, applied late", true, []Op{noReply(0, Acquire, "a", 0), isFree(200, 210), held(300, 310, "a", 5)}, Limits{}},
		{"lost renewal, applied", true, []Op{granted(0, 10, "a", 5), noReply(500, Renew, "a", 5), held(1400, 1410, "a", 8)}, Limits{}},
		{"lost release, applied late", true, []Op{granted(0, 10, "a", 5), noReply(20, Release, "a", 5), held(150, 160, "a", 5), isFree(300, 310)}, Limits{}},
		{"busy changes nothing", true, []Op{granted(0, 10, "a", 5), op(Release, "a", 5, kinds.Busy, at(20, 21)), held(30, 31, "a", 5)}, Limits{}},
		{"a write found superseded after a long time", true, []Op{granted(0, 10, "a", 5), renewLost(900, 2300, "a", 5), held(1400, 1410, "a", 7), granted(2200, 2210, "b", 9)}, Limits{}},
		{"late within the fault that held it up", true, []Op{noReply(0, Acquire, "a", 0), isFree(7000, 7010), held(7500, 7510, "a", 5)}, Limits{Windows: []Window{{Start: 50 * ms, End: 4000 * ms}}}},
		{"bucket wiped", true, []Op{granted(0, 10, "a", 5), {Call: Wipe, Key: "k", Outcome: OK, Start: 20 * ms, End: 30 * ms}, isFree(40, 41), renewLost(50, 51, "a", 5)}, Limits{}},
		{"stale read in a partition", true, []Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), granted(40, 50, "b", 8), held(60, 61, "a", 5)}, Limits{Windows: []Window{{Start: 15 * ms, End: 70 * ms, Stale: true}}}},

		// What must never be.
		{"two holders", false, []Op{granted(0, 10, "a", 5), granted(500, 510, "b", 6)}, Limits{}},
		{"freed before its time", false, []Op{granted(0, 10, "a", 5), isFree(900, 910)}, Limits{}},
		{"renewal lost", false, []Op{granted(0, 10, "a", 5), renewed(900, 910, "a", 5, 6), granted(1200, 1210, "b", 8)}, Limits{}},
		{"renewal goes back", false, []Op{granted(0, 10, "a", 5), renewed(100, 110, "a", 5, 6), held(200, 210, "a", 5)}, Limits{}},
		{"released lease comes back", false, []Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), held(40, 50, "a", 5)}, Limits{}},
		{"fence goes down", false, []Op{granted(0, 10, "a", 5), granted(1100, 1110, "b", 4)}, Limits{}},
		{"fence repeated", false, []Op{granted(0, 10, "a", 5), granted(1100, 1110, "b", 5)}, Limits{}},
		{"lease without end", false, []Op{granted(0, 10, "a", 5), held(2100, 2110, "a", 5)}, Limits{Late: time.Second}},
		{"stale owner", false, []Op{granted(0, 10, "a", 5), granted(1005, 1015, "b", 6), held(1020, 1030, "a", 5)}, Limits{}},
		{"release by somebody else", false, []Op{granted(0, 10, "a", 5), released(20, 30, "b", 5)}, Limits{}},
		{"renew by an old revision", false, []Op{granted(0, 10, "a", 5), renewed(20, 30, "a", 5, 6), renewed(40, 50, "a", 5, 7)}, Limits{}},
		{"renew refused to the rightful holder", false, []Op{granted(0, 10, "a", 5), renewLost(20, 30, "a", 5)}, Limits{}},
		{"denied while free", false, []Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), denied(40, 50, "b", "a", 5)}, Limits{}},
		{"denied in the holder's own name", false, []Op{granted(0, 10, "a", 5), denied(40, 50, "a", "a", 5)}, Limits{}},
		{"idempotent acquire extends", false, []Op{granted(0, 10, "a", 5), granted(900, 910, "a", 5), held(2105, 2110, "a", 5)}, Limits{Late: time.Second}},
		{"idempotent acquire writes", false, []Op{granted(0, 10, "a", 5), granted(500, 510, "a", 6)}, Limits{}},
		{"success of a message id seen before", false, []Op{noReply(0, Acquire, "a", 0), granted(1300, 1310, "b", 6), granted(1400, 1410, "a", 5)}, Limits{}},
		{"renewal sent long after the end", false, []Op{granted(0, 10, "a", 5), isFree(1100, 1110), renewed(2300, 2310, "a", 5, 6)}, Limits{Late: time.Second}},
		{"renewal on its way, but the key was taken", false, []Op{granted(0, 10, "a", 5), granted(1100, 1110, "b", 6), renewed(980, 1200, "a", 5, 7)}, Limits{}},
		{"too late", false, []Op{noReply(0, Acquire, "a", 0), isFree(6000, 6010), held(6100, 6110, "a", 5)}, Limits{}},
		{"stale read long after the partition", false, []Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), held(25060, 25061, "a", 5)}, Limits{Windows: []Window{{Start: 15 * ms, End: 70 * ms, Stale: true}}}},
		{"renew after evict", false, []Op{granted(0, 10, "a", 5), op(Evict, "", 5, kinds.Evicted, at(100, 110)), renewed(120, 130, "a", 5, 9)}, Limits{}},
		{"quick refusal after a write", false, []Op{granted(0, 10, "a", 5), renewLost(100, 200, "a", 5), held(250, 260, "a", 7)}, Limits{}},
		{"forward to the former owner", false, []Op{granted(0, 10, "a", 5), released(20, 30, "a", 5), granted(40, 50, "b", 8), op(Forward, "", 0, kinds.OwnerTimeout, at(60, 400), got("a", 5))}, Limits{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for i := range c.ops {
				c.ops[i].ID, c.ops[i].Client = i+1, i
			}
			want := porcupine.Illegal
			if c.legal {
				want = porcupine.Ok
			}
			if j := CheckRegister("k", c.ops, c.lim); j.Result != want {
				t.Errorf("checker says %s, want %s", j.Result, want)
				for i := range c.ops {
					t.Log(&c.ops[i])
				}
			}
		})
	}
}

// The sizes that load.go keeps to must be judged quickly: 200 operations, five
// clients, eight of them unknown.
func TestModelIsFastEnough(t *testing.T) {
	var ops []Op
	rev, now := uint64(10), int64(0)
	for i := 0; len(ops) < 192; i++ {
		h := fmt.Sprint("h", i%5)
		ops = append(ops, granted(now, now+5, h, rev))
		for j := range 4 {
			ops = append(ops, denied(now+6+int64(j), now+40, fmt.Sprint("x", j), h, rev))
		}
		ops = append(ops, renewed(now+45, now+50, h, rev, rev+1), released(now+60, now+70, h, rev+1))
		if i%3 == 0 && i < 24 {
			ops = append(ops, noReply(now+2, Acquire, fmt.Sprint("lost", i), 0))
		}
		rev, now = rev+3, now+80
	}
	for i := range ops {
		ops[i].ID, ops[i].Client = i+1, i%5
	}
	j := CheckRegister("k", ops, Limits{Timeout: 20 * time.Second})
	if j.Result != porcupine.Ok || j.Took > 5*time.Second {
		t.Errorf("%d operations: %s in %v", len(ops), j.Result, j.Took)
	}
	path, err := j.Picture(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if s, err := os.Stat(path); err != nil || s.Size() == 0 {
		t.Errorf("picture: %v", err)
	}
}

func TestHistoryRoundTrip(t *testing.T) {
	want := []Op{granted(0, 10, "a", 5), renewLost(11, 12, "a", 5), noReply(20, Acquire, "b", 0)}
	var b bytes.Buffer
	if err := WriteOps(&b, want); err != nil {
		t.Fatal(err)
	}
	have, err := ReadOps(&b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, have); d != "" {
		t.Error(d)
	}
}
