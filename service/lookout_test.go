package service

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
)

func newTestLookout(t *testing.T, hop, store *nats.Conn) *lookout {
	t.Helper()
	j, err := newJS(store, "", "", &clock{})
	if err != nil {
		t.Fatal(err)
	}
	return newLookout(hop, j, "api.leases", "dagnats.lease.inbox", slog.New(slog.DiscardHandler))
}

// seen looks and tells where others are, "calls", "inboxes", both or "", and what is said.
func (l *lookout) seen(t *testing.T) (on, detail string) {
	t.Helper()
	l.look(t.Context())
	for _, x := range *l.found.Load() {
		if x.Others {
			on += x.On + " "
		}
		if !x.Checked {
			t.Errorf("%s were not checked: %s", x.On, x.Detail)
		}
		detail += x.Detail + " "
	}
	return strings.TrimSpace(on), detail
}

// TestLookout: a stream or a subscription over the subjects of calls or inboxes is found, and
// its end too; those that have a reason to be there are not taken for one (F6).
func TestLookout(t *testing.T) {
	node := testnats.Server(t)
	nc := node.Connect()
	l := newTestLookout(t, node.Connect(), node.Connect())
	streams, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	// What is there anyway: an instance, an owner, who follows events and keeps them.
	for _, subject := range []string{"api.leases.acquire", "api.leases.owner", "dagnats.lease.inbox.h1.>", "dagnats.lease.changed.>", "$SRV.>"} {
		if _, err := nc.QueueSubscribe(subject, "q", func(*nats.Msg) {}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := streams.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"dagnats.lease.changed.>"}}); err != nil {
		t.Fatal(err)
	}
	if on, detail := l.seen(t); on != "" || strings.TrimSpace(detail) != "" {
		t.Fatalf("nobody is there, and %s: %s", on, detail)
	}
	for _, c := range []struct{ subject, want string }{
		{"api.leases.*", "calls"},
		{"api.>", "calls"},
		{"dagnats.lease.inbox.>", "inboxes"},
		{"dagnats.lease.inbox.*.*", "inboxes"},
		{"dagnats.*.inbox.>", "inboxes"},
		{"api.leases.>", "calls"},
		{">", "calls inboxes"},
	} {
		for _, queue := range []string{"", "dagnats-leases"} {
			sub, err := nc.QueueSubscribe(c.subject, queue, func(*nats.Msg) {})
			if err != nil {
				t.Fatal(err)
			}
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
			if on, detail := l.seen(t); on != c.want || !strings.Contains(detail, "somebody subscribes to ") {
				t.Errorf("subscription to %s (%q): %q, want %q: %s", c.subject, queue, on, c.want, detail)
			}
			_ = sub.Unsubscribe()
			if err := nc.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if c.subject == ">" {
			continue // no stream can have it
		}
		if _, err := streams.CreateStream(t.Context(), jetstream.StreamConfig{Name: "AUDIT", Subjects: []string{c.subject}}); err != nil {
			t.Fatalf("%s: %v", c.subject, err)
		}
		if on, detail := l.seen(t); on != c.want || !strings.Contains(detail, "the stream AUDIT stores") {
			t.Errorf("stream of %s: %q, want %q: %s", c.subject, on, c.want, detail)
		}
		if err := streams.DeleteStream(t.Context(), "AUDIT"); err != nil {
			t.Fatal(err)
		}
		if on, detail := l.seen(t); on != "" {
			t.Errorf("%s is gone, and %s: %s", c.subject, on, detail)
		}
	}
	// A stream of some calls answers these; no subscription to what nobody uses shows it.
	if _, err := streams.CreateStream(t.Context(), jetstream.StreamConfig{Name: "SOME", Subjects: []string{"api.leases.acquire"}}); err != nil {
		t.Fatal(err)
	}
	if on, detail := l.seen(t); on != "calls" || !strings.Contains(detail, "the stream SOME stores") {
		t.Errorf("stream of api.leases.acquire: %q: %s", on, detail)
	}
}

// TestLookoutWithoutPermission: where NATS does not permit to look, it says so, does not take
// that for somebody, and goes on with what is permitted.
func TestLookoutWithoutPermission(t *testing.T) {
	node := testnats.Server(t, func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "all", Password: "pw"},
			{Username: "none", Password: "pw", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Deny: []string{"api.>", "dagnats.>", "$JS.API.STREAM.NAMES"}}}},
		}
	})
	as := func(user string) *nats.Conn { return node.Connect(nats.UserInfo(user, "pw")) }
	if _, err := as("all").Subscribe(">", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	const no = "were not looked for: NATS does not permit it"
	l := newTestLookout(t, as("none"), as("none"))
	if on, detail := l.seen(t); on != "" || strings.Count(detail, no) != 4 {
		t.Errorf("%q: %s", on, detail)
	}
	l = newTestLookout(t, as("none"), as("all"))
	if on, detail := l.seen(t); on != "" || strings.Count(detail, no) != 2 {
		t.Errorf("%q: %s", on, detail)
	}
	l = newTestLookout(t, as("all"), as("none"))
	testnats.Eventually(t, 5*time.Second, func() bool {
		on, detail := l.seen(t)
		return on == "calls inboxes" && strings.Count(detail, no) == 2
	}, "the tap is not found")
}

// TestLookoutWithoutAnswer: no JetStream and no connection are no proof of anything, and
// are looked at again soon.
func TestLookoutWithoutAnswer(t *testing.T) {
	node := testnats.Server(t)
	hop, store := node.Connect(), node.Connect()
	store.Close()
	l := newTestLookout(t, hop, store)
	if again := l.look(t.Context()); again != lookoutAgain {
		t.Errorf("looks again after %v", again)
	}
	hop.Close()
	l.look(t.Context())
	for _, x := range *l.found.Load() {
		if x.Others || x.Checked || x.Detail == "" {
			t.Errorf("%+v", x)
		}
	}
	ended, end := context.WithCancel(t.Context())
	end()
	l.run(ended) // returns
}

// TestLookoutSubjects: what may be refused without a word is nothing that anybody needs.
func TestLookoutSubjects(t *testing.T) {
	l := newLookout(nil, &js{}, "api.leases", "dagnats.lease.inbox", nil)
	for _, p := range l.parts {
		if !Lookout(p.probe()) {
			t.Errorf("%s is noisy", p.probe())
		}
	}
	for _, subject := range []string{"api.leases.lookout", "$KV.leases.lookout", "dagnats.lease.inbox.lookout.k", "$JS.API.STREAM.INFO.KV_leases", "$JS.API.STREAM.NAMES.x"} {
		if Lookout(subject) {
			t.Errorf("%s is refused without a word", subject)
		}
	}
}
