package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain makes this test binary be leased itself when it is called so: the
// processes that the tests start are the program as it is, built with the tests'
// own flags.
func TestMain(m *testing.M) {
	if strings.HasSuffix(filepath.Base(os.Args[0]), ".test") {
		// Under nohup, say, HUP is ignored, and so it would be by every command that
		// is started here.
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	testscript.Main(m, map[string]func(){
		"leased": main,
		"child":  child,
	})
}

// leasedCommand is leased, not yet started.
func leasedCommand(t testing.TB, env []string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return &exec.Cmd{Path: self, Args: append([]string{"leased"}, args...), Env: env}
}

// patience is how long a test waits for what must happen.
const patience = 20 * time.Second

// cleanEnv is the environment without anything that steers leased, in a home of
// its own, with env (NAME=value) added.
func cleanEnv(t *testing.T, env ...string) []string {
	t.Helper()
	home := t.TempDir()
	kept := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "NATS_") || strings.HasPrefix(v, "XDG_") || strings.HasPrefix(v, "HOME=") || strings.HasPrefix(v, "NOTIFY_SOCKET=")
	})
	return append(append(kept, "HOME="+home, "XDG_CONFIG_HOME="+filepath.Join(home, "config")), env...)
}

// process is a leased that runs as a child.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	exited chan struct{}

	mu    sync.Mutex
	lines []string
	more  chan struct{} // closed and made anew with each line
}

// start runs leased with args; it is killed when the test ends.
func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: leasedCommand(t, env, args...), exited: make(chan struct{}), more: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for scan := bufio.NewScanner(stderr); scan.Scan(); {
			p.mu.Lock()
			p.lines = append(p.lines, scan.Text())
			close(p.more)
			p.more = make(chan struct{})
			p.mu.Unlock()
		}
	}()
	go func() {
		<-read
		_ = p.cmd.Wait()
		close(p.exited)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.exited
		if t.Failed() {
			t.Logf("leased %v printed:\n%s", args, p.output())
		}
	})
	return p
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

// find waits for a line in the log that match accepts.
func (p *process) find(what string, match func(line string) bool) string {
	p.t.Helper()
	deadline := time.After(patience)
	for seen := 0; ; {
		p.mu.Lock()
		lines, more := p.lines, p.more
		p.mu.Unlock()
		for ; seen < len(lines); seen++ {
			if match(lines[seen]) {
				return lines[seen]
			}
		}
		select {
		case <-more:
		case <-deadline:
			p.t.Fatalf("no line with %s in\n%s", what, p.output())
		case <-p.exited:
			if p.mu.Lock(); seen == len(p.lines) {
				p.mu.Unlock()
				p.t.Fatalf("ended without a line with %s:\n%s", what, p.output())
			}
			p.mu.Unlock()
		}
	}
}

// line waits for a log line with all the texts.
func (p *process) line(texts ...string) string {
	p.t.Helper()
	return p.find(strings.Join(texts, " and "), func(line string) bool {
		return !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) })
	})
}

// serving is the log line that says everything is up.
type serving struct {
	NATS, HTTP, Version        string
	Embedded, Connected, Ready bool
}

func (p *process) serving() (s serving) {
	p.t.Helper()
	if err := json.Unmarshal([]byte(p.line(`"msg":"serving"`)), &s); err != nil {
		p.t.Fatal(err)
	}
	return s
}

// exit waits for the end and returns the exit code.
func (p *process) exit() int {
	p.t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		p.t.Fatalf("still running:\n%s", p.output())
		return 0
	}
}

func (p *process) signal(s os.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// runs runs leased to its end.
func runs(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := leasedCommand(t, env, args...)
	var o, e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &o, &e
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return o.String(), e.String(), cmd.ProcessState.ExitCode()
}

// anyPorts are the flags that let the system choose every port.
func anyPorts(t *testing.T) []string {
	t.Helper()
	return []string{"serve", "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", t.TempDir()}
}

// beside are the flags of a leased on a NATS that runs already.
func beside(more ...string) []string {
	return append([]string{"serve", "--http-listen", "127.0.0.1:0"}, more...)
}

// startNATS runs a server with JetStream and the given configuration.
func startNATS(t *testing.T, conf string) *server.Server {
	t.Helper()
	o := natsOptions(t, conf)
	o.Port = server.RANDOM_PORT
	return runNATS(t, o)
}

func natsOptions(t *testing.T, conf string) *server.Options {
	t.Helper()
	file := writeFile(t, "nats.conf", conf)
	o, err := server.ProcessConfigFile(file)
	if err != nil {
		t.Fatal(err)
	}
	o.ConfigFile = ""
	o.Host, o.JetStream, o.StoreDir, o.NoSigs = "127.0.0.1", true, t.TempDir(), true
	return o
}

func runNATS(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	ns, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	if !ns.ReadyForConnections(patience) {
		t.Fatal("NATS server does not start")
	}
	return ns
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func dial(t *testing.T, url string, options ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// eventually waits until f is true.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !f() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// scrape reads the series of a leased: name{labels} to value.
func scrape(t *testing.T, address string) map[string]string {
	t.Helper()
	_, body := get(t, "http://"+address+"/metrics")
	series := map[string]string{}
	for line := range strings.Lines(body) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && !strings.HasPrefix(line, "#") {
			series[line[:i]] = strings.TrimSpace(line[i:])
		}
	}
	return series
}

func names(series map[string]string) []string { return slices.Sorted(maps.Keys(series)) }

// lockedBuffer takes a log from many goroutines.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *lockedBuffer) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(b, nil)) }
