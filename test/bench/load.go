//go:build linux

package main

import (
	"context"
	"slices"
	"sync"
	"time"
)

// maxErrors ends a cell early: a contestant that fails this often in one cell
// has no speed worth measuring.
const maxErrors = 1000

// A cell is what one contestant did in one workload in one round.
type cell struct {
	Topology   string             `json:"topology"`
	Workload   string             `json:"workload"`
	Callers    int                `json:"callers"`
	Target     string             `json:"target"`
	Round      int                `json:"round"`
	Ops        int                `json:"ops"`
	OpsPerSec  float64            `json:"ops_per_sec"`
	P50        time.Duration      `json:"p50_ns"`
	P99        time.Duration      `json:"p99_ns"`
	Max        time.Duration      `json:"max_ns"`
	CPUPer1k   float64            `json:"cpu_ms_per_1k_ops"` // all server processes together
	CPUByName  map[string]float64 `json:"cpu_ms_per_1k_by"`  // the same by kind of process
	RSS        int64              `json:"rss_bytes"`         // all server processes together
	RSSByName  map[string]int64   `json:"rss_bytes_by"`      // the same by kind of process
	Held       int                `json:"held,omitempty"`    // leases held while the cell ran
	Pages      int                `json:"pages,omitempty"`   // of lists, that were read meanwhile
	Ends       *ends              `json:"ends,omitempty"`
	LoadCPU    float64            `json:"load_cpu_ms_per_1k"` // the generator's own
	Foreign    float64            `json:"foreign_cpus"`       // CPUs that the rest of the machine used meanwhile: noise
	Errors     int                `json:"errors"`             // operations that failed, not counted in Ops
	FirstError string             `json:"first_error,omitempty"`
}

// A worker is one caller of a closed loop: its next operation starts when its
// last has ended.
type worker struct {
	id       int
	from, to time.Time // the window that is measured
	took     []time.Duration
	ops      int
	errors   int
	first    error
}

// timed runs one operation that counts as n. What ends outside the window is
// not counted, what fails is counted as an error alone.
func (w *worker) timed(n int, op func() error) error {
	start := time.Now()
	err := op()
	w.record(n, time.Since(start), err)
	return err
}

// record counts an operation that ends now and took d.
func (w *worker) record(n int, d time.Duration, err error) {
	end := time.Now()
	if end.Before(w.from) || !end.Before(w.to) {
		return
	}
	if err != nil {
		w.errors++
		if w.first == nil {
			w.first = err
		}
		return
	}
	w.ops += n
	w.took = append(w.took, d)
}

// drive runs unit over and over in c callers for warm + length and measures
// what ends in the last length of it. The context of the units ends with the
// window; an error that comes after it is nobody's.
func drive(ctx context.Context, c int, warm, length time.Duration, procs []*child, unit func(ctx context.Context, w *worker) error) cell {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	from := time.Now().Add(warm)
	to := from.Add(length)
	workers := make([]*worker, c)
	var all sync.WaitGroup
	for i := range workers {
		w := &worker{id: i, from: from, to: to}
		workers[i] = w
		all.Go(func() {
			for ctx.Err() == nil && w.errors < maxErrors/c+1 {
				if unit(ctx, w) != nil {
					pause(ctx, time.Millisecond) // a contestant that is down must not be hammered
				}
			}
		})
	}
	pause(ctx, time.Until(from))
	before, self, machine := usage(procs), selfCPU(), machineCPU()
	pause(ctx, time.Until(to))
	after, selfAfter, machineAfter := usage(procs), selfCPU(), machineCPU()
	measured := time.Since(from)
	cancel()
	all.Wait()

	result := cell{Callers: c, CPUByName: map[string]float64{}, RSSByName: map[string]int64{}}
	var took []time.Duration
	for _, w := range workers {
		result.Ops += w.ops
		result.Errors += w.errors
		took = append(took, w.took...)
		if w.first != nil && result.FirstError == "" {
			result.FirstError = w.first.Error()
		}
	}
	slices.Sort(took)
	result.OpsPerSec = float64(result.Ops) / length.Seconds()
	result.P50, result.P99, result.Max = quantile(took, 0.5), quantile(took, 0.99), quantile(took, 1)
	per1k := func(d time.Duration) float64 {
		if result.Ops == 0 {
			return 0
		}
		return d.Seconds() * 1000 / (float64(result.Ops) / 1000)
	}
	for i, p := range procs {
		cpu := per1k(after[i].cpu - before[i].cpu)
		result.CPUPer1k += cpu
		result.CPUByName[p.name] += cpu
		result.RSS += after[i].rss
		result.RSSByName[p.name] += after[i].rss
	}
	result.LoadCPU = per1k(selfAfter - self)
	others := machineAfter - machine - (selfAfter - self)
	for i := range procs {
		others -= after[i].cpu - before[i].cpu
	}
	result.Foreign = max(0, others.Seconds()/measured.Seconds())
	return result
}

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
