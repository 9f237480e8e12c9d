package contract

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestReplySubjectIsNoWeapon: a caller names the subject of its reply, and the service
// publishes there with its own rights. Nothing comes of a request whose reply would be
// written over a lease, reach an owner, give an order to JetStream, look like an event,
// call the service itself, or go to whoever listens. This holds without any permissions (P7).
func TestReplySubjectIsNoWeapon(t *testing.T) {
	r := newRig(t, setup{uncounted: true})
	l := r.acquire("victim", "A", 60000)
	asked := make(chan *nats.Msg, 1000)
	for _, subject := range []string{inbox + ">", events + "made-up"} {
		sub, err := r.nc.Subscribe(subject, func(m *nats.Msg) { asked <- m })
		if err != nil {
			t.Fatal(err)
		}
		defer sub.Unsubscribe()
	}
	before := r.stream()

	sent := uint64(0)
	for _, to := range []string{
		bucketSubject + "victim",
		bucketSubject + "new",
		inbox + "A.victim",
		events + "made-up",
		api + "evict",
		api + "owner.x",
		"$SRV.PING",
		"_INBOX.>", "_INBOX.*.x", ">", "*",
		"_INBOX..x",
	} {
		for call, q := range good("victim", l.Revision) {
			// forward would reach the owner by the right way too.
			if call == "acquire" {
				q.Key = "other"
			}
			for _, body := range [][]byte{raw(q), []byte("{")} {
				if err := r.nc.PublishRequest(api+call, to, body); err != nil {
					t.Fatalf("%s: %v", to, err)
				}
				sent++
			}
		}
	}
	unheard := func() (n uint64) {
		for _, c := range r.counted() {
			n += c[kinds.NoReply]
		}
		return n
	}
	testnats.Eventually(t, 5*time.Second, func() bool { return unheard() == sent }, testnats.Lazy(func() string {
		return fmt.Sprintf("%d of %d are counted no_reply", unheard(), sent)
	}))

	// The server refuses these itself, or hands them over: nothing comes of them either way.
	for _, to := range []string{"$JS.API.STREAM.PURGE.KV_leases", "$JS.API.STREAM.DELETE.KV_leases", "$JS.ACK.KV_leases.c.1.1.1.1.1"} {
		for call, q := range good("victim", l.Revision) {
			if err := r.nc.PublishRequest(api+call, to, raw(q)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := r.owner("victim"); got.lease() != l.lease() {
		t.Errorf("the lease is now %s", got.raw)
	}
	if after := r.stream(); after.LastSeq != before.LastSeq || after.Msgs != before.Msgs {
		t.Errorf("the stream went from %d (%d messages) to %d (%d)", before.LastSeq, before.Msgs, after.LastSeq, after.Msgs)
	}
	if len(asked) > 0 {
		m := <-asked
		t.Errorf("%d messages reached the owner or look like events; the first: %s %q", len(asked)+1, m.Subject, m.Data)
	}
}

// TestCallersInboxes: replies go to every subject that can be a caller's inbox: through a
// service import of another account, through a leaf node, and to inboxes by another name.
func TestCallersInboxes(t *testing.T) {
	port := testnats.FreePort(t)
	hub := testnats.Server(t, configured(t, fmt.Sprintf(`
		leafnodes { host: 127.0.0.1, port: %d, authorization { user: leaf, password: p, account: A } }
		no_auth_user: a
		accounts {
			A { jetstream: enabled, users: [{user: a, password: a}]
				exports: [{service: "api.leases.*"}, {service: "$SRV.>"}] }
			B { users: [{user: b, password: b}]
				imports: [{service: {account: A, subject: "api.leases.*"}}
					{service: {account: A, subject: "api.leases.owner"}, to: "theirs.owner"}
					{service: {account: A, subject: "$SRV.PING.dagnats-api"}}] }
		}`, port)))
	leaf := testnats.Server(t, testnats.WithoutJetStream, configured(t, fmt.Sprintf(`
		server_name: leaf
		leafnodes { remotes: [{url: "nats-leaf://leaf:p@127.0.0.1:%d"}], reconnect: "50ms" }`, port)))
	testnats.Eventually(t, 10*time.Second, func() bool { return hub.NS().NumLeafNodes() == 1 }, "the leaf is not connected")
	r := newRig(t, setup{node: hub, uncounted: true})
	l := r.acquire("k", "A", 60000)

	for name, c := range map[string]struct {
		nc      *nats.Conn
		subject string
	}{
		"as it comes":              {hub.Connect(), api + "owner"},
		"another prefix":           {hub.Connect(nats.CustomInboxPrefix("team.replies")), api + "owner"},
		"one request a time":       {hub.Connect(nats.UseOldRequestStyle()), api + "owner"},
		"account":                  {hub.Connect(nats.UserInfo("b", "b")), api + "owner"},
		"account, other name":      {hub.Connect(nats.UserInfo("b", "b")), "theirs.owner"},
		"account, another prefix":  {hub.Connect(nats.UserInfo("b", "b"), nats.CustomInboxPrefix("mine")), api + "owner"},
		"account, service's names": {hub.Connect(nats.UserInfo("b", "b"), nats.CustomInboxPrefix("dagnats.lease.inbox")), api + "owner"},
		"leaf":                     {leaf.Connect(), api + "owner"},
		"leaf, another prefix":     {leaf.Connect(nats.CustomInboxPrefix("team.replies")), api + "owner"},
		"account, discovery":       {hub.Connect(nats.UserInfo("b", "b")), "$SRV.PING.dagnats-api"},
	} {
		t.Run(name, func(t *testing.T) {
			var m *nats.Msg
			testnats.Eventually(t, 5*time.Second, func() bool {
				var err error
				m, err = c.nc.Request(c.subject, []byte(`{"key":"k"}`), time.Second)
				return err == nil
			}, "no reply")
			var got struct {
				Held     bool
				Revision uint64
				Name     string
			}
			if err := json.Unmarshal(m.Data, &got); err != nil {
				t.Fatal(err)
			}
			if (!got.Held || got.Revision != l.Revision) && got.Name != microName {
				t.Errorf("answered %s", m.Data)
			}
		})
	}
}

// configured reads a configuration as nats-server does.
func configured(t testing.TB, conf string) testnats.Option {
	return func(o *server.Options) {
		if err := o.ProcessConfigString(conf); err != nil {
			t.Fatalf("%s\n%v", conf, err)
		}
	}
}
