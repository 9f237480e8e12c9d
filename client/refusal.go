package client

import (
	"errors"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"
	"weak"

	"github.com/nats-io/nats.go"
)

// refusals hears what the server refuses on one connection. A server tells it on
// the connection, not in answer to what it refuses, and nats.go passes it to the
// connection's error handler only. So this stands behind the application's handler,
// once for all Clients of the connection; whoever sets another handler later takes
// it away, and a refused call is found out by its time-out then.
type refusals struct {
	mu    sync.Mutex
	ears  map[int]func(refusal)
	last  int           // of the ears
	heard error         // the last error that was heard
	news  chan struct{} // closed and made anew when one is heard

	// mute is why no reply can come, until the next reconnection: the subscription
	// for replies was refused.
	mute       error
	reconnects uint64
}

// refusal is one thing that the server refused.
type refusal struct {
	err     error
	publish bool   // else a subscription
	subject string // empty when the server did not name it
}

var byConn = struct {
	sync.Mutex
	refusals map[weak.Pointer[nats.Conn]]*refusals
}{refusals: map[weak.Pointer[nats.Conn]]*refusals{}}

func refusalsOf(nc *nats.Conn) *refusals {
	p := weak.Make(nc)
	byConn.Lock()
	defer byConn.Unlock()
	if r := byConn.refusals[p]; r != nil || nc == nil {
		return r
	}
	r := &refusals{ears: map[int]func(refusal){}, heard: nc.LastError(), news: make(chan struct{})}
	byConn.refusals[p] = r
	runtime.AddCleanup(nc, func(p weak.Pointer[nats.Conn]) {
		byConn.Lock()
		defer byConn.Unlock()
		delete(byConn.refusals, p)
	}, p)
	application := nc.ErrorHandler()
	nc.SetErrorHandler(func(nc *nats.Conn, sub *nats.Subscription, err error) {
		if application != nil {
			application(nc, sub, err)
		}
		r.hear(nc, err)
	})
	return r
}

func (r *refusals) hear(nc *nats.Conn, err error) {
	told, isRefusal := readRefusal(err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heard = err
	close(r.news)
	r.news = make(chan struct{})
	if !isRefusal {
		return
	}
	if told.ofReplies(nc) {
		r.mute, r.reconnects = err, nc.Stats().Reconnects
	}
	for _, ear := range r.ears {
		ear(told)
	}
}

// listen lets f hear each refusal until stop is called. f must not block.
func (r *refusals) listen(f func(refusal)) (stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	id := r.last
	r.ears[id] = f
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.ears, id)
	}
}

// muted is why no reply can come over nc, nil if one can.
func (r *refusals) muted(nc *nats.Conn) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mute != nil && nc.Stats().Reconnects != r.reconnects {
		r.mute = nil
	}
	return r.mute
}

// caughtUp returns when what the server refused before the last flush of nc has
// been heard, or after a second: the application's handler may block.
func (r *refusals) caughtUp(nc *nats.Conn) {
	late := time.NewTimer(time.Second)
	defer late.Stop()
	for {
		r.mu.Lock()
		heard, news := r.heard, r.news
		r.mu.Unlock()
		last := nc.LastError() // nats.go sets it before it calls any handler
		if _, isRefusal := readRefusal(last); !isRefusal || errors.Is(heard, last) {
			return
		}
		select {
		case <-news:
		case <-late.C:
			return
		}
	}
}

var refusalText = regexp.MustCompile(`(?i)violation for (publi|subscri)\w+ to "([^"]*)"`)

// readRefusal reads what was refused from the server's words.
func readRefusal(err error) (refusal, bool) {
	r := refusal{err: err}
	switch {
	case errors.Is(err, nats.ErrMaxSubscriptionsExceeded):
		return r, true
	case !errors.Is(err, nats.ErrPermissionViolation):
		return r, false
	}
	if m := refusalText.FindStringSubmatch(err.Error()); m != nil {
		r.publish, r.subject = strings.EqualFold(m[1], "publi"), m[2]
	}
	return r, true
}

// ofReplies says whether it is nc's subscription for all replies that was refused.
func (r refusal) ofReplies(nc *nats.Conn) bool {
	prefix := nc.Opts.InboxPrefix
	if prefix == "" {
		prefix = strings.TrimSuffix(nats.InboxPrefix, ".")
	}
	inbox, ok := strings.CutPrefix(r.subject, prefix+".")
	token, all := strings.CutSuffix(inbox, ".*")
	return !r.publish && ok && all && !strings.Contains(token, ".")
}
