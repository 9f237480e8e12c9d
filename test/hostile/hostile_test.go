package hostile

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/test/fault"
)

var (
	flagLength   = flag.Duration("hostile.length", 0, "how long the attacks go on in each topology, at least 1m; 0: only the judge is tested")
	flagTopology = flag.String("hostile.topology", "embedded,r3", "embedded, r3 or both, comma separated")
	flagP99      = flag.Duration("hostile.p99", 250*time.Millisecond, "bound of the honest renewals' p99; a machine that is not quiet needs a wider one")
	flagOnly     = flag.String("hostile.only", "", "attacks to run, comma separated; empty: all; \"none\": only the honest")
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testnats.ServersOwn()) }

func TestHostile(t *testing.T) {
	if *flagLength == 0 {
		t.Skip("-hostile.length is not given")
	}
	if *flagLength < time.Minute {
		t.Fatalf("-hostile.length %v: must be at least 1m, or attacks that take turns do not happen", *flagLength)
	}
	for _, topology := range strings.Split(*flagTopology, ",") {
		t.Run(topology, func(t *testing.T) { run(t, topology, *flagLength) })
	}
}

// chosen are the attacks that the flags ask for.
func chosen(t *testing.T) (as []*attack) {
	only := strings.Split(*flagOnly, ",")
	for _, a := range attacks() {
		if *flagOnly == "" || slices.Contains(only, a.name) {
			as = append(as, a)
		}
	}
	if len(as) == 0 && *flagOnly != "none" {
		t.Fatalf("no attack is called %q", *flagOnly)
	}
	return as
}

func run(t *testing.T, topology string, length time.Duration) {
	as := chosen(t)
	s := newStage(t, topology, length)
	rec := fault.NewRecorder()
	s.judge = newJudge(rec.Clock)
	s.honest = &honest{judge: s.judge, rec: rec, box: &fault.Inbox{}}
	if err := s.judge.start(s); err != nil {
		t.Fatal(err)
	}
	defer s.judge.tap.Close()

	// What there is of everything while the honest hold and nothing else happens.
	good, rest := context.WithCancel(context.Background())
	defer rest()
	gone := s.honest.start(good, s)
	defer gone()
	defer rest()
	pause(good, 5*time.Second)
	before := s.levels()
	consumers := s.consumers()

	began := rec.Clock.Now()
	hostile, stop := context.WithTimeout(context.Background(), length)
	defer stop()
	var attacking sync.WaitGroup
	attacking.Go(func() { s.judge.watch(hostile, s) })
	for _, a := range as {
		a.mustTry = int(float64(a.least) * length.Minutes())
		attacking.Go(func() { a.run(hostile, s, &a.tally) })
	}
	for hostile.Err() == nil {
		select {
		case <-hostile.Done():
		case <-s.rejoin:
			last := s.services[len(s.services)-1]
			last.Term()
			if code := last.Wait(40 * time.Second); code != 0 {
				s.judge.found("leaving", "the instance that was asked to leave ended with %d", code)
			}
			last.Restart()
		}
	}
	ended := rec.Clock.Now()
	attacking.Wait()

	// What attackers hold lasts 20 s at the most, what they wait for 30 s.
	held, inFlight := float64(keepers+handovers/5+1), float64(handovers+2)
	s.until(90*time.Second, "the leases and calls of the attackers do not end", func(m map[string]float64) bool {
		for series, n := range m {
			if strings.HasPrefix(series, "leased_requests_in_flight{") && n > inFlight {
				return false
			}
		}
		return m["leased_leases_held"] <= held
	})
	if n := s.judge.untold(); n > 0 {
		s.judge.found("untold", "the ends of %d leases were told by nobody", n)
	}
	// The runtime gives memory back by and by.
	var after []level
	var over []string
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Second) {
		after, over = s.levels(), nil
		for i := range after {
			for _, what := range after[i].over(before[i]) {
				over = append(over, fmt.Sprintf("instance %d: %s", i, what))
			}
		}
		if len(over) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, what := range over {
		s.judge.found("not back to base", "%s", what)
	}
	if n := s.consumers(); n > consumers {
		s.judge.found("not back to base", "the bucket has %d consumers, and had %d", n, consumers)
	}

	rest()
	gone()
	s.until(30*time.Second, "the leases of the honest do not end", func(m map[string]float64) bool { return m["leased_leases_held"] == 0 })
	drain, end := context.WithTimeout(context.Background(), 30*time.Second)
	if err := s.judge.tap.Drain(drain); err != nil {
		s.judge.found("harness", "%v", err)
	}
	end()
	s.judge.histories(s.honest)
	for _, svc := range s.services {
		if out := svc.Output(); strings.Contains(out, "panic:") || strings.Contains(out, "DATA RACE") {
			s.judge.found("bug", "an instance panicked or raced: its output has more")
		}
	}

	ds, slow := s.honest.renewals(began, ended)
	if q := quantile(ds, 0.99); q > *flagP99 {
		s.judge.found("slow", "p99 of the honest renewals is %v, more than %v; slower ones by second:%s", q, *flagP99, slow)
	}
	for _, a := range as {
		if a.tally.tried < a.mustTry {
			s.judge.found("harness", "%s tried %d times, not %d: the run proves nothing of it", a.name, a.tally.tried, a.mustTry)
		}
	}
	if least := int(float64(keepers) * length.Seconds() / ttl.Seconds() * 2); len(ds) < least {
		s.judge.found("harness", "%d honest renewals, not %d", len(ds), least)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %v: %d messages stored; %d honest calls; %d honest renewals in %v p50, %v p99, %v at most\n", topology, length, s.judge.stored, len(rec.Ops()), len(ds),
		quantile(ds, 0.5).Round(10*time.Microsecond), quantile(ds, 0.99).Round(10*time.Microsecond), quantile(ds, 1).Round(10*time.Microsecond))
	for i := range before {
		fmt.Fprintf(&b, "instance %d: before %v; after %v\n", i, before[i], after[i])
	}
	var honest tally
	for _, op := range rec.Ops() {
		honest.end(cmp.Or(string(op.Kind), "nothing"))
	}
	fmt.Fprintf(&b, "answers to the honest: %s\n", honest.ends())
	t.Logf("%s%s", &b, table(as))
	s.judge.report(t)
}

// until waits until the series of every instance are so.
func (s *stage) until(within time.Duration, otherwise string, so func(map[string]float64) bool) {
	deadline := time.Now().Add(within)
	for i := 0; i < len(s.services); {
		m, err := scrape(s.services[i].HTTP())
		switch {
		case err == nil && so(m):
			i++
		case time.Now().After(deadline):
			s.judge.found("not back to base", "instance %d: %s (%v)", i, otherwise, err)
			return
		default:
			time.Sleep(200 * time.Millisecond)
		}
	}
}

// levels are what each instance uses.
func (s *stage) levels() []level {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ls, errs := make([]level, len(s.services)), make([]error, len(s.services))
	together(len(ls), func(i int) { ls[i], errs[i] = measure(ctx, s.services[i].HTTP()) })
	if err := errors.Join(errs...); err != nil {
		s.t.Fatal(err)
	}
	return ls
}

// consumers is how many consumers the bucket has.
func (s *stage) consumers() int {
	s.t.Helper()
	nc := s.connect(judgeRole, "consumers", &tally{})
	if nc == nil {
		s.t.Fatal("the judge has no connection")
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stream, err := js.Stream(ctx, "KV_leases")
	if err != nil {
		s.t.Fatal(err)
	}
	return stream.CachedInfo().State.Consumers
}
