package service

import (
	"context"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// near keeps a connection to the server that leads the bucket's stream, where the Store
// connection goes to another one: a write over it passes through one server less, and
// so does its verdict. It is a shortcut. While there is none, or as soon as a verdict
// does not come over it, writes go over the Store connection. Reads always do: of two
// servers that both believe to lead, this is the one to have been deposed.
type near struct {
	store *nats.Conn
	dial  func(...nats.Option) (*nats.Conn, error)
	log   *slog.Logger

	way  atomic.Pointer[requests] // nil: there is none
	news chan string              // the leader, as the last look showed it

	// The rest belongs to the goroutine of run.
	last    *requests         // way, also when that was lost
	urls    map[string]string // of servers, by their names
	sought  string            // the leader that was looked for last
	again   time.Time         // it is not looked for before
	backoff time.Duration
	former  []*nats.Conn // replies may still come over these
	closing <-chan time.Time
}

const (
	nearTimeout = 2 * time.Second // for one server
	nearLeast   = 5 * time.Second
	nearMost    = 5 * time.Minute
)

func newNear(store *nats.Conn, dial func(...nats.Option) (*nats.Conn, error), log *slog.Logger) *near {
	return &near{store: store, dial: dial, log: log, news: make(chan string, 1), urls: map[string]string{}}
}

// leads says which server leads the stream; "" is nobody, or a server that is alone.
func (n *near) leads(name string) {
	select {
	case <-n.news:
	default:
	}
	select {
	case n.news <- name:
	default:
	}
}

// run follows the leader until ctx is done.
func (n *near) run(ctx context.Context) {
	defer func() {
		n.use(nil)
		n.closeFormer()
	}()
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.closing:
			n.closeFormer()
		case leader := <-n.news:
			n.follow(ctx, leader)
		}
	}
}

// follow sees to it that writes go straight to leader, if they can.
func (n *near) follow(ctx context.Context, leader string) {
	now, here := time.Now(), n.store.ConnectedServerName()
	n.urls[here] = n.store.ConnectedUrl()
	if leader != n.sought {
		n.sought, n.again, n.backoff = leader, time.Time{}, 0
	}
	way := n.way.Load()
	switch {
	case leader == "", leader == here, way == nil && n.last != nil:
		n.use(nil)
	case way != nil && way.nc.ConnectedServerName() == leader:
		if now.After(n.again) {
			n.backoff = 0 // it lasts
		}
		return
	}
	if leader == "" || leader == here || now.Before(n.again) {
		return
	}
	// Not at once again should it be lost, either.
	n.backoff = min(max(2*n.backoff, nearLeast), nearMost)
	n.again = now.Add(n.backoff)
	nc := n.find(ctx, leader)
	n.use(nc)
	if nc != nil {
		n.log.Info("writes go straight to the leader of the bucket", "server", leader)
	}
}

// find connects to the server of that name, and gives nil if it cannot.
func (n *near) find(ctx context.Context, name string) *nats.Conn {
	urls := n.store.Servers()
	rand.Shuffle(len(urls), func(i, j int) { urls[i], urls[j] = urls[j], urls[i] })
	other := slices.Collect(maps.Values(n.urls)) // none of these but the one of that name, if they are right
	slices.SortStableFunc(urls, func(a, b string) int {
		rank := func(url string) int {
			switch {
			case url == n.urls[name]:
				return 0
			case slices.Contains(other, url):
				return 2
			}
			return 1
		}
		return rank(a) - rank(b)
	})
	for _, url := range urls {
		if ctx.Err() != nil {
			return nil
		}
		nc, err := n.dial(func(o *nats.Options) error {
			o.Url, o.Servers = "", []string{url}
			o.AllowReconnect, o.RetryOnFailedConnect = false, false
			o.ReconnectBufSize, o.Timeout = -1, nearTimeout
			return nil
		})
		if err != nil {
			n.log.Debug("no connection to a server that may lead the bucket", "error", err)
			continue
		}
		n.urls[nc.ConnectedServerName()] = url
		if nc.ConnectedServerName() == name {
			return nc
		}
		nc.Close()
	}
	return nil
}

// use makes nc the way of writes from now on, the Store connection if it is nil. What
// is under way over the one before can still be answered there.
func (n *near) use(nc *nats.Conn) {
	var way *requests
	if nc != nil {
		way = &requests{nc: nc}
		way.late = func() { n.lost(way) }
		nc.SetClosedHandler(func(*nats.Conn) { n.lost(way) })
	}
	if n.last != nil {
		n.former = append(n.former, n.last.nc)
		n.closing = time.After(callBudget)
	}
	n.last = way
	n.way.Store(way)
	if nc != nil && nc.IsClosed() {
		n.lost(way)
	}
}

// lost is called when way is of no use any more.
func (n *near) lost(way *requests) { n.way.CompareAndSwap(way, nil) }

func (n *near) closeFormer() {
	for _, nc := range n.former {
		nc.Close()
	}
	n.former, n.closing = nil, nil
}
