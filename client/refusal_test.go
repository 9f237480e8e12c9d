package client

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// permissions makes a server where user "u" may only publish and receive what is
// given.
func permissions(publish, subscribe []string) testnats.Option {
	return func(o *server.Options) {
		o.Users = []*server.User{
			{Username: "all", Password: "p"},
			{Username: "u", Password: "p", Permissions: &server.Permissions{
				Publish:   &server.SubjectPermission{Allow: publish},
				Subscribe: &server.SubjectPermission{Allow: subscribe},
			}},
		}
	}
}

// quiet is for connections on which refusals are expected.
var quiet = nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})

// TestNotPermitted: what the server does not permit is known at once.
func TestNotPermitted(t *testing.T) {
	n := testnats.Server(t, permissions(
		[]string{"api.leases.owner", "silent.*"}, []string{"_INBOX.>", "dagnats.lease.inbox.me.>"}))
	all := n.Connect(nats.UserInfo("all", "p"))
	for _, subject := range []string{"api.leases.*", "silent.*"} {
		if _, err := all.Subscribe(subject, func(m *nats.Msg) {
			if strings.HasSuffix(m.Subject, "owner") && strings.HasPrefix(m.Subject, "api") {
				_ = m.Respond([]byte(`{"held":false,"key":"k"}`))
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := all.Flush(); err != nil {
		t.Fatal(err)
	}
	user := func(o ...nats.Option) *nats.Conn {
		return n.Connect(append([]nats.Option{quiet, nats.UserInfo("u", "p")}, o...)...)
	}
	soon := func(t *testing.T) func() {
		start := time.Now()
		return func() {
			t.Helper()
			if took := time.Since(start); took > 10*time.Second {
				t.Errorf("it took %v", took)
			}
		}
	}

	t.Run("calls, all at once", func(t *testing.T) {
		defer soon(t)()
		var mu sync.Mutex
		var told []string
		nc := user(nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, err.Error())
		}))
		c, second := New(nc, Options{Timeout: time.Minute}), New(nc, Options{Timeout: time.Minute})
		l := Lease{Key: "k", Holder: "me", Revision: 7, TTL: ttl}
		calls := map[string]func(*Client) error{
			"acquire": func(c *Client) error {
				_, err := c.Acquire(t.Context(), AcquireRequest{Key: "k", Holder: "me", TTL: ttl})
				return err
			},
			"renew":      func(c *Client) error { _, err := c.Renew(t.Context(), l); return err },
			"release":    func(c *Client) error { _, err := c.Release(t.Context(), l); return err },
			"evict":      func(c *Client) error { _, err := c.Evict(t.Context(), "k", 7); return err },
			"forward":    func(c *Client) error { _, err := c.Forward(t.Context(), ForwardRequest{Key: "k"}); return err },
			"list":       func(c *Client) error { _, _, err := c.List(t.Context(), ListRequest{}); return err },
			"renew_many": func(c *Client) error { _, err := c.RenewMany(t.Context(), "me", ttl, []Lease{l}); return err },
		}
		var running sync.WaitGroup
		for name, call := range calls {
			for _, c := range []*Client{c, second} {
				running.Go(func() {
					err := call(c)
					if kinds.Of(err) != kinds.Unavailable || !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), "api.leases."+name) {
						t.Errorf("%s: %v", name, err)
					}
				})
			}
		}
		running.Go(func() {
			if r, err := c.Owner(t.Context(), "k"); err != nil || r.Kind != kinds.Free {
				t.Error(r, err)
			}
		})
		running.Wait()
		mu.Lock()
		defer mu.Unlock()
		if len(told) != 2*len(calls) {
			t.Errorf("the application was told of %d", len(told))
		}
	})

	t.Run("a call that is permitted is not taken for one that is not", func(t *testing.T) {
		nc := user()
		c := New(nc, Options{Prefix: "silent", Timeout: 300 * time.Millisecond})
		done := make(chan error, 1)
		go func() {
			_, err := c.Owner(t.Context(), "k")
			done <- err
		}()
		_ = New(nc, Options{Timeout: 100 * time.Millisecond}).wire.publish(&nats.Msg{Subject: "api.leases.evict"})
		if err := <-done; kinds.Of(err) != kinds.Unknown || errors.Is(err, nats.ErrPermissionViolation) {
			t.Error(err)
		}
	})

	t.Run("Hold, Elect and Shards end with it", func(t *testing.T) {
		defer soon(t)()
		c := New(user(), Options{Timeout: time.Minute})
		_, hold := c.Hold(t.Context(), "k", HoldOptions{})
		for what, err := range map[string]error{
			"Hold":   hold,
			"Elect":  c.Elect(t.Context(), "k", ElectOptions{}),
			"Shards": c.Shards(t.Context(), "g", []string{"g-0"}, ShardsOptions{}),
		} {
			if !errors.Is(err, nats.ErrPermissionViolation) {
				t.Errorf("%s: %v", what, err)
			}
		}
	})

	t.Run("an inbox", func(t *testing.T) {
		defer soon(t)()
		nc := user()
		c := New(nc, Options{})
		_, err := c.Inbox("other", InboxOptions{})
		if !errors.Is(err, nats.ErrPermissionViolation) || !strings.Contains(err.Error(), "dagnats.lease.inbox.other.>") {
			t.Errorf("the inbox of another: %v", err)
		}
		for range 20 { // one that is permitted, amid refusals of others
			_ = nc.Publish("api.leases.evict", nil)
			in, err := c.Inbox("me", InboxOptions{})
			if err != nil {
				t.Fatal(err)
			}
			in.Close()
		}
		if nc.NumSubscriptions() != 0 {
			t.Errorf("%d subscriptions are left", nc.NumSubscriptions())
		}
	})

	t.Run("no room for a subscription", func(t *testing.T) {
		small := testnats.Server(t, func(o *server.Options) { o.MaxSubs = 1 })
		nc := small.Connect(quiet)
		if _, err := nc.SubscribeSync("x"); err != nil {
			t.Fatal(err)
		}
		if _, err := New(nc, Options{}).Inbox("me", InboxOptions{}); !errors.Is(err, nats.ErrMaxSubscriptionsExceeded) {
			t.Error(err)
		}
	})
}

// TestRepliesNotPermitted: without the right to receive replies the first call may
// have been applied, and no other is sent.
func TestRepliesNotPermitted(t *testing.T) {
	n := testnats.Server(t, permissions([]string{"api.leases.>"}, []string{"_INBOX_me.>"}))
	served := make(chan *nats.Msg, 10)
	if _, err := n.Connect(nats.UserInfo("all", "p")).ChanSubscribe("api.leases.owner", served); err != nil {
		t.Fatal(err)
	}
	c := New(n.Connect(quiet, nats.UserInfo("u", "p")), Options{Timeout: time.Minute})
	_, err := c.Owner(t.Context(), "k")
	if kinds.Of(err) != kinds.Unknown || !errors.Is(err, nats.ErrPermissionViolation) {
		t.Error(err)
	}
	_, err = c.Owner(t.Context(), "k")
	if kinds.Of(err) != kinds.Unavailable || !errors.Is(err, nats.ErrPermissionViolation) {
		t.Error(err)
	}
	mine := New(n.Connect(nats.UserInfo("u", "p"), nats.CustomInboxPrefix("_INBOX_me")), Options{Timeout: 100 * time.Millisecond})
	if _, err := mine.Owner(t.Context(), "k"); kinds.Of(err) != kinds.Unknown || errors.Is(err, nats.ErrPermissionViolation) {
		t.Error(err)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return len(served) >= 2 }, "two requests of three")
	if len(served) != 2 {
		t.Errorf("%d requests were sent", len(served))
	}
}

// TestInboxNotPermittedAnyMore: a permission that goes with a reconnection.
func TestInboxNotPermittedAnyMore(t *testing.T) {
	subscribe := &server.SubjectPermission{Allow: []string{"dagnats.lease.inbox.>"}}
	n := testnats.Server(t, func(o *server.Options) {
		o.Users = []*server.User{{Username: "u", Password: "p", Permissions: &server.Permissions{Subscribe: subscribe}}}
	})
	told := make(chan error, 10)
	in, err := New(n.Connect(quiet, nats.UserInfo("u", "p"), nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond)), Options{}).
		Inbox("me", InboxOptions{OnError: func(err error) { told <- err }})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	n.Stop()
	subscribe.Allow = []string{"nothing"}
	n.Restart()
	select {
	case err := <-told:
		if !errors.Is(err, nats.ErrPermissionViolation) {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("nobody was told")
	}
}

// TestEventsNotPermitted: a Hold that cannot follow its events says so, once, and
// stands.
func TestEventsNotPermitted(t *testing.T) {
	n := testnats.Server(t, permissions([]string{">"}, []string{"_INBOX.>"}))
	if _, err := n.Connect(nats.UserInfo("all", "p")).Subscribe("api.leases.*", func(m *nats.Msg) {
		key := "k1"
		if strings.Contains(string(m.Data), "k2") {
			key = "k2"
		}
		answer := `{"granted":true,"held":true,"key":"` + key + `","holder":"me","revision":7,"ttl_ms":15000,"acquired_at":"2026-10-18T12:00:00Z"}`
		switch {
		case strings.HasSuffix(m.Subject, ".renew"):
			answer = strings.Replace(answer, "7", "8", 1)
		case strings.HasSuffix(m.Subject, ".release"):
			answer = `{"error":"e","kind":"lost"}`
		}
		_ = m.Respond([]byte(answer))
	}); err != nil {
		t.Fatal(err)
	}
	c := New(n.Connect(quiet, nats.UserInfo("u", "p")), Options{})
	told := make(chan error, 10)
	for _, key := range []string{"k1", "k2"} {
		h, err := c.Hold(t.Context(), key, HoldOptions{Holder: "me", OnError: func(err error) { told <- err }})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := h.Check(); err != nil {
				t.Error(err)
			}
			_ = h.Resign(t.Context())
		}()
	}
	select {
	case err := <-told:
		if !errors.Is(err, nats.ErrPermissionViolation) {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Error("nobody was told")
	}
	if err := c.wire.flush(); err != nil || len(told) != 0 {
		t.Errorf("%v; told %d times more", err, len(told))
	}
}

// TestClosedForGood: whatever waits over a connection that will not come back ends.
func TestClosedForGood(t *testing.T) {
	n := testnats.Server(t)
	if _, err := n.Connect().Subscribe("api.leases.*", func(m *nats.Msg) {
		_ = m.Respond([]byte(`{"granted":false,"held":true,"key":"k","holder":"other","revision":7}`))
	}); err != nil {
		t.Fatal(err)
	}
	connect := func() *Client {
		return New(n.Connect(nats.MaxReconnects(2), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0)), Options{})
	}
	ended := make(chan error)
	waiting := []func(*Client) error{
		func(c *Client) error { return c.Elect(context.Background(), "k", ElectOptions{}) },
		func(c *Client) error { _, err := c.Hold(context.Background(), "k", HoldOptions{}); return err },
		func(c *Client) error { return c.Run(context.Background(), "k", HoldOptions{}, nil) },
	}
	for _, wait := range waiting {
		c := connect()
		go func() { ended <- wait(c) }()
	}
	closed := connect()
	n.Stop()
	for range waiting {
		select {
		case err := <-ended:
			if !errors.Is(err, nats.ErrConnectionClosed) {
				t.Error(err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("it waits on")
		}
	}
	testnats.Eventually(t, 10*time.Second, closed.wire.(natsWire).nc.IsClosed, "the connection to be closed")
	if err := closed.Shards(t.Context(), "g", []string{"g-0"}, ShardsOptions{}); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Error(err)
	}
	if _, err := closed.Inbox("me", InboxOptions{}); !errors.Is(err, nats.ErrConnectionClosed) {
		t.Error(err)
	}
}

// TestShardsOfAClosedConnection: what is held is worked on until it is lost or
// given up, then the membership ends.
func TestShardsOfAClosedConnection(t *testing.T) {
	inBubble(t, "closed", func(t *testing.T, w *world) {
		p := w.process()
		var mu sync.Mutex
		var worked []string
		done := make(chan error, 1)
		go func() {
			done <- newClient(p, Options{}).Shards(t.Context(), "g", []string{"g-0", "g-1"}, ShardsOptions{
				Work: func(ctx context.Context, h *Hold) {
					<-ctx.Done()
					mu.Lock()
					defer mu.Unlock()
					worked = append(worked, h.Key())
				},
			})
		}()
		time.Sleep(time.Minute)
		p.closed.Store(true)
		select {
		case err := <-done:
			if !errors.Is(err, nats.ErrConnectionClosed) {
				t.Error(err)
			}
		case <-time.After(15 * time.Second):
			t.Error("it goes on")
		}
		slices.Sort(worked)
		if !slices.Equal(worked, []string{"g-0", "g-1"}) {
			t.Error(worked)
		}
	})
}
