package fault

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestServerClockSet: somebody sets the clock of the server by an hour, forward or back,
// inside and outside of the service. Nobody is granted a key before the end of its lease
// on a clock that nobody set, and the service says what happened.
func TestServerClockSet(t *testing.T) {
	if *flagLength == 0 {
		t.Skip("-fault.length is not given: it builds programs with another standard library")
	}
	for name, c := range map[string]struct {
		inside bool
		by     time.Duration
	}{
		"inside, forward": {true, time.Hour}, "outside, forward": {false, time.Hour}, "inside, by 20 s": {true, 20 * time.Second}, "inside, back": {true, -time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			env := []string{shiftDir + "=" + dir}
			var s *testnats.Service
			var url string
			var pid int
			if c.inside {
				s = testnats.LeasedFrom(t, shiftedLeased(t, ""), env, "serve", "--nats-listen", fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t)), "--store-dir", t.TempDir(), "--http-listen", "127.0.0.1:0")
				url, pid = s.NATS(), s.PID()
			} else {
				if err := os.Setenv(shiftDir, dir); err != nil {
					t.Fatal(err)
				}
				defer os.Unsetenv(shiftDir)
				n := testnats.Child(t, testnats.ChildOptions{Program: shiftedServer(t)})
				s = testnats.Leased(t, "serve", "--server", n.URL, "--http-listen", "127.0.0.1:0")
				url, pid = n.URL, n.PID()
			}
			nc := testnats.Connect(t, url)
			call := func(name string, body map[string]any) (r struct {
				Granted  bool
				Kind     string
				Error    string
				Revision uint64
			}) {
				t.Helper()
				data, _ := json.Marshal(body)
				m, err := nc.Request("api.leases."+name, data, 6*time.Second)
				if err == nats.ErrNoResponders {
					return r
				}
				if err != nil {
					t.Fatal(err)
				}
				if err := json.Unmarshal(m.Data, &r); err != nil {
					t.Fatal(err)
				}
				return r
			}
			const ttl = 15 * time.Second
			acquire := func(key, holder string) bool {
				return call("acquire", map[string]any{"key": key, "holder": holder, "ttl_ms": ttl.Milliseconds()}).Granted
			}
			var sent time.Time
			testnats.Eventually(t, 20*time.Second, func() bool { sent = time.Now(); return acquire("k", "A") }, "never granted")
			if err := shift(dir, pid, int(c.by/time.Second)); err != nil {
				t.Fatal(err)
			}
			for i := 0; time.Since(sent) < ttl; i++ {
				if acquire("k", "B") && time.Since(sent) < ttl {
					t.Fatalf("two holders: B got the key %v before the end of A's lease", ttl-time.Since(sent))
				}
				time.Sleep(5 * time.Millisecond)
			}
			get := func(path string) string {
				resp, err := http.Get("http://" + s.HTTP() + path)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				if err != nil {
					t.Fatal(err)
				}
				return string(body)
			}
			if text := get("/readyz?verbose"); !strings.Contains(text, "was set") {
				t.Errorf("the readiness does not tell of it:\n%s", text)
			}
			if text := get("/metrics"); !strings.Contains(text, "\nleased_clock_steps_total 1\n") {
				t.Error("the step is not counted once")
			}
			if c.by > 0 {
				testnats.Eventually(t, 20*time.Second, func() bool { return acquire("k", "B") }, "never granted again")
			}
		})
	}
}
