package storage

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestUnsupportedServer is row 10: a server that cannot keep leases is told so
// on each lease subject, discovery and metrics work meanwhile, and the service
// goes on by itself once a good server stands in its place.
func TestUnsupportedServer(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		server testnats.ChildOptions
		says   string // in the error
	}{
		{"Debian's 2.9.10", testnats.ChildOptions{Version: "2.9.10"}, "2.11"},
		{"without JetStream", testnats.ChildOptions{NoJetStream: true}, "JetStream"},
		{"account without JetStream", testnats.ChildOptions{Config: "accounts { APP { users: [{user: app, password: app}] }, JS { jetstream: enabled, users: [{user: js, password: js}] } }\nno_auth_user: app\n"}, "account"},
		{"2.11.9", testnats.ChildOptions{Version: "2.11.9"}, "2.11.9"},
		{"2.12.0", testnats.ChildOptions{Version: "2.12.0"}, "2.12.0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.server.Port = testnats.FreePort(t)
			bad := testnats.Child(t, c.server)
			call := callerOn(t, bad.URL)
			in, stop := serveUntil(t, bad.URL)
			defer stop() // before the server goes
			unsupported(t, call, in, c.says)
			if err := api(call.nc, "STREAM.INFO.KV_leases", nil, nil); err == nil {
				t.Error("the bucket was made on a server that cannot keep leases")
			}

			bad.Kill()
			good := testnats.Child(t, testnats.ChildOptions{Port: c.server.Port})
			resumes(t, call, in)

			// And back: what was good can be replaced by what is not.
			good.Kill()
			c.server.StoreDir = t.TempDir()
			bad = testnats.Child(t, c.server)
			if c.server.NoJetStream || c.server.Config != "" {
				// Nobody answers, or an account that lost JetStream: no wrong promise in either case.
				testnats.Eventually(t, 10*time.Second, func() bool {
					k := call.acquire("k3", "A", time.Second).Kind
					return k == "unavailable" || k == "unsupported"
				}, "still serving")
			} else {
				testnats.Eventually(t, 10*time.Second, func() bool { return call.acquire("k3", "A", time.Second).Kind == "unsupported" }, "never unsupported")
			}
			bad.Kill()
			testnats.Child(t, testnats.ChildOptions{Port: c.server.Port})
			resumes(t, call, in)
		})
	}
}

// unsupported proves that every lease subject says so, whatever is asked, and
// that the rest of the service is there.
func unsupported(t *testing.T, c *caller, in *instance, says string) {
	t.Helper()
	all := callAll(t, c)
	for _, r := range all {
		if r.Kind != "unsupported" || !strings.Contains(r.Error, says) {
			t.Errorf("%s: got %s: %s; want unsupported with %q", r.Key, r.Kind, r.Error, says)
		}
		// It comes before any look at the body.
		if bad := c.call(r.Key, map[string]any{"no such member": 1}); bad.Kind != "unsupported" {
			t.Errorf("%s with an invalid body: %s", r.Key, bad.Kind)
		}
	}
	msg, err := c.nc.Request("$SRV.INFO.dagnats-api", nil, 2*time.Second)
	if err != nil {
		t.Fatalf("discovery: %v", err)
	}
	var info struct {
		Endpoints []struct{ Name string } `json:"endpoints"`
	}
	if err := json.Unmarshal(msg.Data, &info); err != nil || len(info.Endpoints) < 5 {
		t.Errorf("discovery: %d endpoints, %v", len(info.Endpoints), err)
	}
	rec := httptest.NewRecorder()
	in.metrics.Handler(nil).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	for _, r := range all {
		line := fmt.Sprintf("leased_replies_total{endpoint=%q,kind=\"unsupported\"} ", r.Key)
		_, count, ok := strings.Cut(rec.Body.String(), line)
		if !ok || strings.HasPrefix(count, "0\n") {
			t.Errorf("no count of unsupported replies of %s", r.Key)
		}
	}
	if !strings.Contains(rec.Body.String(), `leased_bucket_state{state="unsupported"} 1`) {
		t.Error("metrics do not say that the server is unsupported")
	}
	if got := in.failing(); len(got) == 0 {
		t.Error("ready on a server that cannot keep leases")
	}
}

// resumes proves that the service serves, with nothing done to it.
func resumes(t *testing.T, c *caller, in *instance) {
	t.Helper()
	testnats.Eventually(t, 15*time.Second, func() bool { return len(in.failing()) == 0 }, late(func() string { return fmt.Sprint(in.failing()) }))
	testnats.Eventually(t, 5*time.Second, func() bool { return c.owner("k").Kind == "free" }, "owner does not answer")
	held := c.grant("k", "A", 2*time.Second)
	renewed := c.want(c.renew(held, 2*time.Second), "renewed")
	if r := c.owner("k"); r.Revision != renewed.Revision {
		t.Errorf("owner: %s %d, want revision %d", r.Kind, r.Revision, renewed.Revision)
	}
	c.want(c.release(renewed), "released")
}

// TestTooOldStreamLeader: in a cluster of two versions the leader of the bucket
// decides, for every call, wherever the service is connected.
func TestTooOldStreamLeader(t *testing.T) {
	t.Parallel()
	cl := testnats.ChildCluster(t, 3, testnats.ChildOptions{}, "2.11.10", "2.11.9", "2.11.10")
	in := serve(t, cl.Servers[0].URL, replicas(3))
	c := callerOn(t, cl.Servers[0].URL)
	cl.WaitLeader("KV_leases")
	for range 2 {
		cl.StepDown("KV_leases", 1)
		testnats.Eventually(t, 10*time.Second, func() bool { return c.acquire("k", "A", time.Second).Kind == "unsupported" }, "grants on a leader of 2.11.9: ", late(in.bucket))
		unsupported(t, c, in, "2.11.9")
		cl.StepDown("KV_leases", 2)
		testnats.Eventually(t, 10*time.Second, func() bool { return c.acquire("k", "A", time.Second).Kind == "granted" }, "does not resume: ", late(in.bucket))
	}
}

// TestServerThatIsNotThere: without any NATS the service starts, and it serves
// once there is one.
func TestServerThatIsNotThere(t *testing.T) {
	t.Parallel()
	port := testnats.FreePort(t)
	in, stop := serveUntil(t, fmt.Sprintf("nats://127.0.0.1:%d", port))
	defer stop()
	if len(in.failing()) == 0 {
		t.Error("ready without NATS")
	}
	n := testnats.Child(t, testnats.ChildOptions{Port: port})
	c := &caller{t, n.Connect(nats.Name("caller"))}
	resumes(t, c, in)
}
