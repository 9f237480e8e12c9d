package contract

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// sum is the sum of a series over the instances, from their own registries.
func (r *rig) sum(name string) (n float64) {
	r.t.Helper()
	for _, i := range r.all {
		families, err := i.metrics.Gatherer().Gather()
		if err != nil {
			r.t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == name {
				for _, m := range f.GetMetric() {
					n += m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return n
}

// waits sends an acquire that waits, and returns when it does.
func (r *rig) waits(nc *nats.Conn, subject, reply, key, holder string) {
	r.t.Helper()
	before := r.sum("leased_waiters")
	body := fmt.Appendf(nil, `{"key":%q,"holder":%q,"ttl_ms":60000,"wait_ms":30000}`, key, holder)
	if err := nc.PublishRequest(subject, reply, body); err != nil {
		r.t.Fatal(err)
	}
	testnats.Eventually(r.t, 10*time.Second, func() bool { return r.sum("leased_waiters") == before+1 }, holder, " does not wait")
}

// TestGrantThatNobodyHears: callers that wait for a key go away in every way that NATS
// can see. Each gets the key in its turn, and has it no longer than it takes to find
// out that nobody heard of it (P20).
func TestGrantThatNobodyHears(t *testing.T) {
	t.Parallel()
	for instances := 1; instances <= 2; instances++ {
		t.Run(fmt.Sprintf("%d instances", instances), func(t *testing.T) { ghosts(t, instances) })
	}
}

func ghosts(t *testing.T, instances int) {
	r := newRig(t, setup{instances: instances, uncounted: true})
	first := r.acquire("k", "before", 60000)

	closed, left := r.connect(), r.connect()
	inbox := left.NewInbox()
	sub, err := left.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	r.waits(closed, api+"acquire", closed.NewInbox(), "k", "gone-closed")
	r.waits(closed, api+"acquire", closed.NewInbox(), "k", "gone-closed-too")
	r.waits(left, api+"acquire", inbox, "k", "gone-unsubscribed")
	r.waits(left, api+"acquire", "nobody.ever.listened", "k", "gone-before")
	closed.Close()
	if err := sub.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	if err := left.Flush(); err != nil {
		t.Fatal(err)
	}

	alive := make(chan *nats.Msg, 1)
	living := r.connect()
	inbox = living.NewInbox()
	if _, err := living.ChanSubscribe(inbox, alive); err != nil {
		t.Fatal(err)
	}
	r.waits(living, api+"acquire", inbox, "k", "alive")

	const takenBack = "leased_grants_taken_back_total"
	released := time.Now()
	r.release(first)
	select {
	case m := <-alive:
		got, err := r.read("acquire", m, released, time.Now())
		if err != nil || got.kind != kinds.Granted || got.Holder != "alive" {
			t.Fatalf("%v, %v", got, err)
		}
		t.Logf("%v that were gone cost %v", r.sum(takenBack), time.Since(released).Round(time.Millisecond))
		if owner := r.owner("k"); owner.Holder != "alive" || owner.Revision != got.Revision {
			t.Errorf("the owner is now %s", owner.raw)
		}
		r.release(got)
	case <-time.After(20 * time.Second):
		t.Fatalf("20 s after the release the key belongs to %s", r.owner("k").raw)
	}
	// Those at the other instance may have their turn after it.
	testnats.Eventually(t, 20*time.Second, func() bool { return r.sum(takenBack) == 4 && !*r.owner("k").Held },
		testnats.Lazy(func() string {
			return fmt.Sprintf("%v grants were taken back, owner: %s", r.sum(takenBack), r.owner("k").raw)
		}))
}

// TestGrantsThatAreHeard: who hears its grant keeps it, from wherever it asked; and what
// was granted without waiting is not asked after.
func TestGrantsThatAreHeard(t *testing.T) {
	t.Parallel()
	port := testnats.FreePort(t)
	hub := testnats.Server(t, configured(t, fmt.Sprintf(`
		leafnodes { host: 127.0.0.1, port: %d, authorization { user: leaf, password: p, account: A } }
		no_auth_user: a
		accounts {
			A { jetstream: enabled, users: [{user: a, password: a}], exports: [{service: "api.leases.*"}] }
			B { users: [{user: b, password: b}]
				imports: [{service: {account: A, subject: "api.leases.*"}}
					{service: {account: A, subject: "api.leases.acquire"}, to: "theirs.acquire"}] }
		}`, port)))
	leaf := testnats.Server(t, testnats.WithoutJetStream, configured(t, fmt.Sprintf(`
		server_name: leaf
		leafnodes { remotes: [{url: "nats-leaf://leaf:p@127.0.0.1:%d"}], reconnect: "50ms" }`, port)))
	testnats.Eventually(t, 10*time.Second, func() bool { return hub.NS().NumLeafNodes() == 1 }, "the leaf is not connected")
	r := newRig(t, setup{node: hub, uncounted: true})

	granted := map[string]uint64{}
	for name, c := range map[string]struct {
		nc      *nats.Conn
		subject string
	}{
		"plain":         {hub.Connect(), api + "acquire"},
		"old-style":     {hub.Connect(nats.UseOldRequestStyle()), api + "acquire"},
		"account":       {hub.Connect(nats.UserInfo("b", "b")), api + "acquire"},
		"account-other": {hub.Connect(nats.UserInfo("b", "b")), "theirs.acquire"},
		"leaf":          {leaf.Connect(), api + "acquire"},
	} {
		first := r.acquire(name, "before", 60000)
		heard := make(chan *nats.Msg, 1)
		inbox := c.nc.NewInbox()
		if _, err := c.nc.ChanSubscribe(inbox, heard); err != nil {
			t.Fatal(err)
		}
		r.waits(c.nc, c.subject, inbox, name, "waited")
		sent := time.Now()
		r.release(first)
		select {
		case m := <-heard:
			got, err := r.read("acquire", m, sent, time.Now())
			if err != nil || got.kind != kinds.Granted {
				t.Fatalf("%s: %v, %v", name, got, err)
			}
			granted[name] = got.Revision
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: no reply", name)
		}
	}
	// Nobody hears this one, which did not wait: it stays.
	body := []byte(`{"key":"at-once","holder":"gone","ttl_ms":60000,"wait_ms":30000}`)
	if err := r.nc.PublishRequest(api+"acquire", "nobody.listens", body); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return *r.owner("at-once").Held }, "it is not granted")

	// What NATS says comes in the order of the replies: after this one nothing can
	// come of those before.
	first := r.acquire("last", "before", 60000)
	r.waits(r.nc, api+"acquire", "nobody.listens", "last", "gone")
	r.release(first)
	testnats.Eventually(t, 10*time.Second, func() bool { return r.sum("leased_grants_taken_back_total") == 1 }, "the last is not taken back")
	for name, revision := range granted {
		if owner := r.owner(name); owner.Holder != "waited" || owner.Revision != revision {
			t.Errorf("%s: granted as %d, and now %s", name, revision, owner.raw)
		}
	}
	if owner := r.owner("at-once"); owner.Holder != "gone" {
		t.Errorf("what was granted at once: %s", owner.raw)
	}
}
