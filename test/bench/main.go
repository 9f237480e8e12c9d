//go:build linux

// Command bench measures how close the lease service comes to bare JetStream.
//
// The same closed loop of callers runs over every contestant: callers that
// write their leases themselves ("raw", the yardstick), the KV API of nats.go,
// a naive service, the lease service over external servers and with the server
// inside, and etcd and redis where they are installed. In each workload the
// contestants take turns round by round, each on servers of its own that idle
// meanwhile, and what is told are medians over the rounds and ratios to raw
// within a round. Renewals over few and over many held leases take turns with each
// other too, so that one can be told as a ratio to the other.
//
//	go run ./test/bench                                   # all but 1M leases
//	go run ./test/bench -topologies r1 -workloads cycle -targets raw,leased -c 64
//	go run ./test/bench -workloads poll -before OLD       # beside an older leased
//	go run ./test/bench -json > bench.json
//
// Everything runs on loopback, is bounded in time and ends with this process.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

type options struct {
	targets, workloads, topologies []string
	callers                        []int
	rounds                         int
	warm, length, limit            time.Duration
	conns, instances, held, ends   int
	json                           bool
	natsServer, leased, etcd       string
	before                         string // an older leased, the target leased-before
	logf                           func(format string, args ...any)
}

// heavy workloads run only when they are named.
var heavy = []string{"renew1m", "list1m", "expire300k", "restart"}

func main() {
	if len(os.Args) == 4 && os.Args[1] == "serve" {
		if err := serveChild(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	opts, err := parseFlags(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := bench(ctx, opts)
	if err == nil {
		err = r.write(os.Stdout, opts.json)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (options, error) {
	o := options{logf: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, time.Now().Format("15:04:05 ")+format+"\n", args...)
	}}
	var targetNames, workloadNames, topologyNames, defaultWorkloads []string
	for _, t := range targets() {
		targetNames = append(targetNames, t.name)
	}
	defaultTargets := slices.DeleteFunc(slices.Clone(targetNames), func(name string) bool { return name == "leased-before" })
	for _, w := range workloads() {
		if w.with != "" {
			continue
		}
		workloadNames = append(workloadNames, w.name)
		if !slices.Contains(heavy, w.name) {
			defaultWorkloads = append(defaultWorkloads, w.name)
		}
	}
	for _, t := range topologies {
		topologyNames = append(topologyNames, t.name)
	}
	o.targets, o.workloads, o.topologies, o.callers = defaultTargets, defaultWorkloads, topologyNames, []int{1, 64, 256}

	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	list := func(name string, value *[]string, known []string, what string) {
		f.Func(name, fmt.Sprintf("comma separated %s: %s (default %s)", what, strings.Join(known, ","), strings.Join(*value, ",")), func(s string) error {
			*value = strings.Split(s, ",")
			for _, v := range *value {
				if !slices.Contains(known, v) {
					return fmt.Errorf("-%s knows %s, not %q", name, strings.Join(known, " "), v)
				}
			}
			return nil
		})
	}
	list("targets", &o.targets, targetNames, "contestants")
	list("workloads", &o.workloads, workloadNames, "workloads")
	list("topologies", &o.topologies, topologyNames, "topologies")
	f.Func("c", "comma separated numbers of callers for cycle (default 1,64,256)", func(s string) error {
		o.callers = nil
		for v := range strings.SplitSeq(s, ",") {
			n, err := strconv.Atoi(v)
			if err != nil || n < 1 || n > 4096 {
				return fmt.Errorf("-c takes numbers from 1 to 4096, not %q", v)
			}
			o.callers = append(o.callers, n)
		}
		return nil
	})
	f.IntVar(&o.rounds, "rounds", 3, "rounds; the medians are over them")
	f.DurationVar(&o.length, "duration", 2*time.Second, "measured time of one contestant in one round")
	f.DurationVar(&o.warm, "warm", 500*time.Millisecond, "time before it that is not measured")
	f.DurationVar(&o.limit, "limit", time.Hour, "end of the whole run")
	f.IntVar(&o.conns, "conns", 2, "NATS or etcd connections the callers share, at least one a server")
	f.IntVar(&o.held, "held", 1_000_000, "leases held in renew1m, list1m and restart")
	f.IntVar(&o.ends, "ends", 300_000, "leases that end within a second in expire300k")
	f.IntVar(&o.instances, "instances", 1, "leased processes beside external servers")
	f.BoolVar(&o.json, "json", false, "print JSON instead of tables")
	f.StringVar(&o.natsServer, "nats-server", "", "nats-server to run (default: built, of the version in go.mod)")
	f.StringVar(&o.leased, "leased", "", "leased to run (default: built from ./cmd/leased)")
	f.StringVar(&o.before, "before", "", "older leased to run as the target leased-before, in the same rounds")
	f.StringVar(&o.etcd, "etcd", "etcd", "etcd to run")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if named := slices.Contains(o.targets, "leased-before"); o.before != "" && !named {
		o.targets = append(o.targets, "leased-before")
	} else if named && o.before == "" {
		return o, errors.New("the target leased-before needs -before")
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unknown argument %q", f.Arg(0))
	}
	if o.rounds < 1 || o.rounds > 100 || o.length <= 0 || o.length > time.Minute || o.conns < 1 || o.conns > 256 ||
		o.instances < 1 || o.instances > 16 || o.held < 1000 || o.held > 10_000_000 {
		return o, errors.New("-rounds is 1..100, -duration up to 1m, -conns 1..256, -instances 1..16, -held 1000..10000000")
	}
	return o, nil
}

func targets() []target {
	return []target{rawTarget(), kvTarget(), naiveTarget(), leasedTarget("leased-before", (*env).leasedBefore), leasedTarget("leased", (*env).leased), embeddedTarget(), proxyTarget(), etcdTarget(), etcdSpareTarget(), redisTarget()}
}

// bench runs everything that opts select.
func bench(ctx context.Context, opts options) (*report, error) {
	ctx, cancel := context.WithTimeout(ctx, opts.limit)
	defer cancel()
	dir, err := os.MkdirTemp("", "leased-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	e := &env{opts: opts, nursery: newNursery(), dir: dir, bins: map[string]string{}}
	defer e.nursery.end()
	rep := &report{
		Command: strings.Join(append([]string{"go run ./test/bench"}, os.Args[1:]...), " "),
		Go:      runtime.Version(), CPUs: runtime.NumCPU(), Started: time.Now().UTC(),
		Rounds: opts.rounds, Length: opts.length,
	}
	for _, t := range topologies {
		if slices.Contains(opts.topologies, t.name) {
			if err := benchTopology(ctx, e, t, rep); err != nil {
				return rep, err
			}
		}
	}
	rep.Took = time.Since(rep.Started)
	return rep, nil
}

// A lane is a contestant in one workload.
type lane struct {
	workload workload
	run      *run
	unit     func(context.Context, *worker) error
}

// benchTopology starts the contestants that have work here and lets them take
// turns in one workload, or group of workloads, after the other.
func benchTopology(ctx context.Context, e *env, t topology, rep *report) error {
	var todo [][]workload
	for _, w := range workloads() {
		if !slices.Contains(e.opts.workloads, w.name) && !slices.Contains(e.opts.workloads, w.with) {
			continue
		}
		if w.held == 0 && (slices.Contains(heavy, w.name) || slices.Contains(heavy, w.with)) {
			w.held = e.opts.held
		}
		if last := len(todo) - 1; last >= 0 && w.group != "" && w.group == todo[last][0].group {
			todo[last] = append(todo[last], w)
		} else {
			todo = append(todo, []workload{w})
		}
	}
	runs, end := startAll(ctx, e, t, rep, slices.Concat(todo...))
	defer end()
	for _, group := range todo {
		if err := benchGroup(ctx, e, t, group, runs, rep); err != nil {
			return err
		}
	}
	return nil
}

// startAll starts the contestants that one of todo has; end stops them.
func startAll(ctx context.Context, e *env, t topology, rep *report, todo []workload) (runs []*run, end func()) {
	for _, target := range targets() {
		needed := slices.ContainsFunc(todo, func(w workload) bool { return w.has(target) })
		if !slices.Contains(e.opts.targets, target.name) || !slices.Contains(target.topologies, t.name) || !needed {
			continue
		}
		if target.missing != nil {
			if why := target.missing(e); why != "" {
				rep.skip(e, t.name, "", target.name, why)
				continue
			}
		}
		system, err := target.start(ctx, e, t)
		if err != nil {
			rep.skip(e, t.name, "", target.name, err.Error())
			continue
		}
		runs = append(runs, &run{env: e, target: target, system: system})
	}
	return runs, func() {
		for _, r := range runs {
			r.system.close()
		}
	}
}

func (w workload) has(t target) bool {
	if w.only == nil {
		return !t.grantless
	}
	return slices.Contains(w.only, t.name)
}

// benchGroup runs the workloads of a group in the same rounds. The first has the
// contestants in runs, each other one has contestants of its own.
func benchGroup(ctx context.Context, e *env, t topology, group []workload, runs []*run, rep *report) error {
	of := [][]*run{runs}
	for _, w := range group[1:] {
		if w.with != "" {
			of = append(of, runs)
			continue
		}
		own, end := startAll(ctx, e, t, rep, []workload{w})
		defer end()
		of = append(of, own)
	}
	callers := group[0].callers
	if callers == nil {
		callers = e.opts.callers
	}
	for _, c := range callers {
		var lanes []lane
		for i, w := range group {
			lanes = append(lanes, lanesOf(ctx, e, t, w, c, of[i], rep)...)
		}
		// What a contestant does in one workload of a group stands beside what it
		// does in another.
		order := func(l lane) int {
			return slices.IndexFunc(targets(), func(t target) bool { return t.name == l.run.target.name })
		}
		slices.SortStableFunc(lanes, func(a, b lane) int { return order(a) - order(b) })
		if err := benchLanes(ctx, e, t, c, lanes, rep); err != nil {
			return err
		}
	}
	return nil
}

// lanesOf prepares the contestants that can for w.
func lanesOf(ctx context.Context, e *env, t topology, w workload, callers int, runs []*run, rep *report) (lanes []lane) {
	for _, r := range runs {
		if !w.has(r.target) {
			continue
		}
		if most := r.target.maxHeld; most > 0 && w.held > most {
			rep.skip(e, t.name, w.name, r.target.name, fmt.Sprintf("it takes minutes to grant more than %d leases", most))
			continue
		}
		if err := r.prepare(ctx, callers, w); err != nil {
			rep.skip(e, t.name, w.name, r.target.name, err.Error())
			continue
		}
		l := lane{workload: w, run: r}
		if w.unit != nil {
			l.unit = w.unit(r, callers)
		}
		lanes = append(lanes, l)
	}
	return lanes
}

// What is told of a group is a ratio of ratios, of four cells that this machine may
// have run at different speeds: each round is a number of turns then, shorter ones.
const (
	groupTurns   = 4
	groupShorter = 2
)

// benchLanes lets lanes take turns, round by round.
func benchLanes(ctx context.Context, e *env, t topology, callers int, lanes []lane, rep *report) error {
	rounds, shorter := e.opts.rounds, time.Duration(1)
	if slices.ContainsFunc(lanes, func(l lane) bool { return l.workload.name != lanes[0].workload.name }) {
		rounds, shorter = rounds*groupTurns, groupShorter
	}
	for round := range rounds {
		for _, i := range interleave(len(lanes), round) {
			if ctx.Err() != nil {
				return fmt.Errorf("the run was ended: %w", ctx.Err())
			}
			var c cell
			w, system := lanes[i].workload, lanes[i].run.system
			switch {
			case w.name == "restart":
				c = restart(ctx, system)
			case w.storm:
				c = storm(ctx, lanes[i].run, callers, e.opts.ends)
			default:
				unhang := func() {}
				if w.hung {
					var err error
					if unhang, err = system.(hanger).hang(ctx); err != nil {
						return err
					}
				}
				end := lanes[i].run.list(ctx, w.listers)
				c = drive(ctx, callers, e.opts.warm, max(e.opts.length, w.length)/shorter, system.procs(), lanes[i].unit)
				c.Pages = end()
				unhang()
			}
			c.Topology, c.Workload, c.Target, c.Round, c.Held = t.name, w.name, lanes[i].run.target.name, round, w.held
			rep.Cells = append(rep.Cells, c)
			e.opts.logf("%-6s %-9s C=%-4d %-10s round %d: %8.0f ops/s  p50 %s  p99 %s  errors %d %s%s%v",
				t.name, w.name, callers, c.Target, round+1, c.OpsPerSec, short(c.P50), short(c.P99), c.Errors, c.FirstError, pagesOf(c), c.Ends)
		}
	}
	return nil
}

// pagesOf tells of the pages that were read beside a cell.
func pagesOf(c cell) string {
	if c.Pages == 0 {
		return ""
	}
	return fmt.Sprintf("  %d pages beside it", c.Pages)
}
