package contract

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// growthChild marks the process that TestNothingIsLeft measures.
const growthChild = "CONTRACT_TEST_GROWTH"

// TestNothingIsLeftOf100000Keys: half are released, half expire; when the last
// tombstone is gone so is everything else. It counts goroutines and heap, so it
// has a process of its own, this test again.
func TestNothingIsLeftOf100000Keys(t *testing.T) {
	t.Parallel()
	if os.Getenv(growthChild) != "" {
		growth(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestNothingIsLeftOf100000Keys$", "-test.v", "-test.timeout=10m")
	cmd.Env = append(os.Environ(), growthChild+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "_test.go:") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// footprint is what may grow.
type footprint struct {
	goroutines, series, consumers int
	heap                          int // bytes
}

func (r *rig) footprint() footprint {
	r.t.Helper()
	var f footprint
	for range 3 { // finalizers and pools need more than one
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	f.heap, f.goroutines = int(m.HeapAlloc), runtime.NumGoroutine()
	families, err := r.all[0].metrics.Gatherer().Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, family := range families {
		f.series += len(family.GetMetric())
	}
	f.consumers = r.stream().Consumers
	return f
}

// churn has n keys come and go: every second one is released, the others lapse.
func (r *rig) churn(prefix string, n int) {
	r.t.Helper()
	// Raw messages: the checks of every reply would cost more than the calls.
	const clients = 32
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			nc, err := nats.Connect(r.node.URL) // not kept until the end of the test
			if err != nil {
				r.t.Error(err)
				return
			}
			defer nc.Close()
			// Until there is a verdict, as a client would.
			call := func(endpoint, body string) (got reply) {
				for !r.t.Failed() {
					m, err := nc.Request(api+endpoint, []byte(body), 20*time.Second)
					if err == nil {
						got = reply{}
						err = json.Unmarshal(m.Data, &got)
					}
					switch {
					case err != nil:
						r.t.Errorf("%s %s: %v", endpoint, body, err)
					case got.ErrorKind != "unknown" && got.ErrorKind != "unavailable":
						return got
					}
				}
				return got
			}
			for i := c; i < n && !r.t.Failed(); i += clients {
				key := fmt.Sprintf("%s-%d", prefix, i)
				if i/clients%2 == 0 {
					call("acquire", fmt.Sprintf(`{"key":"%s","holder":"A","ttl_ms":1000}`, key))
					continue
				}
				l := call("acquire", fmt.Sprintf(`{"key":"%s","holder":"A","ttl_ms":5000}`, key))
				if got := call("release", fmt.Sprintf(`{"key":"%s","holder":"A","revision":%d}`, key, l.Revision)); !got.Released && got.ErrorKind != "lost" {
					r.t.Errorf("%s: release: %s", key, got.Error)
				}
			}
		})
	}
	wg.Wait()
}

// empty waits until the stream is: tombstones live for 32 s.
func (r *rig) empty() {
	r.t.Helper()
	testnats.Eventually(r.t, 2*time.Minute, func() bool { return r.stream().Msgs == 0 }, "the stream is not empty again: ",
		testnats.Lazy(func() string { return fmt.Sprintf("%+v", r.stream()) }))
}

func growth(t *testing.T) {
	const keys = 100_000 / slowness // with the race detector it would take minutes
	r := newRig(t, setup{uncounted: true})
	// The base: everything has been in use once, the server's caches are full,
	// and nothing is left.
	for _, call := range calls {
		r.call(call, good("base", 1)[call])
	}
	r.want(kinds.Evicted, "evict", request{Key: "base", Revision: r.owner("base").Revision})
	r.churn("base", 3000/slowness)
	r.empty()
	base := r.footprint()

	start := time.Now()
	r.churn("k", keys)
	took := time.Since(start)
	during := r.stream()
	r.empty()
	within := func(after, base, slack int) bool { return after <= base+base/10+slack }
	var after footprint
	// What serves the last tombstones' ends, and the server's block caches, need
	// a moment.
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(250 * time.Millisecond) {
		after = r.footprint()
		if within(after.goroutines, base.goroutines, 2) && within(after.heap, base.heap, 0) || time.Now().After(deadline) {
			break
		}
	}
	t.Logf("%d keys in %v; then %d messages of %d subjects, 0 after %v more; before %+v, after %+v", keys, took.Round(time.Second),
		during.Msgs, during.NumSubjects, (time.Since(start) - took).Round(time.Second), base, after)
	if s := r.stream(); s.Msgs != 0 || s.NumSubjects != 0 {
		t.Errorf("the stream has %d messages of %d subjects", s.Msgs, s.NumSubjects)
	}
	if !within(after.goroutines, base.goroutines, 2) {
		t.Errorf("%d goroutines, before %d", after.goroutines, base.goroutines)
	}
	if after.series != base.series {
		t.Errorf("%d series, before %d", after.series, base.series)
	}
	if after.consumers != base.consumers || after.consumers > len(r.all) {
		t.Errorf("%d consumers, before %d", after.consumers, base.consumers)
	}
	// The server and the client are in this process too.
	if !within(after.heap, base.heap, 0) {
		t.Errorf("the heap is %d bytes, before %d: %.1f more a key", after.heap, base.heap, float64(after.heap-base.heap)/float64(keys))
	}
}
