package service

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// requests sends requests on a connection and hands the replies over, many at a
// time: what nats.go's Request does, without a context, a channel and a goroutine
// that waits for each.
type requests struct {
	nc *nats.Conn

	mu     sync.Mutex
	prefix string // of the reply subjects, "" before the first request
	next   uint64
	open   map[uint64]*exchange
}

// exchange is one request that is out.
type exchange struct {
	r     *requests
	id    uint64
	done  func(*nats.Msg, error)
	timer *time.Timer
}

var exchanges sync.Pool

// start publishes msg, and returns. done is called once: with the reply; with
// nats.ErrTimeout after wait, nats.ErrNoResponders if nobody was there to answer,
// or the error of the publishing, before start returns. It must not block: all
// replies come one after the other.
func (r *requests) start(msg *nats.Msg, wait time.Duration, done func(*nats.Msg, error)) {
	e, _ := exchanges.Get().(*exchange)
	if e == nil {
		e = &exchange{}
	}
	r.mu.Lock()
	if r.prefix == "" {
		prefix := r.nc.NewInbox() + "."
		if _, err := r.nc.Subscribe(prefix+"*", r.deliver); err != nil {
			r.mu.Unlock()
			done(nil, err)
			return
		}
		r.prefix, r.open = prefix, make(map[uint64]*exchange)
	}
	r.next++
	e.r, e.id, e.done = r, r.next, done
	r.open[e.id] = e
	msg.Reply = r.prefix + strconv.FormatUint(e.id, 36)
	if e.timer == nil {
		e.timer = time.AfterFunc(wait, e.expired)
	} else {
		e.timer.Reset(wait)
	}
	id := e.id
	r.mu.Unlock()
	if err := r.nc.PublishMsg(msg); err != nil {
		if done := r.take(id); done != nil {
			done(nil, err)
		}
	}
}

// take ends the request id and gives what waits for its reply, nil if that has
// been told.
func (r *requests) take(id uint64) (done func(*nats.Msg, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.open[id]
	if e == nil {
		return nil
	}
	delete(r.open, id)
	done = e.done
	e.done = nil
	if e.timer.Stop() { // else expired still looks at it
		exchanges.Put(e)
	}
	return done
}

// expired is called by e's timer.
func (e *exchange) expired() {
	e.r.mu.Lock()
	id := e.id
	e.r.mu.Unlock()
	if done := e.r.take(id); done != nil {
		done(nil, nats.ErrTimeout)
	}
}

// deliver gives a reply to the request that waits for it, if one still does.
func (r *requests) deliver(msg *nats.Msg) {
	id, err := strconv.ParseUint(msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:], 36, 64)
	if err != nil {
		return
	}
	done := r.take(id)
	switch {
	case done == nil:
	case len(msg.Data) == 0 && msg.Header.Get("Status") == "503":
		done(nil, nats.ErrNoResponders)
	default:
		done(msg, nil)
	}
}
