package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// silent is a leased serve whose stderr is a pipe that only the test reads.
type silent struct {
	t      *testing.T
	cmd    *exec.Cmd
	read   *os.File
	nc     *nats.Conn
	http   string
	exited chan struct{}
}

// startSilent starts one with its pipe full to the brim.
func startSilent(t *testing.T) *silent {
	t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { read.Close() })
	for filler := bytes.Repeat([]byte("full\n"), 100); ; {
		if err := write.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
			t.Fatal(err)
		}
		if _, err := write.Write(filler); errors.Is(err, os.ErrDeadlineExceeded) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	address := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	s := &silent{t: t, read: read, http: fmt.Sprintf("127.0.0.1:%d", freePort(t)), exited: make(chan struct{})}
	s.cmd = leasedCommand(t, cleanEnv(t), "serve", "--nats-listen", address, "--http-listen", s.http, "--store-dir", t.TempDir())
	s.cmd.Stderr = write
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close()
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.exited
	})
	s.nc = dial(t, "nats://"+address, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond))
	eventually(t, "it serves", func() bool {
		m, err := s.nc.Request("api.leases.owner", []byte(`{"key":"k"}`), time.Second)
		return err == nil && strings.Contains(string(m.Data), `"held":false`)
	})
	return s
}

func (s *silent) call(name, body string) string {
	s.t.Helper()
	m, err := s.nc.Request("api.leases."+name, []byte(body), patience)
	if err != nil {
		s.t.Fatalf("%s %s: %v", name, body, err)
	}
	return string(m.Data)
}

// handovers has n keys taken, 50 at a time.
func (s *silent) handovers(n int) {
	s.t.Helper()
	work, errs := make(chan int), make(chan error, n)
	var workers sync.WaitGroup
	for range 50 {
		workers.Go(func() {
			for i := range work {
				m, err := s.nc.Request("api.leases.acquire", fmt.Appendf(nil, `{"key":"k%d","holder":"a","ttl_ms":60000}`, i), patience)
				if err == nil && !strings.Contains(string(m.Data), `"granted":true`) {
					err = errors.New(string(m.Data))
				}
				errs <- err
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	workers.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// failures makes n calls that fail and are logged each.
func (s *silent) failures(n int) {
	s.t.Helper()
	if _, err := s.nc.Request("$KV.leases.foreign", []byte("x"), patience); err != nil {
		s.t.Fatal(err)
	}
	for range n {
		if got := s.call("owner", `{"key":"foreign"}`); !strings.Contains(got, `"internal"`) {
			s.t.Fatal(got)
		}
	}
}

// leaves has it leave, soon.
func (s *silent) leaves() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	select {
	case <-s.exited:
		if code := s.cmd.ProcessState.ExitCode(); code != exitOK {
			s.t.Errorf("exit code %d", code)
		}
	case <-time.After(patience):
		s.t.Error("SIGTERM is not obeyed")
	}
}

// TestNobodyReadsTheLog: stderr is a full pipe. Calls go on, the checks and a series tell of
// it, and SIGTERM is obeyed.
func TestNobodyReadsTheLog(t *testing.T) {
	s := startSilent(t)
	s.handovers(1500)
	s.failures(1500)
	code, checks := get(t, "http://"+s.http+"/readyz?verbose")
	if code != 200 || !strings.Contains(checks, "warning log: ") || !strings.Contains(checks, "dropped") {
		t.Errorf("%d %s", code, checks)
	}
	if n := scrape(t, s.http)["leased_log_dropped_total"]; n == "" || n == "0" {
		t.Errorf("%q dropped lines are counted", n)
	}
	s.leaves()
}

// TestSlowReaderOfTheLog: one that takes 17 KB a second does not slow the calls down, and
// learns how many lines it missed.
func TestSlowReaderOfTheLog(t *testing.T) {
	s := startSilent(t)
	slow, done := make(chan struct{}), make(chan string, 1)
	go func() {
		var text bytes.Buffer
		for tick := time.NewTicker(60 * time.Millisecond); ; {
			select {
			case <-tick.C:
				_, _ = io.CopyN(&text, s.read, 1024)
			case <-slow:
				_, _ = io.Copy(&text, s.read)
				done <- text.String()
				return
			}
		}
	}()
	start := time.Now()
	s.handovers(2000)
	s.failures(1500)
	if took := time.Since(start); took > 15*time.Second {
		t.Errorf("3500 calls took %v", took)
	}
	close(slow)
	eventually(t, "the log flows again", func() bool {
		_ = s.call("owner", `{"key":"foreign"}`) // a line more
		return !strings.Contains(s.checks(), "nobody reads")
	})
	s.leaves()
	var missed float64
	text := <-done
	for line := range strings.Lines(text) {
		var fields map[string]any
		if strings.HasPrefix(line, "full") {
			continue
		}
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("a line is broken: %q: %v", line, err)
		}
		if n, ok := fields["lines"].(float64); ok && strings.Contains(fields["msg"].(string), "dropped") {
			missed += n
		}
	}
	if missed == 0 {
		t.Errorf("no line says how many were dropped, in %d bytes", len(text))
	}
}

func (s *silent) checks() string {
	s.t.Helper()
	_, text := get(s.t, "http://"+s.http+"/readyz?verbose")
	return text
}

// TestReaderOfTheLogGoes: a pipe without a reader ends nothing.
func TestReaderOfTheLogGoes(t *testing.T) {
	s := startSilent(t)
	s.read.Close()
	s.failures(20)
	eventually(t, "the lost lines are counted", func() bool {
		n := scrape(t, s.http)["leased_log_dropped_total"]
		return n != "" && n != "0"
	})
	s.leaves()
}

// gate is a writer that lets nothing through until it is opened.
type gate struct {
	lockedBuffer
	open chan struct{}
}

func (g *gate) Write(b []byte) (int, error) {
	<-g.open
	return g.lockedBuffer.Write(b)
}

// TestLogIsAsSlogWritesIt: what goes through the queue comes out as it would without, and
// as it was when it was logged.
func TestLogIsAsSlogWritesIt(t *testing.T) {
	plain := func(log *slog.Logger, list []string, failure error) {
		log = log.With("connection", "c", "error", failure).WithGroup("g")
		log.Info("scalars", "a", 1, "b", uint64(1<<63), "c", true, "d", time.Second, "e", "x\n\x1b", "f", 1.5, "g", time.Unix(0, 0))
		log.Warn("others", "list", list, "none", []string(nil), "nil", nil, "error", failure, "group", slog.GroupValue(slog.Any("error", failure)))
		log.Debug("not wanted")
	}
	for _, text := range []bool{false, true} {
		g := &gate{open: make(chan struct{})}
		l := newLogs(g, slog.LevelInfo, text, false)
		list, failure := []string{"a", "b"}, &moody{"first"}
		plain(l.at(slog.LevelDebug), list, failure)
		l.at(slog.LevelError).Warn("below its own level")
		list[0], failure.text = "changed", "changed"
		close(g.open)
		l.close()

		var want bytes.Buffer
		options := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey && len(groups) == 0 {
				return slog.Attr{}
			}
			return a
		}}
		var handler slog.Handler = slog.NewJSONHandler(&want, options)
		if text {
			handler = slog.NewTextHandler(&want, options)
		}
		plain(slog.New(handler), []string{"a", "b"}, &moody{"first"})
		got := ""
		for line := range strings.Lines(g.String()) {
			if text {
				_, line, _ = strings.Cut(line, " ")
			} else {
				_, line, _ = strings.Cut(line, ",")
				line = "{" + line
			}
			got += line
		}
		if got != want.String() {
			t.Errorf("got\n%swant\n%s", got, want.String())
		}
	}
}

// moody is an error that changes.
type moody struct{ text string }

func (m *moody) Error() string { return m.text }

// TestLogIsCheap: a line of scalars costs the one who logs it no memory.
func TestLogIsCheap(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	l := newLogs(g, slog.LevelInfo, false, false)
	defer func() { close(g.open); l.close() }()
	log := l.at(slog.LevelInfo)
	if n := testing.AllocsPerRun(200, func() {
		log.LogAttrs(t.Context(), slog.LevelInfo, "lease acquired", slog.String("key", "k"), slog.String("holder", "h"), slog.Uint64("revision", 1), slog.String("cause", "acquire"))
	}); n > 0 {
		t.Errorf("%v allocations a line", n)
	}
}

// TestLogLeaves: leaving waits a moment for what waits, and no longer.
func TestLogLeaves(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	l := newLogs(g, slog.LevelInfo, false, false)
	log := l.at(slog.LevelInfo)
	for range 3 * logRoom {
		log.Info("x")
	}
	if n := l.dropped.Load(); n < logRoom || n > 2*logRoom {
		t.Errorf("%d dropped of %d", n, 3*logRoom)
	}
	start := time.Now()
	l.close()
	if took := time.Since(start); took < logFarewell || took > logFarewell+5*time.Second {
		t.Errorf("leaving took %v", took)
	}
	close(g.open)
	<-l.done
	if kept := uint64(strings.Count(g.String(), `"msg":"x"`)); kept+l.dropped.Load() != 3*logRoom {
		t.Errorf("%d lines and %d dropped are not %d", kept, l.dropped.Load(), 3*logRoom)
	}
	if !strings.Contains(g.String(), "log lines were dropped") {
		t.Error("no line says so")
	}
}
