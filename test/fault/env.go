package fault

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// Topology is where a run happens.
type Topology string

const (
	// Embedded: leased with its own server inside, and a second leased beside it
	// on the same server. The first is killed with its server.
	Embedded Topology = "embedded"
	// R1: one nats-server and three instances of leased.
	R1 Topology = "r1"
	// R3: three nats-servers and three instances of leased, three replicas.
	R3 Topology = "r3"
)

// Variant is what runs instead of the usual programs.
type Variant struct {
	Leased  string   // path of leased
	Env     []string // of leased
	Server  string   // path of nats-server
	Config  string   // more configuration of every nats-server
	Version string   // of nats-server
	Store   string   // store directory of the single server
	Args    []string // more arguments of every leased
}

// Env is a running system: servers, instances of leased and the links between
// them, all of which a fault may break.
type Env struct {
	T   testing.TB
	On  Topology
	Rng *rand.Rand
	Rec *Recorder
	Log *Log
	Box *Inbox

	// Foreign keys are those that a fault writes past the service.
	Foreign map[string]bool

	Servers  []*testnats.ChildServer // none when embedded
	Cluster  *testnats.Processes     // R3 only
	Services []*testnats.Service
	// ToServer are the links from instance i to server j, Clients those from the
	// clients to server j.
	ToServer [][]*testnats.Link
	Clients  []*testnats.Link

	urls  []string // of the servers themselves
	bin   string   // leased
	admin *Client
	probe int
}

// NewEnv starts a system and waits until every instance serves.
func NewEnv(t testing.TB, on Topology, seed uint64, v Variant) *Env {
	t.Helper()
	rec := NewRecorder()
	e := &Env{T: t, On: on, Rng: rand.New(rand.NewPCG(seed, 0xfa)), Rec: rec, Log: NewLog(rec.Clock), Box: &Inbox{}, Foreign: map[string]bool{}}
	if v.Leased == "" {
		v.Leased = testnats.LeasedBinary(t)
	}
	e.bin = v.Leased
	replicas := "1"
	o := testnats.ChildOptions{Version: v.Version, Program: v.Server, Config: v.Config, Sync: "always", StoreDir: v.Store}
	switch on {
	case Embedded:
		store := filepath.Join(t.TempDir(), "store")
		listen := fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t))
		e.urls = []string{"nats://" + listen}
		e.Services = append(e.Services, testnats.LeasedFrom(t, v.Leased, v.Env, append([]string{"serve", "--nats-listen", listen, "--store-dir", store, "--http-listen", "127.0.0.1:0"}, v.Args...)...))
	case R1:
		e.Servers = append(e.Servers, testnats.Child(t, o))
		e.urls = []string{e.Servers[0].URL}
	case R3:
		e.Cluster = testnats.ChildCluster(t, 3, o)
		e.Servers, e.urls, replicas = e.Cluster.Servers, e.Cluster.URLs(), "3"
	}
	for range 3 - len(e.Services) {
		var links []*testnats.Link
		var urls []string
		for range e.urls {
			l := testnats.Relay(t, e.urls[(len(e.ToServer)+len(links))%len(e.urls)])
			links, urls = append(links, l), append(urls, l.URL())
		}
		// The links of an instance are in the order of the servers, whichever it
		// tries first.
		first := len(e.ToServer) % len(links)
		byServer := make([]*testnats.Link, len(links))
		for i, l := range links {
			byServer[(first+i)%len(links)] = l
		}
		e.ToServer = append(e.ToServer, byServer)
		e.Services = append(e.Services, testnats.LeasedFrom(t, v.Leased, v.Env, append([]string{"serve", "--server", strings.Join(urls, ","), "--replicas", replicas, "--http-listen", "127.0.0.1:0"}, v.Args...)...))
		if on == Embedded {
			break
		}
	}
	for _, url := range e.urls {
		e.Clients = append(e.Clients, testnats.Relay(t, url))
	}
	nc, err := nats.Connect(strings.Join(e.urls, ","), connOptions("admin")...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	e.admin = &Client{ID: 1000, Conn: nc, Record: rec}
	e.WaitReady(60 * time.Second)
	return e
}

// Connect makes the connection of client i: to all servers through the clients'
// links, a different one first for each.
func (e *Env) Connect(i int) (*nats.Conn, error) {
	var urls []string
	for j := range e.Clients {
		urls = append(urls, e.Clients[(i+j)%len(e.Clients)].URL())
	}
	return nats.Connect(strings.Join(urls, ","), connOptions(fmt.Sprintf("client-%d", i))...)
}

// outside are the instances that are not the embedded server's process.
func (e *Env) outside() []*testnats.Service {
	if e.On == Embedded {
		return e.Services[1:]
	}
	return e.Services
}

// link is the links of an outside instance.
func (e *Env) link(outside int) []*testnats.Link { return e.ToServer[outside] }

// process is what can be killed, paused and started again.
type process interface {
	Kill()
	Pause()
	Resume()
	Restart()
	Running() bool
}

// server is the process of server i: in the embedded topology leased itself.
func (e *Env) server(i int) process {
	if e.On == Embedded {
		return e.Services[0]
	}
	return e.Servers[i]
}

// leader is the server that leads the bucket.
func (e *Env) leader() int {
	if e.Cluster == nil {
		return 0
	}
	return e.Cluster.WaitLeader(bucketStream)
}

// Fault opens a window named name.
func (e *Env) Fault(name string, shape Window) (end func()) {
	shape.Fault = name
	return e.Rec.Fault(shape)
}

// ready returns what keeps the system from serving.
func (e *Env) ready() error {
	for i, s := range e.Services {
		if !s.Running() {
			return fmt.Errorf("instance %d does not run", i)
		}
		if err := httpOK("http://" + s.HTTP() + "/readyz?verbose"); err != nil {
			return fmt.Errorf("instance %d: %w", i, err)
		}
	}
	for _, s := range e.Servers {
		if err := s.Healthy(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	si, err := bucketInfo(ctx, e.admin.Conn)
	if err != nil {
		return err
	}
	if si.Cluster != nil {
		for _, r := range si.Cluster.Replicas {
			if !r.Current || r.Offline {
				return fmt.Errorf("replica %s is not current", r.Name)
			}
		}
	}
	return nil
}

// WaitReady waits until everything serves and every replica is current.
func (e *Env) WaitReady(within time.Duration) {
	e.T.Helper()
	var err error
	testnats.Eventually(e.T, within, func() bool { err = e.ready(); return err == nil }, testnats.Lazy(func() string { return fmt.Sprint("the system is not ready: ", err) }))
}

var httpClient = &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: time.Second}).DialContext}}

func httpOK(url string) error {
	resp, err := httpClient.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var b [500]byte
		n, _ := resp.Body.Read(b[:])
		return fmt.Errorf("%s: %s %s", url, resp.Status, b[:n])
	}
	return nil
}

var replySeries = regexp.MustCompile(`^leased_replies_total\{endpoint="([a-z_]+)",kind="([a-z_]+)"\} ([0-9.e+]+)$`)

// Counted reads the reply counters of instance i.
func (e *Env) Counted(i int) (map[Call]map[kinds.Kind]uint64, error) {
	resp, err := httpClient.Get("http://" + e.Services[i].HTTP() + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	counts := map[Call]map[kinds.Kind]uint64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		m := replySeries.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		n, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			return nil, err
		}
		call := Call(m[1])
		if counts[call] == nil {
			counts[call] = map[kinds.Kind]uint64{}
		}
		counts[call][kinds.Kind(m[2])] = uint64(n)
	}
	if len(counts) == 0 {
		return nil, fmt.Errorf("no leased_replies_total on instance %d", i)
	}
	return counts, lines.Err()
}

// AllCounted sums the counters of all instances.
func (e *Env) AllCounted() (map[Call]map[kinds.Kind]uint64, error) {
	sum := map[Call]map[kinds.Kind]uint64{}
	for i := range e.Services {
		one, err := e.Counted(i)
		if err != nil {
			return nil, err
		}
		for call, of := range one {
			if sum[call] == nil {
				sum[call] = map[kinds.Kind]uint64{}
			}
			for kind, n := range of {
				sum[call][kind] += n
			}
		}
	}
	return sum, nil
}

// recoverIn is the time after the last fault in which everything must work
// again, serveIn the time in which a free key must then be granted.
const (
	recoverIn = 30 * time.Second
	serveIn   = time.Second
)

// Recovered waits until a free key can be acquired within 1 s through every
// instance, and returns how long that took; 30 s is the limit (I18).
func (e *Env) Recovered() (time.Duration, error) {
	start := time.Now()
	last := fmt.Errorf("nothing tried")
	for time.Since(start) < recoverIn {
		if last = e.serveAll(); last == nil {
			return time.Since(start), nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return time.Since(start), fmt.Errorf("30 s after the last fault not every instance serves: %w", last)
}

// serveAll acquires fresh keys until every instance has granted one. Each must
// be granted in time.
func (e *Env) serveAll() error {
	granted := func(i int) (uint64, error) {
		c, err := e.Counted(i)
		return c[Acquire][kinds.Granted], err
	}
	before := make([]uint64, len(e.Services))
	for i := range e.Services {
		var err error
		if before[i], err = granted(i); err != nil {
			return err
		}
	}
	for range 20 {
		for range 5 {
			e.probe++
			name := fmt.Sprintf("probe-%d", e.probe)
			op := e.admin.Do(Op{Call: Acquire, Key: name, Holder: name, TTL: time.Second})
			if op.Outcome != OK || op.End-op.Start > int64(serveIn) {
				return fmt.Errorf("a free key took %v: %v %s", time.Duration(op.End-op.Start), &op, op.Text)
			}
		}
		all := true
		for i := range e.Services {
			now, err := granted(i)
			if err != nil {
				return err
			}
			all = all && now > before[i]
		}
		if all {
			return nil
		}
	}
	return fmt.Errorf("an instance granted none of 100 leases")
}

// api asks JetStream for something and fails on its refusal.
func (e *Env) api(what string, body any) error {
	var out struct {
		Error *struct {
			Code        int    `json:"err_code"`
			Description string `json:"description"`
		} `json:"error"`
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := jsCall(ctx, e.admin.Conn, what, body, &out); err != nil {
		return err
	}
	if out.Error != nil {
		return fmt.Errorf("%s: %d %s", what, out.Error.Code, out.Error.Description)
	}
	return nil
}

// cacheDir keeps programs that take long to build.
func cacheDir(t testing.TB) string {
	t.Helper()
	dir, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir = filepath.Join(dir, "leased-test", "fault")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
