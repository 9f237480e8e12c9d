package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/nats-io/nats.go"
)

// TestOneHoldAProcess: what is one holder to the service is one Hold here (H1).
func TestOneHoldAProcess(t *testing.T) {
	heldHere := func(t *testing.T, err error) {
		t.Helper()
		var held *HeldHereError
		if !errors.As(err, &held) || held.Key != "k" || held.Holder != "proc-1" {
			t.Errorf("%v; want that this process holds it already", err)
		}
	}
	inBubble(t, "the second of two goroutines with one holder id is refused", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		inside := 0
		work := func(context.Context, *Hold) error {
			inside++
			time.Sleep(6 * time.Second)
			return nil
		}
		first := make(chan error, 1)
		go func() { first <- c.Run(t.Context(), "k", HoldOptions{Holder: "proc-1", TTL: 6 * time.Second}, work) }()
		time.Sleep(300 * time.Millisecond)
		heldHere(t, c.Run(t.Context(), "k", HoldOptions{Holder: "proc-1", TTL: 6 * time.Second}, work))
		heldHere(t, c.Run(t.Context(), "k", HoldOptions{Holder: "proc-1", NoWait: true}, work))
		heldHere(t, c.Elect(t.Context(), "k", ElectOptions{HoldOptions: HoldOptions{Holder: "proc-1"}}))
		if err := <-first; err != nil || inside != 1 {
			t.Errorf("%v; %d inside", err, inside)
		}
		// It was released, so it is free for the next.
		if err := c.Run(t.Context(), "k", HoldOptions{Holder: "proc-1"}, work); err != nil {
			t.Error(err)
		}
	})

	inBubble(t, "also while the first still waits, and no longer", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		w.seize("k", "other", time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error, 1)
		go func() {
			_, err := c.Hold(ctx, "k", HoldOptions{Holder: "proc-1"})
			gaveUp <- err
		}()
		time.Sleep(time.Second)
		_, err := c.Hold(t.Context(), "k", HoldOptions{Holder: "proc-1"})
		heldHere(t, err)
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		_, err = c.Hold(t.Context(), "k", HoldOptions{Holder: "proc-1", NoWait: true})
		if denied, ok := errors.AsType[*DeniedError](err); !ok || denied.Lease.Holder != "other" {
			t.Error(err)
		}
	})

	inBubble(t, "another key, and another holder id, are no matter", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		var holds []*Hold
		for _, key := range []string{"k", "l"} {
			h, err := c.Hold(t.Context(), key, HoldOptions{Holder: "proc-1"})
			if err != nil {
				t.Fatal(err)
			}
			holds = append(holds, h)
		}
		_, err := c.Hold(t.Context(), "k", HoldOptions{NoWait: true})
		if _, ok := errors.AsType[*DeniedError](err); !ok {
			t.Error(err)
		}
		for _, h := range holds {
			_ = h.Resign(t.Context())
		}
	})

	inBubble(t, "a Hold that was lost makes way, and resigning it takes nothing from the next", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		old, err := c.Hold(t.Context(), "k", HoldOptions{Holder: "proc-1", TTL: 10 * time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		old.mu.Lock()
		old.claim.until = time.Now() // as after a pause; the lease lives on
		old.mu.Unlock()
		if old.Check() == nil {
			t.Fatal("it stands")
		}
		next, err := c.Hold(t.Context(), "k", HoldOptions{Holder: "proc-1", TTL: 10 * time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		if err := old.Resign(t.Context()); err != nil || w.owner("k") != "proc-1" {
			t.Errorf("%v; %q holds it", err, w.owner("k"))
		}
		_, err = c.Hold(t.Context(), "k", HoldOptions{Holder: "proc-1", NoWait: true})
		heldHere(t, err)
		if err := next.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("%v; %q holds it", err, w.owner("k"))
		}
	})

	inBubble(t, "two memberships of one group under one id", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		ctx, cancel := context.WithCancel(t.Context())
		o := ShardsOptions{HoldOptions: HoldOptions{Holder: "proc-1"}, Work: func(ctx context.Context, _ *Hold) { <-ctx.Done() }}
		first := make(chan error, 1)
		go func() { first <- c.Shards(ctx, "g", []string{"g-0"}, o) }()
		time.Sleep(time.Second)
		if _, ok := errors.AsType[*HeldHereError](c.Shards(ctx, "g", []string{"g-0"}, o)); !ok {
			t.Error("it was not refused")
		}
		cancel()
		<-first
	})
}

// TestOneHoldOverTwoConnections: two connections to the same servers are one place,
// whatever the order and the credentials, and other servers are another.
func TestOneHoldOverTwoConnections(t *testing.T) {
	n, other := testnats.Server(t), testnats.Server(t)
	place := func(url string, o ...nats.Option) any {
		return New(testnats.Connect(t, url, o...), Options{}).wire.place()
	}
	both := n.URL + "," + other.URL
	for _, same := range [][2]any{
		{place(n.URL), place(n.URL)},
		{place(both), place(other.URL + ", " + n.URL)},
		{place(n.URL), place("nats://me:secret@" + n.URL[len("nats://"):])},
	} {
		if same[0] != same[1] {
			t.Errorf("%v is not %v", same[0], same[1])
		}
	}
	if place(n.URL) == place(other.URL) || place(n.URL, nats.InProcessServer(n.NS())) == place(n.URL, nats.InProcessServer(n.NS())) {
		t.Error("two places are taken for one")
	}
}
