package embedded

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"
)

const childEnv = "EMBEDDED_TEST_STORE"

// The test binary is also the child process that is killed while it holds a store.
// serversOwn is nats-server's own ticker: a server in this process may leave it
// behind, and nobody outside can end it.
var serversOwn = goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1")

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		child(dir)
		return
	}
	goleak.VerifyTestMain(m, serversOwn)
}

func child(dir string) {
	s, err := Start(Options{Listen: "127.0.0.1:0", StoreDir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(s.ClientURL())
	select {}
}

func start(t *testing.T, o Options) *Server {
	t.Helper()
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if o.StoreDir == "" {
		o.StoreDir = t.TempDir()
	}
	if o.Users == nil {
		o.Users = map[string]*server.Permissions{all: nil}
	}
	s, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shutdown(t, s) })
	return s
}

func shutdown(t *testing.T, s *Server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := s.Shutdown(ctx); err != nil {
		t.Error(err)
	}
}

// all is a user who may do everything.
const all = "all"

func connect(t *testing.T, s *Server, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := s.Connect(all, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// put stores a message in stream S, made on first use, and returns its sequence.
func put(t *testing.T, nc *nats.Conn) uint64 {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	ack, err := js.Publish(t.Context(), "s", []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	return ack.Sequence
}

func writeFile(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestStartAndStopLeaveNothing(t *testing.T) {
	before := goleak.IgnoreCurrent()
	dir := t.TempDir()
	for i := range 20 {
		s, err := Start(Options{Listen: "127.0.0.1:0", StoreDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		nc, err := s.Connect(all)
		if err != nil {
			t.Fatal(err)
		}
		if got, want := put(t, nc), uint64(i+1); got != want {
			t.Fatalf("start %d: sequence %d, want %d: what was stored is gone", i, got, want)
		}
		nc.Close()
		shutdown(t, s)
		if _, err := net.Dial("tcp", strings.TrimPrefix(s.ClientURL(), "nats://")); err == nil {
			t.Fatal("the listener is still open after Shutdown")
		}
	}
	goleak.VerifyNone(t, before, serversOwn)
}

func TestDefaults(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "store")
	s := start(t, Options{StoreDir: dir})
	if c := s.ns.JetStreamConfig(); !c.SyncAlways {
		t.Error("sync is not always by default")
	}
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o700 {
		t.Errorf("store directory has mode %o, want 700", info.Mode().Perm())
	}
	if s.Version() != server.VERSION || s.Version() == "" {
		t.Errorf("version %q", s.Version())
	}
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	put(t, nc)
	if host, port, err := splitListen(DefaultListen); host != "127.0.0.1" || port != 4222 || err != nil {
		t.Errorf("default listen is %s %d %v", host, port, err)
	}
}

// TestPrecedence: an option wins over the file, the file over the default.
func TestPrecedence(t *testing.T) {
	dir, flagDir := t.TempDir(), t.TempDir()
	file := writeFile(t, fmt.Sprintf(`
		listen: "127.0.0.1:4229"
		server_name: from_file
		max_payload: 65536
		max_pending: 128MB
		jetstream { store_dir: %q, sync_interval: 10s }
	`, dir))
	log := newLogger(nil)

	opts, err := Options{ConfigFile: file}.serverOptions(log)
	if err != nil {
		t.Fatal(err)
	}
	if opts.Port != 4229 || opts.ServerName != "from_file" || opts.StoreDir != dir || opts.SyncAlways || opts.SyncInterval != 10*time.Second || opts.MaxPayload != 65536 || opts.MaxPending != 128<<20 {
		t.Errorf("the file does not hold: %+v", opts)
	}
	opts, err = Options{ConfigFile: file, Listen: "localhost:0", ServerName: "n", StoreDir: flagDir, SyncAlways: true}.serverOptions(log)
	if err != nil {
		t.Fatal(err)
	}
	if opts.Host != "localhost" || opts.Port != -1 || opts.ServerName != "n" || opts.StoreDir != flagDir || !opts.SyncAlways || opts.MaxPayload != 65536 {
		t.Errorf("the options do not win: %+v", opts)
	}

	if opts, err := (Options{StoreDir: dir}).serverOptions(log); err != nil || opts.MaxPending != maxPending {
		t.Errorf("the default does not hold: %+v, %v", opts, err)
	}

	s := start(t, Options{ConfigFile: file, SyncInterval: time.Minute})
	if c := s.ns.JetStreamConfig(); c.SyncAlways || c.SyncInterval != time.Minute {
		t.Errorf("sync is %v %v, want every minute", c.SyncAlways, c.SyncInterval)
	}
	always := start(t, Options{ConfigFile: writeFile(t, `jetstream { sync_interval: always }`)})
	if c := always.ns.JetStreamConfig(); !c.SyncAlways {
		t.Error("sync_interval: always in the file does not hold")
	}
}

func TestBadOptions(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	notDir := writeFile(t, "")
	for name, c := range map[string]struct {
		o    Options
		conf string
		want []string
	}{
		"no store":            {o: Options{StoreDir: "-"}, want: []string{"--store-dir", "store_dir"}},
		"store is a file":     {o: Options{StoreDir: notDir}, want: []string{"--store-dir", notDir}},
		"listen without port": {o: Options{Listen: "127.0.0.1"}, want: []string{"--nats-listen", "host:port"}},
		"listen bad port":     {o: Options{Listen: "127.0.0.1:65536"}, want: []string{"--nats-listen", "65535"}},
		"both syncs":          {o: Options{SyncAlways: true, SyncInterval: 1}, want: []string{"--sync"}},
		"negative sync":       {o: Options{SyncInterval: -1}, want: []string{"--sync"}},
		"port taken":          {o: Options{Listen: taken.Addr().String()}, want: []string{"--nats-listen", "taken", taken.Addr().String()}},
		"file port taken":     {conf: `http: "` + taken.Addr().String() + `"`, want: []string{"--nats-config", "taken", taken.Addr().String()}},
		"no file":             {o: Options{ConfigFile: "/nonexistent/nats.conf"}, want: []string{"--nats-config", "/nonexistent/nats.conf"}},
		"unknown setting":     {conf: `jetstraem: on`, want: []string{"--nats-config", "jetstraem"}},
		"broken file":         {conf: `authorization { `, want: []string{"--nats-config"}},
		"unknown account":     {o: Options{Account: "B"}, conf: `accounts { A { jetstream: on, users: [{user: a, password: a}] } }`, want: []string{"--nats-account B"}},
		"ambiguous account": {conf: `accounts { A { jetstream: on, users: [{user: a, password: a}] }, B { jetstream: on, users: [{user: b, password: b}] } }`,
			want: []string{"--nats-account", "A", "B"}},
		"system account": {o: Options{Account: "SYS"}, conf: `system_account: SYS, accounts { SYS { users: [{user: a, password: a}] } }`, want: []string{"--nats-account SYS"}},
		"account without jetstream": {conf: `accounts { A { users: [{user: a, password: a}] } }`,
			want: []string{"account A", "jetstream: enabled"}},
		"accounts without users": {conf: `accounts { A { jetstream: on } }`, want: []string{"account $G", "JetStream"}},
		"account nobody is in":   {o: Options{Account: "A"}, conf: `accounts { A { jetstream: on } }`, want: []string{"--nats-account A", "no users"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.o.StoreDir == "" {
				c.o.StoreDir = t.TempDir()
			}
			if c.o.StoreDir == "-" {
				c.o.StoreDir = ""
			}
			if c.o.Listen == "" {
				c.o.Listen = "127.0.0.1:0"
			}
			if c.conf != "" {
				c.o.ConfigFile = writeFile(t, c.conf)
			}
			before := goleak.IgnoreCurrent()
			s, err := Start(c.o)
			if err == nil {
				shutdown(t, s)
				t.Fatal("started")
			}
			t.Log(err)
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not name %q", err, w)
				}
			}
			goleak.VerifyNone(t, before, serversOwn)
			if c.o.StoreDir != "" && c.o.StoreDir != notDir {
				f, err := lockStore(c.o.StoreDir)
				if err != nil {
					t.Fatalf("the failed start left the store locked: %v", err)
				}
				f.Close()
			}
		})
	}
}

func TestOneProcessAStore(t *testing.T) {
	dir := t.TempDir()
	s := start(t, Options{StoreDir: dir})
	_, err := Start(Options{Listen: "127.0.0.1:0", StoreDir: dir})
	if err == nil {
		t.Fatal("two servers on one store")
	}
	t.Log(err)
	for _, w := range []string{"--store-dir", dir, fmt.Sprintf("pid %d", os.Getpid())} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not name %q", err, w)
		}
	}
	connect(t, s) // the refused start did not harm the first
}

func TestKilledProcessFreesItsStore(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill := func() {
		if !killed {
			killed = true
			cmd.Process.Kill()
			cmd.Wait()
		}
	}
	t.Cleanup(kill)
	url, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || !strings.HasPrefix(url, "nats://") {
		t.Fatalf("child says %q, %v", url, err)
	}
	nc, err := nats.Connect(strings.TrimSpace(url))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	first := put(t, nc)

	_, err = Start(Options{Listen: "127.0.0.1:0", StoreDir: dir})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("pid %d", cmd.Process.Pid)) {
		t.Fatalf("while the child has the store: %v", err)
	}
	kill()
	s := start(t, Options{StoreDir: dir})
	if got := put(t, connect(t, s)); got != first+1 {
		t.Errorf("sequence %d after the kill, want %d", got, first+1)
	}
}

func TestShutdownHonoursContext(t *testing.T) {
	s := start(t, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Shutdown(ctx); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown: %v", err)
	}
	shutdown(t, s) // goes on, and may be called again
	shutdown(t, s)
}

func TestLog(t *testing.T) {
	var buf syncBuffer
	quiet := slog.New(slog.NewJSONHandler(&buf, nil))
	s := start(t, Options{Logger: quiet})
	connect(t, s)
	shutdown(t, s)
	if buf.String() != "" {
		t.Errorf("at level info an ordinary run says:\n%s", buf.String())
	}

	loud := slog.New(slog.NewJSONHandler(&buf, &slog.HandlerOptions{Level: levelServerTrace}))
	conf := writeFile(t, `authorization { users: [{user: a, password: plain}] }`)
	s = start(t, Options{Logger: loud, ConfigFile: conf})
	connect(t, s)
	if nc, err := nats.Connect(s.ClientURL()); err == nil {
		nc.Close()
		t.Fatal("connected without credentials")
	}
	shutdown(t, s)
	levels := map[string]bool{}
	for line := range strings.Lines(buf.String()) {
		var rec struct{ Level, Msg, Component string }
		if err := json.Unmarshal([]byte(line), &rec); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if rec.Component != "nats-server" {
			t.Errorf("a line does not say that it is the server's: %s", line)
		}
		levels[rec.Level] = true
	}
	for _, l := range []string{"ERROR", "WARN", "DEBUG", "DEBUG-4", "DEBUG-8"} {
		if !levels[l] {
			t.Errorf("no line at level %s", l)
		}
	}
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
