package fault

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// The tests below are reports from the field on leases, locks and NATS, each
// turned into a scenario with its right outcome. Their names are those of the
// rows they come from: L grants, fences and retries, T time and restarts, P
// partitions and storage.

// field makes a system for one report.
func field(t *testing.T, on Topology, v Variant) *Env {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no real processes")
	}
	return NewEnv(t, on, 1, v)
}

// call makes one call of the admin client.
func (e *Env) call(op Op) Op { return e.admin.Do(op) }

func (e *Env) acquire(key, holder string, ttl time.Duration) Op {
	return e.call(Op{Call: Acquire, Key: key, Holder: holder, TTL: ttl})
}

func (e *Env) owner(key string) Op { return e.call(Op{Call: Owner, Key: key}) }

// must fails the test unless op ended as one of the kinds.
func must(t *testing.T, op Op, want ...kinds.Kind) Op {
	t.Helper()
	if !slices.Contains(want, op.Kind) {
		t.Fatalf("%v %q, want %v", &op, op.Text, want)
	}
	return op
}

// messages is how many messages the key has in the stream's copy.
func messages(l *Log, key string) []*Entry { return l.Snapshot().ByKey[key] }

func startTap(t *testing.T, e *Env) *Tap {
	t.Helper()
	tap, err := StartTap(e.Log, e.urls)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(tap.Close)
	return tap
}

func drain(t *testing.T, tap *Tap) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := tap.Drain(ctx); err != nil {
		t.Fatal(err)
	}
}

// run gathers what e recorded, for the checks.
func (e *Env) run() *Run {
	return &Run{Clock: e.Rec.Clock, Ops: e.Rec.Ops(), Log: e.Log.Snapshot(), Inbox: e.Box.Deliveries(), Windows: e.Rec.Windows(), End: e.Rec.Clock.Now(), Foreign: e.Foreign}
}

// judge fails the test for everything that is wrong in the run.
func judge(t *testing.T, r *Run) {
	t.Helper()
	rep, _ := r.Verify(time.Minute)
	for _, v := range rep.Violations {
		t.Error(v)
	}
	for _, key := range rep.Undone {
		t.Errorf("the checker could not decide key %s", key)
	}
}

// planned runs a fault of the list as a field report.
func planned(t *testing.T, id string, on Topology, length time.Duration) *Report {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: no real processes")
	}
	f, ok := FaultNamed(id)
	if !ok {
		t.Fatalf("no fault %s", id)
	}
	p := Plan{Fault: f, On: on, Seed: *flagSeed, Length: max(length, *flagLength), Clients: *flagClients, Pace: *flagPace, Dir: outDir()}
	if ok, why := p.Available(); !ok {
		t.Skip(why)
	}
	rep := p.Execute(t)
	for _, e := range rep.Errors {
		t.Error(e)
	}
	for _, v := range rep.Violations {
		t.Error(v)
	}
	for _, key := range rep.Undone {
		t.Errorf("the checker could not decide key %s", key)
	}
	return rep
}

// The reply of the first write is lost, and the retry makes two clients believe
// that they hold (docker/libkv 186, portworx/kvdb 18).
func TestL01_LostReplyThenRetry(t *testing.T) {
	e := field(t, R1, Variant{})
	tap := startTap(t, e)
	for _, c := range []struct {
		key   string
		links []*testnats.Link
		match func([]byte) bool
	}{
		// What the server tells the service, and what the service tells the client.
		{"ack", []*testnats.Link{e.ToServer[0][0], e.ToServer[1][0], e.ToServer[2][0]}, testnats.PubAck(bucketStream)},
		{"reply", e.Clients, testnats.Containing(`"key":"reply"`, `"granted":true`)},
	} {
		nc, err := e.Connect(0)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		client := Client{ID: 1, Conn: nc, Record: e.Rec, Timeout: 5 * time.Second}
		dropped := make(chan struct{}, len(c.links))
		for _, l := range c.links {
			got := l.DropNext(c.match, testnats.Pass)
			go func() {
				select {
				case <-got:
					dropped <- struct{}{}
				case <-t.Context().Done():
				}
			}()
		}
		first := client.Do(Op{Call: Acquire, Key: c.key, Holder: "A", TTL: 60 * time.Second})
		select {
		case <-dropped:
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: nothing was dropped", c.key)
		}
		if first.Outcome != OK && first.Outcome != Unknown {
			t.Errorf("%s: first try: %v", c.key, &first)
		}
		again := must(t, client.Do(Op{Call: Acquire, Key: c.key, Holder: "A", TTL: 60 * time.Second}), kinds.Granted)
		must(t, client.Do(Op{Call: Acquire, Key: c.key, Holder: "B", TTL: 60 * time.Second}), kinds.Denied)
		drain(t, tap)
		if m := messages(e.Log, c.key); len(m) != 1 || m[0].Seq != again.Got.Rev {
			t.Errorf("%s: the stream has %v, the reply said %d", c.key, m, again.Got.Rev)
		}
	}
	judge(t, e.run())
}

// A grant comes back after it has already lapsed (etcd 11456, 9921,
// node-redlock 296).
func TestL03_SlowGrantCountsFromSending(t *testing.T) {
	e := field(t, R1, Variant{})
	for _, links := range e.ToServer {
		links[0].Delay(700*time.Millisecond, 0, testnats.Down)
	}
	e.admin.Timeout = 15 * time.Second
	for _, ttl := range []time.Duration{time.Second, 2 * time.Second, 5 * time.Second} {
		op := e.acquire(fmt.Sprintf("slow-%d", ttl/time.Second), "A", ttl)
		took := time.Duration(op.End - op.Start)
		// One way to the service and one for the ack are in what the holder lost.
		switch {
		case op.Outcome == OK && op.Got.Left > ttl-700*time.Millisecond:
			t.Errorf("%v after %v: %v left", &op, took, op.Got.Left)
		case op.Outcome == OK && op.Got.Left <= 0:
			t.Errorf("%v: granted with nothing left", &op)
		case op.Outcome != OK && op.Outcome != Unknown && op.Kind != kinds.Unavailable:
			t.Errorf("%v", &op)
		}
		t.Logf("ttl %v: %s after %v, %v left", ttl, op.Kind, took.Round(time.Millisecond), op.Got.Left)
	}
}

// A late release frees the next holder's lock, and revision 0 means any
// (ShedLock 2583, redis 4308, node-redlock 42).
func TestL08_LateReleaseAndOddRevisions(t *testing.T) {
	e := field(t, R1, Variant{})
	tap := startTap(t, e)
	a := must(t, e.acquire("k", "A", time.Second), kinds.Granted)
	testnats.Eventually(t, 5*time.Second, func() bool { op := e.owner("k"); return op.Kind == kinds.Free })
	b := must(t, e.acquire("k", "B", 60*time.Second), kinds.Granted)
	drain(t, tap)
	before := len(messages(e.Log, "k"))
	must(t, e.call(Op{Call: Release, Key: "k", Holder: "A", Revision: a.Got.Rev}), kinds.Lost)
	must(t, e.call(Op{Call: Release, Key: "k", Holder: "B", Revision: a.Got.Rev}), kinds.Lost)
	must(t, e.call(Op{Call: Renew, Key: "k", Holder: "A", Revision: b.Got.Rev, TTL: 5 * time.Second}), kinds.Lost)
	for _, rev := range []string{"0", "-0", "-1", "null", `"5"`, "5.5", "1e400", ""} {
		for _, call := range []string{"release", "renew"} {
			body := `{"key":"k","holder":"B","ttl_ms":5000`
			if rev != "" {
				body += `,"revision":` + rev
			}
			msg, err := e.admin.Conn.Request("api.leases."+call, []byte(body+"}"), 5*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			var r reply
			if err := json.Unmarshal(msg.Data, &r); err != nil || r.Kind != string(kinds.Invalid) {
				t.Errorf("%s with revision %q: %s", call, rev, msg.Data)
			}
		}
	}
	if now := must(t, e.owner("k"), kinds.Held); now.Got.Rev != b.Got.Rev || now.Got.Holder != "B" {
		t.Errorf("B held %d, now %v", b.Got.Rev, &now)
	}
	drain(t, tap)
	if after := len(messages(e.Log, "k")); after != before {
		t.Errorf("%d messages were written", after-before)
	}
}

// A paused holder wakes up and acts (etcd 10811, client-go 728).
func TestL10_PausedHolderWakesUp(t *testing.T) {
	e := field(t, R1, Variant{})
	holder := func(name string) (*Client, *nats.Conn) {
		nc, err := nats.Connect(e.urls[0], connOptions(name)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return &Client{ID: len(name), Conn: nc, Record: e.Rec}, nc
	}
	a, aConn := holder("A")
	b, bConn := holder("BB")
	asked := make(chan *nats.Msg, 1)
	if _, err := aConn.Subscribe(inboxPrefix+"A.>", func(m *nats.Msg) { asked <- m }); err != nil {
		t.Fatal(err)
	}
	if _, err := bConn.Subscribe(inboxPrefix+"B.>", func(m *nats.Msg) { _ = m.Respond([]byte("B says yes")) }); err != nil {
		t.Fatal(err)
	}
	if err := aConn.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := bConn.Flush(); err != nil {
		t.Fatal(err)
	}
	held := must(t, a.Do(Op{Call: Acquire, Key: "k", Holder: "A", TTL: time.Second}), kinds.Granted)
	// A takes the request and stands still for three times its lease.
	must(t, e.call(Op{Call: Forward, Key: "k", ForwardID: "1", Timeout: 300 * time.Millisecond}), kinds.OwnerTimeout)
	old := <-asked
	time.Sleep(3 * time.Second)
	must(t, b.Do(Op{Call: Acquire, Key: "k", Holder: "B", TTL: 60 * time.Second}), kinds.Granted)
	// It wakes up: its renewal is lost, its answer nobody's.
	must(t, a.Do(Op{Call: Renew, Key: "k", Holder: "A", Revision: held.Got.Rev, TTL: time.Second}), kinds.Lost)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			op := e.call(Op{Call: Forward, Key: "k", ForwardID: "2", Timeout: time.Second})
			if op.Kind != kinds.Forwarded || op.AnswerOf != "B says yes" {
				t.Errorf("%v answered %q", &op, op.AnswerOf)
			}
		})
		if err := aConn.Publish(old.Reply, []byte("A says late")); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
}

// Writes are lost or doubled in a change of leader (nats-server 6627, 6486, 6717).
func TestL11_LeaderStepsDown(t *testing.T) {
	rep := planned(t, "step-down", R3, 15*time.Second)
	t.Logf("%d step-downs, %d operations, %d grants, %d unknown", rep.Injected, rep.Ops, rep.Grants, rep.Unknown)
}

// The conflict code that only clusters give is not known (nats.go 2097, nats.java 1463).
func TestL13_ParallelRenewalsOfOneRevision(t *testing.T) {
	e := field(t, R3, Variant{})
	for round := range 20 {
		key := fmt.Sprint("k", round)
		held := must(t, e.acquire(key, "A", 60*time.Second), kinds.Granted)
		var wg sync.WaitGroup
		var mu sync.Mutex
		count := map[kinds.Kind]int{}
		for range 8 {
			wg.Go(func() {
				op := e.call(Op{Call: Renew, Key: key, Holder: "A", Revision: held.Got.Rev, TTL: 60 * time.Second})
				mu.Lock()
				defer mu.Unlock()
				count[op.Kind]++
			})
		}
		wg.Wait()
		if count[kinds.Renewed] != 1 || count[kinds.Lost] != 7 {
			t.Errorf("round %d: %v, want one renewed and seven lost", round, count)
		}
	}
	for i, s := range e.Services {
		if strings.Contains(s.Output(), `"level":"ERROR"`) {
			t.Errorf("instance %d logged an error", i)
		}
	}
}

// Acquire fails though the key is free: a marker or tombstone is in the way
// (nats-server 6712, 5162, 3895).
func TestL14_AcquireReleaseLoop(t *testing.T) {
	e := field(t, R3, Variant{})
	tap := startTap(t, e)
	var wg sync.WaitGroup
	ctx, stop := context.WithTimeout(t.Context(), max(8*time.Second, *flagLength))
	defer stop()
	for i := range 20 {
		nc, err := e.Connect(i)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		c := Client{ID: i, Conn: nc, Record: e.Rec}
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				name := fmt.Sprintf("h%d-%d", i, n)
				op := c.Do(Op{Call: Acquire, Key: "k", Holder: name, TTL: time.Second})
				if op.Outcome == OK && n%10 != 9 { // every tenth runs out
					c.Do(Op{Call: Release, Key: "k", Holder: name, Revision: op.Got.Rev})
				}
				pause(ctx, 10*time.Millisecond)
			}
		})
	}
	wg.Wait()
	drain(t, tap)
	// Twenty clients on one key are too many for the model: the checks alone, and
	// that every refusal names a lease that stood at some time of the call.
	r := e.run()
	for _, v := range r.Judge() {
		t.Error(v)
	}
	until := map[uint64]int64{}
	entries := r.Log.ByKey["k"]
	for i, m := range entries {
		until[m.Seq] = r.Clock.At(m.Ends())
		if i+1 < len(entries) {
			// Seen, not stamped: a cluster stamps a message before it commits it.
			until[m.Seq] = min(until[m.Seq], entries[i+1].Seen)
		}
	}
	grants, refusals := 0, 0
	for i := range r.Ops {
		op := &r.Ops[i]
		switch {
		case op.Call == Acquire && op.Outcome == OK:
			grants++
		case op.Kind == kinds.Denied:
			refusals++
			m := r.Log.bySeq[op.Got.Rev]
			if m == nil || op.Start > until[m.Seq]+int64(wallSlack) || op.End < r.Clock.At(m.Time)-int64(wallSlack) {
				t.Errorf("refused while nobody held it so: %v (stored %v)", op, m)
			}
		}
	}
	if grants < 20 { // on a machine that is busy with other things too
		t.Errorf("only %d grants", grants)
	}
	t.Logf("%d grants, %d refusals", grants, refusals)
}

// Leases that ran out show again after a restart, and replicas disagree on what
// has run out (nats-server 6828, 6758, 3653).
func TestT04_ExpiredStaysExpired(t *testing.T) {
	e := field(t, R3, Variant{})
	const keys = 400
	begin := e.Rec.Clock.Now()
	last := make([]Op, keys)
	for i := range keys {
		last[i] = must(t, e.acquire(fmt.Sprint("k", i), "A", time.Second), kinds.Granted)
		if i%40 == 39 { // some ends are passed while everything works
			time.Sleep(100 * time.Millisecond)
		}
	}
	leader := e.leader()
	if err := e.crashServers([]int{(leader + 1) % 3}, 200*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	e.Cluster.StepDown(bucketStream, (leader+1)%3)
	// Through every server, all the time: a lease that was over is never seen again.
	var wg sync.WaitGroup
	ctx, stop := context.WithTimeout(t.Context(), 8*time.Second)
	defer stop()
	for s := range 3 {
		nc, err := nats.Connect(e.urls[s], connOptions("poll")...)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		c := Client{ID: 10 + s, Conn: nc, Record: e.Rec}
		wg.Go(func() {
			for i := s; ctx.Err() == nil; i++ {
				op := c.Do(Op{Call: Owner, Key: fmt.Sprint("k", i%keys)})
				end := last[i%keys].End + int64(time.Second)
				if op.Kind == kinds.Held && op.Start > end+int64(wallSlack) {
					t.Errorf("over since %v, but %v", time.Duration(op.Start-end), &op)
				}
				if i%50 == 0 {
					pause(ctx, 10*time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	for i := range 20 {
		must(t, e.acquire(fmt.Sprint("k", i), "B", time.Second), kinds.Granted)
	}
	t.Logf("%d leases, %v", keys, time.Duration(e.Rec.Clock.Now()-begin).Round(time.Second))
}

// A clock jump ends or prolongs leases (etcd 9888, 9395).
func TestT09_ServerClockJumps(t *testing.T) {
	if *flagLength == 0 {
		t.Skip("-fault.length is not given: it builds a server of its own")
	}
	planned(t, "server-clock", R1, 15*time.Second)
}

// An embedded server catches SIGTERM first and the process dies without
// draining (liftbridge 442, nats-server 5360, dendrite 2289).
func TestT10_EmbeddedLeavesInOrder(t *testing.T) {
	e := field(t, Embedded, Variant{})
	revs := map[string]uint64{}
	for i := range 100 {
		key := fmt.Sprint("k", i)
		revs[key] = must(t, e.acquire(key, "A", 600*time.Second), kinds.Granted).Got.Rev
	}
	for round := range 5 {
		s := e.Services[0]
		s.Term()
		if code := s.Wait(31 * time.Second); code != 0 {
			t.Fatalf("round %d: exit code %d", round, code)
		}
		s.Restart()
		e.WaitReady(30 * time.Second)
	}
	for key, rev := range revs {
		if op := must(t, e.owner(key), kinds.Held); op.Got.Rev != rev {
			t.Errorf("%s: %v, was %d", key, &op, rev)
		}
	}
	if err := e.refusedSecond(); err != nil {
		t.Error(err)
	}
}

// An upgrade or downgrade puts the stream offline (nats-server 7158, natscli 1393).
func TestT11_UpgradeAndDowngrade(t *testing.T) {
	if *flagLength == 0 {
		t.Skip("-fault.length is not given: it takes minutes")
	}
	planned(t, "upgrade", R3, 40*time.Second)
}

// A server that cannot expire keys is not served from, with a clear word, and
// served from again when it can.
func TestT11_UnsupportedServer(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: no real processes")
	}
	server := testnats.Child(t, testnats.ChildOptions{Version: "2.12.0"})
	testnats.Leased(t, "serve", "--server", server.URL, "--http-listen", "127.0.0.1:0")
	c := Client{Conn: server.Connect(), Record: NewRecorder()}
	testnats.Eventually(t, 10*time.Second, func() bool {
		op := c.Do(Op{Call: Acquire, Key: "k", Holder: "A", TTL: time.Second})
		return op.Kind == kinds.Unsupported && strings.Contains(op.Text, "2.12")
	})
	server.Use("2.15.3")
	server.Restart()
	testnats.Eventually(t, 20*time.Second, func() bool {
		op := c.Do(Op{Call: Acquire, Key: "k", Holder: "A", TTL: time.Second})
		return op.Kind == kinds.Granted
	})
}

// A crash and pauses lose acknowledged writes (nats-server 7567, 7564).
func TestP02_PauseKill(t *testing.T) {
	if *flagLength == 0 {
		t.Skip("-fault.length is not given: it takes minutes")
	}
	planned(t, "pause-kill", R3, 30*time.Second)
}

// The bucket is deleted under a running service: silence (nats-server 6614,
// nats.rs 795).
func TestP04_BucketDeleted(t *testing.T) {
	e := field(t, R1, Variant{})
	tap := startTap(t, e)
	held := must(t, e.acquire("k", "A", 5*time.Second), kinds.Granted)
	if err := e.deleteBucket(); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 15*time.Second, func() bool { op := e.acquire("k", "B", time.Second); return op.Kind == kinds.Granted })
	for _, op := range e.Rec.Ops() {
		if op.Kind == kinds.Granted && op.Holder == "B" {
			if op.End < held.Start+int64(5*time.Second) {
				t.Errorf("granted while the old lease stood: %v", &op)
			}
			if op.Got.Rev <= held.Got.Rev {
				t.Errorf("fence %d after %d", op.Got.Rev, held.Got.Rev)
			}
		}
	}
	drain(t, tap)
	judge(t, e.run())
}

// Every reconnect leaks a consumer, or the watch is dead after a restart
// (openobserve 13594, nats.go 1094, 1370).
func TestP05_NoConsumerIsLeft(t *testing.T) {
	e := field(t, R1, Variant{})
	for range 6 {
		e.Servers[0].Restart()
		e.WaitReady(30 * time.Second)
	}
	// A change after the last restart is seen: a waiting acquire is woken at once.
	held := must(t, e.acquire("k", "A", 60*time.Second), kinds.Granted)
	woken := make(chan Op, 1)
	go func() {
		woken <- e.call(Op{Call: Acquire, Key: "k", Holder: "B", TTL: time.Second, Wait: 10 * time.Second})
	}()
	time.Sleep(500 * time.Millisecond)
	released := must(t, e.call(Op{Call: Release, Key: "k", Holder: "A", Revision: held.Got.Rev}), kinds.Released)
	op := must(t, <-woken, kinds.Granted)
	after := time.Duration(op.End - released.End)
	if after > 9*time.Second {
		t.Errorf("woken %v after the release: the watch is dead", after)
	}
	t.Logf("woken %v after the release", after.Round(time.Millisecond))
	testnats.Eventually(t, 30*time.Second, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		si, err := bucketInfo(ctx, e.admin.Conn)
		return err == nil && si.State.Consumers <= len(e.Services)
	}, "more consumers than instances")
}

// All waiters fire at once on a release (consul 9469).
func TestP06_ManyWantOneKey(t *testing.T) {
	e := field(t, R1, Variant{})
	const many = 500
	// What the others' calls take when nothing happens, on this machine now.
	var times []time.Duration
	p99 := func() time.Duration {
		slices.Sort(times)
		return times[len(times)*99/100]
	}
	for i := range 100 {
		op := must(t, e.acquire(fmt.Sprint("before", i), "O", time.Second), kinds.Granted)
		times = append(times, time.Duration(op.End-op.Start))
		time.Sleep(10 * time.Millisecond)
	}
	quiet := p99()
	held := must(t, e.acquire("k", "A", 60*time.Second), kinds.Granted)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	var mu sync.Mutex
	var grants []Op
	for i := range many {
		wg.Go(func() {
			c := Client{ID: 100 + i, Conn: e.admin.Conn, Record: e.Rec}
			for ctx.Err() == nil {
				op := c.Do(Op{Call: Acquire, Key: "k", Holder: fmt.Sprint("w", i), TTL: 60 * time.Second})
				if op.Outcome == OK {
					mu.Lock()
					grants = append(grants, op)
					mu.Unlock()
					return
				}
				pause(ctx, time.Second)
			}
		})
	}
	// Meanwhile others go about their business.
	times = nil
	var released Op
	for i := range 200 {
		if i == 100 {
			released = must(t, e.call(Op{Call: Release, Key: "k", Holder: "A", Revision: held.Got.Rev}), kinds.Released)
		}
		op := must(t, e.acquire(fmt.Sprint("other", i), "O", time.Second), kinds.Granted)
		times = append(times, time.Duration(op.End-op.Start))
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	wg.Wait()
	if len(grants) != 1 {
		t.Errorf("%d of %d were granted", len(grants), many)
	}
	for _, op := range e.Rec.Ops() {
		if op.Key == "k" && op.Start > released.End && time.Duration(op.End-op.Start) > time.Second {
			t.Errorf("an answer took %v: %v", time.Duration(op.End-op.Start), &op)
		}
	}
	if got := p99(); got > max(100*time.Millisecond, 5*quiet) {
		t.Errorf("p99 of the others is %v, was %v before", got, quiet)
	}
	t.Logf("others: median %v, p99 %v, before %v", times[len(times)/2], p99(), quiet)
}
