package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// ended is a key whose leases are all over, and how that came.
type ended struct {
	key     string
	highest uint64 // of its revisions
}

// endings makes keys whose leases end in every way there is, each under the
// names of prefix, and returns when all of them are over. The last are cut as
// close to the return as they come.
func endings(c *caller, prefix string) (over []ended) {
	c.t.Helper()
	const longest = 10 * time.Minute
	add := func(r reply) { over = append(over, ended{r.Key, r.Revision}) }
	key := func(name string) string { return prefix + "-" + name }

	expiring := c.grant(key("expired"), "A", time.Second)
	lapsing := c.grant(key("renewed-short"), "A", longest)
	lapsing = c.want(c.renew(lapsing, time.Second), "renewed")
	again := c.grant(key("renewed-short-twice"), "A", longest)
	again = c.want(c.renew(again, 2*time.Second), "renewed")
	again = c.want(c.renew(again, time.Second), "renewed")
	// A long lease that was released, then a short one of another holder.
	first := c.grant(key("long-then-short"), "A", longest)
	c.want(c.release(first), "released")
	short := c.grant(key("long-then-short"), "B", time.Second)
	// Long, expired by renewal, taken over by another with a short one.
	for _, l := range []reply{expiring, lapsing, again, short} {
		time.Sleep(time.Until(l.got.Add(time.Second)))
		c.want(c.owner(l.Key), "free")
	}
	taken := c.grant(key("taken-over"), "A", longest)
	taken = c.want(c.renew(taken, time.Second), "renewed")
	time.Sleep(time.Until(taken.got.Add(time.Second)))
	taken = c.grant(key("taken-over"), "B", time.Second)
	time.Sleep(time.Until(taken.got.Add(time.Second)))
	c.want(c.owner(taken.Key), "free")
	for _, r := range []reply{expiring, lapsing, again, short, taken} {
		add(r)
	}
	for _, ttl := range []time.Duration{time.Second, 15 * time.Second, longest} {
		l := c.grant(fmt.Sprintf("%s-released-%v", prefix, ttl), "A", ttl)
		c.want(c.release(l), "released")
		add(l)
	}
	l := c.grant(key("renewed-then-released"), "A", longest)
	l = c.want(c.renew(l, time.Second), "renewed")
	c.want(c.release(l), "released")
	add(l)
	return over
}

// stayGone proves that nobody is shown as holder of the keys again, that each
// can be taken, and that fences went on.
func stayGone(c *caller, over []ended, look time.Duration) {
	c.t.Helper()
	for until := time.Now().Add(look); ; {
		for _, e := range over {
			if r := c.owner(e.key); r.Kind == "held" {
				c.t.Errorf("%s rose again: holder %s, revision %d, expires %v", e.key, r.Holder, r.Revision, r.Expires)
			}
		}
		if time.Now().After(until) {
			break
		}
	}
	for _, e := range over {
		var r reply
		testnats.Eventually(c.t, 10*time.Second, func() bool {
			r = c.acquire(e.key, "C", 5*time.Second)
			if r.Kind == "denied" {
				c.t.Fatalf("%s: denied in favour of %s, revision %d", e.key, r.Holder, r.Revision)
			}
			return r.Kind == "granted"
		}, e.key, " is not granted")
		if r.Revision <= e.highest {
			c.t.Errorf("%s: revision %d after %d", e.key, r.Revision, e.highest)
		}
	}
}

// TestEndedLeasesStayGoneEmbedded is row 9 with the NATS server inside: service
// and server are killed at the same instant, right after leases ended.
func TestEndedLeasesStayGoneEmbedded(t *testing.T) {
	t.Parallel()
	repeat := 4
	if long {
		repeat = 25
	}
	for _, sync := range []string{"always", "2m"} {
		t.Run("sync "+sync, func(t *testing.T) {
			t.Parallel()
			port := testnats.FreePort(t)
			s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", port), "--store-dir", t.TempDir(), "--http-listen", "", "--sync", sync)
			c := callerOn(t, s.NATS())
			kept := c.grant("kept", "K", 10*time.Minute)
			for i := range repeat {
				over := endings(c, fmt.Sprintf("r%d", i))
				s.Kill()
				s.Restart()
				testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("kept").Kind == "held" }, "the lease that was not over is not there")
				if r := c.owner("kept"); r.Revision != kept.Revision || r.Holder != "K" {
					t.Errorf("the lease that was not over: %s, revision %d, was %d", r.Holder, r.Revision, kept.Revision)
				}
				stayGone(c, over, 700*time.Millisecond)
				kept = c.want(c.renew(kept, 10*time.Minute), "renewed")
			}
		})
	}
}

// TestKilledUnderLoad: the process with the server inside is killed in the
// middle of many calls. What was acknowledged is there as it was acknowledged;
// what was cut off is there or not, and never as another's.
func TestKilledUnderLoad(t *testing.T) {
	t.Parallel()
	rounds := 3
	if long {
		rounds = 20
	}
	for _, flush := range []string{"always", "2m"} {
		t.Run("sync "+flush, func(t *testing.T) {
			t.Parallel()
			port := testnats.FreePort(t)
			s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", port), "--store-dir", t.TempDir(), "--http-listen", "", "--sync", flush)
			c := callerOn(t, s.NATS())
			revisions := map[uint64]string{}
			var acks atomic.Int64
			for round := range rounds {
				states := make([]*cut, 48)
				var wg sync.WaitGroup
				for i := range states {
					states[i] = &cut{nc: c.nc, key: fmt.Sprintf("r%d-k%d", round, i), holder: fmt.Sprintf("h%d", i), acks: &acks}
					wg.Go(func() { states[i].run(t, s.Done()) })
				}
				// In full flight, also where this machine is busy with other things.
				for end := time.Now().Add(6 * time.Second); acks.Load() < int64(400*(round+1)) && time.Now().Before(end); {
					time.Sleep(5 * time.Millisecond)
				}
				s.Kill()
				wg.Wait()
				s.Restart()
				testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("warm").Kind == "free" }, "does not serve")
				for _, st := range states {
					for _, rev := range st.revisions {
						if had := revisions[rev]; had != "" {
							t.Errorf("revision %d was issued for %s and for %s", rev, had, st.key)
						}
						revisions[rev] = st.key
					}
					o := c.owner(st.key)
					m := lastOf(t, c.nc, st.key)
					switch {
					case o.Kind == "held" && (m == nil || m.Seq != o.Revision || o.Holder != st.holder):
						t.Errorf("%s: owner says %s, revision %d; stored %+v", st.key, o.Holder, o.Revision, m)
					case st.open != "":
						// Not known which of the two.
						if o.Kind == "held" && o.Revision < st.revision {
							t.Errorf("%s: revision %d, and %d was acknowledged", st.key, o.Revision, st.revision)
						}
					case st.held && (o.Kind != "held" || o.Revision != st.revision):
						t.Errorf("%s: acknowledged with revision %d, now %s %d", st.key, st.revision, o.Kind, o.Revision)
					case !st.held && o.Kind == "held":
						t.Errorf("%s: released, and back with revision %d", st.key, o.Revision)
					}
				}
			}
			t.Logf("%d calls acknowledged", acks.Load())
			if acks.Load() < int64(100*rounds) {
				t.Error("too few to tell anything")
			}
		})
	}
}

// cut is a client with a key of its own until its calls are cut off.
type cut struct {
	nc          *nats.Conn
	key, holder string
	acks        *atomic.Int64

	held      bool
	revision  uint64
	revisions []uint64
	open      string // the call that got no answer
}

func (k *cut) run(t *testing.T, done <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	for i := 0; ; i++ {
		name := []string{"acquire", "renew", "renew", "release"}[i%4]
		k.open = name
		body, _ := json.Marshal(map[string]any{"key": k.key, "holder": k.holder, "revision": max(k.revision, 1), "ttl_ms": 600000})
		msg, err := k.nc.RequestWithContext(ctx, "api.leases."+name, body)
		if err != nil {
			return
		}
		var r reply
		if err := json.Unmarshal(msg.Data, &r); err != nil {
			t.Error(err)
			return
		}
		if r.Kind != "" {
			if r.Kind != "unavailable" && r.Kind != "unknown" && r.Kind != "internal" {
				t.Errorf("%s %s: %s: %s", k.key, name, r.Kind, r.Error)
			}
			return
		}
		k.open = ""
		k.acks.Add(1)
		k.held = name != "release"
		if k.held {
			k.revision = r.Revision
			k.revisions = append(k.revisions, r.Revision)
		}
	}
}

// TestTombstonesOutliveTheirUse: once a tombstone is gone, what it covered is
// over by the clock, so a crash then brings nothing back either.
func TestTombstonesOutliveTheirUse(t *testing.T) {
	t.Parallel()
	port := testnats.FreePort(t)
	s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", port), "--store-dir", t.TempDir(), "--http-listen", "")
	c := callerOn(t, s.NATS())
	var over []ended
	for i := range 20 {
		l := c.grant(fmt.Sprintf("released-%d", i), "A", time.Second*time.Duration(1+i%3))
		c.want(c.release(l), "released")
		over = append(over, ended{l.Key, l.Revision})
		l = c.grant(fmt.Sprintf("expired-%d", i), "A", time.Second)
		over = append(over, ended{l.Key, l.Revision})
	}
	// 3 s of the lease, 2 s and 30 s of the tombstone, and the server's sweep.
	testnats.Eventually(t, 50*time.Second, func() bool { return bucketOf(t, c.nc).State.Messages == 0 }, "tombstones stay")
	s.Kill()
	s.Restart()
	stayGone(c, over, time.Second)
}

// TestShortenedLeaseWithoutService: the message of a lease that was shortened
// outlives it, and nobody is there to end it; it is over all the same.
func TestShortenedLeaseWithoutService(t *testing.T) {
	t.Parallel()
	n := testnats.Child(t, testnats.ChildOptions{})
	_, stop := serveUntil(t, n.URL)
	c := callerOn(t, n.URL)
	testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("k").Kind == "free" }, "nobody serves")
	long := c.grant("k", "A", 10*time.Minute)
	short := c.want(c.renew(long, time.Second), "renewed")
	if ttl := seconds(t, lastOf(t, c.nc, "k")); ttl < 10*time.Minute {
		t.Errorf("stored with Nats-TTL %v", ttl)
	}
	stop()
	n.Restart()
	time.Sleep(time.Until(short.got.Add(time.Second)))
	_, stop = serveUntil(t, n.URL)
	defer stop()
	testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("k").Kind != noResponders }, "nobody serves")
	stayGone(c, []ended{{"k", short.Revision}}, 300*time.Millisecond)
}

// TestLiftedFencesSurvive: a bucket that was lifted stays so through a crash,
// empty or not. It was sound, so what it held may be believed in until it would be over.
func TestLiftedFencesSurvive(t *testing.T) {
	t.Parallel()
	n := testnats.Child(t, testnats.ChildOptions{})
	in, stop := serveUntil(t, n.URL)
	defer stop()
	in.waitReady(t)
	c := callerOn(t, n.URL)
	for _, empty := range []bool{false, true} {
		held := c.grant("k", "A", 3*time.Second)
		if empty {
			lift(t, c.nc)
		}
		lift(t, c.nc)
		last := bucketOf(t, c.nc).State.LastSeq
		if last <= held.Revision+1 {
			t.Fatalf("not lifted: %d after %d", last, held.Revision)
		}
		n.Restart()
		in.waitReady(t)
		testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("k").Kind == "free" }, "the lifted bucket is not free")
		var r reply
		testnats.Eventually(t, 20*time.Second, func() bool {
			r = c.acquire("k", "B", time.Second)
			return r.Kind == "granted"
		}, "the lifted bucket grants nothing")
		if r.Revision <= last {
			t.Errorf("revision %d after the lift to %d", r.Revision, last)
		} else {
			c.want(c.release(r), "released")
		}
	}
}

// TestEndedLeasesStayGoneCluster is row 9 in a cluster: a follower is killed,
// comes back and is made leader, so that what it recovered is what all see.
func TestEndedLeasesStayGoneCluster(t *testing.T) {
	t.Parallel()
	repeat := 3
	if long {
		repeat = 15
	}
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{})
	in, stop := serveUntil(t, cl.URL(), replicas(3))
	defer stop()
	in.waitReady(t)
	c := callerOn(t, cl.URL())
	kept := c.grant("kept", "K", 10*time.Minute)
	stirred := stir(c, "stir") // traffic goes on all the time
	defer stirred()
	for i := range repeat {
		over := endings(c, fmt.Sprintf("r%d", i))
		leader := cl.WaitLeader("KV_leases")
		victim := (leader + 1 + i%2) % 3
		cl.Servers[victim].Kill()
		cl.Servers[victim].Restart()
		cl.StepDown("KV_leases", victim)
		testnats.Eventually(t, 15*time.Second, func() bool { return c.owner("kept").Kind == "held" }, "the lease that was not over is not there")
		if r := c.owner("kept"); r.Revision != kept.Revision {
			t.Errorf("the lease that was not over: revision %d, was %d", r.Revision, kept.Revision)
		}
		stayGone(c, over, time.Second)
		testnats.Eventually(t, 15*time.Second, func() bool {
			r := c.renew(kept, 10*time.Minute)
			if r.Kind == "renewed" {
				kept = r
			}
			return r.Kind == "renewed"
		}, "the lease that was not over is not renewed")
	}
}

// stir makes calls on other keys until it is told to stop.
func stir(c *caller, prefix string) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			case <-time.After(5 * time.Millisecond):
			}
			r, err := call(c.nc, "acquire", map[string]any{"key": fmt.Sprintf("%s-%d", prefix, i%50), "holder": "S", "ttl_ms": 2000})
			if err != nil {
				c.t.Error(err)
				return
			}
			if r.Kind == "granted" && i%2 == 0 {
				_, _ = call(c.nc, "release", map[string]any{"key": r.Key, "holder": "S", "revision": r.Revision})
			}
		}
	})
	return sync.OnceFunc(func() {
		close(done)
		wg.Wait()
	})
}

// TestExpiredThroughEachServer is T04: asked through each server around an
// ordinary end, and after a crash and a failover, a lease that is over is never
// shown again.
func TestExpiredThroughEachServer(t *testing.T) {
	t.Parallel()
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{})
	var ins []*instance
	for i := range 3 {
		in, stop := serveUntil(t, cl.Servers[i].URL, replicas(3), apiPrefix(fmt.Sprintf("via%d", i)))
		defer stop()
		ins = append(ins, in)
	}
	var conns []*nats.Conn
	for i, in := range ins {
		in.waitReady(t)
		conns = append(conns, cl.Servers[i].Connect())
	}
	keys, rounds := 20, 3
	if long {
		rounds = 30
	}
	for round := range rounds {
		free := make([]time.Time, keys) // when it was first seen to be free
		held := make([]reply, keys)
		var mu sync.Mutex
		var wg sync.WaitGroup
		for k := range keys {
			key := fmt.Sprintf("r%d-k%d", round, k)
			var g reply
			testnats.Eventually(t, 20*time.Second, func() (ok bool) {
				var err error
				if g, err = callAt(conns[k%3], fmt.Sprintf("via%d", k%3), "acquire", map[string]any{"key": key, "holder": "A", "ttl_ms": 1000}); err != nil {
					t.Fatal(err)
				}
				return g.Kind == "granted"
			}, key, " is not granted: ", late(func() string { return g.Kind + " " + g.Error }))
			held[k] = g
			for i := range 3 {
				wg.Go(func() {
					for time.Since(g.got) < 2500*time.Millisecond {
						r, err := callAt(conns[i], fmt.Sprintf("via%d", i), "owner", map[string]any{"key": key})
						if err != nil {
							t.Error(err)
							return
						}
						mu.Lock()
						switch {
						case r.Kind == "free" && r.got.Before(g.sent.Add(time.Second)):
							t.Errorf("%s: free %v before its end", key, g.sent.Add(time.Second).Sub(r.got))
						case r.Kind == "free" && free[k].IsZero():
							free[k] = r.got
						case r.Kind == "held" && !free[k].IsZero() && r.sent.After(free[k]):
							t.Errorf("%s: held again, asked %v after it was free", key, r.sent.Sub(free[k]))
						case r.Kind == "held" && r.sent.After(g.got.Add(time.Second)):
							t.Errorf("%s: held, asked %v after its end", key, r.sent.Sub(g.got.Add(time.Second)))
						}
						mu.Unlock()
						time.Sleep(50 * time.Millisecond)
					}
				})
			}
		}
		wg.Wait()
		for k := range keys {
			if free[k].IsZero() {
				t.Errorf("r%d-k%d: never seen to be free", round, k)
			}
		}
		leader := cl.WaitLeader("KV_leases")
		victim := (leader + 1) % 3
		cl.Servers[victim].Kill()
		cl.Servers[victim].Restart()
		cl.StepDown("KV_leases", victim)
		for k := range keys {
			key := fmt.Sprintf("r%d-k%d", round, k)
			i := (victim + 1 + k) % 3
			c := &caller{t, conns[i]}
			r, err := callAt(c.nc, fmt.Sprintf("via%d", i), "owner", map[string]any{"key": key})
			if err != nil || r.Kind == "held" {
				t.Errorf("%s: after the failover %s %s %d %v", key, r.Kind, r.Holder, r.Revision, err)
			}
		}
	}
}

// TestPauseKill is P02, once: a minority stands still, another server is killed
// while it does, and then all of them change places. What was acknowledged is
// there in the end.
func TestPauseKill(t *testing.T) {
	t.Parallel()
	repeat := 1
	if long {
		repeat = 10
	}
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{Sync: "always"})
	// Each server has an instance of its own, as a connection to a paused one
	// takes a while to find that out.
	var conns []*nats.Conn
	for i := range 3 {
		in, stop := serveUntil(t, cl.Servers[i].URL, replicas(3), apiPrefix(fmt.Sprintf("via%d", i)))
		defer stop()
		in.waitReady(t)
		conns = append(conns, cl.Servers[i].Connect())
	}
	var mu sync.Mutex
	acked := map[string]reply{}
	do := func(server int, name string, body map[string]any) reply {
		r, err := callAt(conns[server], fmt.Sprintf("via%d", server), name, body)
		if err != nil {
			t.Error(err)
		}
		return r
	}
	take := func(server int, prefix string, d time.Duration) {
		for i, end := 0, time.Now().Add(d); time.Now().Before(end); i++ {
			key := fmt.Sprintf("%s-%d", prefix, i)
			if r := do(server, "acquire", map[string]any{"key": key, "holder": "A", "ttl_ms": 600000}); r.Kind == "granted" {
				mu.Lock()
				acked[key] = r
				mu.Unlock()
			}
			time.Sleep(3 * time.Millisecond)
		}
	}
	for i := range repeat {
		leader := cl.WaitLeader("KV_leases")
		paused, killed, last := (leader+1)%3, (leader+2)%3, leader
		take(leader, fmt.Sprintf("before-%d", i), 500*time.Millisecond)
		cl.Servers[paused].Pause()
		take(leader, fmt.Sprintf("minority-%d", i), 2*time.Second)
		cl.Servers[killed].Kill()
		cl.Servers[last].Pause()
		cl.Servers[paused].Resume()
		killedBack := make(chan struct{})
		go func() {
			defer close(killedBack)
			take(paused, fmt.Sprintf("dark-%d", i), 2*time.Second)
		}()
		cl.Servers[killed].Restart()
		<-killedBack
		testnats.Eventually(t, 60*time.Second, func() bool {
			return do(paused, "acquire", map[string]any{"key": fmt.Sprintf("back-%d", i), "holder": "A", "ttl_ms": 1000}).Kind == "granted"
		}, "no grant with two of three")
		take(paused, fmt.Sprintf("half-%d", i), 3*time.Second)
		cl.Servers[last].Resume()
		testnats.Eventually(t, 60*time.Second, func() bool {
			return do(last, "acquire", map[string]any{"key": fmt.Sprintf("after-%d", i), "holder": "A", "ttl_ms": 1000}).Kind == "granted"
		}, "no grant after all of it")
	}
	lost := 0
	for key, r := range acked {
		var o reply
		testnats.Eventually(t, 20*time.Second, func() bool {
			o = do(len(key)%3, "owner", map[string]any{"key": key})
			return o.Kind == "held" || o.Kind == "free"
		}, "no answer: ", late(func() string { return o.Kind + o.Error }))
		if o.Kind != "held" || o.Revision != r.Revision {
			if lost++; lost <= 5 {
				t.Errorf("%s: granted with revision %d, now %s %d", key, r.Revision, o.Kind, o.Revision)
			}
		}
	}
	t.Logf("%d grants, %d lost", len(acked), lost)
	if len(acked) < 40*repeat {
		t.Errorf("only %d grants", len(acked))
	}
}

// TestEmbeddedLeaves is T10: told to stop, the service with the server inside
// ends with 0 and all leases are there at the next start; a second process on
// the same store is refused.
func TestEmbeddedLeaves(t *testing.T) {
	t.Parallel()
	repeat := 4
	if long {
		repeat = 20
	}
	dir := t.TempDir()
	port := testnats.FreePort(t)
	s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", port), "--store-dir", dir, "--http-listen", "")
	c := callerOn(t, s.NATS())
	held := map[string]reply{}
	for i := range 100 {
		key := fmt.Sprintf("k-%d", i)
		held[key] = c.grant(key, "A", 10*time.Minute)
	}
	second := exec.Command(testnats.LeasedBinary(t), "serve", "--nats-listen", "127.0.0.1:0", "--store-dir", dir, "--http-listen", "")
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "store") {
		t.Errorf("a second process on one store: %v: %s", err, out)
	}
	for range repeat {
		s.Term()
		if code := s.Wait(20 * time.Second); code != 0 {
			t.Fatalf("exit code %d", code)
		}
		s.Restart()
		testnats.Eventually(t, 10*time.Second, func() bool { return c.owner("k-0").Kind == "held" }, "does not serve")
		for key, r := range held {
			if o := c.owner(key); o.Kind != "held" || o.Revision != r.Revision || o.Holder != "A" {
				t.Errorf("%s: %s %s %d, was revision %d", key, o.Kind, o.Holder, o.Revision, r.Revision)
			}
		}
	}
}
