package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// Fault is one way to break the system.
type Fault struct {
	Name string
	Says string
	// On are the topologies where it makes sense.
	On []Topology
	// Available says whether this machine can do it, and if not, why.
	Available func() (bool, string)
	// Prepare makes the programs that the run needs in place of the usual ones.
	Prepare func(e Preparation) Variant
	// Load is the traffic, where the usual one does not do.
	Load func(Load) Load
	// Inject breaks the system again and again until ctx ends, mends it, and
	// says how often it did. What it counts it has seen happen.
	Inject func(ctx context.Context, e *Env) (did int, err error)
	// PerMinute is how often it must happen at least.
	PerMinute float64
	// Least is how often at least, however short the run.
	Least int
	// Needs is the shortest time in which it can happen at all.
	Needs time.Duration
	// Check is one more check of the run.
	Check func(r *Run) []Violation
}

// every calls inject again and again with a pause of about gap between, until
// ctx ends, and counts.
func every(ctx context.Context, e *Env, gap time.Duration, inject func() error) (did int, err error) {
	for pause(ctx, gap/2+time.Duration(e.Rng.Int64N(int64(gap)))) {
		if err := inject(); err != nil {
			return did, err
		}
		did++
	}
	return did, nil
}

// between is a random time from lo to hi.
func (e *Env) between(lo, hi time.Duration) time.Duration {
	return lo + time.Duration(e.Rng.Int64N(int64(hi-lo)+1))
}

// crash kills p as a crash does and starts it again after d.
func (e *Env) crash(name string, p process, d time.Duration) error {
	end := e.Fault(name, Window{})
	defer end()
	if !p.Running() {
		return fmt.Errorf("%s: it does not run", name)
	}
	p.Kill()
	if p.Running() {
		return fmt.Errorf("%s: it survived", name)
	}
	time.Sleep(d)
	p.Restart()
	e.WaitReady(60 * time.Second)
	return nil
}

// stall pauses p for d.
func (e *Env) stall(name string, p process, d time.Duration, shape Window) {
	end := e.Fault(name, shape)
	defer end()
	p.Pause()
	time.Sleep(d)
	p.Resume()
}

func anywhere() (bool, string) { return true, "" }

func asRoot() (bool, string) {
	if os.Geteuid() != 0 {
		return false, "needs root to mount a file system"
	}
	return true, ""
}

// Faults is the list.
var Faults = []Fault{
	{
		Name: "none", Says: "nothing", On: []Topology{Embedded, R1, R3}, Available: anywhere, Least: 1,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			<-ctx.Done()
			return 1, nil
		},
	},
	{
		Name: "kill-service", Says: "kill -9 of an instance", On: []Topology{Embedded, R1, R3}, Available: anywhere, PerMinute: 8, Least: 1,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 3*time.Second, func() error {
				s := e.outside()
				return e.crash("kill instance", s[e.Rng.IntN(len(s))], e.between(50*time.Millisecond, time.Second))
			})
		},
	},
	{
		Name: "drain-service", Says: "SIGTERM of an instance with 200 requests in flight", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 6, Least: 1,
		Inject: injectTerm, Check: checkLeavesCleanly,
	},
	{
		Name: "pause-service", Says: "pause of an instance, or of holders", On: []Topology{Embedded, R1, R3}, Available: anywhere, PerMinute: 6, Least: 1,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 2*time.Second, func() error {
				d := []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 3 * time.Second, 6 * time.Second}[e.Rng.IntN(5)]
				if e.Rng.IntN(3) > 0 {
					s := e.outside()
					e.stall("pause instance", s[e.Rng.IntN(len(s))], d, Window{})
					return nil
				}
				// Holders stand still as far as anybody can tell: what they sent, and
				// what is sent to them, arrives when they go on.
				end := e.Fault("pause holders", Window{})
				defer end()
				l := e.Clients[e.Rng.IntN(len(e.Clients))]
				l.Set(testnats.Stall)
				time.Sleep(d)
				l.Set(testnats.Pass)
				return nil
			})
		},
	},
	{
		Name: "kill-server", Says: "kill -9 of the only server, also between a write and its ack", On: []Topology{Embedded, R1}, Available: anywhere, PerMinute: 5, Least: 1,
		Inject: injectServerKill,
	},
	{
		Name: "kill-nodes", Says: "kill -9 of a follower, the leader, two, all", On: []Topology{R3}, Available: anywhere, PerMinute: 3, Least: 1,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			turn := e.Rng.IntN(4)
			return every(ctx, e, 4*time.Second, func() error {
				leader := e.leader()
				var victims []int
				switch turn++; turn % 4 {
				case 0:
					victims = []int{(leader + 1) % 3}
				case 1:
					victims = []int{leader}
				case 2:
					victims = []int{leader, (leader + 1) % 3}
				default:
					victims = []int{0, 1, 2}
				}
				return e.crashServers(victims, e.between(100*time.Millisecond, 2*time.Second))
			})
		},
	},
	{
		Name: "kill-follower", Says: "kill -9 of a follower that then leads", On: []Topology{R3}, Available: anywhere, PerMinute: 4, Least: 1,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 4*time.Second, func() error {
				follower := (e.leader() + 1 + e.Rng.IntN(2)) % 3
				if err := e.crashServers([]int{follower}, e.between(100*time.Millisecond, time.Second)); err != nil {
					return err
				}
				end := e.Fault("crashed follower leads", Window{})
				defer end()
				if now := e.Cluster.StepDown(bucketStream, follower); now != follower {
					return fmt.Errorf("n%d leads, not the crashed n%d", now, follower)
				}
				return nil
			})
		},
	},
	{
		Name: "step-down", Says: "the leader steps down every 2 s", On: []Topology{R3}, Available: anywhere, PerMinute: 15, Least: 2,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 2*time.Second, func() error {
				end := e.Fault("step down", Window{})
				defer end()
				e.Cluster.StepDown(bucketStream)
				return nil
			})
		},
	},
	{
		Name: "pause-leader", Says: "pause of the server that leads", On: []Topology{Embedded, R1, R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 10 * time.Second,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 5*time.Second, func() error {
				d := []time.Duration{time.Second, 2 * time.Second, 6 * time.Second, 15 * time.Second}[e.Rng.IntN(4)]
				if until, ok := ctx.Deadline(); ok {
					d = min(d, max(time.Second, time.Until(until)))
				}
				defer e.Fault("leader paused", Window{Stale: e.On == R3})()
				e.stall("pause leader", e.server(e.leader()), d, Window{Stale: e.On == R3})
				e.WaitReady(60 * time.Second)
				return nil
			})
		},
	},
	{
		Name: "partition", Says: "partitions: leader from peers, one link, one way, instance or clients from server", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 15 * time.Second,
		Inject: func(ctx context.Context, e *Env) (int, error) {
			return every(ctx, e, 3*time.Second, func() error {
				e.partition(e.between(3*time.Second, 15*time.Second))
				return nil
			})
		},
	},
	{
		Name: "pause-kill", Says: "pause-kill and part-kill", On: []Topology{R3}, Available: anywhere, PerMinute: 1, Least: 1, Needs: 30 * time.Second,
		Inject: injectPauseKill,
	},
	{
		Name: "slow-links", Says: "slow and torn links, acks dropped", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 6, Least: 2,
		Inject: injectSlowLinks,
	},
	{
		Name: "no-verdict", Says: "an instance gets no verdict on its writes for a while", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 20, Least: 3,
		Inject: injectNoVerdicts,
	},
	{
		Name: "edge-renewals", Says: "renewals at the edge of the lease", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 120, Least: 40,
		Load: func(l Load) Load {
			l.Edge, l.MinTTL, l.MaxTTL = true, time.Second, 2*time.Second
			l.Clients *= 2
			return l
		},
		Inject: func(ctx context.Context, e *Env) (int, error) {
			if e.Cluster != nil {
				e.Cluster.SetRouteDelay(2 * time.Millisecond)
				defer e.Cluster.SetRouteDelay(0)
			}
			<-ctx.Done()
			renewals := 0
			for _, op := range e.Rec.Ops() {
				if op.Call == Renew && !op.Bogus {
					renewals++
				}
			}
			return renewals, nil
		},
	},
	{
		Name: "server-clock", Says: "the server's clock jumps and runs fast", On: []Topology{R1}, Available: anywhere, PerMinute: 3, Least: 2,
		Prepare: func(p Preparation) Variant {
			ownClocks(p)
			return Variant{Server: shiftedServer(p.T)}
		},
		Inject: injectServerClock,
	},
	{
		Name: "service-clock", Says: "the service's clocks are wrong", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 3, Least: 2,
		Prepare: func(p Preparation) Variant {
			ownClocks(p)
			return Variant{Leased: shiftedLeased(p.T, p.Leased)}
		},
		Inject: injectServiceClock,
	},
	{
		Name: "full-disk", Says: "the disk is full", On: []Topology{R1}, Available: asRoot, PerMinute: 1.5, Least: 1, Needs: 12 * time.Second,
		Prepare: func(p Preparation) Variant { return Variant{Store: filepath.Join(smallDisk(p.T), "store")} },
		Inject:  injectDiskFull,
	},
	{
		Name: "slow-server", Says: "a slow server: 50 ms of every 100 it stands still", On: []Topology{Embedded, R1, R3}, Available: anywhere, PerMinute: 100, Least: 10,
		Inject: func(ctx context.Context, e *Env) (did int, err error) {
			defer e.Fault("slow server", Window{})()
			for pause(ctx, 50*time.Millisecond) {
				p := e.server(e.leader())
				p.Pause()
				time.Sleep(50 * time.Millisecond)
				p.Resume()
				did++
			}
			return did, nil
		},
	},
	{
		Name: "old-store", Says: "one node comes back with an older copy of its store", On: []Topology{R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 15 * time.Second,
		Inject: injectOldStore,
	},
	{
		Name: "damaged-files", Says: "a stopped node's files are damaged", On: []Topology{R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 10 * time.Second,
		Inject: injectDamage,
	},
	{
		Name: "upgrade", Says: "rolling upgrade and downgrade", On: []Topology{R3}, Available: anywhere, PerMinute: 0, Least: 1, Needs: 40 * time.Second,
		Prepare: func(Preparation) Variant { return Variant{Version: "2.12.1"} },
		Inject:  injectUpgrade,
	},
	{
		Name: "bucket-edits", Says: "the bucket is deleted, edited and made again", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 15 * time.Second,
		Inject: injectOperator,
	},
	{
		Name: "permissions", Says: "permissions are taken away", On: []Topology{R1}, Available: anywhere, PerMinute: 3, Least: 1,
		Prepare: preparePermissions, Inject: injectPermissions,
	},
	{
		Name: "storms", Says: "storms: 1000 clients come back, 500 want one key, a subscriber does not read", On: []Topology{R1, R3}, Available: anywhere, PerMinute: 2, Least: 1,
		Inject: injectStorms,
	},
	{
		Name: "second-leased", Says: "a second leased on the same store", On: []Topology{Embedded}, Available: anywhere, PerMinute: 10, Least: 2,
		Inject: injectSecondOnStore,
	},
	{
		Name: "mix", Says: "kills, pauses, step-downs, partitions and slow links, mixed", On: []Topology{R3}, Available: anywhere, PerMinute: 2, Least: 1, Needs: 20 * time.Second,
		Inject: injectMix,
	},
}

// FaultNamed finds a fault.
func FaultNamed(name string) (Fault, bool) {
	for _, f := range Faults {
		if f.Name == name {
			return f, true
		}
	}
	return Fault{}, false
}

// crashServers kills servers together and starts them again after d.
func (e *Env) crashServers(victims []int, d time.Duration) error {
	end := e.Fault(fmt.Sprintf("kill servers %v", victims), Window{})
	defer end()
	for _, v := range victims {
		e.Servers[v].Kill()
		if e.Servers[v].Running() {
			return fmt.Errorf("server %d survived", v)
		}
	}
	time.Sleep(d)
	var wg sync.WaitGroup
	for _, v := range victims {
		wg.Go(e.Servers[v].Restart)
	}
	wg.Wait()
	e.WaitReady(90 * time.Second)
	return nil
}

// injectTerm tells instances to leave while 200 requests are on their way.
func injectTerm(ctx context.Context, e *Env) (int, error) {
	burst := 0
	return every(ctx, e, 3*time.Second, func() error {
		s := e.Services[e.Rng.IntN(len(e.Services))]
		defer e.Fault("SIGTERM", Window{})()
		burst++
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() {
				name := fmt.Sprintf("term-%d-%d", burst, i)
				e.admin.Do(Op{Call: Acquire, Key: name, Holder: name, TTL: time.Second})
			})
		}
		s.Term()
		code := s.Wait(31 * time.Second)
		wg.Wait()
		if code != 0 {
			return fmt.Errorf("exit code %d after SIGTERM", code)
		}
		s.Restart()
		e.WaitReady(60 * time.Second)
		return nil
	})
}

// checkLeavesCleanly (I19): a request is answered or refused as nobody's, never
// left without a word, when instances leave in order.
func checkLeavesCleanly(r *Run) (vs []Violation) {
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Kind == "" && op.Outcome == Unknown {
			vs = append(vs, Violation{"I19", op.Key, fmt.Sprintf("no answer: %v %s", op, op.Text)})
		}
	}
	return vs
}

// injectServerKill kills the only server: at random, and right after it has
// stored something whose ack it will not send.
func injectServerKill(ctx context.Context, e *Env) (int, error) {
	// Long leases, released: what a crash must not bring back.
	for i := range 20 {
		name := fmt.Sprintf("long-%d", i)
		op := e.admin.Do(Op{Call: Acquire, Key: name, Holder: name, TTL: 600 * time.Second})
		if op.Outcome == OK {
			e.admin.Do(Op{Call: Release, Key: name, Holder: name, Revision: op.Got.Rev})
		}
	}
	return every(ctx, e, 4*time.Second, func() error {
		if e.On == R1 && e.Rng.IntN(2) == 0 {
			end := e.Fault("ack dropped, then killed", Window{})
			dropped := e.link(e.Rng.IntN(len(e.ToServer)))[0].DropNext(testnats.PubAck(bucketStream), testnats.Blackhole)
			select {
			case <-dropped:
			case <-time.After(3 * time.Second):
			}
			e.server(0).Kill()
			for _, links := range e.ToServer {
				links[0].Set(testnats.Pass)
			}
			e.server(0).Restart()
			e.WaitReady(60 * time.Second)
			end()
		} else if err := e.crash("kill server", e.server(0), e.between(0, 2*time.Second)); err != nil {
			return err
		}
		for i := range 20 {
			e.admin.Do(Op{Call: Owner, Key: fmt.Sprintf("long-%d", i)})
		}
		return nil
	})
}

// partition cuts something off for d and waits until all is well again.
func (e *Env) partition(d time.Duration) {
	kind := e.Rng.IntN(5)
	if e.Cluster == nil {
		kind = 3 + kind%2
	}
	mode := []testnats.Mode{testnats.Blackhole, testnats.Blackhole, testnats.Stall, testnats.Cut}[e.Rng.IntN(4)]
	var cut []*testnats.Link
	switch kind {
	case 0:
		defer e.Fault("leader from peers", Window{Stale: true})()
		e.Cluster.Isolate(e.leader(), mode)
	case 1:
		defer e.Fault("one link", Window{Stale: true})()
		a := e.Rng.IntN(3)
		b := (a + 1 + e.Rng.IntN(2)) % 3
		e.Cluster.Block(a, b, mode)
		e.Cluster.Block(b, a, mode)
	case 2:
		defer e.Fault("one way", Window{Stale: true})()
		leader := e.leader()
		if mode == testnats.Cut {
			mode = testnats.Blackhole
		}
		for i := range 3 {
			switch {
			case i == leader:
			case e.Rng.IntN(2) == 0:
				e.Cluster.Block(i, leader, mode)
			default:
				e.Cluster.Block(leader, i, mode)
			}
		}
	case 3:
		defer e.Fault("instance from servers", Window{})()
		cut = e.link(e.Rng.IntN(len(e.ToServer)))
	default:
		defer e.Fault("clients from a server", Window{})()
		cut = []*testnats.Link{e.Clients[e.Rng.IntN(len(e.Clients))]}
	}
	for _, l := range cut {
		l.Set(mode)
	}
	time.Sleep(d)
	for _, l := range cut {
		l.Set(testnats.Pass)
	}
	if e.Cluster != nil {
		e.Cluster.Heal()
	}
	e.WaitReady(60 * time.Second)
}

// injectPauseKill is the order of events that lost acknowledged writes in
// JetStream before: a minority stands still (or is cut off), the others go on,
// one of them is killed, the rest stand still, the minority comes back alone
// with the one that was killed.
func injectPauseKill(ctx context.Context, e *Env) (did int, err error) {
	long := 5 * time.Second
	for pause(ctx, 2*time.Second) {
		if until, ok := ctx.Deadline(); ok && did > 0 && time.Until(until) < 3*long {
			break
		}
		minority := e.Rng.IntN(3)
		killed, other := (minority+1)%3, (minority+2)%3
		cut := did%2 == 1
		end := e.Fault([]string{"pause-kill", "part-kill"}[did%2], Window{Stale: true})
		stop := func(i int) {
			if cut {
				e.Cluster.Isolate(i, testnats.Blackhole)
			} else {
				e.Servers[i].Pause()
			}
		}
		stop(minority)
		time.Sleep(long)
		e.Servers[killed].Kill()
		if cut {
			e.Cluster.Heal()
			e.Cluster.Isolate(other, testnats.Blackhole)
		} else {
			e.Servers[other].Pause()
			e.Servers[minority].Resume()
		}
		e.Servers[killed].Restart()
		time.Sleep(long)
		if cut {
			e.Cluster.Heal()
		} else {
			e.Servers[other].Resume()
		}
		e.WaitReady(90 * time.Second)
		end()
		did++
	}
	return did, nil
}

// injectSlowLinks makes links slow, tears them, and drops exactly one ack or
// one reply.
func injectSlowLinks(ctx context.Context, e *Env) (int, error) {
	all := append([]*testnats.Link(nil), e.Clients...)
	for _, links := range e.ToServer {
		all = append(all, links...)
	}
	return every(ctx, e, 2*time.Second, func() error {
		l := all[e.Rng.IntN(len(all))]
		d := e.between(time.Second, 4*time.Second)
		switch e.Rng.IntN(7) {
		case 0:
			defer e.Fault("100 ms", Window{})()
			l.Delay(100*time.Millisecond, 50*time.Millisecond)
			time.Sleep(d)
			l.Delay(0, 0)
		case 1:
			defer e.Fault("1 s", Window{})()
			l.Delay(time.Second, 0)
			time.Sleep(d)
			l.Delay(0, 0)
		case 2:
			defer e.Fault("resets", Window{})()
			for range 5 {
				l.CloseConns()
				time.Sleep(d / 5)
			}
		case 3:
			defer e.Fault("one byte at a time", Window{})()
			l.Slice(1, 100*time.Microsecond)
			time.Sleep(d)
			l.Slice(0, 0)
		case 4, 5:
			// Exactly one ack of one instance, and nothing else.
			defer e.Fault("ack dropped", Window{})()
			links := e.ToServer[e.Rng.IntN(len(e.ToServer))]
			return dropOne(links, testnats.PubAck(bucketStream))
		default:
			defer e.Fault("reply dropped", Window{})()
			return dropOne(e.Clients, testnats.Containing(`"granted":true`))
		}
		return nil
	})
}

// injectNoVerdicts drops what the server says to the writes of one instance: one
// of them, or all of them for longer than a call may take. Requests and reads
// go on.
func injectNoVerdicts(ctx context.Context, e *Env) (int, error) {
	verdict := func(frame []byte) bool {
		return testnats.PubAck(bucketStream)(frame) || testnats.Containing(`"stream":"`+bucketStream+`"`, `"err_code":10071`)(frame)
	}
	dropped := 0
	_, err := every(ctx, e, 500*time.Millisecond, func() error {
		defer e.Fault("verdicts dropped", Window{})()
		links := e.ToServer[e.Rng.IntN(len(e.ToServer))]
		until := time.Now()
		if e.Rng.IntN(3) == 0 {
			until = until.Add(5 * time.Second)
		}
		for first := true; first || time.Now().Before(until); first = false {
			if err := dropOne(links, verdict); err != nil {
				return err
			}
			dropped++
		}
		return nil
	})
	return dropped, err
}

// dropOne drops the next message that match is true for on each link that has
// one within a while, and fails if none has.
func dropOne(links []*testnats.Link, match func([]byte) bool) error {
	got := make(chan struct{}, len(links)) // an instance has one connection to one of them
	for _, l := range links {
		dropped := l.DropNext(match, testnats.Pass)
		go func() {
			select {
			case <-dropped:
				got <- struct{}{}
			case <-time.After(time.Minute):
			}
		}()
	}
	select {
	case <-got:
		return nil
	case <-time.After(20 * time.Second):
		return errors.New("nothing came that could be dropped")
	}
}

// injectUpgrade takes the cluster from one version to a newer one and back, one
// node at a time.
func injectUpgrade(ctx context.Context, e *Env) (did int, err error) {
	for _, version := range []string{"2.14.10", "2.15.3", "2.14.10", "2.12.1"} {
		if ctx.Err() != nil && did > 0 {
			break
		}
		for i, s := range e.Servers {
			end := e.Fault(fmt.Sprintf("n%d to %s", i, version), Window{})
			s.Use(version)
			s.Term()
			s.Wait(30 * time.Second)
			s.Restart()
			e.WaitReady(90 * time.Second)
			end()
		}
		did++
	}
	return did, nil
}

// lag keeps what the leader stores from a follower, not for so long that the follower
// stands for election.
func (e *Env) lag() error {
	leader := e.leader()
	follower := (leader + 1 + e.Rng.IntN(2)) % 3
	defer e.Fault("a follower lags", Window{})()
	e.Cluster.Block(leader, follower, testnats.Stall)
	defer e.Cluster.Heal()
	time.Sleep(e.between(time.Second, 2*time.Second))
	return nil
}

// injectMix is a seeded mix, a quarter of its time without faults.
func injectMix(ctx context.Context, e *Env) (int, error) {
	return every(ctx, e, 3*time.Second, func() error {
		d := e.between(500*time.Millisecond, 8*time.Second)
		switch e.Rng.IntN(6) {
		case 0:
			return e.crash("kill instance", e.Services[e.Rng.IntN(3)], d/4)
		case 1:
			e.stall("pause instance", e.Services[e.Rng.IntN(3)], d, Window{})
		case 2:
			return e.crashServers([]int{e.Rng.IntN(3)}, d/4)
		case 3:
			defer e.Fault("step down", Window{})()
			e.Cluster.StepDown(bucketStream)
		case 4:
			e.partition(d)
		default:
			defer e.Fault("100 ms", Window{})()
			e.Cluster.SetRouteDelay(50 * time.Millisecond)
			time.Sleep(d)
			e.Cluster.SetRouteDelay(0)
		}
		return nil
	})
}

// injectStorms lets many come at once.
func injectStorms(ctx context.Context, e *Env) (int, error) {
	storm := 0
	return every(ctx, e, 5*time.Second, func() error {
		storm++
		defer e.Fault("storm", Window{})()
		name := fmt.Sprintf("storm-%d", storm)
		e.Foreign[name] = true // its history is not all in the record
		first := e.admin.Do(Op{Call: Acquire, Key: name, Holder: "first", TTL: 5 * time.Second})
		if first.Outcome != OK {
			return fmt.Errorf("storm: %v %s", &first, first.Text)
		}
		// 500 want one key at the moment it is released.
		var wg sync.WaitGroup
		grants := make(chan Op, 500)
		begin := make(chan struct{})
		for i := range 500 {
			wg.Go(func() {
				<-begin
				// 500 clients on one key are more than a history can bear: what is
				// checked of them is that exactly one is granted.
				c := Client{ID: 2000 + i, Conn: e.admin.Conn, Record: NewRecorder()}
				op := c.Do(Op{Call: Acquire, Key: name, Holder: fmt.Sprint("waiter-", i), TTL: 5 * time.Second})
				if op.Outcome == OK {
					grants <- op
				}
			})
		}
		released := e.admin.Do(Op{Call: Release, Key: name, Holder: "first", Revision: first.Got.Rev})
		close(begin)
		wg.Wait()
		close(grants)
		// One that waits gets the key when it is released.
		waiting := make(chan Op, 1)
		second := e.admin.Do(Op{Call: Acquire, Key: name + "-wait", Holder: "first", TTL: 10 * time.Second})
		go func() {
			waiting <- e.admin.Do(Op{Call: Acquire, Key: name + "-wait", Holder: "waiter", TTL: time.Second, Wait: 5 * time.Second})
		}()
		time.Sleep(300 * time.Millisecond)
		free := e.admin.Do(Op{Call: Release, Key: name + "-wait", Holder: "first", Revision: second.Got.Rev})
		if w := <-waiting; second.Outcome == OK && free.Outcome == OK && (w.Outcome != OK || time.Duration(w.End-free.End) > 2*time.Second) {
			return fmt.Errorf("storm: released at %.1f ms, but %v", float64(free.End)/1e6, &w)
		}
		if n := len(grants); released.Outcome == OK && n != 1 {
			return fmt.Errorf("storm: %d of 500 were granted the released key", n)
		}
		// Everybody's connection is torn at once.
		for _, l := range e.Clients {
			l.CloseConns()
		}
		for _, links := range e.ToServer {
			for _, l := range links {
				l.CloseConns()
			}
		}
		time.Sleep(time.Second)
		return nil
	})
}

// injectSecondOnStore starts leased again on the embedded server's store.
func injectSecondOnStore(ctx context.Context, e *Env) (int, error) {
	return every(ctx, e, 2*time.Second, func() error {
		return e.refusedSecond()
	})
}
