package service

import (
	"fmt"
	"runtime"
	"testing"
	"time"
)

// TestViewRoom: what a lease takes in memory, renewed or not: keys and holders
// of 20 bytes, each its own.
func TestViewRoom(t *testing.T) {
	const (
		leases = 200_000
		most   = 280 // bytes
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
