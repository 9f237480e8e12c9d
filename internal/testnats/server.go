package testnats

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Option changes how a server inside the test process is configured.
type Option func(*server.Options)

// SyncAlways syncs each write to disk, as the embedded server of the product does by default;
// tests leave it off, as it tells nothing without a power loss and takes time.
func SyncAlways(o *server.Options) { o.SyncAlways = true }

// WithoutJetStream runs a server that knows no JetStream.
func WithoutJetStream(o *server.Options) { o.JetStream = false }

// StoreDir keeps the store in dir instead of a directory that goes with the test.
func StoreDir(dir string) Option { return func(o *server.Options) { o.StoreDir = dir } }

// Node is a nats-server inside the test process. Stop and Restart keep its port and store.
type Node struct {
	Name string
	URL  string

	t    testing.TB
	opts *server.Options
	log  *output

	mu sync.Mutex
	ns *server.Server // nil when stopped
}

// Server starts a single server with JetStream.
func Server(t testing.TB, opts ...Option) *Node {
	t.Helper()
	n := newNode(t, "n0", opts)
	n.Restart()
	return n
}

func newNode(t testing.TB, name string, opts []Option) *Node {
	t.Helper()
	o := &server.Options{
		ServerName: name,
		Host:       "127.0.0.1",
		Port:       FreePort(t),
		JetStream:  true,
		StoreDir:   t.TempDir(),
		NoSigs:     true,
	}
	for _, opt := range opts {
		opt(o)
	}
	n := &Node{Name: o.ServerName, URL: fmt.Sprintf("nats://127.0.0.1:%d", o.Port), t: t, opts: o, log: &output{}}
	n.log.showOnFailure(t, n.Name)
	t.Cleanup(n.Stop)
	return n
}

// NS is the running server, for what it alone can tell; nil when it is stopped.
func (n *Node) NS() *server.Server {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.ns
}

// Running tells whether the server has been started and not been stopped.
func (n *Node) Running() bool { return n.NS() != nil }

// Log is what the server has logged so far.
func (n *Node) Log() string { return n.log.String() }

// Connect opens a connection that ends with the test.
func (n *Node) Connect(opts ...nats.Option) *nats.Conn {
	n.t.Helper()
	return Connect(n.t, n.URL, opts...)
}

// Stop shuts the server down in good order and waits until all of it is gone.
func (n *Node) Stop() {
	ns := n.NS()
	if ns == nil {
		return
	}
	ns.Shutdown()
	ns.WaitForShutdown()
	n.mu.Lock()
	n.ns = nil
	n.mu.Unlock()
}

// Restart stops the server if it runs and starts it again.
func (n *Node) Restart() {
	n.t.Helper()
	n.Stop()
	n.start()
	n.ready()
}

func (n *Node) start() {
	n.t.Helper()
	ns, err := server.NewServer(n.opts.Clone())
	if err != nil {
		n.t.Fatalf("server %s: %v", n.Name, err)
	}
	n.log.forgetFatal()
	ns.SetLoggerV2(n.log, n.opts.Debug, n.opts.Trace, false)
	n.mu.Lock()
	n.ns = ns
	n.mu.Unlock()
	ns.Start()
}

func (n *Node) ready() {
	n.t.Helper()
	if err := n.log.fatalError(); err != "" {
		n.t.Fatalf("server %s: %s", n.Name, err)
	}
	if !n.NS().ReadyForConnections(20 * time.Second) {
		n.t.Fatalf("server %s: not ready for connections", n.Name)
	}
}

// Connect opens a connection that ends with the test. It keeps nothing to send later while it is
// disconnected, and tries again without end.
func Connect(t testing.TB, url string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, append([]nats.Option{
		nats.Timeout(5 * time.Second), nats.MaxReconnects(-1), nats.ReconnectWait(50 * time.Millisecond), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(-1),
	}, opts...)...)
	if err != nil {
		t.Fatalf("connect to %s: %v", url, err)
	}
	t.Cleanup(nc.Close)
	return nc
}
