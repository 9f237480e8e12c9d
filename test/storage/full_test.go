package storage

import (
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// TestFull: where JetStream has no room for a write, each call is answered unavailable at
// once, in the server's words, and so it stands in the readiness; nothing is
// unknown; and it is over by itself once there is room.
func TestFull(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		config string
		user   *url.Userinfo
		says   string
	}{
		"the account": {
			config: "jetstream { store_dir: %q }\naccounts { A { jetstream: { max_file: 40000 }, users: [{user: a, password: a}] }, SYS { users: [{user: s, password: s}] } }\nsystem_account: SYS\n",
			user:   url.UserPassword("a", "a"), says: "resource limits exceeded for account",
		},
		"the server": {config: "jetstream { store_dir: %q, max_file_store: 40000 }\n", says: "insufficient"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := testnats.Child(t, testnats.ChildOptions{NoJetStream: true, Config: fmt.Sprintf(c.config, t.TempDir()), User: c.user})
			in := serve(t, n.URL).waitReady(t)
			cl := callerOn(t, n.URL)
			const ttl = 4 * time.Second
			meta := strings.Repeat("x", 512)
			acquire := func(i int) reply {
				return cl.call("acquire", map[string]any{"key": fmt.Sprintf("k-%d", i), "holder": "A", "ttl_ms": ttl.Milliseconds(), "meta": meta})
			}
			refused := func(what string, r reply) {
				t.Helper()
				if r.Kind != "unavailable" || !strings.Contains(r.Error, c.says) || strings.Contains(r.Error, "time left") {
					t.Errorf("%s: %s: %s", what, r.Kind, r.Error)
				}
				if took := r.got.Sub(r.sent); took > 1500*time.Millisecond {
					t.Errorf("%s: answered after %v", what, took)
				}
			}
			var first, r reply
			for i := range 1000 {
				r = acquire(i)
				if r.Kind != "granted" {
					break
				}
				if i == 0 {
					first = r
				}
			}
			refused("the first that is refused", r)
			for i := range 5 {
				refused("a later one", acquire(2000+i))
			}
			if r := cl.owner(first.Key); time.Now().Before(first.sent.Add(ttl)) && r.Kind != "held" {
				t.Errorf("owner: %s: %s", r.Kind, r.Error)
			}
			if why := fmt.Sprint(in.failing()); !strings.Contains(why, "writes") || !strings.Contains(why, c.says) {
				t.Errorf("the readiness says %s", why)
			}
			if n := in.gauge("leased_writes_refused_total"); n < 6 {
				t.Errorf("%v writes are counted as refused", n)
			}
			if log := in.log.String(); strings.Count(log, c.says) != 1 {
				t.Errorf("the log says it %d times", strings.Count(log, c.says))
			}
			// The leases end, and there is room.
			testnats.Eventually(t, 20*time.Second, func() bool { return acquire(3000).Kind == "granted" }, "never granted again")
			testnats.Eventually(t, 5*time.Second, func() bool { return len(in.failing()) == 0 }, late(func() string { return fmt.Sprint(in.failing()) }))
		})
	}
}
