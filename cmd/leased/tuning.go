package main

import (
	"context"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// Garbage that may gather before it is collected. A service with few leases has
// a heap of a few MiB, which Go would collect many times a second under load;
// one with a million has hundreds, of which as much again would be too much. With
// the server inside, what the server knows of each lease is marked again each time
// too, so that more gathers when there are many.
const (
	garbage       = 64 << 20  // bytes, whatever the heap
	garbageInside = 256 << 20 // at most, with the server inside: twice the heap

	leastGC     = 25 // percent of the heap
	mostGC      = 1600
	gcEvery     = time.Second
	liveHeap    = "/gc/heap/live:bytes"
	gcTolerance = 0.1
)

// tune sees to GOGC until ctx is done, unless the environment sets it: about twice
// the heap of garbage may gather, but no more than most.
func tune(ctx context.Context, most uint64) {
	if os.Getenv("GOGC") != "" {
		return
	}
	percent := 100
	sample := []metrics.Sample{{Name: liveHeap}}
	tick := time.NewTicker(gcEvery)
	defer tick.Stop()
	for {
		metrics.Read(sample)
		if p := gcPercent(sample[0].Value.Uint64(), most); math.Abs(float64(p-percent)) > gcTolerance*float64(percent) {
			debug.SetGCPercent(p)
			percent = p
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// gcPercent is GOGC for a heap of live bytes.
func gcPercent(live, most uint64) int {
	gathers := min(max(2*live, garbage), most)
	return int(min(max(100*gathers/max(live, 1), leastGC), mostGC))
}

// halveCPUs runs Go code on half of the CPUs at a time, unless the environment says
// on how many. A call is a chain of short pieces of work: each CPU more is woken for
// the next piece and mostly finds it done (ADR 0010).
func halveCPUs() {
	if all := runtime.GOMAXPROCS(0); all > 1 && os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS((all + 1) / 2)
	}
}
