//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

// TestMain lets the test binary be the services that a run starts.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "serve" {
		if err := serveChild(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 5 && os.Args[1] == "load" {
		if err := runLoad(os.Args[2], os.Args[3], os.Args[4]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func TestQuantile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		values []time.Duration
		q      float64
		want   time.Duration
	}{
		{nil, 0.5, 0},
		{[]time.Duration{7}, 0.5, 7},
		{[]time.Duration{7}, 0, 7},
		{[]time.Duration{1, 9}, 0.5, 1},
		{[]time.Duration{1, 9}, 0.51, 9},
		{hundred, 0.5, 50},
		{hundred, 0.99, 99},
		{hundred, 0.991, 100},
		{hundred, 1, 100},
	} {
		if got := quantile(c.values, c.q); got != c.want {
			t.Errorf("quantile of %d values at %v = %d, want %d", len(c.values), c.q, got, c.want)
		}
	}
}

func TestMedian(t *testing.T) {
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing = %v, want NaN", got)
	}
	values := []float64{9, 1, 5}
	if got := median(values); got != 5 {
		t.Errorf("median of %v = %v, want 5", values, got)
	}
	if !slices.Equal(values, []float64{9, 1, 5}) {
		t.Errorf("median changed the order of its values: %v", values)
	}
	if got := median([]float64{4, 1, 2, 9}); got != 3 {
		t.Errorf("median of 4 1 2 9 = %v, want 3", got)
	}
}

func TestRatiosPairRounds(t *testing.T) {
	// The machine was twice as fast in round 1, which must not show.
	got := ratios(map[int]float64{0: 50, 1: 100, 3: 7}, map[int]float64{0: 100, 1: 200, 2: 300, 3: 0})
	if diff := cmp.Diff(map[int]float64{0: 0.5, 1: 0.5}, got); diff != "" {
		t.Error(diff)
	}
}

func TestInterleave(t *testing.T) {
	firsts := map[int]bool{}
	for round := range 3 {
		order := interleave(3, round)
		firsts[order[0]] = true
		if s := slices.Sorted(slices.Values(order)); !slices.Equal(s, []int{0, 1, 2}) {
			t.Errorf("round %d runs %v, not each once", round, order)
		}
	}
	if len(firsts) != 3 {
		t.Errorf("in three rounds only %v came first", firsts)
	}
	if got := interleave(0, 5); len(got) != 0 {
		t.Errorf("order of nobody is %v", got)
	}
}

func TestParseStat(t *testing.T) {
	line := "4242 (a (b) c) S 1 4242 4242 0 -1 4194560 100 0 0 0 150 50 0 0 20 0 9 0 77 1234567 321 18446744073709551615 1 1"
	got, err := parseStat([]byte(line))
	if err != nil {
		t.Fatal(err)
	}
	if want := (use{cpu: 2 * time.Second, rss: 321 * int64(os.Getpagesize())}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, bad := range []string{"", "1 (x) S 1 2 3"} {
		if _, err := parseStat([]byte(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

func TestUsageOfThisProcess(t *testing.T) {
	u, err := usageOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if u.rss < 1<<20 {
		t.Errorf("a Go test of %d resident bytes", u.rss)
	}
}

func TestParseMachine(t *testing.T) {
	// user nice system idle iowait irq softirq steal guest guest_nice
	got := parseMachine([]byte("cpu  100 10 20 9999 999 3 4 5 100 10\ncpu0 1 1 1 1\n"))
	if want := 142 * clockTick; got != want {
		t.Errorf("busy %v, want %v", got, want)
	}
}

func TestTurnsStayInTheirShare(t *testing.T) {
	turn := turns(1000, 3, 100)
	seen := map[int]int{}
	for range 10 {
		for id := range 3 {
			from, to := turn(&worker{id: id})
			if from < id*333 || to > (id+1)*333 || to-from != 100 {
				t.Fatalf("worker %d got %d to %d", id, from, to)
			}
			seen[from]++
		}
	}
	if len(seen) != 9 {
		t.Errorf("%d different batches, want 9", len(seen))
	}
}

func TestProto(t *testing.T) {
	b := protoBytes(nil, 1, []byte("header"))
	b = protoInt(b, 2, 1<<40)
	b = protoBytes(b, 3, []byte("value"))
	if n, _ := protoField(b, 2); n != 1<<40 {
		t.Errorf("field 2 = %d", n)
	}
	if _, v := protoField(b, 3); string(v) != "value" {
		t.Errorf("field 3 = %q", v)
	}
	if n, v := protoField(b, 4); n != 0 || v != nil {
		t.Errorf("field 4 = %d, %q", n, v)
	}
	if n, v := protoField([]byte{0x1a, 0x05, 'v'}, 3); n != 0 || v != nil {
		t.Errorf("a cut field = %d, %q", n, v)
	}
}

func TestRecordIsJSON(t *testing.T) {
	b := record("key-1", "holder-1", "acquired", leaseTTL)
	var got struct {
		Key, Holder string
		TTLMs       int64 `json:"ttl_ms"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Key != "key-1" || got.Holder != "holder-1" || got.TTLMs != 10000 {
		t.Errorf("got %+v", got)
	}
	if text(b, `"holder":`) != "holder-1" {
		t.Errorf("text reads holder %q", text(b, `"holder":`))
	}
	if n, err := number(b, `"ttl_ms":`); err != nil || n != 10000 {
		t.Errorf("number reads ttl_ms %d, %v", n, err)
	}
}

func TestRows(t *testing.T) {
	r := &report{Cells: []cell{
		{Topology: "r1", Workload: "cycle", Callers: 64, Target: "raw", Round: 0, OpsPerSec: 100, P50: 10, P99: 20},
		{Topology: "r1", Workload: "cycle", Callers: 64, Target: "leased", Round: 0, OpsPerSec: 50, P50: 20, P99: 60},
		{Topology: "r1", Workload: "cycle", Callers: 64, Target: "leased", Round: 1, OpsPerSec: 120, P50: 30, P99: 30, Errors: 2},
		{Topology: "r1", Workload: "cycle", Callers: 64, Target: "raw", Round: 1, OpsPerSec: 200, P50: 10, P99: 20},
		{Topology: "r1", Workload: "forward", Callers: 64, Target: "leased", Round: 0, OpsPerSec: 5},
	}}
	rows := r.rows()
	if len(rows) != 3 {
		t.Fatalf("%d rows", len(rows))
	}
	leased := rows[1]
	if leased.Target != "leased" || leased.OpsPerSec != 85 || leased.OpsRatio != 0.55 || leased.P50Ratio != 2.5 || leased.P99Ratio != 2.25 || leased.Errors != 2 {
		t.Errorf("got %+v", leased)
	}
	if rows[2].Base != "proxy" || rows[2].OpsRatio != 0 {
		t.Errorf("a row without its yardstick: %+v", rows[2])
	}
}

// Workloads of a group come in turns; each has rows of its own, beside those of
// the first.
func TestRowsOfAGroup(t *testing.T) {
	r := &report{Cells: []cell{
		{Topology: "r1", Workload: "renew1k", Callers: 64, Target: "raw", Round: 0, OpsPerSec: 100},
		{Topology: "r1", Workload: "renew100k", Callers: 64, Target: "raw", Round: 0, OpsPerSec: 80},
		{Topology: "r1", Workload: "renew1k", Callers: 64, Target: "leased", Round: 0, OpsPerSec: 50},
		{Topology: "r1", Workload: "renew100k", Callers: 64, Target: "leased", Round: 0, OpsPerSec: 30},
		{Topology: "r1", Workload: "renew100k", Callers: 64, Target: "leased", Round: 1, OpsPerSec: 35},
		{Topology: "r1", Workload: "owner", Callers: 64, Target: "raw", Round: 0, OpsPerSec: 5},
	}}
	rows := r.rows()
	var order []string
	for _, x := range rows {
		order = append(order, x.Workload+" "+x.Target)
	}
	if diff := cmp.Diff([]string{"renew1k raw", "renew1k leased", "renew100k raw", "renew100k leased", "owner raw"}, order); diff != "" {
		t.Fatal(diff)
	}
	if x := rows[3]; x.Beside != "renew1k" || x.OpsBeside != 0.6 || x.OpsRatioBeside != 0.75 {
		t.Errorf("got %+v, want 30/50 and (30/80)/(50/100) of the one round that all have", x)
	}
	if rows[1].Beside != "" || rows[4].Beside != "" {
		t.Errorf("the first of a group, and one without a group, stand beside none: %+v, %+v", rows[1], rows[4])
	}
}

func TestFlags(t *testing.T) {
	o, err := parseFlags([]string{"-targets", "raw,etcd", "-c", "1,8", "-rounds", "2"})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(o.targets, []string{"raw", "etcd"}) || !slices.Equal(o.callers, []int{1, 8}) || slices.Contains(o.workloads, "renew1m") {
		t.Errorf("got %+v", o)
	}
	if o, err := parseFlags([]string{"-before", "old"}); err != nil || !slices.Contains(o.targets, "leased-before") {
		t.Errorf("-before does not add its target: %v, %v", o.targets, err)
	}
	if slices.Contains(o.targets, "leased-before") {
		t.Error("leased-before is a target without -before")
	}
	for _, bad := range [][]string{{"-targets", "rwa"}, {"-c", "0"}, {"-c", ""}, {"-rounds", "0"}, {"-targets", "leased-before"}, {"-duration", "2h"}, {"more"}} {
		if _, err := parseFlags(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

// A short run of everything that needs no other package: it must move, without
// an error, and leave nothing behind.
func TestSmoke(t *testing.T) {
	o, err := parseFlags([]string{"-topologies", "r1", "-targets", "raw,kv,naive,leased,embedded,proxy", "-c", "4", "-rounds", "1",
		"-workloads", "cycle,owner,contended,poll,handover,forward", "-duration", "150ms", "-warm", "50ms", "-limit", "2m"})
	if err != nil {
		t.Fatal(err)
	}
	o.logf = t.Logf
	r, err := bench(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Skipped) > 0 {
		t.Errorf("skipped: %+v", r.Skipped)
	}
	var cpu float64
	for _, c := range r.Cells {
		if c.Errors > 0 {
			t.Errorf("%s %s: %d errors, first: %s", c.Workload, c.Target, c.Errors, c.FirstError)
		}
		if c.Ops == 0 && c.Workload != "contended" && c.Workload != "handover" {
			t.Errorf("%s %s did nothing", c.Workload, c.Target)
		}
		if c.RSS == 0 {
			t.Errorf("%s %s: no memory was measured", c.Workload, c.Target)
		}
		cpu += c.CPUPer1k
	}
	if cpu == 0 {
		t.Error("no server used any CPU")
	}
	if want := 4*5 + 5 + 3; len(r.Cells) != want {
		t.Errorf("%d cells, want %d", len(r.Cells), want)
	}
	var out bytes.Buffer
	if err := r.write(&out, true); err != nil {
		t.Fatal(err)
	}
	if !json.Valid(out.Bytes()) {
		t.Errorf("not JSON: %.300s", out.Bytes())
	}
	if err := r.write(&out, false); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", out.Bytes())
}

func TestEndsWhenTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	start := time.Now()
	c := drive(ctx, 2, time.Hour, time.Hour, nil, func(context.Context, *worker) error { return nil })
	if took := time.Since(start); took > 5*time.Second || c.Ops != 0 {
		t.Errorf("took %v, %d operations", took, c.Ops)
	}
}
