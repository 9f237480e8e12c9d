package service

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"math/rand/v2"
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
	ids    *rand.ChaCha8
	open   map[uint64]*exchange
}

// newInbox is a subject of nc's for replies, below under. Nobody can guess it, as they could with
// nats.go's own, which count on from one that is shown to all: who may publish there, or
// have somebody publish there, would answer in the name of others.
func newInbox(nc *nats.Conn, under string) string {
	return cmp.Or(nc.Opts.InboxPrefix, "_INBOX") + "." + under + crand.Text()
}

// exchange is one request that is out.
type exchange struct {
	r     *requests
	id    uint64 // random, for the same reason as an inbox; the owner of a key sees those of its forwards
	done  func(*nats.Msg, error)
	timer *time.Timer
}

var exchanges sync.Pool

// start publishes msg, and returns. done is called once: with the reply; with
// nats.ErrTimeout after wait, nats.ErrNoResponders if nobody was there to answer,
// or the error of the publishing, before start returns. It must not block: all
// replies come one after the other. id is for take.
func (r *requests) start(msg *nats.Msg, wait time.Duration, done func(*nats.Msg, error)) (id uint64) {
	e, _ := exchanges.Get().(*exchange)
	if e == nil {
		e = &exchange{}
	}
	r.mu.Lock()
	if err := r.listen(); err != nil {
		r.mu.Unlock()
		done(nil, err)
		return 0
	}
	for id = r.ids.Uint64(); r.open[id] != nil; {
		id = r.ids.Uint64()
	}
	e.r, e.id, e.done = r, id, done
	r.open[id] = e
	var subject [96]byte
	msg.Reply = string(strconv.AppendUint(append(subject[:0], r.prefix...), id, 36))
	if e.timer == nil {
		e.timer = time.AfterFunc(wait, e.expired)
	} else {
		e.timer.Reset(wait)
	}
	r.mu.Unlock()
	if err := r.nc.PublishMsg(msg); err != nil {
		if done := r.take(id); done != nil {
			done(nil, err)
		}
	}
	return id
}

// listen subscribes to the replies, once. r.mu is held.
func (r *requests) listen() error {
	if r.prefix != "" {
		return nil
	}
	prefix := newInbox(r.nc, "") + "."
	if _, err := r.nc.Subscribe(prefix+"*", r.deliver); err != nil {
		return err
	}
	var seed [32]byte
	crand.Read(seed[:]) // never fails
	r.prefix, r.ids, r.open = prefix, rand.NewChaCha8(seed), make(map[uint64]*exchange)
	return nil
}

// ask is start for who can wait: until ctx is done.
func (r *requests) ask(ctx context.Context, msg *nats.Msg) (*nats.Msg, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	type answer struct {
		msg *nats.Msg
		err error
	}
	came := make(chan answer, 1)
	id := r.start(msg, time.Until(deadlineOf(ctx)), func(m *nats.Msg, err error) { came <- answer{m, err} })
	select {
	case a := <-came:
		return a.msg, a.err
	case <-ctx.Done():
		r.take(id)
		return nil, ctx.Err()
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
