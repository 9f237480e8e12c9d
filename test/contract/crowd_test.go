package contract

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// tallied are the kinds of replies to many requests sent at the same time.
type tallied struct {
	sync.WaitGroup
	mu   sync.Mutex
	seen map[kinds.Kind]int
}

func (a *tallied) add(t *testing.T, got *reply, err error) {
	if err != nil {
		t.Error(err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seen == nil {
		a.seen = map[kinds.Kind]int{}
	}
	a.seen[got.kind]++
}

func (a *tallied) of(k kinds.Kind) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.seen[k]
}

// TestHungOwners: 600 forwards of 30 s at once to owners that never answer are more than
// there are places. Those over the share of an owner, or of a key, are refused, and the
// forwards of the others go on (F8).
func TestHungOwners(t *testing.T) {
	t.Parallel()
	const many = 600
	for _, c := range []struct {
		name    string
		hung    []string // holder.key
		healthy string
		words   string // of the refusals
		most    int    // places that the hung have
	}{
		{"one", []string{"H.hung"}, "A.fine", "for this key", 171},
		{"one with many keys", []string{"H.hung-1", "H.hung-2", "H.hung-3", "H.hung-4", "H.hung-5", "H.hung-6", "H.hung-7", "H.hung-8"}, "A.fine", "is used up", 256},
		{"eight", []string{"H1.hung-1", "H2.hung-2", "H3.hung-3", "H4.hung-4", "H5.hung-5", "H6.hung-6", "H7.hung-7", "H8.hung-8"}, "A.fine", "is used up", 456},
		{"another key of the same holder", []string{"H.hung"}, "H.fine", "for this key", 172},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, setup{})
			var got inboxTap
			held := map[string]bool{}
			for _, who := range append(slices.Clone(c.hung), c.healthy) {
				holder, key, _ := strings.Cut(who, ".")
				r.acquire(key, holder, 600000)
				if held[holder] {
					continue
				}
				held[holder] = true
				r.hold(holder, func(m *nats.Msg) {
					if strings.HasSuffix(m.Subject, ".fine") {
						m.Respond(m.Data)
						return
					}
					got.add(m)
				})
			}
			var all tallied
			for n := range many {
				_, key, _ := strings.Cut(c.hung[n%len(c.hung)], ".")
				all.Go(func() {
					f, err := r.ask("forward", request{Key: key, Timeout: 30000})
					all.add(t, f, err)
					if err == nil && f.kind == kinds.Busy && !strings.Contains(f.Error, c.words) && !strings.Contains(f.Error, "calls in flight") {
						t.Errorf("busy does not say whose share is used up: %s", f.Error)
					}
				})
			}
			testnats.Eventually(t, 20*time.Second, func() bool { return len(got.all())+all.of(kinds.Busy) == many }, "not every forward is under way or refused")
			if n := len(got.all()); n > c.most || n < c.most/2 {
				t.Errorf("%d forwards are under way to owners that do not answer, want %d at most", n, c.most)
			}
			_, fine, _ := strings.Cut(c.healthy, ".")
			for range 50 {
				r.want(kinds.Forwarded, "forward", request{Key: fine})
			}
			for _, m := range got.all() {
				m.Respond(nil)
			}
			all.Wait()
		})
	}
}

// crowd has n requests sent at once over connections of their own, 10 each.
func (r *rig) crowd(n int, call string, body []byte) *tallied {
	var all tallied
	var conns []*nats.Conn
	for range (n + 9) / 10 {
		conns = append(conns, r.connect())
	}
	for i := range n {
		all.Go(func() {
			got, err := r.askOn(conns[i/10], call, body)
			all.add(r.t.(*testing.T), got, err)
		})
	}
	return &all
}

// pending lets the server keep as much for one connection as the server inside does.
func pending(o *server.Options) { o.MaxPending = 512 << 20 }

// TestLargeRequestsAtOnce: 480 requests of nearly 1 MB, or of 700 KB to an owner that takes
// its time, are each answered, the connection they come over is not cut, and others go on (P9).
func TestLargeRequestsAtOnce(t *testing.T) {
	const many = 480
	large := append(append([]byte(`{"key":"k"`), bytes.Repeat([]byte(" "), 1<<20-100)...), '}')
	for _, c := range []struct {
		name, call string
		body       []byte
		want       []kinds.Kind
	}{
		{"owner", "owner", large, []kinds.Kind{kinds.Held, kinds.Busy}},
		{"renew_many", "renew_many", large, []kinds.Kind{kinds.Invalid, kinds.Busy}},
		{"forward", "forward", raw(request{Key: "k", Payload: make([]byte, 700_000)}), []kinds.Kind{kinds.Forwarded, kinds.Busy}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, setup{nats: []testnats.Option{pending}})
			r.acquire("k", "A", 60000)
			r.hold("A", func(m *nats.Msg) { m.Respond(nil) })
			l := r.acquire("other", "B", 60000)
			all := r.crowd(many, c.call, c.body)
			done := make(chan struct{})
			go func() {
				all.Wait()
				close(done)
			}()
			for open := true; open; {
				l = r.renew(l, 60000)
				select {
				case <-done:
					open = false
				default:
				}
			}
			t.Log(all.seen)
			sum := 0
			for _, k := range c.want {
				sum += all.of(k)
			}
			if sum != many || all.of(c.want[0]) == 0 {
				t.Errorf("%d of %d requests are answered %v: %v", sum, many, c.want, all.seen)
			}
			r.connected()
		})
	}
}

// TestLongRequests: a request may be longer than any of use.
func TestLongRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	pad := func(n int) []byte {
		return append(append([]byte(`{"key":"k"`), bytes.Repeat([]byte(" "), n-len(`{"key":"k"}`))...), '}')
	}
	r.want(kinds.Held, "owner", pad(256<<10))
	r.want(kinds.Held, "owner", pad(1<<20-100))
	r.want(kinds.Held, "owner", pad(200<<10), nats.Header{"X": {strings.Repeat("x", 100<<10)}})
	// The largest request that can be of use.
	q := request{Holder: strings.Repeat("h", 128), TTL: 60000}
	for n := range 1000 {
		q.Leases = append(q.Leases, pair{fmt.Sprintf("%0128d", n), 1<<64 - 1})
	}
	r.want(kinds.Lost, "renew_many", q)
	r.release(l)
}
