package contract

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// slack is what a forward may take beyond its timeout_ms.
const slack = 250 * time.Millisecond

// inboxTap counts what reaches holders. It is the holder's own subscription:
// a tap beside it would count as a responder.
type inboxTap struct {
	mu   sync.Mutex
	msgs []*nats.Msg
}

func (i *inboxTap) add(m *nats.Msg) int {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.msgs = append(i.msgs, m)
	return len(i.msgs)
}

func (i *inboxTap) all() []*nats.Msg {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.msgs)
}

// TestF01HungHolder: the holder never replies. It sees the request once, and
// the caller hears owner_timeout when its time is over, not later and not twice.
func TestF01HungHolder(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	l := r.acquire("k", "A", 60000)
	var got inboxTap
	r.hold("A", func(m *nats.Msg) { got.add(m) })
	for n, timeout := range []int64{100, 1000, 0} {
		want := time.Duration(timeout) * time.Millisecond
		if timeout == 0 {
			want = 5 * time.Second // the default
		}
		f := r.want(kinds.OwnerTimeout, "forward", request{Key: "k", Timeout: timeout, Payload: []byte("a")})
		if f.took() < want || f.took() > want+slack {
			t.Errorf("timeout_ms %d: answered after %v", timeout, f.took())
		}
		if f.Holder != "A" || f.Revision != l.Revision {
			t.Errorf("names %s %d, tried was A %d", f.Holder, f.Revision, l.Revision)
		}
		if seen := got.all(); len(seen) != n+1 {
			t.Errorf("the holder saw %d requests after %d forwards", len(seen), n+1)
		}
	}
}

// TestF02LargeReplies: a reply over the limit is told as such, is not sent
// again and costs nobody the connection; at the limit it passes.
func TestF02LargeReplies(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	var got inboxTap
	var size atomic.Int64
	r.hold("A", func(m *nats.Msg) {
		got.add(m)
		if err := m.Respond(make([]byte, size.Load())); err != nil {
			t.Errorf("a reply of %d bytes: %v", size.Load(), err)
		}
	})
	frame := len(fmt.Sprintf(`{"holder":"A","revision":%d,"payload":"","attempts":1}`, l.Revision))
	fits := int64(base64.StdEncoding.DecodedLen((1<<20 - frame) / 4 * 4))
	for n, c := range []struct {
		size int64
		kind kinds.Kind
	}{{0, kinds.Forwarded}, {750_000, kinds.Forwarded}, {fits, kinds.Forwarded}, {fits + 1, kinds.ReplyTooLarge}, {800_000, kinds.ReplyTooLarge}, {1 << 20, kinds.ReplyTooLarge}, {1, kinds.Forwarded}} {
		size.Store(c.size)
		f := r.want(c.kind, "forward", request{Key: "k"})
		if c.kind == kinds.Forwarded && int64(len(*f.Payload)) != c.size {
			t.Errorf("%d bytes came back as %d", c.size, len(*f.Payload))
		}
		if f.Holder != "A" || f.Revision != l.Revision {
			t.Errorf("%s names %s %d", f.kind, f.Holder, f.Revision)
		}
		if seen := got.all(); len(seen) != n+1 {
			t.Errorf("the holder saw %d requests after %d forwards", len(seen), n+1)
		}
	}
	r.connected()
}

// connected checks that no connection of an instance was dropped.
func (r *rig) connected() {
	r.t.Helper()
	for _, i := range r.all {
		for _, nc := range []*nats.Conn{i.front, i.store, i.hop} {
			if nc.Stats().Reconnects > 0 || !nc.IsConnected() {
				r.t.Errorf("connection %s was dropped: %v", nc.Opts.Name, nc.LastError())
			}
		}
	}
}

// TestF02SmallLeaf: the longest names, 60 KiB payloads and a leaf of 64 KiB
// beside a hub of 1 MiB. Either the service's connection to owners or all of it
// is on the leaf; the limit that counts is that of the connection that sends.
// (A message over the limit of a leaf that it has to cross is another matter:
// nats-server closes the leaf connection, and nobody can tell beforehand.)
func TestF02SmallLeaf(t *testing.T) {
	t.Parallel()
	key, holder := strings.Repeat("k", 128), strings.Repeat("h", 128)
	header, frame := len("NATS/1.0\r\n\r\n")+len(fenceHeader)+len(": 1795977733738126\r\n")+len(deadlineHeader)+len(": 5000\r\n"), len(`{"holder":"","revision":1795977733738126,"payload":"","attempts":1}`)+len(holder)
	fits := base64.StdEncoding.DecodedLen((leafLimit - frame) / 4 * 4)
	type step struct {
		payload, reply int
		kind           kinds.Kind
	}
	for name, c := range map[string]struct {
		onLeaf []string
		steps  []step
	}{
		"hop": {[]string{"hop"}, []step{
			{1, 1, kinds.Forwarded}, {60 << 10, 60 << 10, kinds.Forwarded}, {leafLimit - header, leafLimit, kinds.Forwarded},
			{leafLimit - header + 1, 0, kinds.RequestTooLarge}, {70 << 10, 0, kinds.RequestTooLarge}, {60 << 10, 60 << 10, kinds.Forwarded}}},
		"all": {[]string{"front", "store", "hop"}, []step{
			{1, 1, kinds.Forwarded}, {48000, fits, kinds.Forwarded}, {1, fits + 3, kinds.ReplyTooLarge}, {1, 60 << 10, kinds.ReplyTooLarge},
			{1, leafLimit, kinds.ReplyTooLarge}, {48000, 48000, kinds.Forwarded}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hub, leaf := hubAndLeaf(t)
			r := newRig(t, setup{node: hub, domain: hubDomain, dial: func(_ int, connection string) string {
				if slices.Contains(c.onLeaf, connection) {
					return leaf.URL
				}
				return ""
			}})
			l := r.acquire(key, holder, 60000)
			var got inboxTap
			var answer atomic.Pointer[[]byte]
			answer.Store(&[]byte{})
			r.hold(holder, func(m *nats.Msg) { got.add(m); m.Respond(*answer.Load()) })
			testnats.Eventually(t, 5*time.Second, func() bool { return r.call("forward", request{Key: key}).kind == kinds.Forwarded }, "the leaf does not know the holder")
			for _, s := range c.steps {
				before := len(got.all())
				payload, reply := noise(s.payload), noise(s.reply)
				answer.Store(&reply)
				f := r.want(s.kind, "forward", request{Key: key, Payload: payload})
				if f.Holder != holder || f.Revision != l.Revision {
					t.Errorf("%s names %s %d", f.kind, f.Holder, f.Revision)
				}
				seen := got.all()[before:]
				switch {
				case s.kind == kinds.RequestTooLarge:
					if len(seen) != 0 {
						t.Errorf("%d bytes reached the holder", s.payload)
					}
				case len(seen) != 1 || !bytes.Equal(seen[0].Data, payload):
					t.Errorf("%d bytes, %s: the holder saw %d requests", s.payload, f.kind, len(seen))
				}
				if s.kind == kinds.Forwarded && !bytes.Equal(*f.Payload, reply) {
					t.Errorf("a reply of %d bytes came back as other %d", s.reply, len(*f.Payload))
				}
			}
			r.connected()
			if n := hub.NS().NumLeafNodes(); n != 1 {
				t.Errorf("%d leaf connections", n)
			}
		})
	}
}

// noise is n bytes of every value.
func noise(n int) []byte {
	b := make([]byte, n)
	random := rand.New(rand.NewPCG(uint64(n), 0))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

// TestF03HungForwardsDelayNothing: 100 forwards hang; other calls, and forwards
// to holders that answer, do not notice, and the limit answers busy at once. It
// is about time, so nothing runs beside it.
func TestF03HungForwardsDelayNothing(t *testing.T) {
	const hung, limit = 100, 101 // limit is the share of one key
	r := newRig(t, setup{forwards: 3 * limit})
	r.acquire("hung", "H", 600000)
	var got inboxTap
	r.hold("H", func(m *nats.Msg) { got.add(m) })
	r.acquire("healthy", "A", 600000)
	r.hold("A", func(m *nats.Msg) { m.Respond(m.Data) })
	var wg sync.WaitGroup
	for range hung {
		wg.Go(func() {
			if f, err := r.ask("forward", request{Key: "hung", Timeout: 30000}); err != nil || f.kind != kinds.Forwarded {
				t.Errorf("a forward that hung: %+v, %v", f, err)
			}
		})
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return len(got.all()) == hung }, "the forwards do not reach the holder")

	took := map[string][]time.Duration{}
	l := r.acquire("k", "A", 60000)
	for range 300 {
		l = r.renew(l, 60000)
		took["renew"] = append(took["renew"], l.took())
		a := r.acquire("other", "A", 60000)
		took["acquire"] = append(took["acquire"], a.took())
		took["release"] = append(took["release"], r.release(a).took())
		took["owner"] = append(took["owner"], r.owner("k").took())
		took["forward"] = append(took["forward"], r.want(kinds.Forwarded, "forward", request{Key: "healthy", Payload: []byte("x")}).took())
	}
	for call, d := range took {
		slices.Sort(d)
		p99 := d[len(d)*99/100]
		t.Logf("%s beside %d hung forwards: p50 %v, p99 %v", call, hung, d[len(d)/2], p99)
		if p99 > 100*time.Millisecond {
			t.Errorf("%s: p99 is %v", call, p99)
		}
	}

	// One more may wait; the next is refused at once, and one to another holder is not.
	wg.Go(func() {
		if f, err := r.ask("forward", request{Key: "hung", Timeout: 30000}); err != nil || f.kind != kinds.Forwarded {
			t.Errorf("a forward that hung: %+v, %v", f, err)
		}
	})
	testnats.Eventually(t, 5*time.Second, func() bool { return len(got.all()) == limit }, "the last forward does not reach the holder")
	if f := r.want(kinds.Busy, "forward", request{Key: "hung"}); f.took() > 100*time.Millisecond {
		t.Errorf("busy came after %v", f.took())
	}
	r.want(kinds.Forwarded, "forward", request{Key: "healthy"})
	r.renew(l, 60000)
	for _, m := range got.all() {
		m.Respond(nil)
	}
	wg.Wait()
}

// TestF04HolderRepliesTwice: the first reply counts, the second never answers
// another forward; nor does a reply that comes after its forward is over.
func TestF04HolderRepliesTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("k", "A", 60000)
	r.hold("A", func(m *nats.Msg) {
		m.Respond(append([]byte("first "), m.Data...))
		m.Respond(append([]byte("second "), m.Data...))
	})
	for n := range 100 {
		id := fmt.Sprint(n)
		f := r.want(kinds.Forwarded, "forward", request{Key: "k", Payload: []byte(id)})
		if string(*f.Payload) != "first "+id {
			t.Errorf("forward %s is answered %q", id, *f.Payload)
		}
	}
	// At the same time.
	var wg sync.WaitGroup
	for n := range 100 {
		wg.Go(func() {
			id := fmt.Sprint(n)
			f, err := r.ask("forward", request{Key: "k", Payload: []byte(id)})
			if err != nil || f.kind != kinds.Forwarded || string(*f.Payload) != "first "+id {
				t.Errorf("forward %s: %+v, %v", id, f, err)
			}
		})
	}
	wg.Wait()

	r.acquire("late", "L", 60000)
	var kept *nats.Msg
	r.hold("L", func(m *nats.Msg) {
		if kept == nil {
			kept = m
			return
		}
		kept.Respond([]byte("of the first"))
		m.Respond([]byte("of the second"))
	})
	r.want(kinds.OwnerTimeout, "forward", request{Key: "late", Timeout: 200})
	if f := r.want(kinds.Forwarded, "forward", request{Key: "late"}); string(*f.Payload) != "of the second" {
		t.Errorf("the second forward is answered %q", *f.Payload)
	}
}

// handOver makes key's lease l end and another holder take it, as a holder
// does that is asked when it has already lost.
func (r *rig) handOver(l *reply, to string) *reply {
	if l != nil {
		if got, err := r.ask("release", request{Key: l.Key, Holder: l.Holder, Revision: l.Revision}); err != nil || got.kind != kinds.Released {
			r.t.Errorf("hand-over: release: %+v, %v", got, err)
		}
	}
	got, err := r.ask("acquire", request{Key: "k", Holder: to, TTL: 60000})
	if err != nil || got.kind != kinds.Granted {
		r.t.Errorf("hand-over: acquire: %+v, %v", got, err)
	}
	return got
}

// TestForwardFollowsTheLease: an attempt is followed by another only when it
// proved that the owner did not process the request and the lease has moved,
// and by two at most (F4).
func TestForwardFollowsTheLease(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		chain    string // the holders; who is asked hands over to the next and rejects
		last     string // what the last of the chain does
		kind     kinds.Kind
		holder   int // index of the holder that the reply names
		attempts int
	}{
		{"the second answers", "AB", "answer", kinds.Forwarded, 1, 2},
		{"the third answers", "ABC", "answer", kinds.Forwarded, 2, 3},
		{"never a fourth", "ABCD", "answer", kinds.OwnerRejected, 2, 3},
		{"the second is not there", "AB", "absent", kinds.OwnerUnavailable, 1, 2},
		{"the third is not there", "ABC", "absent", kinds.OwnerUnavailable, 2, 3},
		{"the second is silent", "AB", "hang", kinds.OwnerTimeout, 1, 2},
		{"the second rejects and keeps the lease", "AB", "reject", kinds.OwnerRejected, 1, 2},
		{"the only one rejects and keeps the lease", "A", "reject", kinds.OwnerRejected, 0, 1},
		{"rejected, then free", "AB", "free", kinds.NotHeld, 1, 2},
		{"the only one frees and rejects", "A", "free", kinds.NotHeld, 0, 1},
		{"rejected, renewed, answered", "A", "renew", kinds.Forwarded, 0, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, setup{})
			asked := make([]inboxTap, len(c.chain))
			leases := make([]*reply, len(c.chain))
			leases[0] = r.handOver(nil, c.chain[:1])
			for n := range c.chain {
				if n == len(c.chain)-1 && c.last == "absent" {
					continue
				}
				r.hold(c.chain[n:n+1], func(m *nats.Msg) {
					count := asked[n].add(m)
					last := n == len(c.chain)-1
					switch {
					case !last:
						leases[n+1] = r.handOver(leases[n], c.chain[n+1:n+2])
						reject(m)
					case c.last == "answer", c.last == "renew" && count > 1:
						m.Respond([]byte("done"))
					case c.last == "reject":
						reject(m)
					case c.last == "renew":
						got, err := r.ask("renew", request{Key: "k", Holder: c.chain, Revision: leases[0].Revision, TTL: 60000})
						if err != nil {
							t.Error(err)
						}
						leases[0] = got
						reject(m)
					case c.last == "free":
						if _, err := r.ask("release", request{Key: "k", Holder: leases[n].Holder, Revision: leases[n].Revision}); err != nil {
							t.Error(err)
						}
						reject(m)
					}
				})
			}
			f := r.want(c.kind, "forward", request{Key: "k", Timeout: 2000, Payload: []byte("x")})
			if f.Holder != leases[c.holder].Holder || f.Revision != leases[c.holder].Revision {
				t.Errorf("names %s %d: %s", f.Holder, f.Revision, f.raw)
			}
			if c.kind == kinds.Forwarded && f.Attempts != c.attempts {
				t.Errorf("attempts is %d, want %d", f.Attempts, c.attempts)
			}
			seen := 0
			for n := range asked {
				for _, m := range asked[n].all() {
					seen++
					if string(m.Data) != "x" {
						t.Errorf("holder %d got %q", n, m.Data)
					}
				}
			}
			want := c.attempts
			if c.last == "absent" {
				want--
			}
			if seen != want {
				t.Errorf("the holders saw %d requests, want %d", seen, want)
			}
		})
	}
}

// TestForwardEndsInTimeBetweenAttempts: the time is over while the lease is
// read again. Nothing is in flight, so the owner did not process it.
func TestForwardEndsInTimeBetweenAttempts(t *testing.T) {
	t.Parallel()
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, dial: storeVia(relay)})
	l := r.acquire("k", "A", 60000)
	r.hold("A", func(m *nats.Msg) {
		relay.Set(testnats.Stall, testnats.Down)
		reject(m)
	})
	f := r.want(kinds.OwnerUnavailable, "forward", request{Key: "k", Timeout: 500})
	if f.took() < 500*time.Millisecond || f.took() > 500*time.Millisecond+slack {
		t.Errorf("timeout_ms 500: answered after %v", f.took())
	}
	if f.Holder != "A" || f.Revision != l.Revision {
		t.Errorf("names %s %d", f.Holder, f.Revision)
	}
	relay.Set(testnats.Pass)
}

// TestForwardFence: the header is the revision of the lease, to the digit, and
// follows every renewal.
func TestForwardFence(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	got := make(chan *nats.Msg, 1)
	r.hold("A", func(m *nats.Msg) { got <- m; m.Respond(nil) })
	l := r.acquire("k", "A", 60000)
	for range 5 {
		f := r.want(kinds.Forwarded, "forward", request{Key: "k"})
		m := <-got
		if diff := cmp.Diff(nats.Header{fenceHeader: {fmt.Sprint(l.Revision)}}, timed(t, m, 5*time.Second)); diff != "" {
			t.Errorf("headers of a forward: %s", diff)
		}
		if m.Subject != inbox+"A.k" || f.Revision != l.Revision {
			t.Errorf("forwarded to %s, reply %s", m.Subject, f.raw)
		}
		l = r.renew(l, 60000)
	}
}

// timed takes what says how much time is left off the headers of a forward, and checks
// that it is at most most, and not much less.
func timed(t *testing.T, m *nats.Msg, most time.Duration) nats.Header {
	t.Helper()
	left, err := strconv.ParseUint(m.Header.Get(deadlineHeader), 10, 64)
	if d := time.Duration(left) * time.Millisecond; err != nil || len(m.Header[deadlineHeader]) != 1 || d > most || d < most-time.Second*slowness {
		t.Errorf("%s is %q, want %v and a little less", deadlineHeader, m.Header[deadlineHeader], most)
	}
	header := maps.Clone(m.Header)
	delete(header, deadlineHeader)
	return header
}

// TestForwardDeadline: each owner that is asked is told what is left of the caller's time,
// by default and as the caller says, and less after an attempt that took some (F5).
func TestForwardDeadline(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	const took = 300 * time.Millisecond
	asked := make(chan *nats.Msg, 2)
	r.hold("A", func(m *nats.Msg) {
		asked <- m
		time.Sleep(took)
		r.handOver(l, "B")
		reject(m)
	})
	r.hold("B", func(m *nats.Msg) { asked <- m; m.Respond(nil) })
	r.want(kinds.Forwarded, "forward", request{Key: "k", Timeout: 20000})
	timed(t, <-asked, 20*time.Second)
	timed(t, <-asked, 20*time.Second-took)
	r.want(kinds.Forwarded, "forward", request{Key: "k", Timeout: 100 * slowness})
	timed(t, <-asked, 100*slowness*time.Millisecond)
}

// TestForwardHeaders: of the caller's headers only the trace context passes,
// and nothing of the owner's but the rejection is looked at (F1).
func TestForwardHeaders(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	got := make(chan *nats.Msg, 1)
	r.hold("A", func(m *nats.Msg) {
		got <- m
		m.RespondMsg(&nats.Msg{Data: []byte("ok"), Header: nats.Header{errorHeader: {"no"}, errorCodeHeader: {"500"}, "X-Mine": {"1"},
			"dagnats-lease-reject": {"stale"}, "Nats-Marker-Reason": {"MaxAge"}}})
	})
	fence := []string{fmt.Sprint(l.Revision)}
	for _, c := range []struct{ sent, want nats.Header }{
		{nil, nats.Header{fenceHeader: fence}},
		{nats.Header{fenceHeader: {"1"}, rejectHeader: {"stale"}, "X-Mine": {"1"}, "Nats-Msg-Id": {"7"}, "Authorization": {"secret"}, "Nats-TTL": {"1s"},
			"Nats-Expected-Stream": {"other"}, "dagnats-lease-fence": {"2"}, deadlineHeader: {"1"}, "Trace-Parent": {"not this one"}, "baggage": {"no"}}, nats.Header{fenceHeader: fence}},
		{nats.Header{"traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, "tracestate": {"a=b"}, "X-Mine": {"1"}},
			nats.Header{fenceHeader: fence, "traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, "tracestate": {"a=b"}}},
		// As OpenTelemetry's HeaderCarrier for Go writes them, and others.
		{nats.Header{"Traceparent": {"00-1"}, "Tracestate": {"a=b"}}, nats.Header{fenceHeader: fence, "Traceparent": {"00-1"}, "Tracestate": {"a=b"}}},
		{nats.Header{"TraceParent": {"00-1"}, "TRACESTATE": {"a=b", "c=d"}}, nats.Header{fenceHeader: fence, "TraceParent": {"00-1"}, "TRACESTATE": {"a=b", "c=d"}}},
	} {
		f := r.want(kinds.Forwarded, "forward", request{Key: "k", Payload: []byte("x")}, c.sent)
		if string(*f.Payload) != "ok" {
			t.Errorf("the owner's reply came back as %s", f.raw)
		}
		if diff := cmp.Diff(c.want, timed(t, <-got, 5*time.Second)); diff != "" {
			t.Errorf("headers at the owner: %s", diff)
		}
	}
}

// TestRejectionIsTheHeader: present is rejected, whatever its value and the
// body; absent is an answer, whatever the body (F3).
func TestRejectionIsTheHeader(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("k", "A", 60000)
	var answer atomic.Pointer[nats.Msg]
	r.hold("A", func(m *nats.Msg) { m.RespondMsg(answer.Load()) })
	for _, value := range []string{"stale", "", "no", "false"} {
		answer.Store(&nats.Msg{Data: []byte("body"), Header: nats.Header{rejectHeader: {value}}})
		r.want(kinds.OwnerRejected, "forward", request{Key: "k"})
	}
	for _, body := range []string{"", "stale", `{"error":"x","kind":"lost"}`} {
		answer.Store(&nats.Msg{Data: []byte(body), Header: nats.Header{"Dagnats-Lease-Rejected": {"stale"}}})
		if f := r.want(kinds.Forwarded, "forward", request{Key: "k"}); string(*f.Payload) != body {
			t.Errorf("%q came back as %s", body, f.raw)
		}
	}
}

// TestForwardPayloads arrive byte for byte, both ways, and so does nothing (P6).
func TestForwardPayloads(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.acquire("k", "A", 60000)
	var got inboxTap
	r.hold("A", func(m *nats.Msg) { got.add(m); m.Respond(m.Data) })
	for n, size := range []int{0, 1, 2, 3, 255, 256, 64 << 10, 700 << 10} {
		payload := noise(size)
		f := r.want(kinds.Forwarded, "forward", request{Key: "k", Payload: payload})
		if seen := got.all()[n].Data; !bytes.Equal(seen, payload) {
			t.Errorf("%d bytes reach the owner as other %d", size, len(seen))
		}
		if !bytes.Equal(*f.Payload, payload) {
			t.Errorf("%d bytes come back as other %d", size, len(*f.Payload))
		}
	}
	for _, body := range []string{`{"key":"k"}`, `{"key":"k","payload":""}`} {
		f := r.want(kinds.Forwarded, "forward", body)
		if !strings.Contains(f.raw, `"payload":""`) {
			t.Errorf("an empty reply is %s", f.raw)
		}
	}
}

// TestForwardAfterTheEnd: a holder that went on listening after its lease ended
// is not asked.
func TestForwardAfterTheEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 1000)
	var got inboxTap
	r.hold("A", func(m *nats.Msg) { got.add(m); m.Respond(nil) })
	r.want(kinds.Forwarded, "forward", request{Key: "k"})
	time.Sleep(time.Until(r.stored("k").Time.Add(time.Second)))
	f := r.want(kinds.NotHeld, "forward", request{Key: "k"})
	if f.Holder != "" {
		t.Errorf("names an owner although none was tried: %s", f.raw)
	}
	r.acquire("k", "B", 60000)
	if f := r.want(kinds.OwnerUnavailable, "forward", request{Key: "k"}); f.Holder != "B" || f.Revision <= l.Revision {
		t.Errorf("names %s %d", f.Holder, f.Revision)
	}
	if len(got.all()) != 1 {
		t.Errorf("the old holder saw %d requests", len(got.all()))
	}
}

// TestForwardAttemptsAreCounted by outcome.
func TestForwardAttemptsAreCounted(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	r.hold("ok", func(m *nats.Msg) { m.Respond(nil) })
	r.hold("stale", reject)
	r.hold("hung", func(*nats.Msg) {})
	r.hold("large", func(m *nats.Msg) { m.Respond(make([]byte, 800_000)) })
	for _, holder := range []string{"ok", "stale", "hung", "absent", "large"} {
		r.acquire(holder, holder, 60000)
		r.call("forward", request{Key: holder, Timeout: 300})
	}
	got := map[string]float64{}
	families, err := r.all[0].metrics.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "leased_forward_attempts_total" {
			for _, m := range f.GetMetric() {
				got[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
			}
		}
	}
	want := map[string]float64{"forwarded": 1, "rejected": 1, "timeout": 1, "no_responders": 1, "request_too_large": 0, "reply_too_large": 1, "error": 0}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("attempts by outcome: %s", diff)
	}
}
