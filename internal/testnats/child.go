package testnats

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// ChildOptions say which nats-server to run as a child process and how.
type ChildOptions struct {
	Version     string // such as "2.12.1", see Binary; default DefaultVersion
	Program     string // path of the program; default that of Version
	Name        string // server_name; default n0
	Port        int    // for clients; default a free one
	StoreDir    string // default one that goes with the test
	NoJetStream bool
	Sync        string        // sync_interval, "always" or a duration; default that of nats-server
	Config      string        // more of nats-server's configuration, after what the fields above make
	User        *url.Userinfo // who the URL, and what connects by it, claims to be, where Config has users
}

// ChildServer is a nats-server as a child process. Restart keeps its ports and store.
type ChildServer struct {
	*Process
	Name    string
	URL     string
	Monitor string // URL of the monitoring port, such as http://127.0.0.1:8222
	Version string
	listen  string
}

// Child starts a nats-server of the given version and waits until it is healthy.
func Child(t testing.TB, o ChildOptions) *ChildServer {
	t.Helper()
	s := newChild(t, o)
	s.start()
	s.ready()
	return s
}

func newChild(t testing.TB, o ChildOptions) *ChildServer {
	t.Helper()
	if o.Version == "" {
		o.Version = DefaultVersion
	}
	if o.Name == "" {
		o.Name = "n0"
	}
	if o.Port == 0 {
		o.Port = FreePort(t)
	}
	binary := o.Program
	if binary == "" {
		binary = serverProgram(t, o.Version)
	}
	monitor := FreePort(t)
	var conf strings.Builder
	fmt.Fprintf(&conf, "listen: \"127.0.0.1:%d\"\nhttp: \"127.0.0.1:%d\"\nserver_name: %q\n", o.Port, monitor, o.Name)
	if !o.NoJetStream {
		if o.StoreDir == "" {
			o.StoreDir = t.TempDir()
		}
		fmt.Fprintf(&conf, "jetstream {\n\tstore_dir: %q\n", o.StoreDir)
		if o.Sync != "" {
			fmt.Fprintf(&conf, "\tsync_interval: %s\n", o.Sync)
		}
		conf.WriteString("}\n")
	}
	conf.WriteString(o.Config)
	file := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(file, []byte(conf.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return &ChildServer{
		Process: newProcess(t, fmt.Sprintf("nats-server %s %s", o.Version, o.Name), binary, []string{"-c", file}),
		Name:    o.Name,
		URL:     (&url.URL{Scheme: "nats", User: o.User, Host: fmt.Sprintf("127.0.0.1:%d", o.Port)}).String(),
		Monitor: fmt.Sprintf("http://127.0.0.1:%d", monitor),
		Version: o.Version,
		listen:  fmt.Sprintf("127.0.0.1:%d", o.Port),
	}
}

// Restart kills the server if it runs, starts it again and waits until it is healthy.
func (s *ChildServer) Restart() {
	s.t.Helper()
	s.Kill()
	s.start()
	s.ready()
}

// Use makes the next Restart run another version of nats-server.
func (s *ChildServer) Use(version string) {
	s.t.Helper()
	s.path, s.Version = serverProgram(s.t, version), version
}

// Connect opens a connection that ends with the test.
func (s *ChildServer) Connect(opts ...nats.Option) *nats.Conn {
	s.t.Helper()
	return Connect(s.t, s.URL, opts...)
}

func (s *ChildServer) ready() {
	s.t.Helper()
	s.await(60*time.Second, s.Healthy)
}

// orphan is what /healthz says for good where a consumer was asked for while its stream was being
// deleted. Nobody uses that consumer.
const orphan = "consumer assignment error: stream not found"

// Healthy returns what keeps the server from serving: /healthz not ok, or no client port.
func (s *ChildServer) Healthy() error {
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(s.Monitor + "/healthz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); (resp.StatusCode != http.StatusOK && !bytes.Contains(body, []byte(orphan))) || err != nil {
		return fmt.Errorf("/healthz: %s %s %v", resp.Status, body, err)
	}
	conn, err := net.DialTimeout("tcp", s.listen, 2*time.Second)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := bufio.NewReader(conn).ReadString('\n'); err != nil {
		return fmt.Errorf("no INFO from %s: %w", s.listen, err)
	}
	return nil
}
