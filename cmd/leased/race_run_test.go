package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestRunRace races leased run against a second holder while parts of it are
// paused, cut off and killed: the last heartbeat of its command, which ignores
// TERM, must be before the other's grant. The grant is dated from below: by the
// time at which the request was sent that was granted at once, or by the time
// that the NATS server gave the message that is the grant.
//
// 40 races; with LEASED_LONG=1 500, for about four minutes.
func TestRunRace(t *testing.T) {
	races := 40
	if os.Getenv("LEASED_LONG") != "" {
		races = 500
	}
	s := start(t, cleanEnv(t), append(anyPorts(t), "--sync", "2m")...).serving()
	nc := dial(t, s.NATS)
	r := &racing{t: t, nc: nc, url: s.NATS, env: cleanEnv(t), dir: t.TempDir(), starting: make(chan struct{}, 2), gaps: map[string][]time.Duration{}}

	wall := time.Now().UnixNano() - int64(bootNow())
	next := make(chan int)
	var workers sync.WaitGroup
	for range 12 {
		relay := testnats.Relay(t, s.NATS)
		workers.Go(func() {
			for i := range next {
				err := r.race(i, relay)
				for again := 0; errors.Is(err, errNoStart) && again < 20; again++ {
					r.again.Add(1)
					err = r.race(i, relay)
				}
				if err != nil {
					t.Errorf("race %d, %s: %v", i, raceModes[i%len(raceModes)].name, err)
				}
			}
		})
	}
	for i := range races {
		next <- i
	}
	close(next)
	workers.Wait()
	if moved := time.Duration(time.Now().UnixNano() - int64(bootNow()) - wall).Abs(); moved > 5*time.Millisecond {
		t.Errorf("the wall clock was set by %v during the test: it proves nothing", moved)
	}
	t.Logf("%d races, %d more did not start in time and were run again", races, r.again.Load())
	for _, name := range slices.Sorted(maps.Keys(r.gaps)) {
		gaps := r.gaps[name]
		slices.Sort(gaps)
		t.Logf("%-28s %3d races, from the last heartbeat to the grant: least %v, median %v, most %v", name, len(gaps), gaps[0], gaps[len(gaps)/2], gaps[len(gaps)-1])
	}
}

type racing struct {
	t   *testing.T
	nc  *nats.Conn
	url string
	env []string
	dir string

	starting chan struct{} // how many start at a time: a lease does not wait for the machine
	again    atomic.Int64  // races that were run again
	mu       sync.Mutex
	gaps     map[string][]time.Duration
}

// runner is one leased run.
type runner struct {
	cmd     *exec.Cmd
	relay   *testnats.Link
	ttl     time.Duration
	guard   int
	child   int
	granted <-chan struct{} // to the other
	random  *rand.Rand
}

func (a *runner) signal(pid int, s syscall.Signal) { _ = syscall.Kill(pid, s) }

// wait waits until the other has the lease, or for up to d.
func (a *runner) wait(d time.Duration) {
	select {
	case <-a.granted:
	case <-time.After(d):
	}
}

// some is a random part of d.
func (a *runner) some(d time.Duration) time.Duration { return time.Duration(a.random.Int64N(int64(d))) }

// raceModes are what happens to leased run until it has lost its lease, and the
// exit codes that may come of it.
var raceModes = []struct {
	name  string
	do    func(*runner)
	codes []int
}{
	{"network silent", func(a *runner) { a.relay.Set(testnats.Blackhole) }, []int{exitLost}},
	{"network late", func(a *runner) {
		a.relay.Set(testnats.Stall)
		a.wait(a.ttl/2 + a.some(a.ttl))
		a.relay.Set(testnats.Pass)
		a.wait(a.some(a.ttl))
		a.relay.Set(testnats.Stall)
	}, []int{exitLost}},
	{"replies lost", func(a *runner) { a.relay.Set(testnats.Blackhole, testnats.Down) }, []int{exitLost}},
	{"wrapper stopped", func(a *runner) {
		a.signal(a.cmd.Process.Pid, syscall.SIGSTOP)
	}, []int{exitLost}},
	{"wrapper stopped for a time", func(a *runner) {
		a.signal(a.cmd.Process.Pid, syscall.SIGSTOP)
		a.wait(a.ttl/2 + a.some(a.ttl))
		a.signal(a.cmd.Process.Pid, syscall.SIGCONT)
		a.wait(a.some(a.ttl))
		a.signal(a.cmd.Process.Pid, syscall.SIGSTOP)
	}, []int{exitLost}},
	{"command stopped, network silent", func(a *runner) {
		a.signal(a.child, syscall.SIGSTOP)
		a.relay.Set(testnats.Blackhole)
		a.wait(a.ttl/2 + a.some(a.ttl))
		a.signal(a.child, syscall.SIGCONT)
	}, []int{exitLost}},
	{"command and wrapper stopped", func(a *runner) {
		a.signal(a.child, syscall.SIGSTOP)
		a.signal(a.cmd.Process.Pid, syscall.SIGSTOP)
		a.wait(a.ttl/2 + a.some(a.ttl))
		a.signal(a.child, syscall.SIGCONT)
	}, []int{exitLost}},
	{"guard stopped, network silent", func(a *runner) {
		a.signal(a.guard, syscall.SIGSTOP)
		a.relay.Set(testnats.Blackhole)
	}, []int{exitLost}},
	{"wrapper killed", func(a *runner) { a.signal(a.cmd.Process.Pid, syscall.SIGKILL) }, []int{137}},
	{"guard killed", func(a *runner) { a.signal(a.guard, syscall.SIGKILL) }, []int{exitLost}},
	{"guard stopped, then killed", func(a *runner) {
		a.signal(a.guard, syscall.SIGSTOP)
		a.wait(a.some(a.ttl))
		a.signal(a.guard, syscall.SIGKILL)
	}, []int{exitLost}},
	{"command ended", func(a *runner) { a.signal(a.child, syscall.SIGKILL) }, []int{137, exitLost}}, // lost before on a busy machine
}

// errNoStart is what a machine that is too busy for the TTL makes of a race: the
// lease was over, or NATS did not answer in time, before the command ran. Such a
// race proves nothing and is run again.
var errNoStart = errors.New("no race")

// race is one race.
func (r *racing) race(i int, relay *testnats.Link) error {
	mode := raceModes[i%len(raceModes)]
	random := rand.New(rand.NewPCG(uint64(i), 1))
	ttl := time.Duration(1+random.IntN(2)) * time.Second
	key := fmt.Sprintf("race-%d-%x", i, rand.Uint64())
	file := filepath.Join(r.dir, key)
	relay.Set(testnats.Pass)

	r.starting <- struct{}{}
	started := sync.OnceFunc(func() { <-r.starting })
	defer started()
	a := &runner{relay: relay, ttl: ttl, random: random}
	a.cmd = leasedCommand(r.t, r.env, "run", key, "--ttl", ttl.String(), "--server", relay.URL(), "--timeout", "2s", "--", "child", "beats", file)
	var stderr lockedBuffer
	a.cmd.Stderr = &stderr
	a.cmd.WaitDelay = time.Second
	ended := make(chan struct{})
	launched := make(chan error)
	go func() {
		defer close(ended)
		runtime.LockOSThread() // the kernel ends the child with the thread
		defer runtime.UnlockOSThread()
		a.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		err := a.cmd.Start()
		launched <- err
		if err == nil {
			_ = a.cmd.Wait()
		}
	}()
	if err := <-launched; err != nil {
		return err
	}
	defer func() {
		_ = a.cmd.Process.Kill()
		<-ended
	}()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		beats, _ := os.ReadFile(file)
		pids, _ := os.ReadFile(file + ".pids")
		if n, _ := fmt.Sscan(string(pids), &a.guard, &a.child); n == 2 && bytes.Count(beats, []byte("\n")) > 20 {
			break
		}
		select {
		case <-ended:
			code := exitStatus(a.cmd.ProcessState)
			if code == exitLost || code == exitBefore {
				return fmt.Errorf("%w: it ended with code %d: %s", errNoStart, code, stderr.String())
			}
			return fmt.Errorf("it ended with code %d before the race: %s", code, stderr.String())
		default:
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: %s", errNoStart, stderr.String())
		}
	}

	started()
	var b other
	granted := make(chan struct{})
	a.granted = granted
	var err error
	go func() {
		defer close(granted)
		b, err = r.other(key, i/len(raceModes)%2 == 0)
	}()
	time.Sleep(a.some(ttl / 2)) // anywhere between two renewals
	mode.do(a)
	<-granted
	if err != nil {
		return fmt.Errorf("the other: %w", err)
	}
	// What can beat on does so now.
	a.signal(a.child, syscall.SIGCONT)
	time.Sleep(20 * time.Millisecond)
	a.signal(a.guard, syscall.SIGCONT)
	a.signal(a.cmd.Process.Pid, syscall.SIGCONT)
	relay.Set(testnats.Pass)
	select {
	case <-ended:
	case <-time.After(patience):
		return fmt.Errorf("it does not end: %s", stderr.String())
	}
	if code := exitStatus(a.cmd.ProcessState); !slices.Contains(mode.codes, code) {
		return fmt.Errorf("it ended with code %d, want %d: %s", code, mode.codes, stderr.String())
	}
	if lives(a.guard) || lives(a.child) {
		for deadline := time.Now().Add(patience); lives(a.guard) || lives(a.child); time.Sleep(time.Millisecond) {
			if mode.name != "wrapper killed" || time.Now().After(deadline) {
				return fmt.Errorf("the guard lives: %v, the command: %v", lives(a.guard), lives(a.child))
			}
		}
	}
	return r.judge(mode.name, file, b)
}

// judge compares the last heartbeat with the grant.
func (r *racing) judge(mode, file string, b other) error {
	beats, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	lines := bytes.Split(bytes.TrimSuffix(beats, []byte("\n")), []byte("\n"))
	var boot, wall int64
	if _, err := fmt.Sscan(string(lines[len(lines)-1]), &boot, &wall); err != nil {
		return err
	}
	gap := b.sent - time.Duration(boot)
	if !b.stored.IsZero() {
		gap = time.Duration(b.stored.UnixNano() - wall)
	}
	if gap <= 0 {
		return fmt.Errorf("the last heartbeat is %v after the grant", -gap)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.gaps[mode] = append(r.gaps[mode], gap)
	return nil
}

// other is the second holder's grant.
type other struct {
	sent   time.Duration // boot clock; of the request that was granted
	stored time.Time     // the server's time of the grant, zero if the request was granted at once
}

// other acquires key, waiting in the service or asking again and again.
func (r *racing) other(key string, wait bool) (o other, err error) {
	body := fmt.Sprintf(`{"key":%q,"holder":"other","ttl_ms":5000}`, key)
	if wait {
		body = fmt.Sprintf(`{"key":%q,"holder":"other","ttl_ms":5000,"wait_ms":1000}`, key)
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		o.sent = bootNow()
		m, err := r.nc.Request("api.leases.acquire", []byte(body), patience)
		if err != nil {
			return o, err
		}
		var a reply
		err = json.Unmarshal(m.Data, &a)
		if err == nil && wait && a.Kind == "unavailable" {
			continue // the key became free when the time to wait was over
		}
		if err != nil || a.Granted == nil {
			return o, fmt.Errorf("acquire: %s %w", m.Data, err)
		}
		if *a.Granted {
			if wait {
				o.stored, err = r.stored(a.Revision)
			}
			return o, err
		}
		if !wait {
			time.Sleep(max(2*time.Millisecond, min(time.Duration(a.Left-20)*time.Millisecond, 100*time.Millisecond)))
		}
	}
	return o, fmt.Errorf("never got the key")
}

// stored is the time of a message of the bucket.
func (r *racing) stored(revision uint64) (time.Time, error) {
	m, err := r.nc.Request("$JS.API.STREAM.MSG.GET.KV_leases", fmt.Appendf(nil, `{"seq":%d}`, revision), patience)
	if err != nil {
		return time.Time{}, err
	}
	var got struct{ Message struct{ Time time.Time } }
	if err := json.Unmarshal(m.Data, &got); err != nil || got.Message.Time.IsZero() {
		return time.Time{}, fmt.Errorf("message %d: %s %w", revision, m.Data, err)
	}
	return got.Message.Time, nil
}
