package service

import (
	"context"
	"crypto/tls"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// near keeps a connection to the server that leads the bucket's stream, where the Store
// connection goes to another one: a write over it passes through one server less, and
// so does its verdict. It is a shortcut. While there is none, or as soon as something
// speaks against it, writes go over the Store connection. Reads always do: of two
// servers that both believe to lead, this may be the one that was deposed.
type near struct {
	store *nats.Conn
	dial  func(...nats.Option) (*nats.Conn, error)
	log   *slog.Logger

	way  atomic.Pointer[requests] // nil: there is none
	news chan seat                // of the last look

	// The rest belongs to the goroutine of run.
	last    *requests // what way was before it was lost
	sought  seat
	again   time.Time // it is not looked for before
	backoff time.Duration
	names   map[string]string // of servers, by their addresses
	former  []*nats.Conn      // replies may still come over these
}

// seat is where a stream is led: a server, and its cluster.
type seat struct{ cluster, server string }

// Bounds of how long a way that was looked for in vain, or was lost, is not looked for
// again, while the same server leads.
const (
	nearLeast  = 5 * time.Second
	nearMost   = 5 * time.Minute
	nearSpread = 2 * time.Second // instances do not all come to a new leader at once
)

func newNear(store *nats.Conn, dial func(...nats.Option) (*nats.Conn, error), log *slog.Logger) *near {
	return &near{store: store, dial: dial, log: log, news: make(chan seat, 1), names: map[string]string{}}
}

// leads tells where the stream is led; no server is one that is alone.
func (n *near) leads(s seat) {
	select {
	case <-n.news:
	default:
	}
	select {
	case n.news <- s:
	default:
	}
}

// lost says that nc, if it still is the way, is of no use.
func (n *near) lost(nc *nats.Conn) {
	if way := n.way.Load(); way != nil && way.nc == nc {
		n.way.CompareAndSwap(way, nil)
	}
}

// drop is lost for whatever is the way now.
func (n *near) drop() { n.way.Store(nil) }

// run follows the leader until ctx is done. Nothing may be under way any more then.
func (n *near) run(ctx context.Context) {
	status := n.store.StatusChanged()
	defer n.store.RemoveStatusListener(status)
	defer func() {
		n.use(nil)
		for _, nc := range n.former {
			nc.Close()
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-status:
			// Without the Store connection nobody sees who leads, nor what was written.
			if s != nats.CONNECTED {
				n.use(nil)
			}
		case s := <-n.news:
			n.follow(ctx, s)
		}
	}
}

// follow sees to it that writes go straight to s, if they can.
func (n *near) follow(ctx context.Context, s seat) {
	now := time.Now()
	if n.last != nil && n.way.Load() == nil {
		n.log.Info("writes go over the store connection again", "server", n.sought.server)
		n.use(nil)
		if now.Sub(n.again) > nearMost {
			n.backoff = 0 // it was good for long
		}
	}
	if s != n.sought {
		n.use(nil)
		n.backoff, n.again = 0, now
		if n.sought != (seat{}) {
			n.again = now.Add(rand.N(nearSpread))
		}
		n.sought = s
	}
	if s.server == "" || n.last != nil || now.Before(n.again) {
		return
	}
	if s.server == n.store.ConnectedServerName() || s.cluster != n.store.ConnectedClusterName() {
		return // it is there, or behind a gateway or a leaf node, where no server known here is
	}
	n.backoff = min(max(2*n.backoff, nearLeast), nearMost)
	n.again = now.Add(n.backoff)
	nc := n.find(ctx, s.server)
	if nc == nil {
		level := slog.LevelDebug
		if n.backoff == nearLeast {
			level = slog.LevelInfo
		}
		n.log.Log(ctx, level, "no connection straight to the leader of the bucket", "server", s.server, "again_in", n.backoff)
		clear(n.names) // one of them may be another by now
		return
	}
	n.log.Info("writes go straight to the leader of the bucket", "server", s.server)
	n.use(nc)
}

// find connects to the server of that name, and gives nil if it cannot.
func (n *near) find(ctx context.Context, name string) *nats.Conn {
	servers, here := n.store.ServerPool(), n.store.ConnectedUrl()
	rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	for _, s := range servers {
		if known := n.names[s.URL.Host]; known != "" && known != name || s.URL.String() == here {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		nc, err := n.dial(n.only(s.URL))
		if err != nil {
			n.log.Debug("no connection to a server that may lead the bucket", "nats", s.URL.Redacted(), "error", err)
			continue
		}
		n.names[s.URL.Host] = nc.ConnectedServerName()
		if nc.ConnectedServerName() == name && n.same(nc) {
			return nc
		}
		nc.Close()
	}
	return nil
}

// only makes a connection that goes to one server, or ends.
func (n *near) only(u *url.URL) nats.Option {
	return func(o *nats.Options) error {
		o.Url, o.Servers, o.IgnoreDiscoveredServers = "", []string{u.String()}, true
		o.AllowReconnect, o.RetryOnFailedConnect, o.ReconnectBufSize = false, false, -1
		// The address of a server that told it itself is checked by the name of the one
		// that passed it on, as nats.go does.
		if of, err := url.Parse(n.store.ConnectedUrl()); err == nil && net.ParseIP(u.Hostname()) != nil && net.ParseIP(of.Hostname()) == nil {
			if o.TLSConfig == nil {
				o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12}
			}
			if o.TLSConfig.ServerName == "" {
				o.TLSConfig = o.TLSConfig.Clone()
				o.TLSConfig.ServerName = of.Hostname()
			}
		}
		closed := o.ClosedCB
		o.ClosedCB = func(nc *nats.Conn) {
			n.lost(nc)
			if closed != nil {
				closed(nc)
			}
		}
		return nil
	}
}

// same says that nc is in the account of the Store connection. The server tells it
// after its first answer.
func (n *near) same(nc *nats.Conn) bool {
	return nc.FlushTimeout(tryTimeout) == nil && nc.RemoteAccount() == n.store.RemoteAccount()
}

// use makes nc the way of writes from now on, the Store connection if it is nil. What
// is under way over the one before can still be answered there.
func (n *near) use(nc *nats.Conn) {
	if n.last != nil {
		old := n.last.nc
		n.former = append(slices.DeleteFunc(n.former, (*nats.Conn).IsClosed), old)
		time.AfterFunc(callBudget, old.Close)
	}
	var way *requests
	if nc != nil {
		way = &requests{nc: nc}
	}
	n.last = way
	n.way.Store(way)
	if nc != nil && nc.IsClosed() {
		n.lost(nc)
	}
}
