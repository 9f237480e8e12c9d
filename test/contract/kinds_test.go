package contract

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// codes is the kind table of the contract: the code of every error kind.
var codes = map[kinds.Kind]string{
	"invalid": "400", "lost": "409", "unsupported": "501", "busy": "429", "over_quota": "429", "unavailable": "503", "unknown": "503", "internal": "500",
	"not_held": "404", "owner_unavailable": "502", "owner_rejected": "409", "owner_timeout": "504", "request_too_large": "413", "reply_too_large": "413",
}

// answerable is the contract's word on what each call can answer.
var answerable = map[string][]kinds.Kind{
	"acquire": {"granted", "denied", "invalid", "unsupported", "busy", "unavailable", "unknown", "internal", "over_quota"},
	"renew":   {"renewed", "lost", "invalid", "unsupported", "busy", "unavailable", "unknown", "internal"},
	"release": {"released", "lost", "invalid", "unsupported", "busy", "unavailable", "unknown", "internal"},
	"owner":   {"held", "free", "invalid", "unsupported", "busy", "unavailable", "internal"},
	"list":    {"listed", "invalid", "unsupported", "busy", "unavailable", "internal"},
	"evict":   {"evicted", "lost", "invalid", "unsupported", "busy", "unavailable", "unknown", "internal"},
	// Counted lease by lease.
	"renew_many": {"renewed", "lost", "invalid", "unsupported", "busy", "unavailable", "unknown", "internal", "reply_too_large"},
	"forward":    {"forwarded", "invalid", "unsupported", "busy", "unavailable", "internal", "not_held", "owner_unavailable", "owner_rejected", "owner_timeout", "request_too_large", "reply_too_large"},
}

var calls = []string{"acquire", "renew", "release", "owner", "forward", "list", "evict", "renew_many"}

// good is a valid request of every call about key, with that revision.
func good(key string, revision uint64) map[string]request {
	return map[string]request{
		"acquire":    {Key: key, Holder: "A", TTL: 60000},
		"renew":      {Key: key, Holder: "A", TTL: 60000, Revision: revision},
		"release":    {Key: key, Holder: "A", Revision: revision},
		"owner":      {Key: key},
		"forward":    {Key: key, Timeout: 1000},
		"evict":      {Key: key, Revision: revision},
		"renew_many": {Holder: "A", TTL: 60000, Leases: []pair{{key, revision}}},
		"list":       {Holder: "A"},
	}
}

// TestEveryKindOfEveryCall brings every call to every kind that the contract
// lets it answer, no_reply included. The rig checks body, headers and counters
// of each; what is checked here is that nothing is missing. A panic of a
// handler is not among the ways to internal, as no request is known that causes
// one: TestPanicInAHandler of the root package makes handlers that do.
func TestEveryKindOfEveryCall(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	produced := tally{}
	t.Run("ways", func(t *testing.T) {
		for name, way := range map[string]func(*testing.T) *rig{
			"answers": answers, "invalid": invalid, "lost": lost, "no reply": noReply, "unsupported": unsupported, "busy": busy,
			"no connection": noConnection, "misconfigured": misconfigured, "no answer": noAnswer, "unknown": unknown, "foreign record": foreign, "renewals too large": renewalsTooLarge, "over quota": overQuota,
			"stopping": stopping, "forward": forwardKinds, "request too large": requestTooLarge,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				r := way(t)
				mu.Lock()
				defer mu.Unlock()
				for call, counts := range r.seen {
					for k, n := range counts {
						produced.add(call, k, n)
					}
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	for _, call := range calls {
		for _, k := range append(slices.Clone(answerable[call]), kinds.NoReply) {
			if call == "list" && k == kinds.Internal {
				continue // it reads no record and waits for nobody
			}
			if produced[call][k] == 0 {
				t.Errorf("no test brings %s to %s", call, k)
			}
		}
	}
}

func renewalsTooLarge(t *testing.T) *rig {
	r := newRig(t, setup{nats: []testnats.Option{payloadOf(16 << 10)}})
	r.want(kinds.ReplyTooLarge, "renew_many", r.acquireMany(100, "A", "k-%d", ""))
	return r
}

func answers(t *testing.T) *rig {
	r := newRig(t, setup{})
	before := time.Now().Add(-time.Second) // the service's estimate of the server's clock may lag behind
	got := r.acquire("k", "A", 60000)
	if got.Key != "k" || got.Holder != "A" || got.TTL != 60000 || !*got.Held || got.Left > 60000 || got.Left < 55000 {
		t.Errorf("granted: %s", got.raw)
	}
	if got.AcquiredAt.Before(before) || got.AcquiredAt.After(time.Now()) || got.ExpiresAt.Sub(got.AcquiredAt) != time.Minute {
		t.Errorf("granted at %s until %s, asked between %s and now", got.AcquiredAt, got.ExpiresAt, before)
	}
	denied := r.want(kinds.Denied, "acquire", request{Key: "k", Holder: "B", TTL: 1000})
	if denied.lease() != got.lease() || !*denied.Held {
		t.Errorf("denied shows %s, the lease is %s", denied.raw, got.raw)
	}
	held := r.owner("k")
	if held.lease() != got.lease() || held.Granted != nil {
		t.Errorf("owner shows %s, the lease is %s", held.raw, got.raw)
	}
	renewed := r.renew(got, 30000)
	if renewed.Revision <= got.Revision || renewed.TTL != 30000 || !renewed.AcquiredAt.Equal(got.AcquiredAt) || !*renewed.Held {
		t.Errorf("renewed: %s after %s", renewed.raw, got.raw)
	}
	if held := r.owner("k"); held.lease() != renewed.lease() {
		t.Errorf("owner shows %s after a renewal to %s", held.raw, renewed.raw)
	}
	r.hold("A", func(m *nats.Msg) { m.Respond([]byte("pong")) })
	f := r.want(kinds.Forwarded, "forward", request{Key: "k", Payload: []byte("ping")})
	if f.Holder != "A" || f.Revision != renewed.Revision || string(*f.Payload) != "pong" || f.Attempts != 1 {
		t.Errorf("forwarded: %s", f.raw)
	}
	freed := r.release(renewed)
	if want := fmt.Sprintf(`{"released":true,"held":false,"key":"k","holder":"A","revision":%d}`, renewed.Revision); freed.raw != want {
		t.Errorf("released: %s, want %s", freed.raw, want)
	}
	if free := r.owner("k"); free.raw != `{"held":false,"key":"k"}` {
		t.Errorf("free: %s", free.raw)
	}

	a, b := r.acquire("a", "A", 60000), r.acquire("b", "A", 60000)
	many := r.want(kinds.Renewed, "renew_many", request{Holder: "A", TTL: 30000, Leases: []pair{{"b", b.Revision}, {"a", a.Revision}}})
	renewedB, renewedA := (*many.Leases)[0], (*many.Leases)[1]
	if renewedB.Key != "b" || renewedA.Key != "a" || renewedB.Revision <= b.Revision || renewedA.Revision <= a.Revision || renewedA.TTL != 30000 || !renewedA.AcquiredAt.Equal(a.AcquiredAt) {
		t.Errorf("renewed: %s", many.raw)
	}
	list := r.want(kinds.Listed, "list", `{}`)
	if n := len(*list.Leases); n != 2 || (*list.Leases)[0].lease() != renewedA.lease() || (*list.Leases)[1].lease() != renewedB.lease() {
		t.Errorf("listed: %s", list.raw)
	}
	evicted := r.want(kinds.Evicted, "evict", request{Key: "a", Revision: renewedA.Revision})
	if want := fmt.Sprintf(`{"released":true,"held":false,"key":"a","holder":"A","revision":%d}`, renewedA.Revision); evicted.raw != want {
		t.Errorf("evicted: %s, want %s", evicted.raw, want)
	}
	return r
}

// hold subscribes a holder to its inbox.
func (r *rig) hold(holder string, answer func(*nats.Msg)) *nats.Conn {
	r.t.Helper()
	nc := r.connect(nats.Name(holder))
	if _, err := nc.Subscribe(inbox+holder+".>", answer); err != nil {
		r.t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		r.t.Fatal(err)
	}
	return nc
}

func invalid(t *testing.T) *rig {
	r := newRig(t, setup{})
	before := r.stream().LastSeq
	for _, call := range calls {
		got := r.want(kinds.Invalid, call, `{"KEY":"k"}`)
		if !strings.Contains(got.Error, `"KEY"`) {
			t.Errorf("%s: the error does not name the member: %s", call, got.Error)
		}
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("invalid requests moved the stream from %d to %d", before, after)
	}
	return r
}

func lost(t *testing.T) *rig {
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	before := r.stream().LastSeq
	for _, q := range []request{
		{Key: "k", Holder: "B", Revision: l.Revision, TTL: 1000},     // another holder
		{Key: "k", Holder: "A", Revision: l.Revision - 1, TTL: 1000}, // another revision
		{Key: "k", Holder: "A", Revision: l.Revision + 1, TTL: 1000},
		{Key: "k", Holder: "A", Revision: 1<<64 - 1, TTL: 1000},
		{Key: "never", Holder: "A", Revision: l.Revision, TTL: 1000}, // a free key
	} {
		r.want(kinds.Lost, "renew", q)
		r.want(kinds.Lost, "release", q)
		r.want(kinds.Lost, "renew_many", request{Holder: q.Holder, TTL: 1000, Leases: []pair{{q.Key, q.Revision}}})
		if q.Revision != l.Revision || q.Key != "k" {
			r.want(kinds.Lost, "evict", request{Key: q.Key, Revision: q.Revision})
		}
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("lost calls moved the stream from %d to %d", before, after)
	}
	if now := r.owner("k"); now.lease() != l.lease() {
		t.Errorf("lost calls changed the lease: %s", now.raw)
	}
	r.release(l)
	r.want(kinds.Lost, "renew", request{Key: "k", Holder: "A", Revision: l.Revision, TTL: 1000})
	r.want(kinds.Lost, "release", request{Key: "k", Holder: "A", Revision: l.Revision})
	return r
}

// noReply: a request that nobody can hear the answer of is not carried out.
func noReply(t *testing.T) *rig {
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	asked := make(chan *nats.Msg, 1)
	r.hold("A", func(m *nats.Msg) { asked <- m })
	before := r.stream().LastSeq
	for call, q := range good("k", l.Revision) {
		if call == "acquire" {
			q.Key = "free"
		}
		for _, body := range [][]byte{raw(q), []byte("{"), nil} {
			if err := r.nc.Publish(api+call, body); err != nil {
				t.Fatal(err)
			}
			r.mu.Lock()
			r.seen.add(call, kinds.NoReply, 1)
			r.mu.Unlock()
		}
	}
	testnats.Eventually(t, 5*time.Second, func() bool { return cmp.Equal(r.counted(), r.seen) }, "no_reply is not counted")
	if after := r.stream().LastSeq; after != before {
		t.Errorf("requests without a reply subject moved the stream from %d to %d", before, after)
	}
	if now := r.owner("k"); now.lease() != l.lease() {
		t.Errorf("requests without a reply subject changed the lease: %s", now.raw)
	}
	if r.owner("free").kind != kinds.Free {
		t.Error("an acquire without a reply subject was granted")
	}
	select {
	case m := <-asked:
		t.Errorf("a forward without a reply subject reached the owner: %q", m.Data)
	default:
	}
	return r
}

// unsupported stands before every other judgement, and discovery goes on.
func unsupported(t *testing.T) *rig {
	r := newRig(t, setup{nats: []testnats.Option{testnats.WithoutJetStream}, unready: true})
	testnats.Eventually(t, 10*time.Second, func() bool { return check(r.all[0], "registered") }, "not registered")
	for call, q := range good("k", 1) {
		r.want(kinds.Unsupported, call, q)
		r.want(kinds.Unsupported, call, "garbage")
	}
	if n := len(r.stats(1)); n != len(leased.Endpoints()) {
		t.Errorf("$SRV.STATS shows %d endpoints", n)
	}
	if check(r.all[0], "supported") || check(r.all[0], "bucket") {
		t.Errorf("ready without JetStream: %+v", r.all[0].Ready())
	}
	return r
}

// check tells whether one line of an instance's readiness is OK.
func check(i *instance, name string) bool {
	for _, c := range i.Ready() {
		if c.Name == name {
			return c.OK
		}
	}
	return false
}

// busy stands before invalid. Forwards have a limit of their own, so neither
// kind of call can use up the other's.
func busy(t *testing.T) *rig {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, inFlight: 2, forwards: 2, dial: storeVia(relay)})
	l := r.acquire("k", "A", 60000)
	asked := make(chan *nats.Msg, 10)
	r.hold("A", func(m *nats.Msg) { asked <- m })
	r.acquire("other", "B", 60000)
	r.hold("B", func(m *nats.Msg) { asked <- m })

	// Two forwards, to two holders, fill their limit.
	var wg sync.WaitGroup
	for _, key := range []string{"k", "other"} {
		wg.Go(func() {
			if got, err := r.ask("forward", request{Key: key, Timeout: 20000}); err != nil || got.kind != kinds.Forwarded {
				t.Errorf("a forward that waited: %+v, %v", got, err)
			}
		})
	}
	waiting := []*nats.Msg{<-asked, <-asked}
	atOnce := func(call string, body any) {
		t.Helper()
		if got := r.want(kinds.Busy, call, body); got.took() > time.Second {
			t.Errorf("%s: busy came after %v", call, got.took())
		}
	}
	atOnce("forward", request{Key: "k"})
	atOnce("forward", "garbage")
	r.owner("k")
	l = r.renew(l, 60000)

	// Two calls that wait for JetStream fill the other one.
	relay.Set(testnats.Stall, testnats.Down)
	for _, holder := range []string{"A", "B"} {
		wg.Go(func() {
			if _, err := r.ask("acquire", request{Key: "new", Holder: holder, TTL: 60000}); err != nil {
				t.Error(err)
			}
		})
	}
	testnats.Eventually(t, 5*time.Second, func() bool { return r.all[0].metrics.Endpoint("acquire").Snapshot().InFlight == 2 }, "two acquires in flight")
	for call, q := range good("k", 1) {
		if call != "forward" {
			atOnce(call, q)
			atOnce(call, "garbage")
		}
	}
	relay.Set(testnats.Pass)
	for _, m := range waiting {
		m.Respond(nil)
	}
	wg.Wait()
	r.release(l) // the places are free again
	return r
}

// storeVia leads the connections to the bucket through relay.
func storeVia(relay *testnats.Link) func(int, string) string {
	return func(_ int, connection string) string {
		if connection == "store" {
			return relay.URL()
		}
		return ""
	}
}

// noConnection: nothing is written, nothing is sent late.
func noConnection(t *testing.T) *rig {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, dial: storeVia(relay)})
	l := r.acquire("k", "A", 60000)
	before := r.stream().LastSeq
	relay.Set(testnats.Cut)
	for call, q := range good("k", l.Revision) {
		if call == "acquire" {
			q.Key = "new"
		}
		// The last tries may still find the connection that is going away.
		testnats.Eventually(t, 10*time.Second, func() bool { return r.call(call, q).kind == kinds.Unavailable }, call+" is not unavailable")
	}
	relay.Set(testnats.Pass)
	r.ready(r.all[0])
	if after := r.stream().LastSeq; after != before {
		t.Errorf("unavailable calls moved the stream from %d to %d", before, after)
	}
	r.release(l)
	return r
}

// misconfigured: the sentence names the field, and the service comes back.
func misconfigured(t *testing.T) *rig {
	r := newRig(t, setup{})
	l := r.acquire("k", "A", 60000)
	ctx := t.Context()
	s, err := r.js.Stream(ctx, bucketStream)
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.MaxMsgsPerSubject = 5
	if _, err := r.js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return !check(r.all[0], "bucket") }, "the check does not see a history of 5")
	for call, q := range good("k", l.Revision) {
		if got := r.want(kinds.Unavailable, call, q); !strings.Contains(got.Error, "max_msgs_per_subject") {
			t.Errorf("%s: the sentence does not name the field: %s", call, got.Error)
		}
	}
	cfg.MaxMsgsPerSubject = 1
	if _, err := r.js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	r.ready(r.all[0])
	r.release(l)
	return r
}

// noAnswer: JetStream is silent and nothing was written.
func noAnswer(t *testing.T) *rig {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, dial: storeVia(relay)})
	r.acquire("k", "A", 60000)
	relay.Set(testnats.Blackhole, testnats.Down)
	var wg sync.WaitGroup
	for call, q := range map[string]request{
		"owner":   {Key: "k"},
		"acquire": {Key: "k", Holder: "B", TTL: 1000}, // needs a read: the view knows a lease
		"renew":   {Key: "k", Holder: "A", TTL: 1000, Revision: 1},
		"release": {Key: "k", Holder: "A", Revision: 1},
		"forward": {Key: "k", Timeout: 30000},
		"evict":   {Key: "k", Revision: 1},

		"renew_many": {Holder: "A", TTL: 1000, Leases: []pair{{"k", 1}}},
	} {
		wg.Go(func() {
			got, err := r.ask(call, q)
			switch {
			case err != nil:
				t.Error(err)
			case got.kind != kinds.Unavailable || got.took() > 6*time.Second:
				t.Errorf("%s without an answer from JetStream: %s after %v: %s", call, got.kind, got.took(), got.raw)
			}
		})
	}
	wg.Wait()
	relay.Set(testnats.Pass)
	return r
}

// unknown: the write arrives and its verdict does not. The same call again
// tells what became of it.
func unknown(t *testing.T) *rig {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, dial: storeVia(relay)})
	renewed, released := r.acquire("renewed", "A", 60000), r.acquire("released", "A", 60000)
	evicted, many := r.acquire("evicted", "A", 60000), r.acquire("many", "A", 60000)
	relay.Set(testnats.Blackhole, testnats.Down)
	var wg sync.WaitGroup
	for call, q := range map[string]request{
		"acquire": {Key: "acquired", Holder: "A", TTL: 60000},
		"renew":   {Key: "renewed", Holder: "A", TTL: 60000, Revision: renewed.Revision},
		"release": {Key: "released", Holder: "A", Revision: released.Revision},

		"renew_many": {Holder: "A", TTL: 60000, Leases: []pair{{"many", many.Revision}}},
	} {
		wg.Go(func() {
			got, err := r.ask(call, q)
			switch {
			case err != nil:
				t.Error(err)
			case got.kind != kinds.Unknown || got.took() > 6*time.Second:
				t.Errorf("%s without a verdict: %s after %v: %s", call, got.kind, got.took(), got.raw)
			}
		})
	}
	wg.Wait()
	relay.Set(testnats.Pass)
	r.ready(r.all[0])
	stored := r.stored("acquired")
	if stored == nil {
		t.Fatal("the acquire did not arrive; the test was to lose its ack only")
	}
	if again := r.acquire("acquired", "A", 60000); again.Revision != stored.Sequence {
		t.Errorf("acquire again gives revision %d, stored is %d", again.Revision, stored.Sequence)
	}
	if now := r.owner("renewed"); now.Holder != "A" || !now.AcquiredAt.Equal(renewed.AcquiredAt) || now.Revision <= renewed.Revision {
		t.Errorf("owner after a renewal without a verdict: %s", now.raw)
	}
	if now := r.owner("many"); now.Holder != "A" || !now.AcquiredAt.Equal(many.AcquiredAt) || now.Revision <= many.Revision {
		t.Errorf("owner after a renewal without a verdict: %s", now.raw)
	}
	r.want(kinds.Lost, "release", request{Key: "released", Holder: "A", Revision: released.Revision})

	// evict reads before it writes, so it is the verdict alone that is to be lost.
	relay.DropNext(testnats.PubAck(bucketStream), testnats.Blackhole)
	if got := r.want(kinds.Unknown, "evict", request{Key: "evicted", Revision: evicted.Revision}); got.took() > 6*time.Second {
		t.Errorf("evict without a verdict: after %v", got.took())
	}
	relay.Set(testnats.Pass)
	r.ready(r.all[0])
	if got := r.owner("evicted"); got.kind != kinds.Free {
		t.Errorf("owner after an eviction without a verdict: %s", got.raw)
	}
	return r
}

// foreign: a record that somebody else wrote, and one of ours made unreadable.
func foreign(t *testing.T) *rig {
	r := newRig(t, setup{faulty: true})
	l := r.acquire("damaged", "A", 60000)
	ctx := t.Context()
	if _, err := r.js.Publish(ctx, bucketSubject+"put", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	m := r.stored("damaged")
	damaged := nats.NewMsg(bucketSubject + "damaged")
	damaged.Header.Set(eventHeader, m.Header.Get(eventHeader))
	damaged.Data = m.Data[:len(m.Data)-5]
	if _, err := r.js.PublishMsg(ctx, damaged); err != nil {
		t.Fatal(err)
	}
	// list shows what the instance has seen, which is a moment behind the write.
	testnats.Eventually(t, 5*time.Second, func() bool { return len(*r.call("list", good("damaged", l.Revision)["list"]).Leases) == 0 }, "the instance does not see the foreign records")
	before := r.stream().LastSeq
	for _, key := range []string{"put", "damaged"} {
		for _, revision := range []uint64{l.Revision, r.stored(key).Sequence} {
			for call, q := range good(key, revision) {
				switch call {
				case "evict": // it is the way out, below
				case "list":
					if got := r.call(call, q); len(*got.Leases) != 0 {
						t.Errorf("foreign records are listed: %s", got.raw)
					}
				default:
					r.want(kinds.Internal, call, q)
				}
			}
		}
	}
	if after := r.stream().LastSeq; after != before {
		t.Errorf("calls on foreign records moved the stream from %d to %d", before, after)
	}
	// What `nats kv del` leaves is read as free.
	kv, err := r.js.KeyValue(ctx, "leases")
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Delete(ctx, "put"); err != nil {
		t.Fatal(err)
	}
	if got := r.owner("put"); got.kind != kinds.Free {
		t.Errorf("owner of a deleted key: %s", got.raw)
	}
	r.acquire("put", "A", 60000)
	r.want(kinds.Evicted, "evict", request{Key: "damaged", Revision: r.stored("damaged").Sequence})
	r.acquire("damaged", "B", 60000)
	return r
}

// stopping: a call that outlasts the time to leave is answered internal, and
// so is one that the service ends in the middle of a read.
func stopping(t *testing.T) *rig {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, faulty: true, uncounted: true, dial: storeVia(relay)})
	l := r.acquire("k", "A", 60000)
	asked := make(chan *nats.Msg, 1)
	r.hold("A", func(m *nats.Msg) { asked <- m })
	var wg sync.WaitGroup
	wg.Go(func() {
		got, err := r.ask("forward", request{Key: "k", Timeout: 30000})
		if err != nil || got.kind != kinds.Internal || got.Holder != "A" || got.Revision != l.Revision {
			t.Errorf("a forward in mid-call: %+v, %v", got, err)
		}
	})
	<-asked
	relay.Set(testnats.Stall, testnats.Down)
	i := r.all[0]
	for _, call := range []string{"owner", "evict"} {
		wg.Go(func() {
			got, err := r.ask(call, request{Key: "k", Revision: 1})
			if err != nil || got.kind != kinds.Internal {
				t.Errorf("%s in mid-call: %v, %v", call, got, err)
			}
		})
		testnats.Eventually(t, 5*time.Second, func() bool { return i.metrics.Endpoint(call).Snapshot().InFlight == 1 }, call+" in flight")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := i.Drain(ctx); err == nil {
		t.Error("Drain does not say that calls had to be broken off")
	}
	wg.Wait()
	i.gone = true
	i.close()
	return r
}

// forwardKinds are the errors of forward that need an owner of some kind.
func forwardKinds(t *testing.T) *rig {
	r := newRig(t, setup{})
	named := func(got *reply, l *reply) {
		t.Helper()
		if got.Holder != l.Holder || got.Revision != l.Revision {
			t.Errorf("%s names %s %d, tried was %s %d", got.kind, got.Holder, got.Revision, l.Holder, l.Revision)
		}
	}
	q := request{Key: "k", Timeout: 2000, Payload: []byte("x")}
	free := r.want(kinds.NotHeld, "forward", q)
	if strings.Contains(free.raw, `"holder"`) || strings.Contains(free.raw, `"revision"`) {
		t.Errorf("not_held names an owner although none was tried: %s", free.raw)
	}
	l := r.acquire("k", "A", 60000)
	named(r.want(kinds.OwnerUnavailable, "forward", q), l)
	r.release(l)

	l = r.acquire("k", "hung", 60000)
	r.hold("hung", func(*nats.Msg) {})
	named(r.want(kinds.OwnerTimeout, "forward", q), l)
	r.release(l)

	l = r.acquire("k", "stale", 60000)
	r.hold("stale", reject)
	named(r.want(kinds.OwnerRejected, "forward", q), l)
	r.release(l)

	l = r.acquire("k", "large", 60000)
	r.hold("large", func(m *nats.Msg) { m.Respond(make([]byte, 800_000)) })
	named(r.want(kinds.ReplyTooLarge, "forward", q), l)
	return r
}

// overQuota: one more lease than may be, with its first request and after a wait.
func overQuota(t *testing.T) *rig {
	r := newRig(t, setup{leases: 1})
	l := r.acquire("k", "A", 60000)
	r.want(kinds.OverQuota, "acquire", request{Key: "other", Holder: "A", TTL: 60000})
	r.want(kinds.OverQuota, "acquire", `{"key":"other","holder":"B","ttl_ms":60000,"wait_ms":20000}`)
	r.renew(l, 60000)
	return r
}

// reject answers as the contract asks of a holder whose tenure is another.
func reject(m *nats.Msg) {
	m.RespondMsg(&nats.Msg{Header: nats.Header{rejectHeader: {"stale"}}})
}

// requestTooLarge: the service's connection to the owner takes less than the
// caller's to the service.
func requestTooLarge(t *testing.T) *rig {
	r, l := smallHop(t)
	got := r.want(kinds.RequestTooLarge, "forward", request{Key: "k", Payload: make([]byte, 64<<10)})
	if got.Holder != "A" || got.Revision != l.Revision {
		t.Errorf("request_too_large names no owner: %s", got.raw)
	}
	return r
}

// TestOrderOfJudgement: unsupported before busy before invalid before the rest.
// The first two are shown by the ways above, where garbage is answered
// unsupported and busy; here an invalid request meets a bucket that is not sound (P8).
func TestOrderOfJudgement(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	cfg := jetstream.StreamConfig{}
	s, err := r.js.Stream(t.Context(), bucketStream)
	if err != nil {
		t.Fatal(err)
	}
	cfg = s.CachedInfo().Config
	cfg.MaxAge = time.Hour
	if _, err := r.js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return !check(r.all[0], "bucket") }, "the check does not see a max_age")
	for call, q := range good("k", 1) {
		r.want(kinds.Unavailable, call, q)
		r.want(kinds.Invalid, call, "garbage")
	}
}
