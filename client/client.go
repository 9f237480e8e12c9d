package client

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// Options of a Client. The zero value fits a service with default settings.
type Options struct {
	// Prefix of the service's subjects, "api.leases" if empty.
	Prefix string
	// EventPrefix of change events and inboxes, "dagnats.lease" if empty.
	EventPrefix string
	// Timeout is how long one call may take, 5 s if 0. A context that ends
	// earlier wins. The time an Acquire waits and a Forward's own Timeout are
	// added to it.
	Timeout time.Duration
}

// Client makes calls to the lease service. It is safe for concurrent use and
// needs no closing; the connection stays its owner's.
type Client struct {
	wire    wire
	options Options
}

// New returns a Client that calls over nc.
func New(nc *nats.Conn, o Options) *Client {
	return newClient(natsWire{nc}, o)
}

func newClient(w wire, o Options) *Client {
	if o.Prefix == "" {
		o.Prefix = "api.leases"
	}
	if o.EventPrefix == "" {
		o.EventPrefix = "dagnats.lease"
	}
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	return &Client{wire: w, options: o}
}

// Lease is one lease as the service tells it.
type Lease struct {
	Key      string
	Holder   string
	Revision uint64        // the fence
	TTL      time.Duration // what the call that wrote the revision asked for
	Meta     string

	// AcquiredAt is the start of the tenure, the same in all its revisions;
	// ExpiresAt is advisory. Both are on the NATS server's clock.
	AcquiredAt time.Time
	ExpiresAt  time.Time
	// Left is what was left when the reply was sent, never more than the truth.
	Left time.Duration
}

// Result is the answer of a call about one key.
type Result struct {
	// Kind is granted, denied, renewed, released, held, free or evicted; empty
	// beside an error.
	Kind kinds.Kind
	// Lease is the caller's (granted, renewed), the present holder's (denied,
	// held), the one that was freed (released, evicted: key, holder and revision
	// only) or only the key (free).
	Lease
	// SentAt is taken just before the request was sent and has a monotonic
	// reading: deadlines count from here. Beside an error it is set too, as the
	// call may have been applied.
	SentAt time.Time
}

// AcquireRequest asks for a key.
type AcquireRequest struct {
	Key    string
	Holder string        // unique to the process
	TTL    time.Duration // whole seconds, 1 s to 10 min
	// Wait is how long the service may wait for the key to become free, at most
	// 30 s; 0 answers at once. (Extension.)
	Wait time.Duration
	// Meta is returned in every lease and event, at most 512 bytes. (Extension.)
	Meta string
}

// Acquire takes a free key: Kind is granted, or denied with the lease of the
// present holder. A holder that has the key already gets its lease back
// unchanged and not extended: such a grant starts no new time.
func (c *Client) Acquire(ctx context.Context, r AcquireRequest) (Result, error) {
	q := request{Key: r.Key, Holder: r.Holder, TTL: ms(r.TTL), Wait: ms(r.Wait), Meta: r.Meta}
	return c.one(ctx, "acquire", q, r.Wait, func(a reply) kinds.Kind {
		switch {
		case a.Granted && a.Holder == r.Holder:
			return kinds.Granted
		case !a.Granted && a.Held && a.Holder != r.Holder:
			return kinds.Denied
		}
		return ""
	})
}

// Renew extends l to l.TTL from now. l.Holder and l.Revision must be the current
// pair, else the error's kind is lost. The result has the new revision.
func (c *Client) Renew(ctx context.Context, l Lease) (Result, error) {
	q := request{Key: l.Key, Holder: l.Holder, Revision: l.Revision, TTL: ms(l.TTL)}
	return c.one(ctx, "renew", q, 0, renewed(l))
}

func renewed(l Lease) func(reply) kinds.Kind {
	return func(a reply) kinds.Kind {
		if a.Granted && a.Holder == l.Holder && a.Revision > l.Revision {
			return kinds.Renewed
		}
		return ""
	}
}

// Release frees the key of l. l.Holder and l.Revision must be the current pair,
// else the error's kind is lost.
func (c *Client) Release(ctx context.Context, l Lease) (Result, error) {
	q := request{Key: l.Key, Holder: l.Holder, Revision: l.Revision}
	return c.one(ctx, "release", q, 0, func(a reply) kinds.Kind {
		if a.Released && a.Holder == l.Holder && a.Revision == l.Revision {
			return kinds.Released
		}
		return ""
	})
}

// Owner tells who holds the key: Kind is held or free.
func (c *Client) Owner(ctx context.Context, key string) (Result, error) {
	return c.one(ctx, "owner", request{Key: key}, 0, func(a reply) kinds.Kind {
		switch {
		case !a.Held:
			return kinds.Free
		case a.Holder != "" && a.Revision > 0:
			return kinds.Held
		}
		return ""
	})
}

// Evict frees the key whoever holds it, if revision is the current one, else the
// error's kind is lost. (Extension, for operators.)
func (c *Client) Evict(ctx context.Context, key string, revision uint64) (Result, error) {
	return c.one(ctx, "evict", request{Key: key, Revision: revision}, 0, func(a reply) kinds.Kind {
		if a.Released && a.Revision == revision {
			return kinds.Evicted
		}
		return ""
	})
}

// ForwardRequest is a message for whoever holds Key.
type ForwardRequest struct {
	Key     string
	Payload []byte
	Timeout time.Duration // bounds the whole call, 100 ms to 30 s; 0 leaves it to the service
}

// Forwarded is the owner's answer.
type Forwarded struct {
	Holder   string
	Revision uint64
	Payload  []byte
	Attempts int
	SentAt   time.Time
}

// Forward sends a request to whoever holds the key and returns the answer. Of an
// error, kinds.Lookup says whether the owner may have processed the request; no
// reply from the service is kind unknown: it may have.
func (c *Client) Forward(ctx context.Context, r ForwardRequest) (Forwarded, error) {
	q := request{Key: r.Key, Payload: r.Payload, Timeout: ms(r.Timeout)}
	extra := r.Timeout
	if extra == 0 {
		extra = 5 * time.Second // the service's default
	}
	a, sent, err := c.ask(ctx, "forward", q, extra)
	f := Forwarded{Holder: a.Holder, Revision: a.Revision, Payload: a.Payload, Attempts: a.Attempts, SentAt: sent}
	if err == nil && (a.Holder == "" || a.Revision == 0) {
		err = notUnderstood("forward")
	}
	return f, err
}

// ListRequest selects leases; empty members select all.
type ListRequest struct {
	Prefix string // of keys
	Holder string
	After  string // the Next of the page before
	Limit  int    // of one page, at most 1000
}

// List returns one page of the leases one instance sees, and the After of the
// next page, "" when there is none. It is a view, not a verdict: it can lag.
// (Extension.)
func (c *Client) List(ctx context.Context, r ListRequest) (leases []Lease, next string, err error) {
	q := request{Prefix: r.Prefix, Holder: r.Holder, After: r.After, Limit: r.Limit}
	a, _, err := c.ask(ctx, "list", q, 0)
	if err != nil {
		return nil, "", err
	}
	for _, l := range a.Leases {
		leases = append(leases, l.lease())
	}
	return leases, a.Next, nil
}

// Renewal is the outcome of one lease in RenewMany.
type Renewal struct {
	Result
	Err error // a *kinds.Error, as Renew returns it
}

// RenewMany renews up to 1000 leases of one holder with one request. The
// outcomes are in the order of leases, of which Key and Revision are used. The
// error is that of the whole call, and each outcome has it too. (Extension.)
func (c *Client) RenewMany(ctx context.Context, holder string, ttl time.Duration, leases []Lease) ([]Renewal, error) {
	q := request{Holder: holder, TTL: ms(ttl)}
	for _, l := range leases {
		q.Leases = append(q.Leases, keyRevision{l.Key, l.Revision})
	}
	a, sent, err := c.ask(ctx, "renew_many", q, 0)
	if err == nil && len(a.Leases) != len(leases) {
		err = notUnderstood("renew_many")
	}
	out := make([]Renewal, len(leases))
	for i, l := range leases {
		if err != nil {
			out[i] = Renewal{Result{SentAt: sent}, err}
			continue
		}
		l.Holder, l.TTL = holder, ttl
		out[i].Result, out[i].Err = a.Leases[i].result("renew_many", l.Key, sent, renewed(l))
	}
	return out, err
}

// Call sends a request to one endpoint ("acquire") and returns the body of its
// reply as it came, an error reply too: for tools that show the wire. The error
// is set only when there is no reply.
func (c *Client) Call(ctx context.Context, endpoint string, body []byte) (answer []byte, sent time.Time, err error) {
	return c.call(ctx, endpoint, body, 0)
}

func (c *Client) call(ctx context.Context, endpoint string, body []byte, extra time.Duration) ([]byte, time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, c.options.Timeout+extra)
	defer cancel()
	sent := time.Now()
	answer, err := c.wire.request(ctx, c.options.Prefix+"."+endpoint, body)
	return answer, sent, err
}

// ask sends q and decodes the reply; an error reply becomes the error.
func (c *Client) ask(ctx context.Context, endpoint string, q request, extra time.Duration) (reply, time.Time, error) {
	var a reply
	body, err := json.Marshal(q)
	if err != nil {
		return a, time.Now(), kinds.Errorf(kinds.Invalid, "%s: %w", endpoint, err)
	}
	answer, sent, err := c.call(ctx, endpoint, body, extra)
	if err != nil {
		return a, sent, err
	}
	if err := json.Unmarshal(answer, &a); err != nil {
		return a, sent, notUnderstood(endpoint)
	}
	return a, sent, a.err(endpoint)
}

// one makes a call whose answer is about one key.
func (c *Client) one(ctx context.Context, endpoint string, q request, extra time.Duration, verdict func(reply) kinds.Kind) (Result, error) {
	a, sent, err := c.ask(ctx, endpoint, q, extra)
	if err != nil {
		return Result{SentAt: sent}, err
	}
	return a.result(endpoint, q.Key, sent, verdict)
}

// request is every member a request can have; a call fills those it needs.
type request struct {
	Key      string        `json:"key,omitempty"`
	Holder   string        `json:"holder,omitempty"`
	TTL      ms            `json:"ttl_ms,omitempty"`
	Revision uint64        `json:"revision,omitempty"`
	Timeout  ms            `json:"timeout_ms,omitempty"`
	Payload  []byte        `json:"payload,omitempty"`
	Wait     ms            `json:"wait_ms,omitempty"`
	Meta     string        `json:"meta,omitempty"`
	Prefix   string        `json:"prefix,omitempty"`
	After    string        `json:"after,omitempty"`
	Limit    int           `json:"limit,omitempty"`
	Leases   []keyRevision `json:"leases,omitempty"`
}

type keyRevision struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"`
}

// reply is every member a reply can have.
type reply struct {
	Granted    bool      `json:"granted"`
	Held       bool      `json:"held"`
	Released   bool      `json:"released"`
	Key        string    `json:"key"`
	Holder     string    `json:"holder"`
	Revision   uint64    `json:"revision"`
	AcquiredAt time.Time `json:"acquired_at"`
	ExpiresAt  time.Time `json:"expires_at"`
	TTL        ms        `json:"ttl_ms"`
	Left       ms        `json:"left_ms"`
	Meta       string    `json:"meta"`
	Payload    []byte    `json:"payload"`
	Attempts   int       `json:"attempts"`
	Leases     []reply   `json:"leases"`
	Next       string    `json:"next"`
	Error      string    `json:"error"`
	Kind       string    `json:"kind"`
}

func (a reply) lease() Lease {
	return Lease{
		Key: a.Key, Holder: a.Holder, Revision: a.Revision, TTL: time.Duration(a.TTL), Meta: a.Meta,
		AcquiredAt: a.AcquiredAt, ExpiresAt: a.ExpiresAt, Left: time.Duration(a.Left),
	}
}

// err is the failure that a tells of, nil when it is an answer.
func (a reply) err(endpoint string) error {
	if a.Kind == "" && a.Error == "" {
		return nil
	}
	k := kinds.Kind(a.Kind)
	if !k.IsError() {
		// A kind from a newer service says nothing about what was applied.
		return kinds.Errorf(kinds.Unknown, "%s: a reply of kind %.64q: %s", endpoint, a.Kind, a.Error)
	}
	return &kinds.Error{Kind: k, Text: a.Error, Holder: a.Holder, Revision: a.Revision}
}

func (a reply) result(endpoint, key string, sent time.Time, verdict func(reply) kinds.Kind) (Result, error) {
	if err := a.err(endpoint); err != nil {
		return Result{SentAt: sent}, err
	}
	k := verdict(a)
	if k == "" || a.Key != key || k != kinds.Free && a.Revision == 0 {
		return Result{SentAt: sent}, notUnderstood(endpoint)
	}
	return Result{Kind: k, Lease: a.lease(), SentAt: sent}, nil
}

func notUnderstood(endpoint string) error {
	return kinds.Errorf(kinds.Unknown, "%s: the reply is not one of the lease contract", endpoint)
}

// mayBeApplied says whether the call that failed with err may have taken effect.
func mayBeApplied(err error) bool {
	info, known := kinds.Lookup(kinds.Of(err))
	return !known || info.Applied != kinds.No
}

// namesUnknownMember says whether err is an older service refusing a member of an
// extension.
func namesUnknownMember(err error, member string) bool {
	return kinds.Of(err) == kinds.Invalid && strings.Contains(err.Error(), member)
}

// ms is a duration in whole milliseconds on the wire.
type ms time.Duration

func (d ms) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Duration(d).Milliseconds())
}

func (d *ms) UnmarshalJSON(b []byte) error {
	var n int64
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	*d = ms(time.Duration(n) * time.Millisecond)
	return nil
}

// wire is what this package needs of NATS.
type wire interface {
	// request returns the reply's body. Its errors are *kinds.Error: unavailable
	// when surely nothing was received by a service, unknown otherwise.
	request(ctx context.Context, subject string, body []byte) ([]byte, error)
	// subscribe calls f for each message, one after another, until cancel is
	// called.
	subscribe(subject string, f func(*nats.Msg)) (cancel func(), err error)
	publish(m *nats.Msg) error
	// flush returns when the server knows of all subscriptions made so far.
	flush() error
}

type natsWire struct{ nc *nats.Conn }

func (w natsWire) request(ctx context.Context, subject string, body []byte) ([]byte, error) {
	if !w.nc.IsConnected() {
		// A publish would sit in the reconnect buffer and be sent long after its
		// caller gave up.
		return nil, kinds.Errorf(kinds.Unavailable, "%s: not connected to NATS: %w", subject, nats.ErrDisconnected)
	}
	m, err := w.nc.RequestWithContext(ctx, subject, body)
	switch {
	case err == nil:
		return m.Data, nil
	case errors.Is(err, nats.ErrNoResponders):
		return nil, kinds.Errorf(kinds.Unavailable, "%s: no lease service answers: %w", subject, err)
	case errors.Is(err, nats.ErrMaxPayload), errors.Is(err, nats.ErrBadSubject), errors.Is(err, nats.ErrConnectionDraining):
		return nil, kinds.Errorf(kinds.Unavailable, "%s: not sent: %w", subject, err)
	}
	return nil, kinds.Errorf(kinds.Unknown, "%s: no reply: %w", subject, err)
}

func (w natsWire) subscribe(subject string, f func(*nats.Msg)) (func(), error) {
	sub, err := w.nc.Subscribe(subject, f)
	if err != nil {
		return nil, err
	}
	return func() { _ = sub.Unsubscribe() }, nil
}

func (w natsWire) flush() error { return w.nc.FlushTimeout(5 * time.Second) }

func (w natsWire) publish(m *nats.Msg) error { return w.nc.PublishMsg(m) }
