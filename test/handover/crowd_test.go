package handover

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// TestCrowd: 64 workers ask without a pause for 8 keys that are new ten times a
// second, and who gets one releases it at once. Nothing is wrong with the servers,
// so nobody is told unknown, and no call takes long. So on one instance with the
// server inside, and on two of one server.
func TestCrowd(t *testing.T) {
	for _, c := range []struct {
		name  string
		start func(t *testing.T) (url string)
	}{
		{"one instance", func(t *testing.T) string {
			return testnats.Leased(t, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+t.TempDir(), "--sync=2m").NATS()
		}},
		{"two instances", func(t *testing.T) string {
			url := testnats.Child(t, testnats.ChildOptions{}).URL
			for range 2 {
				testnats.Leased(t, "serve", "--server="+url, "--http-listen=127.0.0.1:0")
			}
			return url
		}},
	} {
		t.Run(c.name, func(t *testing.T) { crowdOf(t, c.start(t), time.Duration(size(3, 60))*time.Second) })
	}
}

func crowdOf(t *testing.T, url string, length time.Duration) {
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	var acquires, granted, unknown, other atomic.Int64
	var took times
	var all sync.WaitGroup
	began := time.Now()
	for w := range 64 {
		nc := testnats.Connect(t, url)
		all.Go(func() {
			holder := fmt.Sprintf("w-%d", w)
			call := func(name, body string) (m struct {
				Granted  bool
				Revision uint64
				Kind     string
			}) {
				reply, err := nc.Request("api.leases."+name, []byte(body), 10*time.Second)
				if err == nil {
					err = json.Unmarshal(reply.Data, &m)
				}
				if err != nil {
					t.Error(err)
					cancel()
				}
				switch m.Kind {
				case "":
				case "unknown":
					unknown.Add(1)
				default:
					if other.Add(1) == 1 {
						t.Errorf("%s: %s", name, reply.Data)
					}
				}
				return m
			}
			for ctx.Err() == nil {
				key := fmt.Sprintf("crowd-%d-%d", time.Since(began)/(100*time.Millisecond), w%8)
				asked := time.Now()
				m := call("acquire", fmt.Sprintf(`{"key":%q,"holder":%q,"ttl_ms":10000}`, key, holder))
				took.add(time.Since(asked))
				acquires.Add(1)
				if m.Granted {
					granted.Add(1)
					call("release", fmt.Sprintf(`{"key":%q,"holder":%q,"revision":%d}`, key, holder, m.Revision))
				}
			}
		})
	}
	all.Wait()
	t.Logf("%d acquires, %d granted, %d unknown; %v", acquires.Load(), granted.Load(), unknown.Load(), strings.TrimSpace(took.String()))
	if n := unknown.Load() + other.Load(); n > 0 {
		t.Errorf("%d of %d calls have no true answer, %d of them unknown", n, acquires.Load(), unknown.Load())
	}
	atMost(t, "p99 of an acquire", took.quantile(0.99), 100*time.Millisecond)
}
