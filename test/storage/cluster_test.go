package storage

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestLeaderChanges is row 7: twenty clients make all calls on a cluster while
// the bucket's leader steps down every two seconds. No acknowledged grant is
// lost, nothing is internal, and nobody is denied a key that nobody holds (H7).
func TestLeaderChanges(t *testing.T) {
	run := 15 * time.Second
	if long {
		run = time.Minute
	}
	cl := testnats.Cluster(t, 3)
	ins := []*instance{serve(t, cl.Servers[0].URL, replicas(3)), serve(t, cl.Servers[1].URL, replicas(3))}
	for _, in := range ins {
		in.waitReady(t)
	}

	var count tally
	stop := make(chan struct{})
	var wg sync.WaitGroup
	shared := &contended{}
	for i := range 20 {
		nc := testnats.Connect(t, cl.Servers[i%3].URL)
		if i < 10 {
			k := &keeping{t: t, nc: nc, key: fmt.Sprintf("own-%d", i), holder: fmt.Sprintf("h%d", i), count: &count}
			k.listen()
			wg.Go(func() { k.run(stop) })
		} else {
			wg.Go(func() { shared.contend(t, nc, fmt.Sprintf("shared-%d", i%5), fmt.Sprintf("c%d", i), &count, stop) })
		}
	}
	changes := 0
	for end := time.Now().Add(run); time.Now().Before(end); {
		next := time.Now().Add(2 * time.Second)
		cl.StepDown("KV_leases")
		changes++
		time.Sleep(time.Until(next))
	}
	close(stop)
	wg.Wait()

	t.Logf("%d leader changes; %s", changes, &count)
	for _, kind := range []string{"internal", noAnswer, noResponders, "invalid", "unsupported", "busy"} {
		if n := count.get(kind); n > 0 {
			t.Errorf("%d times %s", n, kind)
		}
	}
	shared.judge(t)
	if n := count.get("granted") + count.get("renewed"); n < 20*changes {
		t.Errorf("only %d grants and renewals over %d leader changes", n, changes)
	}
	if failed := count.get("unavailable") + count.get("unknown"); failed > count.get("renewed") {
		t.Errorf("more calls failed (%d) than renewals succeeded (%d)", failed, count.get("renewed"))
	}
	for _, in := range ins {
		for _, line := range in.log.errors() {
			t.Errorf("logged: %s", line)
		}
	}
}

// keeping is a client with a key of its own: whatever was acknowledged to it
// must be there until its time is over, counted from the sending.
type keeping struct {
	t           testing.TB
	nc          *nats.Conn
	key, holder string
	count       *tally
	forwarded   atomic.Int64
}

const keepTTL = 6 * time.Second

func (k *keeping) call(name string, more map[string]any) reply {
	body := map[string]any{"key": k.key}
	for n, v := range more {
		body[n] = v
	}
	r, err := call(k.nc, name, body)
	if err != nil {
		k.t.Errorf("%s: %v", k.key, err)
	}
	k.count.add(r.Kind)
	return r
}

func (k *keeping) listen() {
	_, err := k.nc.Subscribe("dagnats.lease.inbox."+k.holder+".>", func(m *nats.Msg) {
		k.forwarded.Add(1)
		_ = m.Respond(m.Data)
	})
	if err == nil {
		err = k.nc.Flush()
	}
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *keeping) run(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		got := k.call("acquire", map[string]any{"holder": k.holder, "ttl_ms": keepTTL.Milliseconds()})
		if got.Kind == "granted" {
			k.tenure(got, stop)
		} else if got.Kind != "unavailable" && got.Kind != "unknown" {
			k.t.Errorf("%s: acquire answers %s: %s, and nobody else wants this key", k.key, got.Kind, got.Error)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// tenure renews, asks and forwards at random until it releases.
func (k *keeping) tenure(now reply, stop <-chan struct{}) {
	lost := func(what string, r reply) {
		k.t.Errorf("%s: %s says %s (holder %q, revision %d; %s), %v after revision %d was acknowledged for %v",
			k.key, what, r.Kind, r.Holder, r.Revision, r.Error, r.got.Sub(now.got).Round(time.Millisecond), now.Revision, keepTTL)
	}
	for {
		select {
		case <-stop:
			return
		default:
		}
		time.Sleep(time.Duration(5+rand.IntN(30)) * time.Millisecond)
		end := now.sent.Add(keepTTL)
		switch p := rand.IntN(100); {
		case p < 60:
			r := k.call("renew", map[string]any{"holder": k.holder, "revision": now.Revision, "ttl_ms": keepTTL.Milliseconds()})
			switch {
			case r.Kind == "renewed" && r.Revision > now.Revision && r.Acquired.Equal(now.Acquired):
				now = r
			case r.Kind == "unavailable":
			case r.Kind == "unknown":
				// The contract's way out: my holder and my tenure, then go on.
				o := k.call("owner", nil)
				if o.Kind == "held" && o.Holder == k.holder && o.Acquired.Equal(now.Acquired) && o.Revision >= now.Revision {
					if o.Revision > now.Revision {
						now.sent = r.sent
					}
					now.Revision = o.Revision
				} else {
					if o.Kind != "unavailable" && o.got.Before(end) {
						lost("owner after an unknown renewal", o)
					}
					return
				}
			case r.got.Before(end):
				lost("renew", r)
				return
			default:
				return
			}
		case p < 80:
			r := k.call("owner", nil)
			if r.Kind != "unavailable" && (r.Kind != "held" || r.Revision != now.Revision || r.Holder != k.holder) && r.got.Before(end) {
				lost("owner", r)
				return
			}
		case p < 90:
			r := k.call("forward", map[string]any{"payload": []byte("ping"), "timeout_ms": 3000})
			switch r.Kind {
			case "forwarded", "unavailable", "owner_unavailable":
			case "owner_timeout":
				// The read may have taken nearly all of the time.
				if took := r.got.Sub(r.sent); took < 2900*time.Millisecond {
					lost("forward", r)
				}
			default:
				if r.got.Before(end) {
					lost("forward", r)
				}
			}
		case p < 95:
			r := k.call("acquire", map[string]any{"holder": k.holder, "ttl_ms": keepTTL.Milliseconds()})
			if r.Kind != "unavailable" && (r.Kind != "granted" || r.Revision != now.Revision) && r.got.Before(end) {
				lost("acquire", r)
				return
			}
		default:
			r := k.call("release", map[string]any{"holder": k.holder, "revision": now.Revision})
			switch {
			case r.Kind == "released":
				return
			case r.Kind == "unknown":
				// It may land yet: until then the lease would seem to be there.
				for time.Now().Before(end) && k.call("owner", nil).Revision == now.Revision {
					time.Sleep(50 * time.Millisecond)
				}
				return
			case r.Kind != "unavailable" && r.got.Before(end):
				lost("release", r)
				return
			}
		}
	}
}

// contended are grants and refusals of keys that several clients want.
type contended struct {
	mu     sync.Mutex
	grants map[uint64]*tenure
	denied []reply
	vague  []reply // acquires without a verdict
}

// tenure is one grant and its end, as its client saw them.
type tenure struct {
	reply         // the first that told of it
	ends  []reply // releases that were tried
}

func (c *contended) granted(r reply) *tenure {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.grants == nil {
		c.grants = map[uint64]*tenure{}
	}
	u := c.grants[r.Revision]
	if u == nil {
		u = &tenure{reply: r}
		c.grants[r.Revision] = u
	}
	return u
}

func (u *tenure) ttl() time.Duration { return time.Duration(u.TTL) * time.Millisecond }

// until is when the lease was perhaps over: before, it excludes all others. The
// reply may tell of a write that an earlier call made. A release that is told
// lost may have been what ended it, when its first try got no verdict.
func (u *tenure) until() time.Time {
	end := u.sent.Add(time.Duration(u.Left) * time.Millisecond)
	for _, r := range u.ends {
		if r.sent.Before(end) {
			end = r.sent
		}
	}
	return end
}

// over is when the lease was certainly over: from then on it excludes nobody.
func (u *tenure) over() time.Time {
	end := u.got.Add(u.ttl())
	for _, r := range u.ends {
		if r.Kind == "released" && r.got.Before(end) {
			end = r.got
		}
	}
	return end
}

func (c *contended) contend(t testing.TB, nc *nats.Conn, key, holder string, count *tally, stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		default:
		}
		time.Sleep(time.Duration(1+rand.IntN(20)) * time.Millisecond)
		ttl := time.Second * time.Duration(1+rand.IntN(2))
		r, err := call(nc, "acquire", map[string]any{"key": key, "holder": holder, "ttl_ms": ttl.Milliseconds()})
		if err != nil {
			t.Error(err)
		}
		count.add(r.Kind)
		r.Key = key
		switch r.Kind {
		case "granted":
			u := c.granted(r)
			time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
			if rand.IntN(10) == 0 {
				continue // let it run out
			}
			rel, err := call(nc, "release", map[string]any{"key": key, "holder": holder, "revision": r.Revision})
			if err != nil {
				t.Error(err)
			}
			count.add(rel.Kind)
			c.mu.Lock()
			u.ends = append(u.ends, rel)
			c.mu.Unlock()
		case "denied":
			c.mu.Lock()
			c.denied = append(c.denied, r)
			c.mu.Unlock()
		default:
			r.Holder = holder
			c.mu.Lock()
			c.vague = append(c.vague, r)
			c.mu.Unlock()
		}
	}
}

// judge compares every refusal with the grants, and the grants with each other.
func (c *contended) judge(t testing.TB) {
	t.Helper()
	byKey := map[string][]*tenure{}
	for _, u := range c.grants {
		byKey[u.Key] = append(byKey[u.Key], u)
	}
	for key, us := range byKey {
		slices.SortFunc(us, func(a, b *tenure) int { return cmp.Compare(a.Revision, b.Revision) })
		for i, u := range us[1:] {
			// From its ack until its time is over, counted from the sending.
			if last := us[i]; u.got.Before(last.until()) && u.Holder != last.Holder {
				t.Errorf("%s: %s has revision %d for %v more, and %s gets revision %d", key, last.Holder, last.Revision, last.until().Sub(u.got), u.Holder, u.Revision)
			}
			if last := us[i]; u.got.Before(last.sent) {
				t.Errorf("%s: revision %d was acknowledged before %d was asked for", key, u.Revision, last.Revision)
			}
		}
	}
	wrong := 0
	for _, d := range c.denied {
		u := c.grants[d.Revision]
		why := ""
		switch {
		case u != nil && (u.Holder != d.Holder || u.Key != d.Key):
			why = "that revision is another's"
		case u != nil && d.sent.After(u.over()):
			why = fmt.Sprintf("that lease was over %v before the call", d.sent.Sub(u.over()))
		case u == nil && !slices.ContainsFunc(c.vague, func(r reply) bool { return r.Key == d.Key && r.Holder == d.Holder && r.sent.Before(d.got) }):
			why = "nobody was granted that"
		}
		if why != "" {
			if wrong++; wrong <= 5 {
				t.Errorf("%s: denied for holder %s, revision %d: %s", d.Key, d.Holder, d.Revision, why)
			}
		}
	}
	if wrong > 5 {
		t.Errorf("%d wrong refusals in all", wrong)
	}
	if len(c.denied) == 0 {
		t.Error("nobody was ever denied: no contention")
	}
}

// TestRenewalsAtTheEdge is row 8: on three replicas with slow links, renewals
// around the very end of their leases. Each that was acknowledged stands.
func TestRenewalsAtTheEdge(t *testing.T) {
	const (
		want   = 5000 // acknowledged in the last quarter of a second, or later
		atEdge = 1500 // of them in the last 50 ms, or later
	)
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{})
	for i := range 2 {
		in, stop := serveUntil(t, cl.Servers[i].URL, replicas(3))
		defer stop()
		in.waitReady(t)
	}
	cl.SetRouteDelay(2 * time.Millisecond)

	var count tally
	var renewed, edge, gone, latency atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	deadline := start.Add(60 * time.Second)
	if long {
		deadline = start.Add(10 * time.Minute)
	}
	conns := make([]*nats.Conn, 8)
	for i := range conns {
		conns[i] = testnats.Connect(t, cl.Servers[i%3].URL)
	}
	for i := range 450 {
		c := &caller{t, conns[i%len(conns)]}
		wg.Go(func() {
			time.Sleep(time.Duration(rand.IntN(2500)) * time.Millisecond) // not all at once
			for round := 0; (renewed.Load() < want || edge.Load() < atEdge) && time.Now().Before(deadline); round++ {
				key, holder := fmt.Sprintf("edge-%d-%d", i, round), "A"
				l := c.acquire(key, holder, time.Second)
				count.add("acquire " + l.Kind)
				if l.Kind != "granted" || l.got.Sub(l.sent) > 300*time.Millisecond {
					// Too much for this machine just now: fewer keys get further.
					time.Sleep(time.Duration(1000+rand.IntN(3000)) * time.Millisecond)
					continue
				}
				// The end is a little after the time in the reply, which was taken just
				// before the write; most calls are to arrive where a removal is under way.
				after := time.Duration(rand.IntN(60)-50) * time.Millisecond
				if rand.IntN(8) == 0 {
					after = time.Duration(10+rand.IntN(290)) * time.Millisecond
				}
				time.Sleep(time.Until(l.Expires.Add(after - time.Duration(latency.Load())/2)))
				r := c.renew(l, 3*time.Second)
				took := int64(r.got.Sub(r.sent))
				latency.Store((7*latency.Load() + took) / 8)
				count.add("renew " + r.Kind)
				if r.Kind == "lost" {
					// It had run out: then nobody has it.
					if left := l.sent.Add(time.Second).Sub(r.got); left > 0 {
						t.Errorf("%s: lost %v before its time was over", key, left)
					}
					continue
				}
				if r.Kind != "renewed" {
					continue
				}
				// Written how long before the end?
				early := l.Expires.Sub(r.Expires.Add(-3 * time.Second))
				if early < 250*time.Millisecond {
					renewed.Add(1)
				}
				if early < 50*time.Millisecond {
					edge.Add(1)
				}
				time.Sleep(time.Until(r.got.Add(1500 * time.Millisecond)))
				o := c.owner(key)
				switch {
				case !o.got.Before(r.sent.Add(3 * time.Second)):
					count.add("owner too late")
				case o.Kind == "unavailable":
					count.add("owner unavailable")
				case o.Kind != "held" || o.Revision != r.Revision || o.Holder != holder:
					gone.Add(1)
					t.Errorf("%s: renewed with revision %d; 1.5 s later %s, revision %d", key, r.Revision, o.Kind, o.Revision)
				default:
					count.add("owner stands")
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d acknowledged near the end, %d of them at the edge; %d gone; %v; %s", renewed.Load(), edge.Load(), gone.Load(), time.Since(start).Round(time.Second), &count)
	wanted, wantedAtEdge := int64(want), int64(atEdge)
	if mean := time.Duration(latency.Load()); renewed.Load() < want && mean > 60*time.Millisecond && !long {
		t.Logf("this machine is too busy for all %d: a call takes %v", want, mean)
		wanted, wantedAtEdge = want/10, atEdge/10
	}
	if renewed.Load() < wanted || edge.Load() < wantedAtEdge {
		t.Errorf("only %d renewals were acknowledged near the end and %d at the edge, %d and %d wanted", renewed.Load(), edge.Load(), wanted, wantedAtEdge)
	}
	if stands := int64(count.get("owner stands")); stands < wanted*8/10 {
		t.Errorf("only %d were seen to stand", stands)
	}
}

// TestMetaLeaderLost: calls go on while the cluster's own leader is cut off and
// another is elected, as long as the bucket's leader is there.
func TestMetaLeaderLost(t *testing.T) {
	t.Parallel()
	cl := testnats.Cluster(t, 3)
	meta := -1
	testnats.Eventually(t, 20*time.Second, func() bool {
		meta = slices.IndexFunc(cl.Servers, func(n *testnats.Node) bool { return n.NS().JetStreamIsLeader() })
		return meta >= 0
	}, "no leader of the cluster")
	via := (meta + 1) % 3
	in, stop := serveUntil(t, cl.Servers[via].URL, replicas(3))
	defer stop()
	in.waitReady(t)
	cl.StepDown("KV_leases", via)
	c := callerOn(t, cl.Servers[via].URL)
	in.waitReady(t)
	held := c.grant("k", "A", 30*time.Second)
	var count tally
	cl.Isolate(meta, testnats.Blackhole)
	defer cl.Heal()
	for end := time.Now().Add(12 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		r := c.renew(held, 30*time.Second)
		count.add(r.Kind)
		if r.Kind == "renewed" {
			held = r
		}
	}
	t.Log(&count)
	if n := count.get("unavailable") + count.get("unknown"); n > 0 {
		t.Errorf("%d renewals failed, and the bucket had its leader all the time", n)
	}
}
