package fault

import (
	"context"
	"fmt"
	"hash/fnv"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Plan says which run to make.
type Plan struct {
	Fault    Fault
	On       Topology
	Seed     uint64
	Length   time.Duration // of the injection
	Clients  int
	Pace     time.Duration
	Leased   string   // variant of leased, "" for the usual one
	Env      []string // of leased
	Dir      string   // where a failure is written
	Quick    bool     // do not wait for the long-term promises
	NoChecks bool     // of the harness itself: recovery, injected enough
}

// seed derives the seed of one run, so that a run alone is the same as in a list.
func (p Plan) seed() uint64 {
	h := fnv.New64a()
	fmt.Fprint(h, p.Fault.Name, p.On, p.Seed)
	return h.Sum64()
}

// Available says whether the plan can be carried out here.
func (p Plan) Available() (bool, string) {
	if !slices.Contains(p.Fault.On, p.On) {
		return false, fmt.Sprintf("%s makes no sense on %s", p.Fault.Name, p.On)
	}
	return p.Fault.Available()
}

// promised is how often the fault must be injected at least.
func (p Plan) promised() int {
	return max(p.Fault.Least, int(p.Fault.PerMinute*p.Length.Minutes()))
}

// Execute makes the run and judges it. What it leaves to the caller is to fail.
func (p Plan) Execute(t testing.TB) *Report {
	t.Helper()
	if p.Length < p.Fault.Needs {
		p.Length = p.Fault.Needs
	}
	v := Variant{}
	if p.Fault.Prepare != nil {
		v = p.Fault.Prepare(Preparation{T: t, Leased: p.Leased})
	}
	if v.Leased == "" {
		v.Leased = p.Leased
	}
	v.Env = append(v.Env, p.Env...)
	e := NewEnv(t, p.On, p.seed(), v)
	tap, err := StartTap(e.Log, e.urls)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()

	load := Load{Seed: p.seed(), Clients: p.Clients, Pace: p.Pace, MinTTL: time.Second, MaxTTL: 5 * time.Second, Evicts: true, Waits: true}
	if p.Fault.Load != nil {
		load = p.Fault.Load(load)
	}
	work, stop := context.WithCancel(context.Background())
	defer stop()
	wait, err := load.Start(work, e.Rec, e.Box, e.Connect)
	if err != nil {
		t.Fatal(err)
	}
	defer wait()
	defer stop()

	time.Sleep(time.Second)
	var problems []string
	problem := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	inject, end := context.WithTimeout(context.Background(), p.Length)
	did, err := p.Fault.Inject(inject, e)
	end()
	if err != nil {
		problem("inject: %v", err)
	}
	if promised := p.promised(); did < promised {
		problem("injected %d times, promised %d", did, promised)
	}
	var recovered time.Duration
	if recovered, err = e.Recovered(); err != nil {
		problem("I18: %v", err)
	}
	time.Sleep(time.Second)
	stop()
	wait()

	healthy := len(e.Rec.Windows()) == 0
	var counted map[Call]map[kinds.Kind]uint64
	if healthy {
		// Everything that will end has ended by then, and has been told.
		if !p.Quick {
			time.Sleep(load.MaxTTL + expiryTold + 2*time.Second)
		}
		if counted, err = e.AllCounted(); err != nil {
			problem("counts: %v", err)
		}
	}
	drain, end := context.WithTimeout(context.Background(), 10*time.Second)
	if err := tap.Drain(drain); err != nil {
		problem("%v", err)
	}
	end()

	run := &Run{Clock: e.Rec.Clock, Ops: e.Rec.Ops(), Log: e.Log.Snapshot(), Inbox: e.Box.Deliveries(), Windows: e.Rec.Windows(), End: e.Rec.Clock.Now(), Healthy: healthy, Counted: counted, Foreign: e.Foreign}
	rep, bad := run.Verify(time.Minute)
	if p.Fault.Check != nil {
		rep.Violations = append(rep.Violations, p.Fault.Check(run)...)
	}
	for i, s := range e.Services {
		if out := s.Output(); strings.Contains(out, "panic:") || strings.Contains(out, "DATA RACE") {
			problem("instance %d panicked or raced: its output has more", i)
		}
	}
	rep.Fault, rep.Topology, rep.Seed, rep.Length = p.Fault.Name, string(p.On), p.Seed, p.Length
	rep.Injected, rep.Promised, rep.Recover = did, p.promised(), recovered
	rep.Errors = problems
	if rep.Grants == 0 {
		rep.Errors = append(rep.Errors, "nothing was granted: the run proves nothing")
	}
	if healthy && rep.Missed > uint64(rep.Stored)/20 {
		rep.Errors = append(rep.Errors, fmt.Sprintf("%d of %d messages were not seen", rep.Missed, rep.Stored))
	}
	if rep.Failed() && p.Dir != "" {
		dir := filepath.Join(p.Dir, fmt.Sprintf("%s-%s-%d", p.Fault.Name, p.On, p.Seed))
		if err := run.Save(dir, rep, bad); err != nil {
			t.Errorf("save the failing run: %v", err)
		} else {
			t.Logf("the failing run is in %s", dir)
		}
	}
	return rep
}
