package storage

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
)

// TestServerRestarts is P05: instances outlive restarts of the server with one
// consumer each, and see what happens after the last one.
func TestServerRestarts(t *testing.T) {
	t.Parallel()
	instances, restarts := 10, 3
	if long {
		instances, restarts = 50, 6
	}
	n := testnats.Server(t)
	var ins []*instance
	for range instances {
		in, stop := serveUntil(t, n.URL)
		defer stop()
		ins = append(ins, in)
	}
	for _, in := range ins {
		in.waitReady(t)
	}
	c := callerOn(t, n.URL)
	held := c.grant("k", "A", 10*time.Minute)
	for range restarts {
		n.Restart()
		for _, in := range ins {
			in.waitReady(t)
		}
		// A request that this client sends before it has noticed the restart is lost.
		testnats.Eventually(t, 30*time.Second, func() bool { return c.owner("k").Kind == "held" }, "does not serve")
		if r := c.owner("k"); r.Revision != held.Revision {
			t.Errorf("after a restart revision %d, was %d", r.Revision, held.Revision)
		}
	}
	last := time.Now()
	seen := c.grant("after", "A", time.Minute)
	testnats.Eventually(t, 10*time.Second, func() bool {
		for _, in := range ins {
			if in.highest() < seen.Revision {
				return false
			}
		}
		return true
	}, "not every instance has seen what was written after the last restart")
	t.Logf("seen by all %v after the last restart", time.Since(last))
	testnats.Eventually(t, 15*time.Second, func() bool { return bucketOf(t, c.nc).State.Consumers <= instances },
		late(func() string {
			return fmt.Sprintf("%d consumers of %d instances", bucketOf(t, c.nc).State.Consumers, instances)
		}))
}

// TestNothingStays is P07: after many short leases, released and expired, the
// bucket is empty and the process is as it was.
func TestNothingStays(t *testing.T) {
	t.Parallel()
	keys := 4000
	if long {
		keys = 100000
	}
	n := testnats.Server(t)
	in := serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 32 {
		wg.Go(func() {
			for {
				i := next.Add(1)
				if i > int64(keys) {
					return
				}
				r, err := call(c.nc, "acquire", map[string]any{"key": fmt.Sprintf("k-%d", i), "holder": "A", "ttl_ms": 1000})
				if err != nil || r.Kind != "granted" {
					t.Errorf("%s %s %v", r.Kind, r.Error, err)
					return
				}
				if i%2 == 0 {
					if r, err := call(c.nc, "release", map[string]any{"key": r.Key, "holder": "A", "revision": r.Revision}); err != nil || r.Kind != "released" && r.Kind != "lost" {
						t.Errorf("%s %s %v", r.Kind, r.Error, err)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	// A tombstone of a lease of 1 s lives 33 s at most, and is swept in bulk.
	testnats.Eventually(t, 60*time.Second, func() bool { return bucketOf(t, c.nc).State.Messages == 0 },
		late(func() string {
			s := bucketOf(t, c.nc).State
			return fmt.Sprintf("%d messages, %d subjects", s.Messages, s.Subjects)
		}))
	if s := bucketOf(t, c.nc).State; s.Subjects != 0 {
		t.Errorf("%d subjects", s.Subjects)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return in.gauge("leased_leases_held") == 0 }, "leases are still counted: ", late(func() string { return fmt.Sprint(in.gauge("leased_leases_held")) }))
	t.Logf("goroutines: %d before, %d after (other tests included)", before, runtime.NumGoroutine())
}

// TestManyWritesAtOnce: tens of thousands of renewals that come at once wait in the
// service and not in the server, where they would be given up, sent again and end as
// unknown. And a write that sees the revision rise by what thousands of others write
// meanwhile is not taken for one in another bucket, for which the service would ask
// the server again each time.
func TestManyWritesAtOnce(t *testing.T) {
	t.Parallel()
	const calls, leases = 48, 1000
	n := testnats.Server(t)
	serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	held := make([][]map[string]any, calls)
	var wg sync.WaitGroup
	for i := range held {
		wg.Go(func() {
			for j := range leases {
				r, err := call(c.nc, "acquire", map[string]any{"key": fmt.Sprintf("k-%d-%d", i, j), "holder": "A", "ttl_ms": 600_000})
				if err != nil || r.Kind != "granted" {
					t.Errorf("%s %s %v", r.Kind, r.Error, err)
					return
				}
				held[i] = append(held[i], map[string]any{"key": r.Key, "revision": r.Revision})
			}
		})
	}
	wg.Wait()
	asked, err := c.nc.SubscribeSync("$JS.API.STREAM.INFO.KV_leases")
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var all atomic.Int64
	for i := range held {
		wg.Go(func() {
			data, err := json.Marshal(map[string]any{"holder": "A", "ttl_ms": 600_000, "leases": held[i]})
			if err != nil {
				t.Error(err)
				return
			}
			msg, err := c.nc.Request(leased.DefaultAPIPrefix+".renew_many", data, 30*time.Second)
			if err != nil {
				t.Error(err)
				return
			}
			// On a slow machine there may be no time for all.
			renewed, late := bytes.Count(msg.Data, []byte(`"granted":true`)), bytes.Count(msg.Data, []byte(`"kind":"unavailable"`))
			if renewed+late != leases {
				t.Errorf("%d of %d renewed, %d not in time: %.200s", renewed, leases, late, msg.Data)
			}
			all.Add(int64(renewed))
		})
	}
	wg.Wait()
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of %d renewed in %v", all.Load(), calls*leases, time.Since(began))
	if all.Load() < calls*leases/10 {
		t.Errorf("%d of %d renewed", all.Load(), calls*leases)
	}
	// The service looks at its bucket every two seconds anyway.
	if got, _, _ := asked.Pending(); got > 2+int(time.Since(began)/time.Second) {
		t.Errorf("the server was asked for the bucket's state %d times", got)
	}
}

// TestSlowServer: what comes at once is stored once, though the server is slow: it
// waits in the service, for time to spare.
func TestSlowServer(t *testing.T) {
	t.Parallel()
	const calls = 4000
	n := testnats.Server(t)
	link := testnats.Relay(t, n.URL)
	in := serve(t, link.URL()).waitReady(t)
	c := callerOn(t, n.URL)
	replies, err := c.nc.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	link.Slice(4096, 5*time.Millisecond, testnats.Up)
	for i := range calls {
		if err := c.nc.PublishRequest(leased.DefaultAPIPrefix+".acquire", replies.Subject, fmt.Appendf(nil, `{"key":"k-%d","holder":"A","ttl_ms":60000}`, i)); err != nil {
			t.Fatal(err)
		}
	}
	kinds := map[string]int{}
	for range calls {
		msg, err := replies.NextMsg(20 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		kind := "granted"
		if !bytes.Contains(msg.Data, []byte(`"granted":true`)) {
			kind = string(msg.Data)
		}
		kinds[kind]++
	}
	t.Log(kinds, in.gauge("leased_write_ambiguous_total"))
	// A machine that is slow itself may have no time for some, and send some again; if all
	// were sent at once, it would be every one of them, and more than once.
	if kinds["granted"] < calls/2 {
		t.Errorf("%v", kinds)
	}
	if again := in.gauge("leased_write_ambiguous_total"); again > calls/2 {
		t.Errorf("%v of %d writes were sent again", again, calls)
	}
	if queued := in.gauge("leased_writes_queued"); queued != 0 {
		t.Errorf("%v writes are queued in the end", queued)
	}
}

// TestMissingPermission is O06: a service that may not write to the bucket says
// so on each call, at once and with the subject, and in its log.
func TestMissingPermission(t *testing.T) {
	t.Parallel()
	n := testnats.Child(t, testnats.ChildOptions{Config: `
authorization {
	users: [
		{ user: all, password: all }
		{ user: reader, password: reader, permissions: { publish: { deny: ["$KV.leases.>"] } } }
	]
}
no_auth_user: all
`})
	in, stop := serveUntil(t, strings.Replace(n.URL, "nats://", "nats://reader:reader@", 1))
	defer stop()
	c := &caller{t, n.Connect()}
	for _, r := range callAll(t, c) {
		if took := r.got.Sub(r.sent); r.Kind != "unavailable" || !strings.Contains(r.Error, "$KV.leases.") || took > time.Second {
			t.Errorf("%s: %s after %v: %s", r.Key, r.Kind, took, r.Error)
		}
	}
	if !strings.Contains(in.bucket(), "$KV.leases.") {
		t.Errorf("readiness says %q", in.bucket())
	}
	if !strings.Contains(in.log.String(), "$KV.leases.") {
		t.Error("the subject is not in the log")
	}
}

// TestDomainOverLeaf is O08: the service on a leaf node keeps leases in the
// hub's JetStream domain, and a bucket of the same name on the leaf is left
// alone.
func TestDomainOverLeaf(t *testing.T) {
	t.Parallel()
	leafPort := testnats.FreePort(t)
	server := func(name, leafnodes string) *testnats.ChildServer {
		return testnats.Child(t, testnats.ChildOptions{Name: name, NoJetStream: true, Config: fmt.Sprintf("jetstream { store_dir: %q, domain: %s }\nleafnodes { %s }\n", t.TempDir(), name, leafnodes)})
	}
	hub := server("hub", fmt.Sprintf(`listen: "127.0.0.1:%d"`, leafPort))
	leaf := server("leaf", fmt.Sprintf(`remotes: [{ url: "nats://127.0.0.1:%d" }]`, leafPort))
	onLeaf, onHub := leaf.Connect(), hub.Connect()
	testnats.Eventually(t, 10*time.Second, func() bool { return apiAt(onLeaf, "$JS.hub.API.", "INFO", nil, nil) == nil }, "the leaf does not reach the hub's domain")
	// The same bucket on the leaf, which must stay empty.
	create(t, onLeaf, ours())

	in, stop := serveUntil(t, leaf.URL, func(o *leased.Options) { o.JSDomain = "hub" })
	defer stop()
	in.waitReady(t)
	holder, err := onLeaf.Subscribe("dagnats.lease.inbox.A.>", func(m *nats.Msg) { _ = m.Respond([]byte("done")) })
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Unsubscribe()
	for _, c := range []*caller{{t, onLeaf}, {t, onHub}} {
		key := fmt.Sprintf("k-%d", rand.Int())
		// The leaf link tells the hub of the service a moment later.
		testnats.Eventually(t, 10*time.Second, func() bool { return c.owner(key).Kind == "free" }, "owner does not answer")
		held := c.grant(key, "A", 10*time.Second)
		if r := c.acquire(key, "B", time.Second); r.Kind != "denied" {
			t.Errorf("acquire: %s", r.Kind)
		}
		renewed := c.want(c.renew(held, 10*time.Second), "renewed")
		if r := c.owner(key); r.Revision != renewed.Revision {
			t.Errorf("owner: %s %d", r.Kind, r.Revision)
		}
		if r := c.forward(key, "x", 2*time.Second); r.Kind != "forwarded" || string(*r.Payload) != "done" {
			t.Errorf("forward: %s %s", r.Kind, r.Error)
		}
		c.want(c.release(renewed), "released")
		if m := lastOf(t, onHub, key); m == nil || m.header.Get("Dagnats-Lease-Event") != "released" {
			t.Errorf("not in the hub's bucket: %+v", m)
		}
	}
	if s := bucketOf(t, onLeaf).State; s.Messages != 0 {
		t.Errorf("%d messages in the bucket on the leaf", s.Messages)
	}
	if !equalJSON(bucketOf(t, onHub).Config["allow_direct"], false) {
		t.Error("the hub's bucket is not ours")
	}
}

// TestRollingVersions is T11: the servers of a cluster go from 2.12.1 to the
// newest version and back, one at a time under load, and leases go on.
func TestRollingVersions(t *testing.T) {
	t.Parallel()
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{Version: "2.12.1"})
	in, stop := serveUntil(t, cl.URL(), replicas(3))
	defer stop()
	in.waitReady(t)
	c := callerOn(t, cl.URL())
	held := map[string]reply{}
	for i := range 30 {
		key := fmt.Sprintf("held-%d", i)
		held[key] = c.grant(key, "A", 10*time.Minute)
	}
	stirred := stir(c, "stir")
	defer stirred()
	versions := []string{testnats.DefaultVersion}
	if long {
		versions = append(versions, "2.12.1")
	}
	for _, version := range versions {
		for i := range 3 {
			cl.Servers[i].Use(version)
			cl.Servers[i].Restart()
			cl.WaitReady()
			cl.WaitLeader("KV_leases")
			for key, was := range held {
				var r reply
				testnats.Eventually(t, 20*time.Second, func() bool {
					r = c.owner(key)
					return r.Kind != "unavailable" && r.Kind != noResponders && r.Kind != noAnswer
				}, late(func() string { return r.Kind + " " + r.Error }))
				if r.Kind != "held" || r.Revision != was.Revision {
					t.Fatalf("%s with n%d at %s: %s %d, was %d", key, i, version, r.Kind, r.Revision, was.Revision)
				}
			}
		}
	}
	for _, was := range held {
		var r reply
		testnats.Eventually(t, 20*time.Second, func() bool { r = c.renew(was, time.Minute); return r.Kind == "renewed" || r.Kind == "lost" }, late(func() string { return r.Kind + r.Error }))
		c.want(r, "renewed")
	}
}

// TestOldServerOnTheStore is the rest of T11: a store that a too old server was
// started on is not served by it, and is sound again after.
func TestOldServerOnTheStore(t *testing.T) {
	t.Parallel()
	port, dir := testnats.FreePort(t), t.TempDir()
	n := testnats.Child(t, testnats.ChildOptions{Port: port, StoreDir: dir})
	in, stop := serveUntil(t, n.URL)
	defer stop()
	in.waitReady(t)
	c := callerOn(t, n.URL)
	held := c.grant("k", "A", 10*time.Minute)
	for _, version := range []string{"2.12.0", "2.11.9"} {
		n.Use(version)
		n.Restart()
		testnats.Eventually(t, 15*time.Second, func() bool {
			k := c.acquire("free", "A", time.Minute).Kind
			if k == "denied" {
				t.Fatal("denied, and nobody holds it")
			}
			// 2.11 does not even open a stream that a newer server made.
			return k == "unsupported" || k == "unavailable" && strings.Contains(in.bucket(), "API level")
		}, version, " serves: ", late(in.bucket))
		n.Use(testnats.DefaultVersion)
		n.Restart()
		testnats.Eventually(t, 15*time.Second, func() bool { return c.owner("k").Kind == "held" }, "does not serve again: ", late(in.bucket))
		held = c.want(c.renew(held, 10*time.Minute), "renewed")
	}
}

// TestParallelRenewals is L13: of eight renewals with one revision one is
// renewed and seven are lost; nothing is internal, nothing is an error (P12).
func TestParallelRenewals(t *testing.T) {
	t.Parallel()
	cl := testnats.Cluster(t, 3)
	in, stop := serveUntil(t, cl.URL(), replicas(3))
	defer stop()
	in.waitReady(t)
	c := callerOn(t, cl.URL())
	held := c.grant("k", "A", time.Minute)
	for round := range 50 {
		var wg sync.WaitGroup
		replies := make([]reply, 8)
		for i := range replies {
			wg.Go(func() { replies[i] = c.renew(held, time.Minute) })
		}
		wg.Wait()
		renewed := 0
		for _, r := range replies {
			switch r.Kind {
			case "renewed":
				renewed++
				held = r
			case "lost":
			default:
				t.Errorf("round %d: %s: %s", round, r.Kind, r.Error)
			}
		}
		if renewed != 1 {
			t.Fatalf("round %d: %d renewed", round, renewed)
		}
	}
	if lines := in.log.errors(); len(lines) > 0 {
		t.Errorf("logged: %v", lines)
	}
}

// TestAcquireReleaseLoop is L14: twenty clients take and free one key; nobody is
// refused while nobody holds it, nor in the seconds after an expiry.
func TestAcquireReleaseLoop(t *testing.T) {
	t.Parallel()
	for _, replicated := range []bool{false, true} {
		t.Run(fmt.Sprint("replicated ", replicated), func(t *testing.T) {
			t.Parallel()
			var url string
			want := int64(1000)
			if replicated {
				url, want = testnats.Cluster(t, 3).URL(), 200
			} else {
				url = testnats.Server(t).URL
			}
			size := 1
			if replicated {
				size = 3
			}
			for range 2 {
				in, stop := serveUntil(t, url, replicas(size))
				defer stop()
				in.waitReady(t)
			}
			var seen contended
			var wins, failed atomic.Int64
			var wg sync.WaitGroup
			for i := range 20 {
				nc := testnats.Connect(t, url)
				wg.Go(func() {
					for wins.Load() < want {
						r, err := call(nc, "acquire", map[string]any{"key": "k", "holder": fmt.Sprintf("h%d", i), "ttl_ms": 60000})
						if err != nil {
							t.Error(err)
							return
						}
						r.Key = "k"
						switch r.Kind {
						case "granted":
							u := seen.granted(r)
							wins.Add(1)
							// A machine that is too busy makes calls fail; then once more.
							for end := time.Now().Add(30 * time.Second); ; {
								rel, err := call(nc, "release", map[string]any{"key": "k", "holder": r.Holder, "revision": r.Revision})
								if err != nil || time.Now().After(end) {
									t.Errorf("release: %s %s %v", rel.Kind, rel.Error, err)
									return
								}
								seen.mu.Lock()
								u.ends = append(u.ends, rel)
								seen.mu.Unlock()
								if rel.Kind == "released" || rel.Kind == "lost" {
									break
								}
								failed.Add(1)
							}
						case "denied":
							seen.mu.Lock()
							seen.denied = append(seen.denied, r)
							seen.mu.Unlock()
							time.Sleep(time.Duration(rand.IntN(4000)) * time.Microsecond)
						case "unknown", "unavailable", noAnswer:
							failed.Add(1)
							r.Holder = fmt.Sprintf("h%d", i)
							seen.mu.Lock()
							seen.vague = append(seen.vague, r)
							seen.mu.Unlock()
						default:
							t.Errorf("acquire: %s: %s", r.Kind, r.Error)
							return
						}
						time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
					}
				})
			}
			wg.Wait()
			seen.judge(t)
			t.Logf("%d grants, %d refusals, %d failures", wins.Load(), len(seen.denied), failed.Load())
			if failed.Load() > want/10 {
				t.Errorf("%d calls failed", failed.Load())
			}

			// In the two seconds after an expiry.
			c := callerOn(t, url)
			for round := range 3 {
				g := c.grant(fmt.Sprintf("e-%d", round), "A", time.Second)
				over := g.got.Add(time.Second)
				time.Sleep(time.Until(over) - 20*time.Millisecond)
				for {
					r := c.acquire(g.Key, "B", time.Second)
					if r.Kind == "granted" {
						if r.got.Before(g.sent.Add(time.Second)) {
							t.Errorf("round %d: granted before the end", round)
						}
						c.want(c.release(r), "released")
						break
					}
					if r.Kind != "denied" || r.sent.After(over) {
						t.Errorf("round %d: %s, asked %v after the end", round, r.Kind, r.sent.Sub(over))
					}
				}
			}
		})
	}
}

// TestPausedHolder is L10: a holder that stood still finds out that it lost the
// key, and what it answers late is nobody's answer.
func TestPausedHolder(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	serve(t, n.URL).waitReady(t)
	c := callerOn(t, n.URL)
	link := testnats.Relay(t, n.URL) // what stands still is all that A sends and gets
	a := callerOn(t, link.URL())
	answer := func(nc *nats.Conn, holder string) {
		t.Helper()
		_, err := nc.Subscribe("dagnats.lease.inbox."+holder+".>", func(m *nats.Msg) { _ = m.Respond([]byte(holder + " " + string(m.Data))) })
		if err == nil {
			err = nc.Flush()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	answer(a.nc, "A")
	b := testnats.Connect(t, n.URL)
	answer(b, "B")

	held := a.grant("k", "A", time.Second)
	link.Set(testnats.Stall)
	old := make(chan reply, 1)
	go func() { old <- c.forward("k", "old", 800*time.Millisecond) }()
	if r := <-old; r.Kind != "owner_timeout" && r.Kind != "not_held" {
		t.Errorf("a forward to a holder that stands still: %s", r.Kind)
	}
	time.Sleep(time.Until(held.got.Add(time.Second)))
	young := c.grant("k", "B", time.Minute)
	if young.Revision <= held.Revision {
		t.Errorf("revision %d after %d", young.Revision, held.Revision)
	}
	for i := range 50 {
		if i == 10 {
			link.Set(testnats.Pass) // A wakes up and answers "old"
		}
		text := fmt.Sprintf("new %d", i)
		if r := c.forward("k", text, 2*time.Second); r.Kind != "forwarded" || string(*r.Payload) != "B "+text || r.Holder != "B" {
			t.Errorf("forward: %s from %s: %s", r.Kind, r.Holder, base64.StdEncoding.EncodeToString(*r.Payload))
		}
	}
	if r := a.renew(held, time.Minute); r.Kind != "lost" {
		t.Errorf("the holder that stood still renews: %s", r.Kind)
	}
	if r := c.owner("k"); r.Holder != "B" || r.Revision != young.Revision {
		t.Errorf("owner: %s %d", r.Holder, r.Revision)
	}
}
