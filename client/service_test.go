package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// TestService runs this package against the real service.
func TestService(t *testing.T) {
	s := testnats.Leased(t, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+t.TempDir())
	for name, test := range map[string]func(*testing.T, string){
		"calls":                    testCalls,
		"verdicts":                 testVerdicts,
		"hold":                     testHold,
		"a lost reply":             testLostReply,
		"silence":                  testSilence,
		"a paused holder":          testPaused,
		"election":                 testElection,
		"forward":                  testForward,
		"an owner that is behind":  testOwnerBehind,
		"an evict":                 testEvict,
		"shards":                   testShards,
		"a late write":             testLateWrite,
		"giving up leaves nothing": testGivingUp,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, s.NATS())
		})
	}
}

// connect makes a Client with a connection of its own.
func connect(t testing.TB, url string, o ...nats.Option) *Client {
	t.Helper()
	return New(testnats.Connect(t, url, o...), Options{Timeout: 3 * time.Second})
}

// key is one that nobody else uses.
func key(t testing.TB) string { return NewHolder("t") }

func testCalls(t *testing.T, url string) {
	c, ctx, k := connect(t, url), t.Context(), key(t)
	must := func(want kinds.Kind) func(Result, error) Result {
		return func(r Result, err error) Result {
			t.Helper()
			if err != nil || r.Kind != want {
				t.Fatalf("%v, %v; want %s", r.Kind, err, want)
			}
			return r
		}
	}
	fails := func(want kinds.Kind, err error) {
		t.Helper()
		if kinds.Of(err) != want {
			t.Errorf("%v; want %s", err, want)
		}
	}
	must(kinds.Free)(c.Owner(ctx, k))
	a := must(kinds.Granted)(c.Acquire(ctx, AcquireRequest{Key: k, Holder: "me", TTL: 5 * time.Second, Meta: "here"}))
	if a.Meta != "here" || a.TTL != 5*time.Second || a.Left <= 4*time.Second || a.Left > a.TTL || a.AcquiredAt.IsZero() {
		t.Errorf("%+v", a.Lease)
	}
	again := must(kinds.Granted)(c.Acquire(ctx, AcquireRequest{Key: k, Holder: "me", TTL: 50 * time.Second}))
	if again.Revision != a.Revision || again.TTL != a.TTL {
		t.Errorf("an idempotent acquire returned %+v", again.Lease)
	}
	d := must(kinds.Denied)(c.Acquire(ctx, AcquireRequest{Key: k, Holder: "other", TTL: 5 * time.Second}))
	if d.Holder != "me" || d.Revision != a.Revision || d.Meta != "here" {
		t.Errorf("%+v", d.Lease)
	}
	a.TTL = 20 * time.Second
	r := must(kinds.Renewed)(c.Renew(ctx, a.Lease))
	if !r.AcquiredAt.Equal(a.AcquiredAt) || r.TTL != a.TTL {
		t.Errorf("%+v", r.Lease)
	}
	if o := must(kinds.Held)(c.Owner(ctx, k)); o.Revision != r.Revision || o.Holder != "me" {
		t.Errorf("%+v", o.Lease)
	}
	_, err := c.Renew(ctx, a.Lease)
	fails(kinds.Lost, err)
	_, err = c.Release(ctx, a.Lease)
	fails(kinds.Lost, err)
	_, err = c.Evict(ctx, k, a.Revision)
	fails(kinds.Lost, err)
	_, err = c.Acquire(ctx, AcquireRequest{Key: "not a key", Holder: "me", TTL: time.Second})
	fails(kinds.Invalid, err)
	_, err = c.Acquire(ctx, AcquireRequest{Key: k, Holder: "me", TTL: 1500 * time.Millisecond})
	fails(kinds.Invalid, err)
	must(kinds.Released)(c.Release(ctx, r.Lease))

	var many []Lease
	for i := range 5 {
		m := must(kinds.Granted)(c.Acquire(ctx, AcquireRequest{Key: fmt.Sprint(k, "-", i), Holder: "many", TTL: 20 * time.Second}))
		many = append(many, m.Lease)
	}
	many[3].Revision++
	out, err := c.RenewMany(ctx, "many", 30*time.Second, many)
	if err != nil || len(out) != 5 {
		t.Fatal(out, err)
	}
	for i, o := range out {
		if i == 3 {
			fails(kinds.Lost, o.Err)
		} else if o.Err != nil || o.Revision <= many[i].Revision || o.TTL != 30*time.Second || o.Key != many[i].Key {
			t.Errorf("%d: %+v, %v", i, o.Lease, o.Err)
		}
	}
	testnats.Eventually(t, 5*time.Second, func() bool {
		var found []string
		for r := (ListRequest{Prefix: k + "-", Holder: "many", Limit: 2}); ; {
			page, next, err := c.List(ctx, r)
			if err != nil || len(page) > 2 {
				t.Fatal(page, err)
			}
			for _, l := range page {
				found = append(found, l.Key)
			}
			if next == "" {
				break
			}
			r.After = next
		}
		return len(found) == 5
	}, "all leases to be listed")
	for _, l := range many {
		o := must(kinds.Held)(c.Owner(ctx, l.Key))
		must(kinds.Evicted)(c.Evict(ctx, l.Key, o.Revision))
	}
	_, err = c.Forward(ctx, ForwardRequest{Key: k, Timeout: time.Second})
	fails(kinds.NotHeld, err)
}

// testVerdicts: what is known when no answer of the service comes.
func testVerdicts(t *testing.T, url string) {
	nc := testnats.Connect(t, url)
	ask := func(prefix string) error {
		_, err := New(nc, Options{Prefix: prefix, Timeout: 200 * time.Millisecond}).Owner(t.Context(), "k")
		return err
	}
	if err := ask("nobody"); kinds.Of(err) != kinds.Unavailable || !errors.Is(err, nats.ErrNoResponders) || mayBeApplied(err) {
		t.Error("no responders:", err)
	}
	if _, err := nc.Subscribe("silent.owner", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	if err := ask("silent"); kinds.Of(err) != kinds.Unknown || !errors.Is(err, context.DeadlineExceeded) || !mayBeApplied(err) {
		t.Error("no reply:", err)
	}
	if _, err := nc.Subscribe("empty.owner", func(m *nats.Msg) { _ = m.Respond(nil) }); err != nil {
		t.Fatal(err)
	}
	if err := ask("empty"); kinds.Of(err) != kinds.Unknown {
		t.Error("an empty reply:", err)
	}
	if _, err := nc.Subscribe("twice.owner", func(m *nats.Msg) {
		var q struct{ Key string }
		_ = json.Unmarshal(m.Data, &q)
		for _, holder := range []string{"first", "second"} {
			_ = m.Respond(fmt.Appendf(nil, `{"held":true,"key":%q,"holder":%q,"revision":1}`, q.Key, holder))
		}
	}); err != nil {
		t.Fatal(err)
	}
	twice := New(nc, Options{Prefix: "twice"})
	for i := range 100 {
		if r, err := twice.Owner(t.Context(), fmt.Sprint("k", i)); err != nil || r.Holder != "first" {
			t.Error("two replies:", r, err)
		}
	}
	big := strings.Repeat("x", 2<<20)
	if _, err := New(nc, Options{}).Owner(t.Context(), big); kinds.Of(err) != kinds.Unavailable || !errors.Is(err, nats.ErrMaxPayload) {
		t.Error("too big to send:", err)
	}
	nc.Close()
	if err := ask("api.leases"); kinds.Of(err) != kinds.Unavailable || mayBeApplied(err) {
		t.Error("closed:", err)
	}
}

func testHold(t *testing.T, url string) {
	a, b, k := connect(t, url), connect(t, url), key(t)
	h, err := a.Hold(t.Context(), k, HoldOptions{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Hold(t.Context(), k, HoldOptions{NoWait: true}); err == nil || !strings.Contains(err.Error(), h.Holder()) {
		t.Error(err)
	}
	granted := make(chan *Hold, 1)
	go func() {
		h, err := b.Hold(t.Context(), k, HoldOptions{TTL: time.Second, Holder: NewHolder("b")})
		if err != nil {
			t.Error(err)
		}
		granted <- h
	}()
	select {
	case <-h.Context().Done():
		t.Fatal(context.Cause(h.Context()))
	case <-granted:
		t.Fatal("two holders")
	case <-time.After(4 * time.Second):
	}
	if h.Revision() <= h.Tenure() || time.Until(h.Deadline()) < 300*time.Millisecond {
		t.Error(h.Revision(), h.Tenure(), time.Until(h.Deadline()))
	}
	if err := h.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	released := time.Now()
	next := <-granted
	if took := time.Since(released); took > time.Second {
		t.Errorf("%v from the release to the next holder", took)
	}
	if next.Tenure() <= h.Revision() {
		t.Error("the fence did not grow")
	}
	if err := next.Resign(t.Context()); err != nil {
		t.Error(err)
	}
}

// testLostReply drops exactly the reply of a renewal on its way to the holder.
func testLostReply(t *testing.T, url string) {
	link := testnats.Relay(t, url)
	c, k := connect(t, link.URL()), key(t)
	h, err := c.Hold(t.Context(), k, HoldOptions{TTL: 3 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	first := h.Revision()
	dropped := link.DropNext(testnats.Containing(k, `"granted":true`), testnats.Pass)
	testnats.Eventually(t, 5*time.Second, func() bool { return h.Revision() != first }, "the renewal")
	select {
	case <-dropped:
	default:
		t.Error("no reply was dropped")
	}
	select {
	case <-h.Context().Done():
		t.Error(context.Cause(h.Context()))
	case <-time.After(5 * time.Second):
	}
	if err := h.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	if r, err := c.Owner(t.Context(), k); err != nil || r.Kind != kinds.Free {
		t.Error(r, err)
	}
}

// testSilence: the network of the holder goes silent, stalls or breaks. Its Context
// ends before the next holder is granted the key, and that is soon after the end.
func testSilence(t *testing.T, url string) {
	for _, mode := range []testnats.Mode{testnats.Blackhole, testnats.Stall, testnats.Cut} {
		link := testnats.Relay(t, url)
		a, b, k := connect(t, link.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond)), connect(t, url), key(t)
		h, err := a.Hold(t.Context(), k, HoldOptions{TTL: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		type end struct {
			at    time.Time
			cause error
		}
		ended := make(chan end, 1)
		context.AfterFunc(h.Context(), func() { ended <- end{time.Now(), context.Cause(h.Context())} })
		link.Set(mode)
		next, err := b.Hold(t.Context(), k, HoldOptions{TTL: 20 * time.Second}) // not lost on a busy machine
		granted := time.Now()
		if err != nil {
			t.Fatal(err)
		}
		e := <-ended
		if !e.at.Before(granted) || kinds.Of(e.cause) != kinds.Lost {
			t.Errorf("mode %v: ended %v after the next grant, cause %v", mode, e.at.Sub(granted), e.cause)
		}
		if late := granted.Sub(h.Deadline()); late < 0 || late > 1500*time.Millisecond {
			t.Errorf("mode %v: granted %v after the deadline", mode, late)
		}
		link.Set(testnats.Pass)
		if h.Check() == nil || h.Context().Err() == nil {
			t.Error("revived")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_ = h.Resign(ctx)
		cancel()
		if err := next.Check(); err != nil {
			t.Error("the late release hurt the next holder:", err)
		}
		if err := next.Resign(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// TestPausedHolder is the child of testPaused: it holds a lease and says so line
// by line as long as Check allows.
func TestPausedHolder(t *testing.T) {
	url, k, _ := strings.Cut(os.Getenv("LEASED_PAUSED"), " ")
	if k == "" {
		t.Skip("LEASED_PAUSED is not given: TestService runs it")
	}
	h, err := connect(t, url).Hold(t.Context(), k, HoldOptions{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for now := time.Now(); h.Check() == nil; now = time.Now() {
		fmt.Printf("acting %d\n", now.UnixNano()) // what is between Check and here, only a fence can tell
		time.Sleep(time.Millisecond)
	}
	fmt.Printf("ended %v\n", context.Cause(h.Context()))
}

// testPaused stops a holder for longer than its lease: when it goes on it does not
// act any more, not even once.
func testPaused(t *testing.T, url string) {
	b, k := connect(t, url), key(t)
	child := exec.Command(os.Args[0], "-test.run=^TestPausedHolder$")
	child.Env = append(os.Environ(), "LEASED_PAUSED="+url+" "+k)
	var out strings.Builder
	child.Stdout = &out
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Process.Kill() }()
	testnats.Eventually(t, 20*time.Second, func() bool {
		r, err := b.Owner(t.Context(), k)
		return err == nil && r.Kind == kinds.Held
	}, "the child to hold the lease")
	time.Sleep(time.Second) // it acts and renews meanwhile
	pause(t, child.Process)
	next, err := b.Hold(t.Context(), k, HoldOptions{TTL: 5 * time.Second})
	granted := time.Now().UnixNano()
	if err != nil {
		t.Fatal(err)
	}
	resume(t, child.Process)
	_ = child.Wait()
	_ = next.Resign(t.Context())
	acts, last := 0, int64(0)
	for line := range strings.Lines(out.String()) {
		if n, _ := fmt.Sscanf(line, "acting %d", &last); n == 1 {
			acts++
			if last > granted {
				t.Errorf("the paused holder acted %v after the next was granted the lease", time.Duration(last-granted))
			}
		}
	}
	if acts < 100 || !strings.Contains(out.String(), "ended lost") {
		t.Errorf("%d acts; it ended with %s", acts, out.String()[max(0, out.Len()-300):])
	}
}

func testElection(t *testing.T, url string) {
	k := key(t)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 12*time.Second, errors.New("over"))
	defer cancel()
	var mu sync.Mutex
	leader, terms, fence := "", 0, uint64(0)
	seen := map[string]int{}
	var all sync.WaitGroup
	for _, name := range []string{"a", "b", "c"} {
		c := connect(t, url)
		all.Go(func() {
			err := c.Elect(ctx, k, ElectOptions{
				HoldOptions: HoldOptions{TTL: time.Second, Holder: NewHolder(name)},
				OnElected: func(ctx context.Context, h *Hold) {
					mu.Lock()
					if leader != "" || h.Revision() <= fence {
						t.Errorf("%s leads under %d beside %s, after %d", name, h.Revision(), leader, fence)
					}
					leader, terms = name, terms+1
					mu.Unlock()
					select {
					case <-ctx.Done():
					case <-time.After(700 * time.Millisecond):
					}
					mu.Lock()
					leader, fence = "", h.Revision()
					mu.Unlock()
				},
				OnNewOwner: func(l Lease) {
					mu.Lock()
					defer mu.Unlock()
					seen[name]++
				},
			})
			if err == nil || err.Error() != "over" {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if terms < 6 || seen["a"] < 3 {
		t.Errorf("%d terms, of which a saw %d", terms, seen["a"])
	}
	if r, err := connect(t, url).Owner(t.Context(), k); err != nil || r.Kind != kinds.Free {
		t.Error(r, err)
	}
}

func testForward(t *testing.T, url string) {
	owner, sender, k := connect(t, url), connect(t, url), key(t)
	me := NewHolder("owner")
	in, err := owner.Inbox(me, InboxOptions{Concurrency: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	h, err := owner.Hold(t.Context(), k, HoldOptions{Holder: me, TTL: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	send := func(payload string) (Forwarded, error) {
		return sender.Forward(t.Context(), ForwardRequest{Key: k, Payload: []byte(payload), Timeout: 2 * time.Second})
	}
	if _, err := send(""); kinds.Of(err) != kinds.OwnerRejected {
		t.Error("before Serve:", err)
	}
	slow := make(chan struct{})
	err = in.Serve(h, func(ctx context.Context, r Request) []byte {
		if r.Fence < h.Tenure() || r.Key != k {
			t.Errorf("%+v", r)
		}
		if string(r.Payload) == "slow" {
			close(slow)
			time.Sleep(700 * time.Millisecond)
		}
		return append(r.Payload, '!')
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, payload := range []string{"", "\x00\xff", strings.Repeat("x", 100_000)} {
		f, err := send(payload)
		if err != nil || string(f.Payload) != payload+"!" || f.Holder != me || f.Revision < h.Tenure() || f.Attempts != 1 {
			t.Errorf("%d bytes: %s %d %d, %v", len(payload), f.Holder, f.Revision, f.Attempts, err)
		}
	}
	answered := make(chan error, 1)
	go func() {
		f, err := send("slow")
		if string(f.Payload) != "slow!" {
			err = errors.Join(err, fmt.Errorf("answered %q", f.Payload))
		}
		answered <- err
	}()
	<-slow
	if err := h.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-answered; err != nil {
		t.Error("what was taken before resigning:", err)
	}
	if _, err := send(""); kinds.Of(err) != kinds.NotHeld {
		t.Error("after resigning:", err)
	}
	stranger, err := owner.Acquire(t.Context(), AcquireRequest{Key: k, Holder: NewHolder("gone"), TTL: time.Second})
	if err != nil || stranger.Kind != kinds.Granted {
		t.Fatal(err)
	}
	if _, err := send(""); kinds.Of(err) != kinds.OwnerUnavailable {
		t.Error("nobody listens:", err)
	}
}

// testOwnerBehind: a burst of forwards that an owner cannot keep up with does not
// keep it from those that come after.
func testOwnerBehind(t *testing.T, url string) {
	owner, k, me := connect(t, url), key(t), NewHolder("owner")
	var dropped atomic.Int32
	in, err := owner.Inbox(me, InboxOptions{Concurrency: 1, OnError: func(err error) {
		if errors.Is(err, context.DeadlineExceeded) {
			dropped.Add(1)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	h, err := owner.Hold(t.Context(), k, HoldOptions{Holder: me})
	if err != nil {
		t.Fatal(err)
	}
	var runs atomic.Int32
	if err := in.Serve(h, func(_ context.Context, r Request) []byte {
		runs.Add(1)
		if left := time.Until(r.Deadline); left <= 0 || left > time.Second {
			t.Errorf("begun %v before its sender gives up", left)
		}
		time.Sleep(500 * time.Millisecond)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	c := connect(t, url)
	var burst sync.WaitGroup
	for range 40 {
		burst.Go(func() {
			_, _ = c.Forward(t.Context(), ForwardRequest{Key: k, Timeout: time.Second})
		})
	}
	burst.Wait()
	testnats.Eventually(t, 20*time.Second, func() bool {
		_, err := c.Forward(t.Context(), ForwardRequest{Key: k, Timeout: time.Second})
		return err == nil
	}, "the owner to be of use again")
	if n := runs.Load(); n > 8 || dropped.Load() < 30 {
		t.Errorf("%d handlers were begun, %d requests dropped", n, dropped.Load())
	}
	if err := h.Resign(t.Context()); err != nil {
		t.Error(err)
	}
}

// testEvict: the old holder and the new one hardly act at the same time, though the
// next renewal is minutes away.
func testEvict(t *testing.T, url string) {
	a, b, k := connect(t, url), connect(t, url), key(t)
	h, err := a.Hold(t.Context(), k, HoldOptions{TTL: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Evict(t.Context(), k, h.Revision()); err != nil {
		t.Fatal(err)
	}
	next, err := b.Hold(t.Context(), k, HoldOptions{TTL: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-h.Context().Done():
		if cause := context.Cause(h.Context()); kinds.Of(cause) != kinds.Lost || !strings.Contains(cause.Error(), "was evicted") {
			t.Error(cause)
		}
	case <-time.After(20 * time.Second):
		t.Error("it acts on")
	}
	_ = h.Resign(t.Context())
	if err := next.Check(); err != nil {
		t.Error(err)
	}
	_ = next.Resign(t.Context())
}

// TestSmallMaxPayload: more leases of one holder than a request, or its reply, has
// room for.
func TestSmallMaxPayload(t *testing.T) {
	n := testnats.Server(t, func(o *server.Options) { o.MaxPayload = 64 << 10 })
	testnats.Leased(t, "serve", "--server="+n.URL, "--http-listen=127.0.0.1:0")
	c := New(n.Connect(), Options{})
	leases := make([]Lease, 600)
	var all sync.WaitGroup
	for from := range 20 {
		all.Go(func() {
			for i := from; i < len(leases); i += 20 {
				r, err := c.Acquire(t.Context(), AcquireRequest{Key: fmt.Sprint("small-", i), Holder: "many", TTL: time.Minute, Meta: strings.Repeat("<", 512)})
				if err != nil {
					t.Error(err)
				}
				leases[i] = r.Lease
			}
		})
	}
	all.Wait()
	out, err := c.RenewMany(t.Context(), "many", time.Minute, leases)
	if err != nil {
		t.Fatal(err)
	}
	for i, o := range out {
		if o.Err != nil || o.Revision <= leases[i].Revision {
			t.Fatalf("%d: %+v", i, o)
		}
	}
}

// testShards lets processes join, leave and die at random; LEASED_SHARDS is for
// how long.
func testShards(t *testing.T, url string) {
	length, err := time.ParseDuration(os.Getenv("LEASED_SHARDS"))
	if err != nil {
		length = 25 * time.Second
	}
	prefix := key(t)
	var last *nats.Conn
	c := newCrew(t, 4*time.Second, 0, func() *Client {
		last = testnats.Connect(t, url)
		return New(last, Options{Timeout: 3 * time.Second})
	})
	c.group = prefix
	for i := range 64 {
		c.keys = append(c.keys, fmt.Sprintf("%s-%02d", prefix, i))
	}
	conns := map[string]*nats.Conn{}
	rng := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
	changes := 0
	for end := time.Now().Add(length); time.Now().Before(end); changes++ {
		names := c.names()
		switch {
		case len(names) == 0, len(names) < 8 && rng.IntN(2) == 0:
			name := NewHolder("p")
			c.join(name)
			conns[name] = last
		case rng.IntN(2) == 0:
			c.leave(names[rng.IntN(len(names))])
		default:
			name := names[rng.IntN(len(names))]
			c.die(name, conns[name].Close)
		}
		for wait := time.Duration(rng.Int64N(int64(5 * c.ttl))); wait > 0 && time.Now().Before(end); wait -= 250 * time.Millisecond {
			time.Sleep(250 * time.Millisecond)
			c.fair()
		}
	}
	c.mu.Lock()
	moves, needed := c.moves+c.owed, c.needed
	c.mu.Unlock()
	for _, name := range c.names() {
		c.leave(name)
	}
	c.all.Wait()
	t.Logf("%d changes, %d moves, %d needed; troubles %v", changes, moves, needed, c.troubles)
	if moves*10 > needed*11 {
		t.Errorf("%d moves, %d were needed", moves, needed)
	}
}

// testLateWrite: a holder that was paused past its lease writes, and the bucket
// refuses it.
func testLateWrite(t *testing.T, url string) {
	k := key(t)
	a, b := connect(t, url), connect(t, url)
	kv := bucket(t, testnats.Connect(t, url))
	h, err := a.Hold(t.Context(), k, HoldOptions{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if err := PutFenced(t.Context(), kv, k, h.Revision(), []byte("from a")); err != nil {
		t.Fatal(err)
	}
	paused := h.Revision()    // a is paused just before it writes under this fence
	_ = h.Resign(t.Context()) // as if it had lost it
	next, err := b.Hold(t.Context(), k, HoldOptions{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if err := PutFenced(t.Context(), kv, k, next.Revision(), []byte("from b")); err != nil {
		t.Fatal(err)
	}
	var stale *StaleError
	if err := PutFenced(t.Context(), kv, k, paused, []byte("late")); !errors.As(err, &stale) {
		t.Error(err)
	}
	if got, fence, err := GetFenced(t.Context(), kv, k); string(got) != "from b" || fence != next.Revision() || err != nil {
		t.Error(string(got), fence, err)
	}
	if err := next.Resign(t.Context()); err != nil {
		t.Error(err)
	}
}

func testGivingUp(t *testing.T, url string) {
	a, b, k := connect(t, url), connect(t, url), key(t)
	h, err := a.Hold(t.Context(), k, HoldOptions{TTL: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Duration(500+rand.IntN(1500))*time.Millisecond, cancel)
		_, err := b.Hold(ctx, k, HoldOptions{TTL: 5 * time.Second})
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if err := h.Resign(t.Context()); err != nil {
		t.Error(err)
	}
	time.Sleep(1200 * time.Millisecond) // longer than a waiter's slice
	if r, err := a.Owner(t.Context(), k); err != nil || r.Kind != kinds.Free {
		t.Errorf("%+v, %v", r, err)
	}
}
