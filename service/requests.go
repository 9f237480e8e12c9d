package service

import (
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// requests sends requests on a connection and brings back the replies, many at
// a time: what nats.go's Request does, without a context and its timers a
// request, which were a fifth of the cost of a write.
type requests struct {
	nc *nats.Conn

	mu     sync.Mutex
	prefix string // of the reply subjects, "" before the first request
	next   uint64
	open   map[uint64]*exchange
}

// exchange is one request that is out.
type exchange struct {
	id    uint64
	reply chan *nats.Msg // of one message
	timer *time.Timer
}

var exchanges = sync.Pool{New: func() any {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &exchange{reply: make(chan *nats.Msg, 1), timer: t}
}}

// start publishes msg and returns without waiting for the reply; finish must
// follow if there is no error.
func (r *requests) start(msg *nats.Msg) (*exchange, error) {
	e := exchanges.Get().(*exchange)
	r.mu.Lock()
	if r.prefix == "" {
		prefix := r.nc.NewInbox() + "."
		if _, err := r.nc.Subscribe(prefix+"*", r.deliver); err != nil {
			r.mu.Unlock()
			return nil, err
		}
		r.prefix, r.open = prefix, make(map[uint64]*exchange)
	}
	r.next++
	e.id = r.next
	r.open[e.id] = e
	msg.Reply = r.prefix + strconv.FormatUint(e.id, 36)
	r.mu.Unlock()
	if err := r.nc.PublishMsg(msg); err != nil {
		r.finish(e, 0)
		return nil, err
	}
	return e, nil
}

// finish waits for the reply, at most so long: nats.ErrTimeout then, or
// nats.ErrNoResponders if nobody was there to answer.
func (r *requests) finish(e *exchange, wait time.Duration) (*nats.Msg, error) {
	var msg *nats.Msg
	select {
	case msg = <-e.reply:
	default:
		if wait > 0 {
			e.timer.Reset(wait)
			select {
			case msg = <-e.reply:
			case <-e.timer.C:
			}
			e.timer.Stop()
		}
	}
	if msg == nil {
		r.mu.Lock()
		delete(r.open, e.id)
		r.mu.Unlock()
		select { // nobody else can send now
		case msg = <-e.reply:
		default:
		}
	}
	exchanges.Put(e)
	switch {
	case msg == nil:
		return nil, nats.ErrTimeout
	case len(msg.Data) == 0 && msg.Header.Get("Status") == "503":
		return nil, nats.ErrNoResponders
	}
	return msg, nil
}

// deliver gives a reply to the request that waits for it, if one still does.
func (r *requests) deliver(msg *nats.Msg) {
	id, err := strconv.ParseUint(msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:], 36, 64)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if e := r.open[id]; e != nil {
		delete(r.open, id)
		e.reply <- msg
	}
}
