package handover

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestGoneClient: 10,000 acquires of a client that closed its connection wait for keys
// that are held. Nobody else is told busy for that, on a free key or a held one. So
// where they came over one connection, and where one holder had ten.
func TestGoneClient(t *testing.T) {
	for name, c := range map[string]struct {
		connections int
		holder      func(i int) string
	}{
		"one connection": {1, func(i int) string { return fmt.Sprint("gone-", i) }},
		"one holder":     {10, func(int) string { return "gone" }},
	} {
		t.Run(name, func(t *testing.T) {
			service := testnats.Leased(t, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+t.TempDir(), "--sync=2m")
			nc := testnats.Connect(t, service.NATS())
			type answer struct {
				Granted, Held bool
				Kind, Error   string
			}
			acquire := func(key, holder, more string) (a answer) {
				t.Helper()
				if err := ask(nc, "api.leases.acquire", fmt.Sprintf(`{"key":%q,"holder":%q,"ttl_ms":60000%s}`, key, holder, more), &a); err != nil {
					t.Fatal(err)
				}
				return a
			}
			for i := range 8 {
				acquire(fmt.Sprint("wall-", i), "wall", "")
			}
			acquire("held", "wall", "")
			var conns []*nats.Conn
			var inboxes []string
			for range c.connections {
				inboxes = append(inboxes, nats.NewInbox())
				conns = append(conns, testnats.Connect(t, service.NATS()))
			}
			for i := range 10_000 {
				gone := conns[i%len(conns)]
				body := fmt.Sprintf(`{"key":"wall-%d","holder":%q,"ttl_ms":60000,"wait_ms":30000}`, i%8, c.holder(i))
				if err := gone.PublishRequest("api.leases.acquire", fmt.Sprintf("%s.%d", inboxes[i%len(conns)], i), []byte(body)); err != nil {
					t.Fatal(err)
				}
				if (i+1)%1000 == 0 { // few enough at once for the limit of calls in flight
					testnats.Eventually(t, 20*time.Second, func() bool { return waiting(t, service.HTTP())+busy(t, service.HTTP()) == i+1 }, "they do not come in")
				}
			}
			for _, gone := range conns {
				gone.Close()
			}
			if a := acquire("free", "other", `,"wait_ms":1000`); !a.Granted {
				t.Errorf("a free key: %+v", a)
			}
			if a := acquire("free-too", c.holder(0), `,"wait_ms":1000`); !a.Granted {
				t.Errorf("a free key for one of those: %+v", a)
			}
			if a := acquire("held", "other", `,"wait_ms":100`); a.Granted || !a.Held {
				t.Errorf("a held key: %+v", a)
			}
		})
	}
}

// busy is how many acquires were answered so, as the service's metrics tell.
func busy(t testing.TB, address string) int {
	t.Helper()
	page := get(t, "http://"+address+"/metrics")
	_, after, _ := strings.Cut(page, `leased_replies_total{endpoint="acquire",kind="busy"} `)
	n := -1
	_, _ = fmt.Sscan(after, &n)
	return n
}
