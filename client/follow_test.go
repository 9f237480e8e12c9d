package client

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/service/kinds"
)

// TestFollow: a Hold ends when its lease does, not with the next renewal (H8).
func TestFollow(t *testing.T) {
	inBubble(t, "an evict ends it at once", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{TTL: 15 * time.Second})
		time.Sleep(time.Second)
		start := time.Now()
		w.evict("k")
		if took := ends(t, h, start); took > 50*time.Millisecond {
			t.Errorf("it acted on for %v", took)
		}
		cause := context.Cause(h.Context())
		if kinds.Of(cause) != kinds.Lost || !strings.Contains(cause.Error(), "was evicted") {
			t.Error(cause)
		}
		_ = h.Resign(t.Context())
		if w.count("release") != 0 {
			t.Error("it released what it had lost")
		}
	})

	inBubble(t, "so does a deletion by hand, and another's grant of which nothing else was heard", func(t *testing.T, w *world) {
		for _, event := range []string{"", "expired", "acquired"} {
			h, _ := hold(t, w, HoldOptions{TTL: 10 * time.Minute})
			time.Sleep(time.Second)
			w.seize("k", "other", time.Second)
			start := time.Now()
			w.forge("k", h.Revision()+10, event, "")
			if took := ends(t, h, start); took > 50*time.Millisecond {
				t.Errorf("%q: it acted on for %v", event, took)
			}
			_ = h.Resign(t.Context())
			time.Sleep(time.Second)
		}
	})

	inBubble(t, "forged events end nothing, and cost a few questions", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{TTL: 15 * time.Second})
		for range 10_000 {
			time.Sleep(time.Millisecond)
			w.forge("k", 1<<62, "released", `{"evicted":true}`)
			w.forge("k", 1<<62, "acquired", `{"holder":"other"}`)
			w.forge("k", 1<<62, "expired", "\x00")
		}
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		if asked, renewed := w.count("owner"), w.count("renew"); asked > 30 || asked == 0 || renewed > 3 {
			t.Errorf("%d questions and %d renewals in 10 s", asked, renewed)
		}
		// Amid all that, a true one.
		start := time.Now()
		w.evict("k")
		if took := ends(t, h, start); took > time.Second {
			t.Errorf("it acted on for %v", took)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "what was not confirmed is not given as the reason later", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.forge("k", 1<<62, "released", `{"evicted":true}`)
		time.Sleep(time.Second)
		w.seize("k", "other", time.Minute)
		ends(t, h, time.Now())
		if cause := context.Cause(h.Context()); strings.Contains(cause.Error(), "evicted") {
			t.Error(cause)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "a read that is behind ends nothing", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{TTL: 15 * time.Second})
		w.mu.Lock()
		w.stale = true
		w.mu.Unlock()
		w.forge("k", 1<<62, "released", `{}`)
		time.Sleep(time.Second)
		if err := h.Check(); err != nil || w.count("renew") != 1 {
			t.Errorf("%v after %d renewals", err, w.count("renew"))
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "its own changes, old ones and those without a revision are no question", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{TTL: 15 * time.Second})
		w.forge("k", h.Revision(), "acquired", "{}")
		w.forge("k", h.Revision()-1, "released", `{"evicted":true}`)
		w.forge("other", 1<<62, "released", "{}")
		w.mu.Lock()
		w.deliver(message("dagnats.lease.changed.k", "released"))
		w.mu.Unlock()
		time.Sleep(time.Minute)
		if err := h.Check(); err != nil || w.count("owner") != 0 {
			t.Errorf("%v, %d questions", err, w.count("owner"))
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "no answer: asked again until there is one", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{TTL: 10 * time.Minute})
		w.play("owner", fault{kind: kinds.Unavailable}, fault{kind: kinds.Busy})
		start := time.Now()
		w.evict("k")
		if took := ends(t, h, start); took > 3*time.Second {
			t.Errorf("it acted on for %v", took)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "every shard follows its own key", func(t *testing.T, w *world) {
		c := newCrew(t, 10*time.Minute, 4, func() *Client { return newClient(w.process(), Options{}) })
		c.join("p")
		time.Sleep(time.Second)
		c.mu.Lock()
		moves := c.moves
		c.mu.Unlock()
		for i := range 4 {
			w.evict(fmt.Sprintf("shard-%02d", i))
		}
		time.Sleep(2 * time.Second) // it lost all, and took all again
		c.mu.Lock()
		if moves != 4 || c.moves != 8 {
			t.Errorf("%d moves before, %d now", moves, c.moves)
		}
		c.mu.Unlock()
		c.leave("p")
		c.all.Wait()
	})
}
