package contract

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// newClient is a rig without an instance of its own: the service is a process.
func newClient(t testing.TB, url string) *rig {
	t.Helper()
	return newRig(t, setup{node: &testnats.Node{URL: url}, instances: -1, uncounted: true})
}

// served waits until the service answers, and answers with something else than
// that it is not yet ready.
func (r *rig) served() {
	r.t.Helper()
	testnats.Eventually(r.t, 20*time.Second, func() bool {
		got, err := r.ask("owner", request{Key: "probe"})
		return err == nil && got.kind == kinds.Free
	}, "the service does not answer")
}

// TestKilledRightAfterALapse: a lease of 600 s, renewed to 1 s, lapses, and the
// server is killed at once. An older state of the key must not come back.
func TestKilledRightAfterALapse(t *testing.T) {
	t.Parallel()
	s := testnats.Leased(t, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t)), "--store-dir", t.TempDir(), "--http-listen", "127.0.0.1:0")
	r := newClient(t, s.NATS())
	var highest uint64
	for round := range 3 {
		r.served()
		leases := map[string]*reply{}
		for n := range 5 {
			key := fmt.Sprintf("k%d-%d", round, n)
			leases[key] = r.renew(r.acquire(key, "A", 600000), 1000)
		}
		// The moment the owner is gone, whether the service has told the end or not.
		for key := range leases {
			testnats.Eventually(t, 5*time.Second, func() bool { return r.owner(key).kind == kinds.Free }, key+" does not lapse")
		}
		s.Restart() // kill -9, and the same store again
		r.served()
		for key, l := range leases {
			if got := r.owner(key); got.kind != kinds.Free {
				t.Errorf("%s is back: %s", key, got.raw)
			}
			r.want(kinds.Lost, "renew", request{Key: key, Holder: "A", Revision: l.Revision, TTL: 1000})
			r.want(kinds.NotHeld, "forward", request{Key: key})
			got := r.acquire(key, "B", 60000)
			if highest = max(highest, l.Revision); got.Revision <= highest {
				t.Errorf("%s: revision %d was issued after %d", key, got.Revision, highest)
			}
			highest = got.Revision
		}
	}
}

// TestO05LeavingAnswersEverybody: SIGTERM while 200 forwards of 2 s and some
// more calls are in flight. Every one is answered, what comes later finds
// nobody, and the exit code is 0. Leases stay.
func TestO05LeavingAnswersEverybody(t *testing.T) {
	t.Parallel()
	for name, embedded := range map[string]bool{"embedded": true, "external": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"serve", "--http-listen", "127.0.0.1:0", "--max-forwards", "1600"} // one key has a third of them
			url := ""
			store := t.TempDir()
			if embedded {
				args = append(args, "--nats-listen", fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t)), "--store-dir", store)
			} else {
				url = testnats.Server(t).URL
				args = append(args, "--server", url)
			}
			s := testnats.Leased(t, args...)
			r := newClient(t, s.NATS())
			r.served()
			const forwards, lasts = 200, 2 * time.Second
			l := r.acquire("k", "A", 600000)
			arrived := make(chan struct{}, forwards)
			r.hold("A", func(m *nats.Msg) {
				arrived <- struct{}{}
				time.AfterFunc(lasts, func() { m.Respond(m.Data) })
			})
			var wg sync.WaitGroup
			for n := range forwards {
				wg.Go(func() {
					id := fmt.Sprint(n)
					got, err := r.ask("forward", request{Key: "k", Timeout: 30000, Payload: []byte(id)})
					if err != nil || got.kind != kinds.Forwarded || string(*got.Payload) != id {
						t.Errorf("forward %d: %v, %v", n, got, err)
					}
				})
			}
			for range forwards {
				select {
				case <-arrived:
				case <-time.After(30 * time.Second):
					t.Fatal("the forwards do not arrive")
				}
			}
			told := time.Now()
			s.Term()
			// Calls on the way while it stops taking them: each is answered, or
			// provably taken by nobody.
			for n := 0; ; n++ {
				got, err := r.ask("acquire", request{Key: fmt.Sprint("late", n), Holder: "A", TTL: 600000})
				if err == nats.ErrNoResponders {
					break
				}
				if err != nil || got.kind != kinds.Granted {
					t.Errorf("an acquire at the time of the signal: %v, %v", got, err)
					break
				}
			}
			wg.Wait()
			if code := s.Wait(20 * time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
			t.Logf("left %v after the signal, with %d forwards of %v in flight", time.Since(told), forwards, lasts)
			if t.Failed() {
				return
			}
			s.Restart()
			r.served()
			if got := r.owner("k"); got.lease() != l.lease() {
				t.Errorf("the lease after a restart: %s, before: %s", got.raw, l.raw)
			}
		})
	}
}

// TestLogsHoldNoPayloads: one line a hand-over, with key, holder, revision and
// cause; nothing that was forwarded.
func TestLogsHoldNoPayloads(t *testing.T) {
	t.Parallel()
	s := testnats.Leased(t, "serve", "--server", testnats.Server(t).URL, "--http-listen", "127.0.0.1:0")
	r := newClient(t, s.NATS())
	r.served()
	l := r.acquire("handed-over", "holder-of-it", 60000)
	r.hold("holder-of-it", func(m *nats.Msg) { m.Respond([]byte("secret-answer")) })
	r.want(kinds.Forwarded, "forward", request{Key: "handed-over", Payload: []byte("secret-question")})
	r.want(kinds.Invalid, "acquire", `{"key":"secret key"}`)
	l = r.renew(l, 60000)
	r.release(l)
	lines := 0
	testnats.Eventually(t, 5*time.Second, func() bool {
		lines = 0
		for line := range strings.Lines(s.Output()) {
			var rec struct {
				Msg, Key, Holder, Cause string
				Revision                uint64
			}
			if json.Unmarshal([]byte(line), &rec) == nil && rec.Key == "handed-over" && rec.Holder == "holder-of-it" && rec.Cause != "" && rec.Revision != 0 {
				lines++
			}
		}
		return lines == 2
	}, "not one line for the acquire and one for the release:\n", testnats.Lazy(s.Output))
	for _, secret := range []string{"secret-answer", "secret-question", "c2VjcmV0", "secret key"} {
		if strings.Contains(s.Output(), secret) {
			t.Errorf("%q is in the log", secret)
		}
	}
}
