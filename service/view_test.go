package service

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestViewRoom: what a lease takes in memory, renewed or not: keys and holders
// of 20 bytes, each its own.
func TestViewRoom(t *testing.T) {
	const (
		leases = 200_000
		most   = 200 // bytes
	)
	live := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	v := newView(&clock{}, nil)
	before, now := live(), time.Now()
	for round := range 3 {
		for i := range leases {
			r := &Record{V: recordVersion, Key: fmt.Sprintf("key-%016d", i), Holder: fmt.Sprintf("hold-%015d", i), TTLMillis: 600_000, AcquiredAt: 1, WrittenAt: 1, Event: Acquired}
			v.wrote(r.Key, uint64(round*leases+i+1), r, false, MaxTTL, now, now)
		}
		got := (live() - before) / leases
		t.Logf("round %d: %d bytes a lease", round, got)
		if got > most {
			t.Errorf("round %d: %d bytes a lease, want %d at most", round, got, most)
		}
	}
	runtime.KeepAlive(v)
}

// expireAll moves everything forward whose time has come, and takes what is to be told,
// as two ticks would.
func expireAll(v *view, now time.Time) (tell []ended) {
	for range 2 {
		for i := range v.shards {
			for v.expire(i, now) {
			}
		}
		tell = append(tell, v.take(now, math.MaxInt)...)
	}
	return tell
}

// TestViewGivesRoomBack: what was known of leases takes no room when they are over, or
// when a new consumer does not show them.
func TestViewGivesRoomBack(t *testing.T) {
	const leases = 50_000
	for how, over := range map[string]func(v *view, now time.Time){
		"over": func(v *view, now time.Time) {
			for _, later := range []time.Duration{2, 3, 60} {
				expireAll(v, now.Add(later*time.Second))
			}
		},
		"not shown": func(v *view, _ time.Time) { v.completed(v.restart()) },
		"forgotten": func(v *view, _ time.Time) { v.forget() },
	} {
		t.Run(how, func(t *testing.T) {
			v, now := newView(&clock{}, nil), time.Now()
			for i := range leases {
				r := &Record{V: recordVersion, Key: fmt.Sprintf("key-%d", i), Holder: "holder", TTLMillis: 1000, AcquiredAt: 1, WrittenAt: 1, Event: Acquired}
				v.wrote(r.Key, uint64(i+1), r, false, time.Second, now, now)
			}
			if got := v.held.Load(); got != leases {
				t.Errorf("%d held, want %d", got, leases)
			}
			over(v, now)
			if got := v.held.Load(); got != 0 {
				t.Errorf("%d held when all is over", got)
			}
			for i := range v.shards {
				sh := &v.shards[i]
				if sh.items != 0 || len(sh.order) != 0 || len(sh.pages) > 1 || sh.texts.size > 2*textBlock || len(sh.due) > 64 || len(sh.index) != 0 {
					t.Fatalf("a shard of %d has %d items, %d hashes, %d pages, %d bytes of text and %d due", leases/len(v.shards), sh.items, len(sh.index), len(sh.pages), sh.texts.size, len(sh.due))
				}
			}
		})
	}
}

// TestKnown: the view gives for a delivered message what a read of it shows, but
// for what it does not keep, and nothing for a message of the same revision from
// another time, or one that was not delivered.
func TestKnown(t *testing.T) {
	at := time.Date(2027, 1, 15, 8, 0, 0, 1002003, time.UTC)
	lease := Record{V: recordVersion, Key: "k", Holder: "h", TTLMillis: 5000, AcquiredAt: TimestampOf(at) - 7000, WrittenAt: TimestampOf(at) - 1, Event: Renewed, Meta: "text"}
	outlived := lease
	outlived.Horizon = lease.WrittenAt + 9001
	freed := lease
	freed.Event, freed.Revision, freed.Evicted = Released, 6, true
	expired := outlived
	expired.Event, expired.Revision = Expired, 6
	for _, rec := range []Record{lease, outlived, freed, expired} {
		e := Entry{Key: "k", Revision: 7, At: at, Record: &rec, Tombstone: rec.Event == Released || rec.Event == Expired}
		v := newView(&clock{}, nil)
		v.wrote("k", 7, &rec, e.Tombstone, rec.TTL(), at, at.Add(time.Millisecond))
		if _, ok := v.known("k", 7, at); ok {
			t.Errorf("%s: known before the consumer showed it", rec.Event)
		}
		v.confirm("k", 7, at, v.epoch.Load())
		got, ok := v.known("k", 7, at)
		got.At = got.At.UTC()
		if diff := cmp.Diff(e, got); !ok || diff != "" {
			t.Errorf("%s: %v\n%s", rec.Event, ok, diff)
		}
		if _, ok := v.known("k", 7, at.Add(1)); ok {
			t.Errorf("%s: known at another time", rec.Event)
		}
		if _, ok := v.known("k", 8, at); ok {
			t.Errorf("%s: the next revision is known", rec.Event)
		}
	}
	v := newView(&clock{}, nil)
	v.delivered(Entry{Key: "k", Revision: 7, At: at, Foreign: "it has no header"}, 0, 0, time.Now())
	if _, ok := v.known("k", 7, at); ok {
		t.Error("a stranger's message is known, without what is wrong with it")
	}
}

// TestReissued: a consumer that shows another message under a revision that the
// view has, as after a server lost what it had acknowledged, is believed.
func TestReissued(t *testing.T) {
	was := time.Now().Add(-2 * time.Second)
	rec := func(holder string, at time.Time) *Record {
		return &Record{V: recordVersion, Key: "k", Holder: holder, TTLMillis: 60_000, AcquiredAt: TimestampOf(at), WrittenAt: TimestampOf(at), Event: Acquired}
	}
	for _, confirmed := range []bool{true, false} {
		v := newView(&clock{}, nil)
		v.wrote("k", 7, rec("A", was), false, time.Minute, was, was)
		if confirmed && !v.confirm("k", 7, was.Add(-time.Millisecond), v.epoch.Load()) {
			t.Fatal("the message that was written is not its own")
		}
		epoch, now := v.restart(), time.Now()
		if v.confirm("k", 7, now, epoch) {
			t.Fatal("another message is taken for the one that was written")
		}
		v.delivered(Entry{Key: "k", Revision: 7, At: now, Record: rec("B", now)}, 0, epoch, now)
		v.completed(epoch)
		if e, ok := v.known("k", 7, now); !ok || e.Record.Holder != "B" {
			t.Errorf("known says %+v %v", e, ok)
		}
		if s, _ := v.get("k", now); s.Record.Holder != "B" || !s.Unbroken || v.held.Load() != 1 {
			t.Errorf("the view has %+v, %d held", s, v.held.Load())
		}
	}
}
