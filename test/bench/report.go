//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// A report is all that a run found.
type report struct {
	Command string        `json:"command"`
	Go      string        `json:"go"`
	CPUs    int           `json:"cpus"`
	Started time.Time     `json:"started"`
	Took    time.Duration `json:"took_ns"`
	Rounds  int           `json:"rounds"`
	Length  time.Duration `json:"length_ns"`
	Skipped []skipped     `json:"skipped"`
	Rows    []row         `json:"rows"`
	Cells   []cell        `json:"cells"`
}

type skipped struct {
	Topology string `json:"topology"`
	Workload string `json:"workload,omitempty"` // "" for all of them
	Target   string `json:"target"`
	Why      string `json:"why"`
}

// A row is a contestant in a workload: medians over the rounds. Ratios are to
// the workload's baseline, taken round by round, 0 where there is none. Beside is
// the first workload of its group, another one than its own.
type row struct {
	Topology  string             `json:"topology"`
	Workload  string             `json:"workload"`
	Callers   int                `json:"callers"`
	Target    string             `json:"target"`
	OpsPerSec float64            `json:"ops_per_sec"`
	P50       time.Duration      `json:"p50_ns"`
	P99       time.Duration      `json:"p99_ns"`
	CPUPer1k  float64            `json:"cpu_ms_per_1k_ops"`
	CPUByName map[string]float64 `json:"cpu_ms_per_1k_by"`
	RSS       float64            `json:"rss_bytes"`
	RSSByName map[string]float64 `json:"rss_bytes_by"`
	Errors    int                `json:"errors"`
	Foreign   float64            `json:"foreign_cpus"`
	Base      string             `json:"base"`
	OpsRatio  float64            `json:"ops_ratio"`
	P50Ratio  float64            `json:"p50_ratio"`
	P99Ratio  float64            `json:"p99_ratio"`

	Beside         string  `json:"beside,omitempty"`
	OpsBeside      float64 `json:"ops_beside,omitempty"`       // OpsPerSec to that of Beside
	OpsRatioBeside float64 `json:"ops_ratio_beside,omitempty"` // OpsRatio to that of Beside
}

func (r *report) skip(e *env, topology, workload, target, why string) {
	r.Skipped = append(r.Skipped, skipped{topology, workload, target, why})
	e.opts.logf("skipped: %s %s %s: %s", topology, workload, target, why)
}

// rows sums the cells up, in the order in which they first came.
func (r *report) rows() []row {
	type group struct {
		topology, workload string
		callers            int
		target             string
	}
	var order []group
	cells := map[group][]cell{}
	for _, c := range r.Cells {
		g := group{c.Topology, c.Workload, c.Callers, c.Target}
		if cells[g] == nil {
			order = append(order, g)
		}
		cells[g] = append(cells[g], c)
	}
	// The workloads of a group came in turns.
	came := slices.Clone(order)
	slices.SortStableFunc(order, func(a, b group) int {
		first := func(x group) int {
			return slices.IndexFunc(came, func(y group) bool { y.target = x.target; return x == y })
		}
		return first(a) - first(b)
	})
	known := map[string]workload{}
	for _, w := range workloads() {
		known[w.name] = w
	}
	// by is a value of each round.
	by := func(g group, value func(cell) float64) map[int]float64 {
		m := map[int]float64{}
		for _, c := range cells[g] {
			m[c.Round] = value(c)
		}
		return m
	}
	middle := func(m map[int]float64) float64 {
		if len(m) == 0 {
			return 0
		}
		return median(slices.Collect(maps.Values(m)))
	}
	var out []row
	for _, g := range order {
		mine := cells[g]
		over := func(value func(cell) float64) float64 {
			var values []float64
			for _, c := range mine {
				values = append(values, value(c))
			}
			return median(values)
		}
		base := known[g.workload].baseline()
		toBase := func(g group, value func(cell) float64) map[int]float64 {
			yardstick := g
			yardstick.target = base
			return ratios(by(g, value), by(yardstick, value))
		}
		ops := func(c cell) float64 { return c.OpsPerSec }
		p50 := func(c cell) float64 { return float64(c.P50) }
		p99 := func(c cell) float64 { return float64(c.P99) }
		one := row{
			Topology: g.topology, Workload: g.workload, Callers: g.callers, Target: g.target,
			OpsPerSec: over(ops), P50: time.Duration(over(p50)), P99: time.Duration(over(p99)),
			CPUPer1k: over(func(c cell) float64 { return c.CPUPer1k }),
			Foreign:  over(func(c cell) float64 { return c.Foreign }),
			RSS:      over(func(c cell) float64 { return float64(c.RSS) }),
			Base:     base, OpsRatio: middle(toBase(g, ops)), P50Ratio: middle(toBase(g, p50)), P99Ratio: middle(toBase(g, p99)),
			CPUByName: map[string]float64{}, RSSByName: map[string]float64{},
		}
		first := slices.IndexFunc(order, func(x group) bool {
			return x.topology == g.topology && x.callers == g.callers && x.target == g.target &&
				known[x.workload].group != "" && known[x.workload].group == known[g.workload].group
		})
		if first >= 0 && order[first] != g {
			beside := order[first]
			one.Beside = beside.workload
			one.OpsBeside = middle(ratios(by(g, ops), by(beside, ops)))
			one.OpsRatioBeside = middle(ratios(toBase(g, ops), toBase(beside, ops)))
		}
		for name := range mine[0].RSSByName {
			one.CPUByName[name] = over(func(c cell) float64 { return c.CPUByName[name] })
			one.RSSByName[name] = over(func(c cell) float64 { return float64(c.RSSByName[name]) })
		}
		for _, c := range mine {
			one.Errors += c.Errors
		}
		out = append(out, one)
	}
	return out
}

func (r *report) write(w io.Writer, asJSON bool) error {
	r.Rows = r.rows()
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	about := map[string]string{}
	for _, wl := range workloads() {
		about[wl.name] = wl.about
	}
	fmt.Fprintf(w, "%s\n%s, %s, %d CPUs, %d rounds of %v, %v in all\n", r.Command, r.Started.Format(time.DateTime), r.Go, r.CPUs, r.Rounds, r.Length, r.Took.Round(time.Second))
	for _, s := range r.Skipped {
		fmt.Fprintf(w, "skipped: %s %s %s: %s\n", s.Topology, s.Workload, s.Target, s.Why)
	}
	for _, c := range r.Cells {
		if c.Ends != nil {
			fmt.Fprintf(w, "%s %s %s round %d:%v\n", c.Topology, c.Workload, c.Target, c.Round+1, c.Ends)
		}
	}
	var tab *tabwriter.Writer
	last := ""
	for _, x := range r.Rows {
		title := fmt.Sprintf("\n%s %s C=%d: %s\n", x.Topology, x.Workload, x.Callers, about[x.Workload])
		if title != last {
			if tab != nil {
				tab.Flush()
			}
			fmt.Fprint(w, title)
			tab = tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
			head := "target\tops/s\tp50\tp99\tCPU ms/1k\tRSS MB\tops x" + x.Base + "\tp50 x\tp99 x\tforeign CPUs\terrors\t"
			if x.Beside != "" {
				head += "ops x" + x.Beside + "\tops x" + x.Base + " xsame\t"
			}
			fmt.Fprintln(tab, head)
			last = title
		}
		fmt.Fprintf(tab, "%s\t%.0f\t%s\t%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%d\t", x.Target, x.OpsPerSec, short(x.P50), short(x.P99),
			split(x.CPUPer1k, x.CPUByName, 1), split(x.RSS, x.RSSByName, 1e6), x.OpsRatio, x.P50Ratio, x.P99Ratio, x.Foreign, x.Errors)
		if x.Beside != "" {
			fmt.Fprintf(tab, "%.2f\t%.2f\t", x.OpsBeside, x.OpsRatioBeside)
		}
		fmt.Fprintln(tab)
	}
	if tab != nil {
		return tab.Flush()
	}
	return nil
}

// split writes a sum and, where several kinds of process share it, its parts.
func split(sum float64, parts map[string]float64, unit float64) string {
	s := fmt.Sprintf("%.0f", sum/unit)
	if len(parts) < 2 {
		return s
	}
	var names []string
	for _, name := range slices.Sorted(maps.Keys(parts)) {
		names = append(names, fmt.Sprintf("%s %.0f", name, parts[name]/unit))
	}
	return s + " (" + strings.Join(names, ", ") + ")"
}

// short writes d with three digits.
func short(d time.Duration) string {
	switch {
	case d < 10*time.Microsecond:
		return d.String()
	case d < time.Millisecond:
		return fmt.Sprintf("%dus", d.Microseconds())
	case d < 100*time.Millisecond:
		return fmt.Sprintf("%.2fms", d.Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%.0fms", d.Seconds()*1000)
	}
	return fmt.Sprintf("%.2fs", d.Seconds())
}
