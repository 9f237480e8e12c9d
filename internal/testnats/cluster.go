package testnats

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Nodes is a cluster of servers inside the test process.
type Nodes struct {
	quorum
	Servers []*Node
}

// Processes is a cluster of nats-server child processes.
type Processes struct {
	quorum
	Servers []*ChildServer
}

// Cluster starts n servers inside this process, joined by routes through relays, and waits until
// they can make a stream with n replicas.
func Cluster(t testing.TB, n int, opts ...Option) *Nodes {
	t.Helper()
	c := &Nodes{}
	c.init(t, n, func(i int) string { return c.Servers[i].URL }, func(i int) bool { return c.Servers[i].Running() })
	for i := range n {
		node := newNode(t, c.name(i), append([]Option{func(o *server.Options) {
			o.Cluster = server.ClusterOpts{Name: "testnats", Host: "127.0.0.1", Port: c.ports[i], Advertise: nowhere, NoAdvertise: true, PoolSize: -1}
			for _, route := range c.routes(i) {
				u, err := url.Parse(route)
				if err != nil {
					t.Fatal(err)
				}
				o.Routes = append(o.Routes, u)
			}
		}}, opts...))
		c.Servers = append(c.Servers, node)
		node.start()
	}
	for _, node := range c.Servers {
		node.ready()
	}
	c.WaitReady()
	return c
}

// ChildCluster starts n child processes in the same way. Name, Port and StoreDir of the options
// are not used; Version may be given for each server in versions.
func ChildCluster(t testing.TB, n int, o ChildOptions, versions ...string) *Processes {
	t.Helper()
	c := &Processes{}
	c.init(t, n, func(i int) string { return c.Servers[i].URL }, func(i int) bool { return c.Servers[i].Running() })
	extra := o.Config
	for i := range n {
		o.Name, o.Port, o.StoreDir = c.name(i), 0, ""
		if i < len(versions) {
			o.Version = versions[i]
		}
		pool := "pool_size: -1, "
		if strings.HasPrefix(o.Version, "2.9.") { // does not know it, and has one route a peer anyway
			pool = ""
		}
		o.Config = fmt.Sprintf("cluster { name: testnats, listen: \"127.0.0.1:%d\", cluster_advertise: %q, no_advertise: true, %sroutes: [%s] }\n%s",
			c.ports[i], nowhere, pool, strings.Join(c.routes(i), ", "), extra)
		s := newChild(t, o)
		c.Servers = append(c.Servers, s)
		s.start()
	}
	for _, s := range c.Servers {
		s.ready()
	}
	c.WaitReady()
	return c
}

// nowhere is what servers tell each other about where they are. Left to themselves they would make
// routes past the relays: what one hears of another by way of a third, it dials directly, and
// no_advertise keeps addresses from clients only.
const nowhere = "127.0.0.1:1"

// quorum is what both kinds of cluster can do. Server i is named n<i>.
type quorum struct {
	t     testing.TB
	n     int
	ports []int     // cluster ports
	link  [][]*Link // [i][j]: what i dials to reach j
	url   func(i int) string
	up    func(i int) bool

	mu    sync.Mutex
	conns []*nats.Conn
}

func (q *quorum) init(t testing.TB, n int, url func(int) string, up func(int) bool) {
	t.Helper()
	q.t, q.n, q.url, q.up = t, n, url, up
	q.conns = make([]*nats.Conn, n)
	for range n {
		q.ports = append(q.ports, FreePort(t))
	}
	for i := range n {
		q.link = append(q.link, make([]*Link, n))
		for j := range n {
			if i != j {
				q.link[i][j] = newLink(t, fmt.Sprintf("127.0.0.1:%d", q.ports[j]), false)
			}
		}
	}
}

func (q *quorum) name(i int) string { return fmt.Sprintf("n%d", i) }

func (q *quorum) index(name string) int {
	for i := range q.n {
		if q.name(i) == name {
			return i
		}
	}
	return -1
}

func (q *quorum) routes(i int) []string {
	var urls []string
	for j, l := range q.link[i] {
		if j != i {
			urls = append(urls, l.URL())
		}
	}
	return urls
}

// URLs are the client URLs of all servers.
func (q *quorum) URLs() []string {
	var urls []string
	for i := range q.n {
		urls = append(urls, q.url(i))
	}
	return urls
}

// URL is all of them in one string, for nats.Connect.
func (q *quorum) URL() string { return strings.Join(q.URLs(), ",") }

// Connect opens a connection to the cluster that ends with the test.
func (q *quorum) Connect(opts ...nats.Option) *nats.Conn {
	q.t.Helper()
	return Connect(q.t, q.URL(), opts...)
}

// SetRouteDelay makes each message between two servers take d one way.
func (q *quorum) SetRouteDelay(d time.Duration) {
	q.each(func(_, _ int, l *Link) { l.Delay(d, 0) })
}

// Isolate cuts server i off from all others, both ways; its clients stay.
func (q *quorum) Isolate(i int, m Mode) {
	q.each(func(from, to int, l *Link) {
		if from == i || to == i {
			l.Set(m)
		}
	})
}

// Block sets the mode for what server from sends to server to, and for that way only, except that
// Cut is for both ways. Two servers have one connection, whoever dialed it.
func (q *quorum) Block(from, to int, m Mode) {
	q.link[from][to].Set(m, Up)
	q.link[to][from].Set(m, Down)
}

// Heal ends Isolate and Block.
func (q *quorum) Heal() {
	q.each(func(_, _ int, l *Link) { l.Set(Pass) })
}

func (q *quorum) each(f func(from, to int, l *Link)) {
	for i := range q.link {
		for j, l := range q.link[i] {
			if i != j {
				f(i, j, l)
			}
		}
	}
}

// isolated tells whether server i has no way to or from any other.
func (q *quorum) isolated(i int) bool {
	alone := true
	q.each(func(from, to int, l *Link) {
		if from == i || to == i {
			alone = alone && l.mode(Up) != Pass && l.mode(Down) != Pass
		}
	})
	return alone && q.n > 1
}

// WaitReady waits until the servers that run and are not isolated can make a stream with a replica
// on each of them.
func (q *quorum) WaitReady() {
	q.t.Helper()
	replicas := 0
	for i := range q.n {
		if q.up(i) && !q.isolated(i) {
			replicas++
		}
	}
	const probe = "testnats_probe"
	var last string
	Eventually(q.t, 60*time.Second, func() bool {
		for i := range q.n {
			var made struct{ apiError }
			config := map[string]any{"name": probe, "subjects": []string{probe}, "storage": "memory", "num_replicas": replicas}
			if err := q.api(i, "STREAM.CREATE."+probe, config, &made, 5*time.Second); err != nil {
				last = err.Error()
				continue
			}
			// The delete is part of being ready: no trace of the probe is left.
			err := q.api(i, "STREAM.DELETE."+probe, nil, &made, 5*time.Second)
			if err == nil {
				return true
			}
			last = err.Error()
		}
		return false
	}, "cluster is not ready: ", Lazy(func() string { return last }))
}

// StreamLeader is the server that leads the stream, -1 when none is known just now. Isolated
// servers are not asked, and not believed.
func (q *quorum) StreamLeader(stream string) int {
	for i := range q.n {
		var info struct {
			apiError
			Cluster struct{ Leader string }
		}
		if q.api(i, "STREAM.INFO."+stream, nil, &info, time.Second) != nil {
			continue
		}
		if leader := q.index(info.Cluster.Leader); leader >= 0 && q.up(leader) && !q.isolated(leader) {
			return leader
		}
	}
	return -1
}

// WaitLeader waits until the stream has a leader and returns it.
func (q *quorum) WaitLeader(stream string) int {
	q.t.Helper()
	leader := -1
	Eventually(q.t, 60*time.Second, func() bool {
		leader = q.StreamLeader(stream)
		return leader >= 0
	}, "stream ", stream, " has no leader")
	return leader
}

// StepDown makes the leader of the stream give way and returns the new one. With prefer, that
// server is asked for, which takes nats-server 2.11.
func (q *quorum) StepDown(stream string, prefer ...int) int {
	q.t.Helper()
	before := q.WaitLeader(stream)
	var request any
	if len(prefer) > 0 {
		if before == prefer[0] {
			return before
		}
		request = map[string]any{"placement": map[string]string{"preferred": q.name(prefer[0])}}
	}
	now := before
	var last string
	Eventually(q.t, 60*time.Second, func() bool {
		var done struct{ apiError }
		if err := q.api(before, "STREAM.LEADER.STEPDOWN."+stream, request, &done, 5*time.Second); err != nil {
			last = err.Error()
		}
		now = q.WaitLeader(stream)
		if len(prefer) > 0 {
			return now == prefer[0]
		}
		return now != before
	}, "stream ", stream, " does not change its leader: ", Lazy(func() string { return last }))
	return now
}

type apiError struct {
	Error *struct {
		Code        int
		ErrCode     int `json:"err_code"`
		Description string
	}
}

func (e apiError) err() error {
	if e.Error == nil {
		return nil
	}
	return fmt.Errorf("%d %d %s", e.Error.Code, e.Error.ErrCode, e.Error.Description)
}

// api asks JetStream through server i.
func (q *quorum) api(i int, subject string, request any, reply interface{ err() error }, within time.Duration) error {
	if !q.up(i) || q.isolated(i) {
		return fmt.Errorf("%s is not there", q.name(i))
	}
	nc, err := q.conn(i)
	if err != nil {
		return err
	}
	var body []byte
	if request != nil {
		if body, err = json.Marshal(request); err != nil {
			return err
		}
	}
	msg, err := nc.Request("$JS.API."+subject, body, within)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(msg.Data, reply); err != nil {
		return err
	}
	return reply.err()
}

func (q *quorum) conn(i int) (*nats.Conn, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.conns[i] != nil {
		return q.conns[i], nil
	}
	nc, err := nats.Connect(q.url(i), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(-1))
	if err != nil {
		return nil, err
	}
	q.conns[i] = nc
	q.t.Cleanup(nc.Close)
	return nc, nil
}
