package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// sender forwards as the service does.
type sender struct {
	t *testing.T
	p *process
	n int

	left []string // the header that says how long it waits
}

// send returns the answer's body, whether it is a rejection, and false for silence.
func (s *sender) send(holder, key string, fence []string, body string) (answer string, rejected, ok bool) {
	s.t.Helper()
	s.n++
	reply := fmt.Sprint("reply.", s.n)
	got := make(chan *nats.Msg, 10)
	stop, err := s.p.subscribe(reply, func(m *nats.Msg) { got <- m }, nil)
	if err != nil {
		s.t.Error(err)
		return
	}
	defer stop()
	h := nats.Header{"traceparent": {"00-1"}, "secret": {"no"}}
	if fence != nil {
		h["Dagnats-Lease-Fence"] = fence
	}
	if s.left != nil {
		h["Dagnats-Lease-Deadline-Ms"] = s.left
	}
	_ = s.p.publish(&nats.Msg{Subject: "dagnats.lease.inbox." + holder + "." + key, Reply: reply, Header: h, Data: []byte(body)})
	select {
	case m := <-got:
		rejected = m.Header.Get("Dagnats-Lease-Reject") == "stale"
		if rejected && len(m.Data) > 0 {
			s.t.Error("a rejection with a body")
		}
		return string(m.Data), rejected, true
	case <-time.After(time.Minute):
		return "", false, false
	}
}

func at(revision uint64) []string { return []string{fmt.Sprint(revision)} }

// TestInbox: rule F2 and rule F7.
func TestInbox(t *testing.T) {
	inBubble(t, "takes what is meant for this tenure and refuses the rest", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, err := c.Inbox("me", InboxOptions{})
		if err != nil {
			t.Fatal(err)
		}
		s := &sender{t: t, p: w.process()}
		if _, rejected, _ := s.send("me", "k", at(1000), ""); !rejected {
			t.Error("taken before anything was acquired")
		}
		h, err := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		if err != nil {
			t.Fatal(err)
		}
		if _, rejected, _ := s.send("me", "k", at(h.Revision()), ""); !rejected {
			t.Error("taken before Serve")
		}
		handled := 0
		err = in.Serve(h, func(ctx context.Context, r Request) []byte {
			handled++
			if r.Key != "k" || r.Header.Get("traceparent") != "00-1" || r.Header.Get("secret") != "" || ctx.Err() != nil {
				t.Errorf("%+v", r)
			}
			return []byte(strings.ToUpper(string(r.Payload)))
		})
		if err != nil {
			t.Fatal(err)
		}
		if got, rejected, _ := s.send("me", "k", at(h.Tenure()), "hello"); rejected || got != "HELLO" {
			t.Error(got, rejected)
		}
		if got, rejected, ok := s.send("me", "k", at(h.Revision()+10), ""); rejected || got != "" || !ok {
			t.Error(got, rejected, ok)
		}
		if _, rejected, _ := s.send("me", "k", at(h.Tenure()-1), ""); !rejected {
			t.Error("a fence from before the tenure was taken")
		}
		if _, rejected, _ := s.send("me", "other", at(h.Revision()), ""); !rejected {
			t.Error("a key that is not held was taken")
		}
		_ = w.process().publish(&nats.Msg{Subject: "dagnats.lease.inbox.me.k", Header: nats.Header{"Dagnats-Lease-Fence": at(h.Revision())}})
		synctest.Wait()
		if handled != 2 {
			t.Errorf("%d requests handled", handled)
		}
		w.seize("k", "other", ttl)
		<-h.Context().Done()
		if _, rejected, _ := s.send("me", "k", at(h.Revision()+100), ""); !rejected {
			t.Error("taken after the lease was lost")
		}
		_ = h.Resign(t.Context())
		in.Close()
		if _, _, ok := s.send("me", "k", at(h.Revision()), ""); ok {
			t.Error("a closed inbox answers")
		}
	})

	inBubble(t, "past the deadline without a renewal it refuses", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		_ = in.Serve(h, func(context.Context, Request) []byte { return nil })
		synctest.Wait() // the next renewal is planned
		h.mu.Lock()
		h.claim.until = time.Now() // as after a pause
		h.mu.Unlock()
		s := &sender{t: t, p: w.process()}
		if _, rejected, _ := s.send("me", "k", at(h.Revision()), ""); !rejected {
			t.Error("taken after a pause that outlived the lease")
		}
		_ = h.Resign(t.Context())
		in.Close()
	})

	inBubble(t, "drains on resign: takes no more, answers what it has, then releases", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		_ = in.Serve(h, func(ctx context.Context, r Request) []byte {
			time.Sleep(2 * ttl)
			if ctx.Err() != nil || w.owner("k") != "me" {
				t.Error("the right to act ended before the request was answered")
			}
			return []byte("late")
		})
		s := &sender{t: t, p: w.process()}
		answered := make(chan string, 1)
		go func() {
			got, _, _ := (&sender{t: t, p: w.process(), n: 100}).send("me", "k", at(h.Revision()), "")
			answered <- got
		}()
		time.Sleep(time.Second)
		resigned := make(chan error, 1)
		go func() { resigned <- h.Resign(context.Background()) }()
		time.Sleep(time.Second)
		if _, rejected, _ := s.send("me", "k", at(h.Revision()), ""); !rejected {
			t.Error("taken while draining")
		}
		if err := <-resigned; err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
		if got := <-answered; got != "late" {
			t.Errorf("answered %q", got)
		}
		in.Close()
	})

	inBubble(t, "an inbox that comes to serve while the Hold resigns is drained too", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		s := &sender{t: t, p: w.process()}
		answered := make(chan string, 1)
		late := func(context.Context) error {
			_ = in.Serve(h, func(context.Context, Request) []byte {
				time.Sleep(time.Second)
				if w.owner("k") != "me" {
					t.Error("released before the request was answered")
				}
				return []byte("late")
			})
			go func() {
				got, _, _ := s.send("me", "k", at(h.Revision()), "")
				answered <- got
			}()
			time.Sleep(time.Millisecond)
			return nil
		}
		h.mu.Lock()
		h.drains = append(h.drains, late) // runs after Resign has looked which inboxes there are
		h.mu.Unlock()
		if err := h.Resign(t.Context()); err != nil || w.owner("k") != "" {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
		if got := <-answered; got != "late" {
			t.Errorf("answered %q", got)
		}
		in.Close()
	})

	inBubble(t, "requests that do not end: the lease is left to run out, not released", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		_ = in.Serve(h, func(ctx context.Context, r Request) []byte {
			<-ctx.Done()
			time.Sleep(time.Second)
			return nil
		})
		s := &sender{t: t, p: w.process()}
		go s.send("me", "k", at(h.Revision()), "")
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := h.Resign(ctx); err == nil || w.owner("k") != "me" || w.count("release") != 0 {
			t.Errorf("%v; owner %q", err, w.owner("k"))
		}
		in.Close()
		time.Sleep(2 * ttl)
		if w.owner("k") != "" {
			t.Error("it never ran out")
		}
	})

	inBubble(t, "no more at once than allowed, none lost", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{Concurrency: 3})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		var now, most, done atomic.Int32
		_ = in.Serve(h, func(ctx context.Context, r Request) []byte {
			most.Store(max(most.Load(), now.Add(1)))
			time.Sleep(time.Second)
			now.Add(-1)
			return nil
		})
		for i := range 12 {
			go func() {
				if _, rejected, ok := (&sender{t: t, p: w.process(), n: 1000 * i}).send("me", "k", at(h.Revision()), ""); ok && !rejected {
					done.Add(1)
				}
			}()
		}
		time.Sleep(5 * time.Second)
		if most.Load() != 3 || done.Load() != 12 {
			t.Errorf("%d at once, %d answered", most.Load(), done.Load())
		}
		_ = h.Resign(t.Context())
		in.Close()
	})

	inBubble(t, "what its sender has given up is not begun", func(t *testing.T, w *world) {
		for _, concurrency := range []int{1, 3} {
			c := newClient(w.process(), Options{})
			var late atomic.Int32
			in, _ := c.Inbox("me", InboxOptions{Concurrency: concurrency, OnError: func(err error) {
				if errors.Is(err, context.DeadlineExceeded) {
					late.Add(1)
				}
			}})
			h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
			start := time.Now()
			var runs, begunLate atomic.Int32
			_ = in.Serve(h, func(ctx context.Context, r Request) []byte {
				runs.Add(1)
				sent := start
				if string(r.Payload) == "probe" {
					sent = start.Add(1900 * time.Millisecond)
				}
				if time.Since(sent) > time.Second {
					begunLate.Add(1)
				}
				if !r.Deadline.Equal(sent.Add(time.Second)) || ctx.Err() != nil {
					t.Error(r.Deadline.Sub(sent), ctx.Err())
				}
				time.Sleep(500 * time.Millisecond)
				return nil
			})
			for i := range 40 {
				go (&sender{t: t, p: w.process(), n: 1000 * i, left: []string{"1000"}}).send("me", "k", at(h.Revision()), "")
			}
			time.Sleep(1900 * time.Millisecond)
			// The owner is of use again.
			probe := &sender{t: t, p: w.process(), n: 1 << 20, left: []string{"1000"}}
			if _, rejected, ok := probe.send("me", "k", at(h.Revision()), "probe"); !ok || rejected {
				t.Error("the probe was not answered")
			}
			if n := int32(3 * concurrency); runs.Load() > n+1 || begunLate.Load() > 0 || runs.Load()-1+late.Load() != 40 {
				t.Errorf("concurrency %d: %d runs, %d begun late, %d dropped", concurrency, runs.Load(), begunLate.Load(), late.Load())
			}
			_ = h.Resign(t.Context())
			in.Close()
			time.Sleep(time.Minute)
		}
	})

	inBubble(t, "a fence is judged before the time, and only a time that can be is one", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		_ = in.Serve(h, func(context.Context, Request) []byte { return []byte("done") })
		for _, v := range []struct {
			left            []string
			fence           uint64
			ok, rejectedToo bool
		}{
			{[]string{"0"}, h.Tenure() - 1, true, true},
			{[]string{"1"}, h.Tenure() - 1, true, true},
			{[]string{"5"}, h.Tenure(), true, false},
			{[]string{"-1"}, h.Tenure(), true, false},
			{[]string{"soon"}, h.Tenure(), true, false},
			{[]string{"1.5"}, h.Tenure(), true, false},
			{[]string{""}, h.Tenure(), true, false},
			{[]string{"0", "0"}, h.Tenure(), true, false},
			{[]string{"18446744073709551615"}, h.Tenure(), true, false},
			{nil, h.Tenure(), true, false},
		} {
			s := &sender{t: t, p: w.process(), left: v.left}
			if _, rejected, ok := s.send("me", "k", at(v.fence), ""); ok != v.ok || rejected != v.rejectedToo {
				t.Errorf("%q under %d: answered %v, rejected %v", v.left, v.fence, ok, rejected)
			}
		}
		_ = h.Resign(t.Context())
		in.Close()
	})

	inBubble(t, "what waits when the lease goes is rejected, not dropped", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{Concurrency: 1})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		_ = in.Serve(h, func(context.Context, Request) []byte { time.Sleep(2 * time.Second); return nil })
		go (&sender{t: t, p: w.process(), n: 1000}).send("me", "k", at(h.Revision()), "")
		time.Sleep(time.Second)
		rejected := make(chan bool)
		go func() {
			_, r, _ := (&sender{t: t, p: w.process(), n: 2000, left: []string{"500"}}).send("me", "k", at(h.Revision()), "")
			rejected <- r
		}()
		time.Sleep(100 * time.Millisecond)
		_ = h.Resign(t.Context())
		if !<-rejected {
			t.Error("it was not rejected")
		}
		in.Close()
	})

	inBubble(t, "writes of one tenure do not refuse each other", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
		var fence Fence
		_ = in.Serve(h, func(ctx context.Context, r Request) []byte {
			if string(r.Payload) == "slow" {
				time.Sleep(5 * time.Second)
			}
			if err := fence.Do(ctx, "r", r.Fence, nil); err != nil {
				t.Errorf("%s: %v, while Check says %v", r.Payload, err, h.Check())
			}
			return nil
		})
		before := h.Revision()
		slow := make(chan bool)
		go func() {
			_, rejected, _ := (&sender{t: t, p: w.process(), n: 1000}).send("me", "k", at(before), "slow")
			slow <- rejected
		}()
		for h.Revision() == before {
			time.Sleep(10 * time.Millisecond)
		}
		(&sender{t: t, p: w.process()}).send("me", "k", at(h.Revision()), "quick")
		<-slow
		_ = h.Resign(t.Context())

		next, err := c.Hold(t.Context(), "k", HoldOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := fence.Do(t.Context(), "r", next.Tenure(), nil); err != nil {
			t.Error(err)
		}
		for _, old := range []uint64{h.Tenure(), h.Revision()} {
			if _, stale := errors.AsType[*StaleError](fence.Do(t.Context(), "r", old, nil)); !stale {
				t.Errorf("%d of the holder before was taken after %d", old, next.Tenure())
			}
		}
		_ = next.Resign(t.Context())
		in.Close()
	})

	inBubble(t, "an inbox serves its own holder id only", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		in, _ := c.Inbox("me", InboxOptions{})
		h, _ := c.Hold(t.Context(), "k", HoldOptions{TTL: ttl})
		if err := in.Serve(h, nil); kinds.Of(err) != kinds.Invalid {
			t.Error(err)
		}
		_ = h.Resign(t.Context())
		in.Close()
	})
}

// TestFenceHeaderVectors runs testdata/fence/header.json through an Inbox.
func TestFenceHeaderVectors(t *testing.T) {
	var vectors struct {
		Cases []struct {
			Name    string
			Values  []string
			Tenure  uint64
			Process bool
		}
	}
	readVectors(t, "header.json", &vectors)
	for _, v := range vectors.Cases {
		inBubble(t, v.Name, func(t *testing.T, w *world) {
			c := newClient(w.process(), Options{})
			in, _ := c.Inbox("me", InboxOptions{})
			w.sequence = v.Tenure - 1
			h, err := c.Hold(t.Context(), "k", HoldOptions{Holder: "me", TTL: ttl})
			if err != nil || h.Tenure() != v.Tenure {
				t.Fatal(err, h.Tenure())
			}
			_ = in.Serve(h, func(context.Context, Request) []byte { return []byte("done") })
			got, rejected, _ := (&sender{t: t, p: w.process()}).send("me", "k", v.Values, "")
			if rejected == v.Process || (got == "done") != v.Process {
				t.Errorf("%q under tenure %d: answered %q, rejected %v", v.Values, v.Tenure, got, rejected)
			}
			_ = h.Resign(t.Context())
			in.Close()
		})
	}
}

func readVectors(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile("testdata/fence/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(err)
	}
}
