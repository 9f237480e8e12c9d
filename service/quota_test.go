package service

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestHoldersAreCounted: a holder's number follows its leases, however they begin, change
// hands and end, and nothing stays of who has none.
func TestHoldersAreCounted(t *testing.T) {
	v := newView(&clock{}, nil)
	newQuota(v, 0, 5)
	now := time.Now()
	rev := uint64(0)
	write := func(key, holder string, event Event, at time.Time) {
		rev++
		r := &Record{V: recordVersion, Key: key, Holder: holder, TTLMillis: 1000, AcquiredAt: 1, WrittenAt: 1, Event: event}
		v.wrote(key, rev, r, event == Released, time.Second, at, at)
	}
	want := func(what string, of map[string]int) {
		t.Helper()
		sum := 0
		for _, n := range of {
			sum += n
		}
		if diff := cmp.Diff(of, v.holders.of); diff != "" || int(v.held.Load()) != sum {
			t.Errorf("%s: %d held, %s", what, v.held.Load(), diff)
		}
	}
	for i := range 3 {
		write(fmt.Sprintf("a-%d", i), "A", Acquired, now)
		write(fmt.Sprintf("b-%d", i), "B", Acquired, now)
	}
	write("a-0", "A", Renewed, now)
	want("acquired and renewed", map[string]int{"A": 3, "B": 3})
	write("b-0", "A", Acquired, now)
	want("one changed hands", map[string]int{"A": 4, "B": 2})
	write("a-1", "A", Released, now)
	write("a-1", "A", Released, now)
	want("one is released", map[string]int{"A": 3, "B": 2})
	expireAll(v, now.Add(2*time.Second))
	want("all are over", map[string]int{})
	write("a-0", "C", Acquired, now.Add(3*time.Second))
	want("one is taken over after its end", map[string]int{"C": 1})
	v.completed(v.restart())
	want("a new consumer does not show it", map[string]int{})
	write("a-0", "D", Acquired, now.Add(3*time.Second))
	v.forget()
	want("the bucket is gone", map[string]int{})
}
