package contract

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// hoard has one client acquire n keys, all at once, for the holders in turn, and returns what
// was granted.
func (r *rig) hoard(n int, key string, holders ...string) (granted []*reply) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			got, err := r.ask("acquire", request{Key: fmt.Sprintf(key, i), Holder: holders[i%len(holders)], TTL: 60000})
			if err != nil || got.kind != kinds.Granted && got.kind != kinds.OverQuota {
				r.t.Errorf("acquire: %v, %v", got, err)
				return
			}
			if got.kind == kinds.Granted {
				mu.Lock()
				defer mu.Unlock()
				granted = append(granted, got)
			}
		})
	}
	all.Wait()
	return granted
}

// TestQuotaOfLeases: of 1000 keys that one client asks for at once it gets as many as there may be,
// neither more nor less, and what is held goes on: it is renewed, taken over by its holder
// when it ended, and released, which makes room for one more (P21).
func TestQuotaOfLeases(t *testing.T) {
	t.Parallel()
	const most = 100
	r := newRig(t, setup{leases: most})
	granted := r.hoard(1000, "k-%d", "A", "B", "C")
	if len(granted) != most {
		t.Fatalf("%d leases are granted, want %d", len(granted), most)
	}
	r.release(granted[1])
	short := r.acquire("short", "A", 1000)
	l := r.renew(granted[0], 60000)
	if again := r.acquire(l.Key, l.Holder, 60000); again.Revision != l.Revision {
		t.Errorf("the present holder asks again and gets %s", again.raw)
	}
	// A lease that ended makes room, for its holder as for anybody.
	testnats.Eventually(t, 10*time.Second, func() bool {
		return r.call("acquire", request{Key: "short", Holder: "A", TTL: 60000}).Revision > short.Revision
	}, "the lease is not taken over after its end")
	r.want(kinds.OverQuota, "acquire", request{Key: "more", Holder: "A", TTL: 60000})
	r.release(l)
	more := r.acquire("more", "D", 60000)
	r.want(kinds.OverQuota, "acquire", request{Key: "yet-more", Holder: "D", TTL: 60000})
	r.want(kinds.Evicted, "evict", request{Key: "more", Revision: more.Revision})
	r.acquire("yet-more", "D", 60000)
}

// TestQuotaOfAHolder: each has its own, whoever else has used up theirs, also at another instance once
// that has seen what was granted; and a lease that changes hands is one of its new holder.
func TestQuotaOfAHolder(t *testing.T) {
	t.Parallel()
	const most = 7
	r := newRig(t, setup{each: most})
	moves := r.acquire("moves", "E", 1000)
	granted := map[string]int{}
	for _, l := range r.hoard(400, "k-%d", "A", "B", "C", "D") {
		granted[l.Holder]++
	}
	for _, holder := range []string{"A", "B", "C", "D"} {
		if granted[holder] != most {
			t.Errorf("%s has %d leases, want %d", holder, granted[holder], most)
		}
	}
	testnats.Eventually(t, 10*time.Second, func() bool {
		got := r.call("acquire", request{Key: "moves", Holder: "F", TTL: 60000})
		return got.kind == kinds.Granted && got.Revision > moves.Revision
	}, "the lease does not change hands")
	if n := len(r.hoard(20, "e-%d", "E")); n != most {
		t.Errorf("the holder before has %d leases beside, want %d", n, most)
	}
	if n := len(r.hoard(20, "f-%d", "F")); n != most-1 {
		t.Errorf("the holder now has %d leases beside, want %d", n, most-1)
	}
	// An instance that starts later counts what it sees. Only it is left to answer.
	r.ready(r.start())
	r.leave(r.all[0], 10*time.Second)
	for _, holder := range []string{"A", "E", "F"} {
		r.want(kinds.OverQuota, "acquire", request{Key: "another", Holder: holder, TTL: 60000})
	}
	r.acquire("another", "G", 60000)
}
