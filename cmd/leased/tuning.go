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

// tune sees to GOGC and, if halve says so, to GOMAXPROCS until ctx is done, unless
// the environment sets them. About twice the heap of garbage may gather, but no more
// than most.
func tune(ctx context.Context, most uint64, halve bool) {
	gc := os.Getenv("GOGC") == ""
	halve = halve && os.Getenv("GOMAXPROCS") == ""
	all := runtime.GOMAXPROCS(0)
	percent, procs := 100, all
	sample := []metrics.Sample{{Name: liveHeap}}
	tick := time.NewTicker(gcEvery)
	defer tick.Stop()
	for {
		metrics.Read(sample)
		live := sample[0].Value.Uint64()
		if p := gcPercent(live, most); gc && math.Abs(float64(p-percent)) > gcTolerance*float64(percent) {
			debug.SetGCPercent(p)
			percent = p
		}
		if n := procsFor(live, all, procs); halve && n != procs {
			runtime.GOMAXPROCS(n)
			procs = n
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

// bigHeap is where the collector needs CPUs of its own: on half of two it would take
// its share from the calls.
const bigHeap = 96 << 20 // bytes

// procsFor is on how many of all CPUs Go code runs at a time, with a heap of live
// bytes; now is the number so far. A call is a chain of short pieces of work: each CPU
// more is woken for the next piece and mostly finds it done (ADR 0010).
func procsFor(live uint64, all, now int) int {
	if live > bigHeap || live > bigHeap*3/4 && now == all {
		return all
	}
	return (all + 1) / 2
}
