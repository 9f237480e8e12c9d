package client

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// Request is one forwarded request.
type Request struct {
	Key string
	// Fence is the Hold's Tenure: send it with every write that the request leads to.
	Fence   uint64
	Payload []byte
	Header  nats.Header // traceparent and tracestate, if the sender set them
	// Deadline is when its sender gives up at the latest, the zero Time if that was
	// not told. What is changed after it is changed for a sender that was told
	// owner_timeout.
	Deadline time.Time
}

// Handler answers a forwarded request; what it returns is the reply's payload. ctx
// is the Hold's: it ends with the right to act as owner.
type Handler func(ctx context.Context, r Request) []byte

// Inbox is the owner's side of Forward for one holder id. It refuses what the
// contract says an owner must refuse, so that the sender knows that it was not
// processed: a key that is not held now, a fence that is missing or no unsigned
// integer, a fence from before the tenure. It drops what has waited here until its
// sender gave up.
type Inbox struct {
	client  *Client
	holder  string
	most    int // handlers at once
	onError func(error)
	cancel  func()
	once    sync.Once

	mu      sync.Mutex
	served  map[string]*served
	waiting []*arrival
	bytes   int // of waiting
	workers int
	closed  bool
}

type served struct {
	hold    *Hold
	handler Handler
	taken   int           // requests being answered
	idle    chan struct{} // set when draining: closed when taken is 0
}

// arrival is a request that waits for its turn.
type arrival struct {
	*nats.Msg
	key      string
	fence    uint64
	deadline time.Time // counted from when it came here, so not before its sender's
}

// InboxOptions of an Inbox.
type InboxOptions struct {
	// Concurrency is how many requests are handled at once, 64 if 0. More wait, in
	// the order of their arrival, until their senders have given up; at most
	// 64 MiB and 65536 of them.
	Concurrency int
	// OnError, if set, is told of answers that could not be sent, such as one over
	// the server's max_payload: its sender gets owner_timeout. It is told of
	// requests that were dropped too, because their senders have given up
	// (context.DeadlineExceeded) or because too many wait (nats.ErrSlowConsumer),
	// and when the server does not permit the subscription any more. It must not
	// block.
	OnError func(error)
}

// What may wait in an Inbox is what nats.go lets a subscription have.
const (
	inboxMost  = 65536
	inboxBytes = 64 << 20
)

// Inbox subscribes to the inbox of holder. Do it before acquiring: from the grant
// on, others may forward. Everything is refused until Serve. That the server does
// not permit the subscription is an error that wraps nats.ErrPermissionViolation.
func (c *Client) Inbox(holder string, o InboxOptions) (*Inbox, error) {
	if o.Concurrency <= 0 {
		o.Concurrency = 64
	}
	if o.OnError == nil {
		o.OnError = func(error) {}
	}
	in := &Inbox{client: c, holder: holder, most: o.Concurrency, onError: o.OnError, served: map[string]*served{}}
	prefix := c.options.EventPrefix + ".inbox." + holder + "."
	var open atomic.Bool
	refused := make(chan error, 1)
	var err error
	in.cancel, err = c.wire.subscribe(prefix+">", func(m *nats.Msg) {
		in.receive(strings.TrimPrefix(m.Subject, prefix), m)
	}, func(err error) {
		if open.Load() {
			in.onError(fmt.Errorf("inbox of %s: nothing arrives: %w", holder, err))
			return
		}
		select {
		case refused <- err:
		default:
		}
	})
	if err != nil {
		return nil, fmt.Errorf("inbox of %s: %w", holder, err)
	}
	err = c.wire.flush()
	open.Store(true)
	select {
	case refusal := <-refused:
		err = cmp.Or(err, refusal)
	default:
	}
	if err != nil {
		in.cancel()
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
	in.once.Do(in.cancel)
	in.mu.Lock()
	in.closed = true
	waiting := in.waiting
	in.waiting, in.bytes = nil, 0
	all := make([]*served, 0, len(in.served))
	for _, s := range in.served {
		all = append(all, s)
	}
	in.mu.Unlock()
	for _, a := range waiting {
		in.reject(a.Msg)
	}
	for _, s := range all {
		_ = in.drain(context.Background(), s)
	}
}

// receive is called for one message after another. It does not wait, so that what
// comes next is looked at when it comes.
func (in *Inbox) receive(key string, m *nats.Msg) {
	if m.Reply == "" {
		return // nobody would learn of a rejection
	}
	a := &arrival{Msg: m, key: key}
	if left, ok := number(m.Header, "Dagnats-Lease-Deadline-Ms"); ok && left <= uint64(maxForward.Milliseconds()) {
		a.deadline = time.Now().Add(time.Duration(left) * time.Millisecond)
	}
	var ok bool
	if a.fence, ok = number(m.Header, "Dagnats-Lease-Fence"); !ok || !in.accepts(a) {
		in.reject(m)
		return
	}
	in.mu.Lock()
	full := !in.closed && (len(in.waiting) >= inboxMost || in.bytes+len(m.Data) > inboxBytes)
	if !in.closed && !full {
		in.waiting = append(in.waiting, a)
		in.bytes += len(m.Data)
		if in.workers < in.most {
			in.workers++
			go in.work()
		}
	}
	closed := in.closed
	in.mu.Unlock()
	switch {
	case closed:
		in.reject(m)
	case full:
		in.onError(fmt.Errorf("inbox of %s: a request for %s was dropped, too many wait: %w", in.holder, key, nats.ErrSlowConsumer))
	}
}

// maxForward is how long a forward may last by the contract.
const maxForward = 30 * time.Second

// work handles what waits until nothing does.
func (in *Inbox) work() {
	for {
		a, s := in.next()
		switch {
		case a == nil:
			return
		case s == nil:
			continue
		}
		h := nats.Header{}
		for _, name := range []string{"traceparent", "tracestate"} {
			if v := a.Header[name]; len(v) > 0 {
				h[name] = v
			}
		}
		in.handle(a, s, Request{Key: a.key, Fence: s.hold.Tenure(), Payload: a.Data, Header: h, Deadline: a.deadline})
	}
}

func (in *Inbox) handle(a *arrival, s *served, r Request) {
	defer in.leave(s)
	out := s.handler(s.hold.Context(), r)
	in.send(&nats.Msg{Subject: a.Reply, Data: out})
}

// next takes the first request that waits. It is nil when none does, and nobody
// serves it when it was rejected or dropped: much may have changed since it came (F7).
func (in *Inbox) next() (*arrival, *served) {
	in.mu.Lock()
	if len(in.waiting) == 0 {
		in.workers--
		in.mu.Unlock()
		return nil, nil
	}
	a := in.waiting[0]
	in.waiting[0] = nil
	in.waiting = in.waiting[1:]
	in.bytes -= len(a.Data)
	s := in.owner(a)
	late := !a.deadline.IsZero() && time.Now().After(a.deadline)
	if s != nil && !late {
		s.taken++
		in.mu.Unlock()
		return a, s
	}
	in.mu.Unlock()
	if s == nil {
		in.reject(a.Msg)
	} else {
		in.onError(fmt.Errorf("inbox of %s: a request for %s was dropped, its sender has given up: %w", in.holder, a.key, context.DeadlineExceeded))
	}
	return a, nil
}

// accepts says whether this process is the owner that a is meant for (F2).
func (in *Inbox) accepts(a *arrival) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.owner(a) != nil
}

// owner is who serves a, nil if it is not meant for this process. Under mu.
func (in *Inbox) owner(a *arrival) *served {
	s := in.served[a.key]
	if s == nil || s.idle != nil || a.fence < s.hold.Tenure() || s.hold.Check() != nil {
		return nil
	}
	return s
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

// F3.
func (in *Inbox) reject(m *nats.Msg) {
	in.send(&nats.Msg{Subject: m.Reply, Header: nats.Header{"Dagnats-Lease-Reject": {"stale"}}})
}

func (in *Inbox) send(m *nats.Msg) {
	if err := in.client.wire.publish(m); err != nil {
		in.onError(fmt.Errorf("inbox of %s: answer not sent: %w", in.holder, err))
	}
}

// number reads a header that has one value, of decimal digits that fit 64 bits.
func number(h nats.Header, name string) (uint64, bool) {
	v := h[name]
	if len(v) != 1 {
		return 0, false
	}
	n, err := strconv.ParseUint(v[0], 10, 64)
	return n, err == nil
}
