package client

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// Request is one forwarded request.
type Request struct {
	Key string
	// Fence is the revision under which it was sent, at least the Hold's Tenure.
	Fence   uint64
	Payload []byte
	Header  nats.Header // traceparent and tracestate, if the sender set them
}

// Handler answers a forwarded request; what it returns is the reply's payload. ctx
// is the Hold's: it ends with the right to act as owner.
type Handler func(ctx context.Context, r Request) []byte

// Inbox is the owner's side of Forward for one holder id. It refuses what the
// contract says an owner must refuse, so that the sender knows that it was not
// processed: a key that is not held now, a fence that is missing or no unsigned
// integer, a fence from before the tenure.
type Inbox struct {
	client  *Client
	holder  string
	onError func(error)
	cancel  func()
	slots   chan struct{}
	closed  chan struct{}
	once    sync.Once

	mu     sync.Mutex
	served map[string]*served
}

type served struct {
	hold    *Hold
	handler Handler
	taken   int           // requests being answered
	idle    chan struct{} // set when draining: closed when taken is 0
}

// InboxOptions of an Inbox.
type InboxOptions struct {
	// Concurrency is how many requests are handled at once, 64 if 0. More wait in
	// the connection, in the order of their arrival.
	Concurrency int
	// OnError, if set, is told of answers that could not be sent, such as one over
	// the server's max_payload: its sender gets owner_timeout.
	OnError func(error)
}

// Inbox subscribes to the inbox of holder. Do it before acquiring: from the grant
// on, others may forward. Everything is refused until Serve.
func (c *Client) Inbox(holder string, o InboxOptions) (*Inbox, error) {
	if o.Concurrency <= 0 {
		o.Concurrency = 64
	}
	if o.OnError == nil {
		o.OnError = func(error) {}
	}
	in := &Inbox{
		client: c, holder: holder, onError: o.OnError, slots: make(chan struct{}, o.Concurrency),
		closed: make(chan struct{}), served: map[string]*served{},
	}
	prefix := c.options.EventPrefix + ".inbox." + holder + "."
	var err error
	in.cancel, err = c.wire.subscribe(prefix+">", func(m *nats.Msg) {
		in.receive(strings.TrimPrefix(m.Subject, prefix), m)
	})
	if err == nil {
		if err = c.wire.flush(); err != nil {
			in.cancel()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("inbox of %s: %w", holder, err)
	}
	return in, nil
}

// Serve lets handler answer what is forwarded to the key of h, for as long as h
// stands. Resigning h drains: no more is taken, what was taken is answered, then
// the key is released.
func (in *Inbox) Serve(h *Hold, handler Handler) error {
	if h.Holder() != in.holder {
		return kinds.Errorf(kinds.Invalid, "the inbox of %s cannot serve a lease of %s", in.holder, h.Holder())
	}
	s := &served{hold: h, handler: handler}
	in.mu.Lock()
	in.served[h.Key()] = s
	in.mu.Unlock()
	h.mu.Lock()
	h.drains = append(h.drains, func(ctx context.Context) error { return in.drain(ctx, s) })
	h.mu.Unlock()
	return nil
}

// Close stops taking requests and returns when those taken are answered.
func (in *Inbox) Close() {
	in.once.Do(func() {
		in.cancel()
		close(in.closed)
	})
	in.mu.Lock()
	all := make([]*served, 0, len(in.served))
	for _, s := range in.served {
		all = append(all, s)
	}
	in.mu.Unlock()
	for _, s := range all {
		_ = in.drain(context.Background(), s)
	}
}

// receive is called for one message after another.
func (in *Inbox) receive(key string, m *nats.Msg) {
	if m.Reply == "" {
		return // nobody would learn of a rejection
	}
	fence, ok := parseFence(m.Header)
	if !ok || !in.accepts(key, fence, nil) {
		in.reject(m)
		return
	}
	select {
	case in.slots <- struct{}{}:
	case <-in.closed:
		in.reject(m)
		return
	}
	var s *served // looked up again: it may have waited long
	if !in.accepts(key, fence, &s) {
		<-in.slots
		in.reject(m)
		return
	}
	go func() {
		defer func() { in.leave(s); <-in.slots }()
		h := nats.Header{}
		for _, name := range []string{"traceparent", "tracestate"} {
			if v := m.Header[name]; len(v) > 0 {
				h[name] = v
			}
		}
		out := s.handler(s.hold.Context(), Request{Key: key, Fence: fence, Payload: m.Data, Header: h})
		in.send(&nats.Msg{Subject: m.Reply, Data: out})
	}()
}

// accepts says whether this process is the owner that fence means; with take it
// also counts the request as taken.
func (in *Inbox) accepts(key string, fence uint64, take **served) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	s := in.served[key]
	if s == nil || s.idle != nil || fence < s.hold.Tenure() || s.hold.Check() != nil {
		return false
	}
	if take != nil {
		s.taken++
		*take = s
	}
	return true
}

func (in *Inbox) leave(s *served) {
	in.mu.Lock()
	defer in.mu.Unlock()
	s.taken--
	if s.idle != nil && s.taken == 0 {
		close(s.idle)
	}
}

func (in *Inbox) drain(ctx context.Context, s *served) error {
	in.mu.Lock()
	if s.idle == nil {
		s.idle = make(chan struct{})
		if s.taken == 0 {
			close(s.idle)
		}
	}
	if in.served[s.hold.Key()] == s {
		delete(in.served, s.hold.Key())
	}
	n := s.taken
	in.mu.Unlock()
	if n == 0 {
		return nil
	}
	select {
	case <-s.idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d forwarded requests are still being handled: %w", n, context.Cause(ctx))
	}
}

func (in *Inbox) reject(m *nats.Msg) {
	in.send(&nats.Msg{Subject: m.Reply, Header: nats.Header{"Dagnats-Lease-Reject": {"stale"}}})
}

func (in *Inbox) send(m *nats.Msg) {
	if err := in.client.wire.publish(m); err != nil {
		in.onError(fmt.Errorf("inbox of %s: answer not sent: %w", in.holder, err))
	}
}

// parseFence reads the fence of a forwarded request: one value of decimal digits
// that fit 64 bits.
func parseFence(h nats.Header) (uint64, bool) {
	v := h["Dagnats-Lease-Fence"]
	if len(v) != 1 {
		return 0, false
	}
	fence, err := strconv.ParseUint(v[0], 10, 64)
	return fence, err == nil
}
