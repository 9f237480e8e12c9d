package storage

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
)

const nearName = "leased-leader"

// TestWritesGoStraightToTheLeader: an instance whose Store connection goes to another
// server than the bucket's leader writes over one that goes there, follows the leader,
// and does without it when that way is cut.
func TestWritesGoStraightToTheLeader(t *testing.T) {
	cl := testnats.Cluster(t, 3)
	relays := map[string]*testnats.Link{} // of the direct ways, by URL
	for _, node := range cl.Servers {
		relays[node.URL] = testnats.Relay(t, node.URL)
	}
	var store *nats.Conn
	in := serve(t, cl.URL(), replicas(3), func(o *leased.Options) {
		store = o.Store
		o.Dial = testnats.Dial(func(opts *nats.Options) error {
			relay := relays[strings.Join(opts.Servers, ",")]
			if relay == nil {
				return fmt.Errorf("asked to connect to %q", opts.Servers)
			}
			opts.Name, opts.Servers = nearName, []string{relay.URL()}
			return nil
		})
	}).waitReady(t)

	// straight says that there is a direct way to the leader, unless Store goes there,
	// and no other.
	straight := func() bool {
		leader := cl.StreamLeader("KV_leases")
		if leader < 0 {
			return false
		}
		for i, node := range cl.Servers {
			want := 0
			if i == leader && node.Name != store.ConnectedServerName() {
				want = 1
			}
			if len(nearAt(t, cl, i)) != want {
				return false
			}
		}
		return true
	}
	var others []int // the servers that Store does not go to
	for i, node := range cl.Servers {
		if node.Name != store.ConnectedServerName() {
			others = append(others, i)
		}
	}
	leader := cl.StepDown("KV_leases", others[0])
	testnats.Eventually(t, 30*time.Second, straight, "no connection straight to the leader")

	c := callerOn(t, cl.URL())
	held := c.grant("way", "h", time.Minute)
	renew := func() {
		t.Helper()
		began := time.Now()
		r := c.renew(held, time.Minute)
		if r.Kind != "renewed" {
			t.Fatalf("renew answers %s: %s, after %v", r.Kind, r.Error, time.Since(began))
		}
		held.Revision = r.Revision
	}
	sent := func() (n int64) {
		for _, c := range nearAt(t, cl, leader) {
			n += c.InMsgs
		}
		return n
	}
	testnats.Eventually(t, 30*time.Second, func() bool {
		before := sent()
		renew()
		return sent() > before
	}, "no renewal goes straight to the leader")

	// The way is cut, silently: the first write gets no verdict over it and goes
	// the other way; the rest do not try it.
	relays[cl.Servers[leader].URL].Set(testnats.Blackhole)
	began := time.Now()
	for range 50 {
		renew()
	}
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("50 renewals took %v without the direct way, half a second and more each", took)
	}
	relays[cl.Servers[leader].URL].Set(testnats.Cut)
	renew()
	relays[cl.Servers[leader].URL].Set(testnats.Pass)
	testnats.Eventually(t, 60*time.Second, straight, "no way straight to the leader again")

	// The leader changes: the way follows, and no lease is lost on it.
	var wg sync.WaitGroup
	stop := make(chan struct{})
	var count tally
	for i := range 8 {
		k := &keeping{t: t, nc: testnats.Connect(t, cl.Servers[i%3].URL), key: fmt.Sprintf("near-%d", i), holder: fmt.Sprintf("h%d", i), count: &count}
		k.listen()
		wg.Go(func() { k.run(stop) })
	}
	for i := range 3 {
		cl.StepDown("KV_leases", others[(i+1)%2])
		testnats.Eventually(t, 60*time.Second, straight, "no way straight to the next leader, or another one still")
	}
	close(stop)
	wg.Wait()
	t.Logf("%s", &count)
	for _, kind := range []string{"internal", noAnswer, noResponders, "invalid"} {
		if n := count.get(kind); n > 0 {
			t.Errorf("%d times %s", n, kind)
		}
	}
	for _, line := range in.log.errors() {
		t.Errorf("logged: %s", line)
	}
}

// nearAt are the direct ways that server i has.
func nearAt(t testing.TB, cl *testnats.Nodes, i int) (near []*server.ConnInfo) {
	t.Helper()
	z, err := cl.Servers[i].NS().Connz(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range z.Conns {
		if c.Name == nearName {
			near = append(near, c)
		}
	}
	return near
}
