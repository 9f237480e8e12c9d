package fault

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/leased/leased/internal/testnats"
)

var (
	flagSeed     = flag.Uint64("fault.seed", 0, "seed of the runs; 0: by the clock")
	flagLength   = flag.Duration("fault.length", 0, "how long each fault is injected; 0: no runs against real processes but the smallest")
	flagTotal    = flag.Duration("fault.total", 0, "time for all faults together, instead of -fault.length")
	flagTopology = flag.String("fault.topology", "", "embedded, r1 or r3, comma separated; empty: all")
	flagOnly     = flag.String("fault.only", "", "faults to run, comma separated; empty: all")
	flagOut      = flag.String("fault.out", "", "directory for failing runs; empty: below the system's temporary directory")
	flagTable    = flag.String("fault.table", "", "file that the table of runs is written to")
	flagClients  = flag.Int("fault.clients", 20, "number of clients")
	flagPace     = flag.Duration("fault.pace", 60*time.Millisecond, "mean pause of a client between two calls")
	flagMutants  = flag.Bool("fault.mutants", false, "run the mutants: every one must be caught")
)

func TestMain(m *testing.M) {
	flag.Parse()
	if *flagSeed == 0 {
		*flagSeed = uint64(time.Now().UnixNano()) % 1_000_000
	}
	goleak.VerifyTestMain(m, testnats.ServersOwn())
}

func outDir() string {
	if *flagOut != "" {
		return *flagOut
	}
	return filepath.Join(os.TempDir(), "leased-fault")
}

// plans are the runs that the flags ask for.
func plans() (ps []Plan) {
	on := []Topology{Embedded, R1, R3}
	if *flagTopology != "" {
		on = nil
		for _, s := range strings.Split(*flagTopology, ",") {
			on = append(on, Topology(s))
		}
	}
	var only []string
	if *flagOnly != "" {
		only = strings.Split(*flagOnly, ",")
	}
	for _, f := range Faults {
		if only != nil && !slices.Contains(only, f.Name) {
			continue
		}
		for _, top := range on {
			if slices.Contains(f.On, top) {
				ps = append(ps, Plan{Fault: f, On: top, Seed: *flagSeed, Clients: *flagClients, Pace: *flagPace, Dir: outDir()})
			}
		}
	}
	length := *flagLength
	if *flagTotal > 0 && len(ps) > 0 {
		// A run costs some 20 s beside the injection.
		length = max(5*time.Second, *flagTotal/time.Duration(len(ps))-20*time.Second)
	}
	for i := range ps {
		ps[i].Length = length
	}
	return ps
}

// TestFault breaks everything that the flags ask for, one run after the other.
// Without -fault.length or -fault.total it makes one short run without faults.
func TestFault(t *testing.T) {
	ps := plans()
	if *flagLength == 0 && *flagTotal == 0 {
		if testing.Short() {
			t.Skip("-short: no run against real processes")
		}
		f, _ := FaultNamed("none")
		ps = []Plan{{Fault: f, On: R1, Seed: *flagSeed, Length: 5 * time.Second, Clients: *flagClients, Pace: *flagPace, Dir: outDir()}}
	}
	if len(ps) == 0 {
		t.Fatalf("no fault is called %q on %q", *flagOnly, *flagTopology)
	}
	var reports []*Report
	defer func() {
		var b strings.Builder
		Table(&b, reports)
		t.Logf("\n%s", &b)
		if *flagTable != "" {
			if err := os.WriteFile(*flagTable, []byte(b.String()), 0o644); err != nil {
				t.Error(err)
			}
		}
	}()
	for _, p := range ps {
		t.Run(p.Fault.Name+"/"+string(p.On), func(t *testing.T) {
			if ok, why := p.Available(); !ok {
				t.Skip(why)
			}
			replay := fmt.Sprintf("go test ./test/fault -run TestFault -fault.only %s -fault.topology %s -fault.length %v -fault.seed %d", p.Fault.Name, p.On, p.Length, p.Seed)
			t.Logf("%s: %s\n  %s", p.Fault.Name, p.Fault.Says, replay)
			rep := p.Execute(t)
			reports = append(reports, rep)
			for _, e := range rep.Errors {
				t.Errorf("%s", e)
			}
			for i, v := range rep.Violations {
				if i == 20 {
					t.Errorf("and %d more", len(rep.Violations)-i)
					break
				}
				t.Errorf("%v", v)
			}
			for _, key := range rep.Undone {
				t.Errorf("the checker could not decide key %s", key)
			}
		})
	}
}
