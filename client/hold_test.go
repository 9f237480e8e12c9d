package client

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

const ttl = 10 * time.Second

// hold is a Hold of key "k" made for it alone, its margin 1 s.
func hold(t *testing.T, w *world, o HoldOptions) (*Hold, *Client) {
	t.Helper()
	if o.TTL == 0 {
		o.TTL = ttl
	}
	c := newClient(w.process(), Options{Timeout: 2 * time.Second})
	h, err := c.Hold(t.Context(), "k", o)
	if err != nil {
		t.Fatal(err)
	}
	return h, c
}

// ends waits for the end of h and returns how long after start it came.
func ends(t *testing.T, h *Hold, start time.Time) time.Duration {
	t.Helper()
	select {
	case <-h.Context().Done():
	case <-time.After(time.Hour):
		t.Fatal("it never ends")
	}
	if err := h.Check(); err == nil {
		t.Error("the Context has ended, but Check says go on")
	}
	return time.Since(start)
}

func inBubble(t *testing.T, name string, f func(t *testing.T, w *world)) {
	t.Run(name, func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { f(t, newWorld(t)) })
	})
}

// TestHold: rule H3.
func TestHold(t *testing.T) {
	inBubble(t, "the deadline counts from the sending of the acquire", func(t *testing.T, w *world) {
		w.play("acquire", fault{slow: 1500 * time.Millisecond})
		w.play("renew", slices.Repeat([]fault{{kind: kinds.Unavailable}}, 1000)...)
		start := time.Now()
		h, _ := hold(t, w, HoldOptions{})
		if got := h.Deadline().Sub(start); got > ttl || got < ttl-2*time.Second {
			t.Errorf("deadline %v after sending", got)
		}
		if got := ends(t, h, start); got != h.Deadline().Sub(start)-ttl/10 {
			t.Errorf("ended %v after sending", got)
		}
		if cause := context.Cause(h.Context()); kinds.Of(cause) != kinds.Lost || !errors.Is(cause, nats.ErrNoResponders) {
			t.Errorf("cause %v", cause)
		}
	})

	inBubble(t, "renewals go on for ever, with the margin asked for", func(t *testing.T, w *world) {
		renewals := 0
		h, _ := hold(t, w, HoldOptions{Margin: 3 * time.Second, OnRenew: func(uint64, time.Time) { renewals++ }})
		time.Sleep(time.Hour)
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		if renewals < 1050 || renewals > 1250 {
			t.Errorf("%d renewals in an hour, one in ttl/3 less up to a tenth is right", renewals)
		}
		if h.Tenure() >= h.Revision() || h.Key() != "k" {
			t.Error(h.Key(), h.Tenure(), h.Revision())
		}
		if err := h.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("resign: %v; owner %q", err, w.owner("k"))
		}
		if cause := context.Cause(h.Context()); !errors.Is(cause, ErrResigned) {
			t.Error(cause)
		}
		if err := h.Resign(t.Context()); err != nil {
			t.Error("second Resign:", err)
		}
	})

	inBubble(t, "a lost reply of a renewal is cured by owner, dated from its sending", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("renew", fault{mute: true})
		first := h.Revision()
		for h.Revision() == first {
			time.Sleep(10 * time.Millisecond)
		}
		if w.count("owner") != 1 || w.count("renew") != 1 {
			t.Fatalf("%d owner calls, %d renewals", w.count("owner"), w.count("renew"))
		}
		if sent := w.call("renew", 0); !h.Deadline().Equal(sent.Add(ttl)) {
			t.Errorf("deadline %v after the renewal was sent", h.Deadline().Sub(sent))
		}
		if err := h.Resign(t.Context()); err != nil {
			t.Error(err)
		}
	})

	inBubble(t, "of two renewals without a verdict the first dates the revision", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		// The first lands only after owner was asked, the second never.
		w.play("renew", fault{kind: kinds.Unknown, land: 700 * time.Millisecond}, fault{kind: kinds.Unknown, late: time.Second, never: true})
		first := h.Revision()
		for h.Revision() == first {
			time.Sleep(10 * time.Millisecond)
		}
		if w.count("renew") != 2 {
			t.Fatalf("%d renewals", w.count("renew"))
		}
		if sent := w.call("renew", 0); !h.Deadline().Equal(sent.Add(ttl)) {
			t.Errorf("deadline %v after the first was sent", h.Deadline().Sub(sent))
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "lost after a renewal without a verdict is not believed before owner", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("renew", fault{mute: true})
		w.play("owner", fault{kind: kinds.Unavailable}) // right after it
		time.Sleep(5 * ttl)
		if err := h.Check(); err != nil {
			t.Fatal(err)
		}
		if got := w.count("owner"); got != 2 {
			t.Errorf("%d owner calls", got)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "owner tells of another: lost at once", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("renew", fault{lose: true})
		w.seize("k", "other", ttl)
		start := time.Now()
		if took := ends(t, h, start); took > 6*time.Second {
			t.Errorf("it took %v", took)
		}
		if kinds.Of(context.Cause(h.Context())) != kinds.Lost {
			t.Error(context.Cause(h.Context()))
		}
		if err := h.Resign(t.Context()); err != nil || w.count("release") != 0 {
			t.Errorf("%v; a release of what is known to be another's", err)
		}
	})

	inBubble(t, "a new tenure under our own name is not ours", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{Holder: "me"})
		time.Sleep(time.Millisecond)
		w.play("renew", fault{lose: true})
		w.seize("k", "me", ttl)
		before := h.Revision()
		ends(t, h, time.Now())
		if h.Revision() != before {
			t.Error("it took up the revision of another tenure")
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "renew says lost: ended, and never taken up again", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.seize("k", "other", time.Second)
		ends(t, h, time.Now())
		calls := len(w.decided())
		time.Sleep(time.Minute)
		if now := w.decided(); len(now) != calls {
			t.Errorf("calls after the end: %v", now[calls:])
		}
	})

	inBubble(t, "under a holder id that may have had the lease before, it renews before it acts", func(t *testing.T, w *world) {
		w.seize("k", "me", 3*time.Second) // a life before, 3 s before its end
		start := time.Now()
		h, _ := hold(t, w, HoldOptions{Holder: "me"})
		if !slices.Equal(w.decided(), []string{"acquire", "renew"}) {
			t.Fatal(w.decided())
		}
		if !h.Deadline().Equal(start.Add(ttl)) || h.Revision() != h.Tenure()+1 {
			t.Error(h.Deadline().Sub(start), h.Revision(), h.Tenure())
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "the same, but it ends meanwhile and another has it", func(t *testing.T, w *world) {
		w.seize("k", "me", 3*time.Second)
		w.play("acquire", fault{slow: 1500 * time.Millisecond})
		w.play("renew", fault{late: 1600 * time.Millisecond})
		go func() {
			time.Sleep(3050 * time.Millisecond)
			w.seize("k", "other", 5*time.Second)
		}()
		start := time.Now()
		h, _ := hold(t, w, HoldOptions{Holder: "me"})
		if took := time.Since(start); took < 8*time.Second {
			t.Errorf("it acts after %v, while another holds", took)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "after an acquire without a verdict it renews before it acts", func(t *testing.T, w *world) {
		w.play("acquire", fault{mute: true})
		h, _ := hold(t, w, HoldOptions{})
		if !slices.Equal(w.decided(), []string{"acquire", "acquire", "renew"}) {
			t.Fatal(w.decided())
		}
		if !h.Deadline().Equal(w.call("renew", 0).Add(ttl)) {
			t.Error("not dated from the renewal")
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "the wall clock of the server is of no account", func(t *testing.T, w *world) {
		for _, shift := range []time.Duration{-1000 * time.Hour, 1000 * time.Hour} {
			w.set(shift)
			start := time.Now()
			h, _ := hold(t, w, HoldOptions{})
			if !h.Deadline().Equal(start.Add(ttl)) {
				t.Error(h.Deadline())
			}
			w.set(-shift) // and jumps
			w.play("renew", fault{}, fault{mute: true})
			time.Sleep(5 * ttl)
			if err := h.Check(); err != nil {
				t.Error(err)
			}
			_ = h.Resign(t.Context())
		}
	})

	inBubble(t, "a pause is seen by Check before any timer fires", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		synctest.Wait() // the next renewal is planned
		h.mu.Lock()
		h.claim.until = time.Now() // as if we had slept until now, timers included
		h.mu.Unlock()
		if err := h.Check(); kinds.Of(err) != kinds.Lost || h.Context().Err() == nil {
			t.Errorf("Check: %v, Context: %v", err, h.Context().Err())
		}
		_ = h.Resign(t.Context())
	})
}

func TestResign(t *testing.T) {
	inBubble(t, "while a renewal is under way: the last thing is the release of what it wrote", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("renew", fault{slow: time.Second})
		for w.count("renew") == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		if err := h.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
		if !slices.Equal(w.decided(), []string{"acquire", "renew", "release"}) {
			t.Error(w.decided())
		}
	})

	inBubble(t, "with a renewal in doubt", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("renew", fault{mute: true})
		w.play("owner", fault{mute: true})
		for w.count("renew") == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		if err := h.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q; %v", err, w.owner("k"), w.decided())
		}
	})

	inBubble(t, "a release without a verdict is repeated", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("release", fault{mute: true}, fault{kind: kinds.Busy})
		if err := h.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
	})

	inBubble(t, "with a context that has ended it still tries once", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := h.Resign(ctx); err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
	})

	inBubble(t, "silence: an error, in bounded time", func(t *testing.T, w *world) {
		h, _ := hold(t, w, HoldOptions{})
		w.play("release", slices.Repeat([]fault{{lose: true}}, 100)...)
		start := time.Now()
		if err := h.Resign(t.Context()); kinds.Of(err) != kinds.Unknown || time.Since(start) > ttl+3*time.Second {
			t.Error(err, time.Since(start))
		}
	})

	inBubble(t, "work that winds down keeps its lease", func(t *testing.T, w *world) {
		ctx, cancel := context.WithCancel(t.Context())
		c := newClient(w.process(), Options{})
		done := make(chan error, 1)
		go func() {
			done <- c.Run(ctx, "k", HoldOptions{TTL: ttl}, func(ctx context.Context, h *Hold) error {
				<-ctx.Done()
				time.Sleep(3 * ttl) // slow to stop
				if w.owner("k") != h.Holder() {
					t.Error("the lease ended before the work")
				}
				return errors.New("done")
			})
		}()
		time.Sleep(time.Second)
		cancel()
		if err := <-done; err == nil || err.Error() != "done" || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
	})

	inBubble(t, "Run tells that the lease was lost", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		err := c.Run(t.Context(), "k", HoldOptions{TTL: ttl}, func(ctx context.Context, h *Hold) error {
			w.seize("k", "other", ttl)
			<-ctx.Done()
			return nil
		})
		if kinds.Of(err) != kinds.Lost {
			t.Error(err)
		}
	})
}

// TestWaiting: rule P15.
func TestWaiting(t *testing.T) {
	inBubble(t, "the service wakes the waiter", func(t *testing.T, w *world) {
		w.seize("k", "other", 7300*time.Millisecond)
		start := time.Now()
		h, _ := hold(t, w, HoldOptions{})
		if took := time.Since(start); took < 7300*time.Millisecond || took > 7400*time.Millisecond {
			t.Errorf("granted after %v", took)
		}
		if got := w.count("acquire"); got != 10 {
			t.Errorf("%d acquires, each waits 750 ms", got)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "an older service: asked again at the lease's end, no sooner than worth it", func(t *testing.T, w *world) {
		w.noWait = true
		w.seize("k", "other", 60*time.Second)
		start := time.Now()
		h, _ := hold(t, w, HoldOptions{})
		if took := time.Since(start); took < 60*time.Second || took > 60500*time.Millisecond {
			t.Errorf("granted after %v", took)
		}
		if got := w.count("acquire"); got > 100 {
			t.Errorf("%d acquires in a minute", got)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "an older service: an event wakes", func(t *testing.T, w *world) {
		w.noWait = true
		other, _ := hold(t, w, HoldOptions{Holder: "other"})
		done := make(chan time.Time, 1)
		go func() {
			h, _ := hold(t, w, HoldOptions{})
			done <- time.Now()
			_ = h.Resign(t.Context())
		}()
		time.Sleep(20*time.Second + 333*time.Millisecond)
		_ = other.Resign(t.Context())
		released := time.Now()
		if took := (<-done).Sub(released); took > 60*time.Millisecond {
			t.Errorf("granted %v after the release", took)
		}
	})

	inBubble(t, "a denial at once, though it was to wait: no storm", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		w.seize("k", "other", time.Hour)
		w.noWait = true // answers as one that is stopping does
		h := &Hold{client: c, options: HoldOptions{}}
		_ = h.options.defaults()
		wt := waiter{h: h}
		n := 0
		for ; ctx.Err() == nil; n++ {
			wt.after(ctx, Result{SentAt: time.Now()}, slice)
		}
		if n > 120 {
			t.Errorf("%d times in 10 s", n)
		}
	})

	inBubble(t, "giving up while waiting leaves nothing behind, within 1.25 s", func(t *testing.T, w *world) {
		for _, f := range []fault{{}, {mute: true}, {lose: true}, {slow: 600 * time.Millisecond}, {kind: kinds.Unknown, land: 100 * time.Millisecond}} {
			w.seize("k", "other", 5*slice+200*time.Millisecond)
			ctx, cancel := context.WithCancelCause(t.Context())
			why := errors.New("no patience")
			n := w.count("acquire")
			go func() {
				for w.count("acquire") < n+5 {
					time.Sleep(time.Millisecond)
				}
				w.play("acquire", f)
				for w.count("acquire") < n+6 {
					time.Sleep(time.Millisecond)
				}
				time.Sleep(150 * time.Millisecond) // while the sixth is under way
				cancel(why)
			}()
			c := newClient(w.process(), Options{})
			_, err := c.Hold(ctx, "k", HoldOptions{TTL: ttl})
			gaveUp := w.call("acquire", n+5).Add(150 * time.Millisecond)
			if !errors.Is(err, why) || time.Since(gaveUp) > 1250*time.Millisecond {
				t.Errorf("%+v: %v after %v", f, err, time.Since(gaveUp))
			}
			if owner := w.owner("k"); owner != "" && owner != "other" {
				t.Errorf("%+v: %s has the lease", f, owner)
			}
			time.Sleep(time.Minute)
		}
	})

	inBubble(t, "NoWait: denied names the holder, trouble is an error at once", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		w.seize("k", "other", time.Minute)
		_, err := c.Hold(t.Context(), "k", HoldOptions{NoWait: true})
		var denied *DeniedError
		if !errors.As(err, &denied) || denied.Lease.Holder != "other" || denied.Lease.Key != "k" {
			t.Error(err)
		}
		w.play("acquire", fault{kind: kinds.Unavailable})
		if _, err := c.Hold(t.Context(), "k", HoldOptions{NoWait: true}); !errors.Is(err, nats.ErrNoResponders) {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		w.play("acquire", fault{mute: true}, fault{mute: true})
		if _, err := c.Hold(t.Context(), "k", HoldOptions{NoWait: true}); kinds.Of(err) != kinds.Unknown || w.owner("k") != "" {
			t.Errorf("%v; left to %q", err, w.owner("k"))
		}
	})

	inBubble(t, "giving up while it renews before it acts, in silence", func(t *testing.T, w *world) {
		for _, renewed := range []bool{false, true} {
			w.seize("k", "me", 10*time.Minute) // a life before
			ctx, cancel := context.WithCancel(t.Context())
			n := w.count("renew")
			w.play("renew", fault{lose: !renewed, mute: renewed})
			w.play("owner", fault{lose: true})
			go func() {
				for w.count("renew") == n {
					time.Sleep(time.Millisecond)
				}
				time.Sleep(150 * time.Millisecond)
				cancel()
			}()
			_, err := newClient(w.process(), Options{}).Hold(ctx, "k", HoldOptions{Holder: "me", TTL: time.Minute})
			gaveUp := w.call("renew", n).Add(150 * time.Millisecond)
			if !errors.Is(err, context.Canceled) || time.Since(gaveUp) > 1500*time.Millisecond {
				t.Errorf("%v after %v", err, time.Since(gaveUp))
			}
			if owner := w.owner("k"); !renewed && owner != "" {
				t.Errorf("%s has the lease", owner)
			}
			w.play("owner")
			time.Sleep(time.Minute)
		}
	})

	inBubble(t, "the part of a millisecond before the wait is over is not spent asking", func(t *testing.T, w *world) {
		w.seize("k", "other", time.Minute)
		start := time.Now()
		_, err := newClient(w.process(), Options{}).Hold(t.Context(), "k", HoldOptions{Wait: 2500*time.Millisecond + 700*time.Microsecond})
		var denied *DeniedError
		if !errors.As(err, &denied) || time.Since(start) > 2501*time.Millisecond || w.count("acquire") > 5 {
			t.Errorf("%v after %v and %d acquires", err, time.Since(start), w.count("acquire"))
		}
	})

	inBubble(t, "Wait limits the wait and not the Hold", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		for _, old := range []bool{false, true} {
			w.mu.Lock()
			w.noWait = old
			w.mu.Unlock()
			w.seize("k", "other", time.Minute)
			start := time.Now()
			_, err := c.Hold(t.Context(), "k", HoldOptions{Wait: 2500 * time.Millisecond})
			var denied *DeniedError
			if !errors.As(err, &denied) || time.Since(start) != 2500*time.Millisecond {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			w.play("acquire", slices.Repeat([]fault{{kind: kinds.Unavailable}}, 100)...)
			if _, err := c.Hold(t.Context(), "k", HoldOptions{Wait: time.Second}); !errors.Is(err, nats.ErrNoResponders) {
				t.Error(err)
			}
			w.play("acquire")
		}
		time.Sleep(time.Minute)
		h, _ := hold(t, w, HoldOptions{Wait: time.Second})
		time.Sleep(time.Minute)
		if err := h.Check(); err != nil {
			t.Error(err)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "trouble is waited out and told", func(t *testing.T, w *world) {
		w.play("acquire", fault{kind: kinds.Unavailable}, fault{kind: kinds.Busy}, fault{kind: kinds.Unsupported}, fault{kind: kinds.Internal})
		var told []kinds.Kind
		h, _ := hold(t, w, HoldOptions{OnError: func(err error) { told = append(told, kinds.Of(err)) }})
		if !slices.Equal(told, []kinds.Kind{kinds.Unavailable, kinds.Busy, kinds.Unsupported, kinds.Internal}) {
			t.Error(told)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "what cannot be asked for is an error at once", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		for _, o := range []HoldOptions{{TTL: 1500 * time.Millisecond}, {TTL: time.Hour}, {TTL: time.Millisecond}, {Margin: -1}, {Margin: 14 * time.Second}} {
			if _, err := c.Hold(t.Context(), "k", o); kinds.Of(err) != kinds.Invalid {
				t.Errorf("%+v: %v", o, err)
			}
		}
		w.play("acquire", fault{kind: kinds.Invalid})
		if _, err := c.Hold(t.Context(), "not a key", HoldOptions{}); kinds.Of(err) != kinds.Invalid {
			t.Error(err)
		}
	})
}

func TestElect(t *testing.T) {
	inBubble(t, "one leader at a time, whose work ends before its release", func(t *testing.T, w *world) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Minute, errors.New("over"))
		defer cancel()
		var mu sync.Mutex
		leading, terms := 0, 0
		seenByA := 0
		var all sync.WaitGroup
		for _, name := range []string{"a", "b", "c"} {
			seen := map[uint64]bool{}
			lost := 0
			all.Go(func() {
				elected := 0
				err := newClient(w.process(), Options{}).Elect(ctx, "k", ElectOptions{
					HoldOptions: HoldOptions{Holder: name, TTL: 5 * time.Second},
					OnElected: func(ctx context.Context, h *Hold) {
						elected++
						mu.Lock()
						leading++
						terms++
						if leading != 1 || w.owner("k") != name {
							t.Errorf("%d lead; %s works while %s holds", leading, name, w.owner("k"))
						}
						turn := terms % 3
						mu.Unlock()
						switch turn {
						case 0: // resign
							time.Sleep(10 * time.Second)
						case 1: // lose it
							time.Sleep(7 * time.Second)
							w.seize("k", "operator", 5*time.Second)
							<-ctx.Done()
						case 2: // wind down slowly when it is over
							select {
							case <-ctx.Done():
								time.Sleep(8 * time.Second)
							case <-time.After(30 * time.Second):
							}
						}
						mu.Lock()
						leading--
						if turn != 1 && w.owner("k") != name {
							t.Errorf("the lease of %s ended before its work", name)
						}
						mu.Unlock()
					},
					OnLost: func(cause error) {
						lost++
						if cause == nil {
							t.Error("no cause")
						}
					},
					OnNewOwner: func(l Lease) {
						if l.Holder == "" || seen[l.Revision] {
							t.Errorf("%s is told twice of %+v", name, l)
						}
						seen[l.Revision] = true
					},
				})
				if err == nil || err.Error() != "over" {
					t.Error(err)
				}
				if name == "a" {
					seenByA = len(seen)
				}
				if elected != lost || elected == 0 {
					t.Errorf("%s: elected %d times, lost %d times", name, elected, lost)
				}
			})
		}
		all.Wait()
		if w.owner("k") != "" {
			t.Errorf("%s still holds", w.owner("k"))
		}
		if terms < 20 || seenByA < 15 {
			t.Errorf("%d terms, a saw %d", terms, seenByA)
		}
	})
}
