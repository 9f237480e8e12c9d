package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync"
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
	deaf    sync.Once // the events could not be followed, and somebody was told
}

// New returns a Client that calls over nc. To learn what the server does not permit,
// it listens behind the error handler that nc has now: set your own before, or a
// call that is not permitted is found out by its time-out.
func New(nc *nats.Conn, o Options) *Client {
	return newClient(natsWire{nc, refusalsOf(nc)}, o)
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

	whole bool // Err is that of the request
}

// RenewMany renews up to 1000 leases of one holder with one request, or with more
// where request or reply would be larger than the server takes. The outcomes are in
// the order of leases, of which Key and Revision are used. The error is that of the
// first request that failed as a whole, and each outcome of that request has it too.
// (Extension.)
func (c *Client) RenewMany(ctx context.Context, holder string, ttl time.Duration, leases []Lease) ([]Renewal, error) {
	out := make([]Renewal, len(leases))
	return out, c.renewMany(ctx, holder, ttl, leases, out)
}

func (c *Client) renewMany(ctx context.Context, holder string, ttl time.Duration, leases []Lease, out []Renewal) error {
	q := request{Holder: holder, TTL: ms(ttl)}
	for _, l := range leases {
		q.Leases = append(q.Leases, keyRevision{l.Key, l.Revision})
	}
	a, sent, err := c.ask(ctx, "renew_many", q, 0)
	if tooLarge(err) && len(leases) > 1 {
		half := len(leases) / 2
		first := c.renewMany(ctx, holder, ttl, leases[:half], out[:half])
		second := c.renewMany(ctx, holder, ttl, leases[half:], out[half:])
		return cmp.Or(first, second)
	}
	if err == nil && len(a.Leases) != len(leases) {
		err = notUnderstood("renew_many")
	}
	for i, l := range leases {
		if err != nil {
			out[i] = Renewal{Result: Result{SentAt: sent}, Err: err, whole: true}
			continue
		}
		l.Holder, l.TTL = holder, ttl
		out[i].Result, out[i].Err = a.Leases[i].result("renew_many", l.Key, sent, renewed(l))
	}
	return err
}

// tooLarge says whether fewer leases in one renew_many would do: nothing was written.
func tooLarge(err error) bool {
	return kinds.Of(err) == kinds.ReplyTooLarge || errors.Is(err, nats.ErrMaxPayload)
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

// lasting says whether err will be the same however often the call is repeated.
func lasting(err error) bool {
	return kinds.Of(err) == kinds.Invalid || errors.Is(err, nats.ErrConnectionClosed) || errors.Is(err, nats.ErrPermissionViolation)
}

// wire is what this package needs of NATS.
type wire interface {
	// request returns the reply's body. Its errors are *kinds.Error: unavailable
	// when surely nothing was received by a service, unknown otherwise.
	request(ctx context.Context, subject string, body []byte) ([]byte, error)
	// subscribe calls f for each message, one after another, until cancel is
	// called, and refused each time that the server refuses the subscription.
	subscribe(subject string, f func(*nats.Msg), refused func(error)) (cancel func(), err error)
	publish(m *nats.Msg) error
	// flush returns when the server knows of all subscriptions made so far and
	// has refused those that it does not permit.
	flush() error
	// place is the same for all wires of this process that lead to one service.
	place() any
}

type natsWire struct {
	nc       *nats.Conn
	refusals *refusals
}

func (w natsWire) request(ctx context.Context, subject string, body []byte) ([]byte, error) {
	switch {
	case w.nc.IsClosed():
		return nil, kinds.Errorf(kinds.Unavailable, "%s: the connection to NATS is closed for good: %w", subject, nats.ErrConnectionClosed)
	case !w.nc.IsConnected():
		// A publish would sit in the reconnect buffer and be sent long after its
		// caller gave up.
		return nil, kinds.Errorf(kinds.Unavailable, "%s: not connected to NATS: %w", subject, nats.ErrDisconnected)
	}
	if err := w.refusals.muted(w.nc); err != nil {
		return nil, kinds.Errorf(kinds.Unavailable, "%s: not sent, as no reply can come: %w", subject, err)
	}
	refused := make(chan refusal, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := w.refusals.listen(func(r refusal) {
		if r.publish && r.subject == subject || r.ofReplies(w.nc) {
			select {
			case refused <- r:
				cancel()
			default:
			}
		}
	})
	m, err := w.nc.RequestWithContext(ctx, subject, body)
	stop()
	select {
	case r := <-refused:
		switch {
		case err == nil:
		case r.publish:
			return nil, kinds.Errorf(kinds.Unavailable, "%s: not permitted: %w", subject, r.err)
		default:
			return nil, kinds.Errorf(kinds.Unknown, "%s: no reply can come: %w", subject, r.err)
		}
	default:
	}
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

func (w natsWire) subscribe(subject string, f func(*nats.Msg), refused func(error)) (func(), error) {
	stop := w.refusals.listen(func(r refusal) {
		if !r.publish && (r.subject == subject || r.subject == "") {
			refused(r.err)
		}
	})
	sub, err := w.nc.Subscribe(subject, f)
	if err != nil {
		stop()
		return nil, err
	}
	return func() {
		stop()
		_ = sub.Unsubscribe()
	}, nil
}

func (w natsWire) flush() error {
	if err := w.nc.FlushTimeout(5 * time.Second); err != nil {
		return err
	}
	w.refusals.caughtUp(w.nc)
	return nil
}

func (w natsWire) publish(m *nats.Msg) error { return w.nc.PublishMsg(m) }

// place is the list of servers that the connection was given, in one form.
func (w natsWire) place() any {
	if w.nc.Opts.InProcessServer != nil || w.nc.Opts.CustomDialer != nil {
		return w.nc // it says nothing about where that leads
	}
	servers := slices.Clone(w.nc.Opts.Servers)
	if w.nc.Opts.Url != "" {
		servers = append(servers, w.nc.Opts.Url)
	}
	for i, s := range servers {
		_, address, found := strings.Cut(s, "://")
		if !found {
			address = s
		}
		servers[i] = address[strings.LastIndexByte(address, '@')+1:]
	}
	slices.Sort(servers)
	return strings.Join(slices.Compact(servers), ",")
}
