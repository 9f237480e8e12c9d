package testnats

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestEventually(t *testing.T) {
	n := 0
	Eventually(t, 5*time.Second, func() bool { n++; return n == 5 })
	rec := &recorder{TB: t}
	rec.run(func() {
		Eventually(rec, 20*time.Millisecond, func() bool { return false }, "because of ", Lazy(func() string { return "rain" }))
	})
	if !strings.Contains(rec.fatal, "because of rain") {
		t.Errorf("the failure says %q", rec.fatal)
	}
}

// recorder is a test that may fail.
type recorder struct {
	testing.TB
	fatal string
}

func (r *recorder) Helper() {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.fatal = fmt.Sprintf(format, args...)
	panic(r)
}

func (r *recorder) run(f func()) {
	defer func() {
		if p := recover(); p != nil && p != any(r) {
			panic(p)
		}
	}()
	f()
}

func TestServer(t *testing.T) {
	s := Server(t)
	nc := s.Connect()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "s", nil); err != nil {
		t.Fatal(err)
	}
	if s.NS().JetStreamConfig().SyncAlways {
		t.Error("SyncAlways is on")
	}
	s.Stop()
	if s.Running() {
		t.Error("runs after Stop")
	}
	Eventually(t, 5*time.Second, func() bool { return !nc.IsConnected() })
	s.Restart()
	Eventually(t, 5*time.Second, nc.IsConnected)
	if n := stored(t, js); n != 1 {
		t.Errorf("%d messages after a restart, want 1", n)
	}
	if !strings.Contains(s.Log(), "Server is ready") {
		t.Errorf("the log is %q", s.Log())
	}

	always := Server(t, SyncAlways, StoreDir(t.TempDir()))
	if !always.NS().JetStreamConfig().SyncAlways {
		t.Error("SyncAlways is off")
	}
	none, err := jetstream.New(Server(t, WithoutJetStream).Connect())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := none.AccountInfo(t.Context()); !errors.Is(err, jetstream.ErrJetStreamNotEnabled) {
		t.Errorf("without JetStream: %v", err)
	}
}

func TestCluster(t *testing.T) {
	t.Parallel()
	c := Cluster(t, 3)
	nc := c.Connect()
	js := stream3(t, nc)

	// A round over a slow link and back is in each publish.
	c.SetRouteDelay(20 * time.Millisecond)
	start := time.Now()
	if _, err := js.Publish(t.Context(), "s", nil); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 40*time.Millisecond {
		t.Errorf("a replicated publish took %v over links of 20ms", took)
	}
	c.SetRouteDelay(0)

	first := c.WaitLeader("S")
	second := c.StepDown("S")
	if second == first {
		t.Errorf("the leader is %d before and after StepDown", first)
	}
	if got := c.StepDown("S", first); got != first {
		t.Errorf("StepDown to %d made %d the leader", first, got)
	}

	c.Servers[first].Stop()
	now := c.WaitLeader("S")
	if now == first {
		t.Error("a stopped server leads")
	}
	c.Servers[first].Restart()
	c.WaitReady()
	if _, err := js.Publish(t.Context(), "s", nil); err != nil {
		t.Error(err)
	}
}

// TestClusterFaults: a leader cut off in any way is replaced, and the cluster heals.
func TestClusterFaults(t *testing.T) {
	t.Parallel()
	c := Cluster(t, 3)
	stream3(t, c.Connect())
	for _, mode := range []Mode{Cut, Stall, Blackhole} {
		old := c.WaitLeader("S")
		c.Isolate(old, mode)
		if mode == Cut { // there is no way past the relays
			for i, want := range map[int]int{old: 0, (old + 1) % 3: 1, (old + 2) % 3: 1} {
				Eventually(t, 5*time.Second, func() bool { return c.Servers[i].NS().NumRoutes() == want })
			}
		}
		now := c.WaitLeader("S")
		if now == old {
			t.Errorf("mode %d: the isolated server leads", mode)
		}
		publish(t, c.Servers[now].Connect())
		c.Heal()
		c.WaitReady()
		publish(t, c.Servers[old].Connect())
	}
	// One way only: the leader is heard and hears nothing.
	old := c.WaitLeader("S")
	for i := range 3 {
		if i != old {
			c.Block(i, old, Blackhole)
		}
	}
	nc := c.Servers[old].Connect()
	if m, err := nc.Request("s", nil, 2*time.Second); err == nil {
		t.Errorf("a leader that hears nobody answered a write: %s", m.Data)
	}
	c.Heal()
	c.WaitReady()
	publish(t, nc)
}

func stream3(t *testing.T, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}, Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	publish(t, nc)
	return js
}

// publish stores a message, after as many tries as an election takes.
func publish(t *testing.T, nc *nats.Conn) {
	t.Helper()
	var last error
	Eventually(t, 30*time.Second, func() bool {
		m, err := nc.Request("s", nil, time.Second)
		if err == nil && !PubAck("S")(m.Data) {
			err = errors.New(string(m.Data))
		}
		last = err
		return err == nil
	}, Lazy(func() string { return "publish: " + last.Error() }))
}

func TestChild(t *testing.T) {
	s := Child(t, ChildOptions{Sync: "always"})
	nc := s.Connect()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	publish(t, nc)
	if v := nc.ConnectedServerVersion(); v != DefaultVersion {
		t.Errorf("version %s, want %s", v, DefaultVersion)
	}

	s.Pause()
	if _, err := nc.Request("s", nil, 200*time.Millisecond); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a paused server: %v", err)
	}
	s.Resume()
	publish(t, nc)

	before := stored(t, js)
	pid := s.PID()
	s.Restart()
	Eventually(t, 10*time.Second, nc.IsConnected)
	if n := stored(t, js); n != before || s.PID() == pid {
		t.Errorf("%d messages in process %d after a restart of %d, want %d", n, s.PID(), pid, before)
	}
	s.Pause()
	s.Kill()
	if s.Running() || s.Healthy() == nil {
		t.Error("runs after Kill")
	}
	if code := s.Wait(time.Second); code != -1 {
		t.Errorf("exit code %d after a kill", code)
	}
	s.Restart()
	s.Term()
	if code := s.Wait(10 * time.Second); code != 1 && code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	if !strings.Contains(s.Output(), "Server is ready") {
		t.Errorf("the output is %q", s.Output())
	}
}

// TestChildVersions starts every version that the tests of the product need.
func TestChildVersions(t *testing.T) {
	for _, version := range append(serverVersions, DefaultVersion) {
		t.Run(version, func(t *testing.T) {
			s := Child(t, ChildOptions{Version: version})
			if v := s.Connect().ConnectedServerVersion(); v != version {
				t.Errorf("this is %s", v)
			}
		})
	}
	s := Child(t, ChildOptions{NoJetStream: true, Config: "max_payload: 65536\n"})
	if nc := s.Connect(); nc.MaxPayload() != 65536 {
		t.Errorf("max_payload %d", nc.MaxPayload())
	}
}

func TestChildCluster(t *testing.T) {
	t.Parallel()
	c := ChildCluster(t, 3, ChildOptions{})
	nc := c.Connect()
	stream3(t, nc)
	old := c.WaitLeader("S")
	c.Servers[old].Kill()
	if c.WaitLeader("S") == old {
		t.Error("a killed server leads")
	}
	publish(t, nc)
	c.Servers[old].Restart()
	c.WaitReady()
	if got := c.StepDown("S", old); got != old {
		t.Errorf("leader %d, want the one that was killed, %d", got, old)
	}
	c.Isolate(old, Blackhole)
	publish(t, c.Servers[c.WaitLeader("S")].Connect())
	c.Heal()
	c.WaitReady()
}

func command(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).CombinedOutput()
	return string(out), err
}

func TestTool(t *testing.T) {
	s := Server(t)
	out, err := command(Tool(t, "nats"), "--server", s.URL, "account", "info")
	if err != nil || !strings.Contains(out, "JetStream") {
		t.Errorf("nats account info: %v\n%s", err, out)
	}
	out, err = command(Tool(t, "nats-server@2.12.1"), "--version")
	if err != nil || !strings.Contains(out, "2.12.1") {
		t.Errorf("nats-server --version: %v\n%s", err, out)
	}
	if _, err := Binary("0.0.1"); !errors.Is(err, errMissing) || !strings.Contains(err.Error(), "v0.0.1") {
		t.Errorf("a version that is not installed: %v", err)
	}
}

func TestLeased(t *testing.T) {
	s := Leased(t, "serve", "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", t.TempDir())
	first := s.NATS()
	nc := Connect(t, first)
	owner := func() error {
		_, err := nc.Request("api.leases.owner", []byte(`{"key":"k"}`), time.Second)
		return err
	}
	ask := func() bool { return owner() == nil }
	Eventually(t, 10*time.Second, ask)
	resp, err := http.Get("http://" + s.HTTP() + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	http.DefaultClient.CloseIdleConnections()

	s.Pause()
	if err := owner(); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("a paused service: %v", err)
	}
	s.Resume()
	Eventually(t, 10*time.Second, ask)

	s.Restart()
	if s.NATS() == "" || s.NATS() == first {
		t.Errorf("at %q after a restart, before at %q", s.NATS(), first)
	}
	s.Term()
	if code := s.Wait(30 * time.Second); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}

	// Of a service that cannot start the test learns why.
	rec := &recorder{TB: t}
	rec.run(func() { Leased(rec, "serve", "--nats-listen", "nonsense", "--store-dir", t.TempDir()) })
	if !strings.Contains(rec.fatal, "--nats-listen") {
		t.Errorf("the failure says %q", rec.fatal)
	}
}

func TestProcess(t *testing.T) {
	p := newProcess(t, "shell", "/bin/sh", []string{"-c", "echo out; echo $WORD >&2; exit 3"})
	p.env = []string{"WORD=err"}
	p.start()
	if code := p.Wait(5 * time.Second); code != 3 {
		t.Errorf("exit code %d, want 3", code)
	}
	if got := p.Output(); !strings.Contains(got, "out\n") || !strings.Contains(got, "err\n") {
		t.Errorf("output %q", got)
	}
	p.Kill() // of what has ended already
	sleep := newProcess(t, "sleep", "/bin/sleep", []string{"60"})
	sleep.start()
	sleep.Signal(syscall.SIGINT)
	<-sleep.Done()
	if _, err := os.Stat("/proc/self"); err == nil && sleep.Running() {
		t.Error("still runs")
	}
}

// TestNoOrphans: the kernel ends the children of a test process that is killed.
func TestNoOrphans(t *testing.T) {
	const inner = "TESTNATS_INNER"
	if os.Getenv(inner) != "" {
		p := newProcess(t, "sleep", "/bin/sleep", []string{"600"})
		p.start()
		fmt.Printf("pid %d\n", p.PID())
		<-p.Done()
		return
	}
	if runtime.GOOS != "linux" {
		t.Skip("only Linux has a death signal")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestNoOrphans$")
	cmd.Env = append(os.Environ(), inner+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	_, scanErr := fmt.Fscanf(out, "pid %d\n", &pid)
	cmd.Process.Kill()
	cmd.Wait()
	if scanErr != nil {
		t.Fatal(scanErr)
	}
	Eventually(t, 10*time.Second, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(stat), ") Z ")
	}, "the child still runs")
}
