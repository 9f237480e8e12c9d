package service

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// Headers of a forward, towards the owner and back.
const (
	HeaderFence  = "Dagnats-Lease-Fence"
	HeaderReject = "Dagnats-Lease-Reject"
)

// traceHeaders pass from the caller to the owner; nothing else does. NATS
// header names are case-sensitive and tracing libraries write these in lower case.
var traceHeaders = []string{"traceparent", "tracestate"}

// maxAttempts is how often one forward may be sent to an owner.
const maxAttempts = 3

// Outcomes of one attempt, for Observer.ForwardAttempt.
const (
	AttemptForwarded       = "forwarded"
	AttemptNoResponders    = "no_responders"
	AttemptRejected        = "rejected"
	AttemptTimeout         = "timeout"
	AttemptRequestTooLarge = "request_too_large"
	AttemptError           = "error"
)

// Attempts lists the outcomes.
func Attempts() []string {
	return []string{AttemptForwarded, AttemptNoResponders, AttemptRejected, AttemptTimeout, AttemptRequestTooLarge, AttemptError}
}

// Forwarded is the owner's answer.
type Forwarded struct {
	Holder   string
	Revision uint64
	Payload  []byte
	Attempts int
}

// Forwarder sends requests to whoever holds a key.
type Forwarder struct {
	leases *Leases
	nc     *nats.Conn
	out    requests // on nc
	inbox  string   // subject prefix of the owners' inboxes
	obs    Observer
}

// Forward sends payload to the owner of key and returns its answer. until is
// the end of the whole call. header is the caller's; only tracing passes.
//
// An attempt is repeated, three in all, only after proof that the owner did not
// process it: nobody listens on its inbox, or it rejected the request. A
// silence is never followed by another attempt.
func (f *Forwarder) Forward(ctx context.Context, key string, payload []byte, header nats.Header, until time.Time) (Forwarded, error) {
	ctx, end := withDeadline(ctx, until)
	defer end()

	var tried Forwarded   // the owner tried last
	var last *kinds.Error // what the last attempt proved
	for {
		owner, err := f.owner(ctx, key)
		switch {
		case err != nil && last != nil && !time.Now().Before(until) && !errors.Is(context.Cause(ctx), ErrStopping):
			return Forwarded{}, f.fail(tried, kinds.Errorf(kinds.OwnerUnavailable, "the time was over with no attempt in flight; the last one: %s", last.Text))
		case err != nil:
			return Forwarded{}, f.fail(tried, err)
		case owner.Kind == kinds.Free:
			return Forwarded{}, f.fail(tried, kinds.Errorf(kinds.NotHeld, "nobody holds this key"))
		case tried.Attempts > 0 && owner.Lease.Holder == tried.Holder && owner.Lease.Revision == tried.Revision:
			return Forwarded{}, f.fail(tried, last)
		}
		tried = Forwarded{Holder: owner.Lease.Holder, Revision: owner.Lease.Revision, Attempts: tried.Attempts + 1}
		reply, failed := f.attempt(ctx, key, tried, payload, header)
		if failed == nil {
			tried.Payload = reply
			return tried, nil
		}
		notProcessed := failed.Kind == kinds.OwnerUnavailable || failed.Kind == kinds.OwnerRejected
		if !notProcessed || tried.Attempts == maxAttempts {
			return Forwarded{}, f.fail(tried, failed)
		}
		last = failed
	}
}

// owner reads the key through the leader.
func (f *Forwarder) owner(ctx context.Context, key string) (Result, error) {
	return f.leases.Do(ctx, Command{Op: OpOwner, Key: key})
}

// attempt sends the request once.
func (f *Forwarder) attempt(ctx context.Context, key string, to Forwarded, payload []byte, header nats.Header) ([]byte, *kinds.Error) {
	msg := nats.NewMsg(f.inbox + "." + to.Holder + "." + key)
	msg.Data = payload
	msg.Header[HeaderFence] = []string{strconv.FormatUint(to.Revision, 10)}
	for _, name := range traceHeaders {
		if v := header.Get(name); v != "" {
			msg.Header[name] = []string{v}
		}
	}
	// The reply subject is new for each attempt, so a late answer to one is
	// never taken for the answer to another.
	reply, err := f.out.ask(ctx, msg)
	switch {
	case err == nil:
	case errors.Is(err, nats.ErrNoResponders):
		f.obs.ForwardAttempt(AttemptNoResponders)
		return nil, kinds.Errorf(kinds.OwnerUnavailable, "nobody listens on the inbox of the owner")
	case errors.Is(err, nats.ErrMaxPayload):
		f.obs.ForwardAttempt(AttemptRequestTooLarge)
		return nil, kinds.Errorf(kinds.RequestTooLarge, "the payload of %d bytes does not fit the service's connection, whose limit is %d bytes a message with its headers", len(payload), f.nc.MaxPayload())
	case errors.Is(err, nats.ErrReconnectBufExceeded), errors.Is(err, nats.ErrConnectionClosed), errors.Is(err, nats.ErrConnectionDraining):
		f.obs.ForwardAttempt(AttemptError)
		return nil, kinds.Errorf(kinds.Unavailable, "the request could not be sent: %w", err)
	case errors.Is(context.Cause(ctx), ErrStopping):
		f.obs.ForwardAttempt(AttemptError)
		return nil, &kinds.Error{Kind: kinds.Internal, Text: "the service stopped while the owner had the request; it may have been processed", Cause: err}
	default:
		f.obs.ForwardAttempt(AttemptTimeout)
		return nil, &kinds.Error{Kind: kinds.OwnerTimeout, Text: "the owner did not answer in time; it may have processed the request", Cause: err}
	}
	if _, rejected := reply.Header[HeaderReject]; rejected {
		f.obs.ForwardAttempt(AttemptRejected)
		return nil, kinds.Errorf(kinds.OwnerRejected, "the owner rejected the request as stale and did not process it")
	}
	f.obs.ForwardAttempt(AttemptForwarded)
	return reply.Data, nil
}

// fail names the owner tried last in err.
func (f *Forwarder) fail(tried Forwarded, err error) error {
	var e *kinds.Error
	if !errors.As(err, &e) {
		e = kinds.Errorf(kinds.Internal, "%w", err)
	}
	named := *e
	named.Holder, named.Revision = tried.Holder, tried.Revision
	return &named
}
