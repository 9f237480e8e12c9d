package service

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// Headers of a forward, towards the owner and back.
const (
	HeaderFence    = "Dagnats-Lease-Fence"
	HeaderDeadline = "Dagnats-Lease-Deadline-Ms" // what is left of the caller's time when the request is sent
	HeaderReject   = "Dagnats-Lease-Reject"
)

// traceHeader says that a header of the caller's passes to the owner; no other one
// does. Tracing libraries do not agree on the case of these names, so both sides see
// them as they were written.
func traceHeader(name string) bool {
	switch strings.ToLower(name) {
	case "traceparent", "tracestate":
		return true
	}
	return false
}

// maxAttempts is how often one forward may be sent to an owner.
const maxAttempts = 3 // F4

// Outcomes of one attempt, for Observer.ForwardAttempt.
const (
	AttemptForwarded       = "forwarded"
	AttemptNoResponders    = "no_responders"
	AttemptRejected        = "rejected"
	AttemptTimeout         = "timeout"
	AttemptRequestTooLarge = "request_too_large"
	AttemptReplyTooLarge   = "reply_too_large"
	AttemptError           = "error"
)

// Attempts lists the outcomes.
func Attempts() []string {
	return []string{AttemptForwarded, AttemptNoResponders, AttemptRejected, AttemptTimeout, AttemptRequestTooLarge, AttemptReplyTooLarge, AttemptError}
}

// Forward is a request to whoever holds a key.
type Forward struct {
	Key     string
	Payload []byte
	Header  nats.Header // the caller's
	Until   time.Time   // the end of the whole call
	Places  int         // that it takes, of Options.MaxForwards
	// Room is how long the body of an owner's answer may be for the caller to get it.
	Room func(to Forwarded) int
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
	places *places
	obs    Observer
}

// Forward sends q to the owner of its key and returns the answer.
//
// An attempt is repeated, three in all, only after proof that the owner did not
// process it: nobody listens on its inbox, or it rejected the request. A
// silence is never followed by another attempt.
func (f *Forwarder) Forward(ctx context.Context, q Forward) (Forwarded, error) {
	ctx, end := withDeadline(ctx, q.Until)
	defer end()

	var tried Forwarded   // the owner tried last
	var last *kinds.Error // what the last attempt proved
	for {
		owner, err := f.owner(ctx, q.Key)
		switch {
		case err != nil && last != nil && !time.Now().Before(q.Until) && !errors.Is(context.Cause(ctx), ErrStopping):
			return Forwarded{}, f.fail(tried, kinds.Errorf(kinds.OwnerUnavailable, "the time was over with no attempt in flight; the last one: %s", last.Text))
		case err != nil:
			return Forwarded{}, f.fail(tried, err)
		case owner.Kind == kinds.Free:
			return Forwarded{}, f.fail(tried, kinds.Errorf(kinds.NotHeld, "nobody holds this key"))
		case tried.Attempts > 0 && owner.Lease.Holder == tried.Holder && owner.Lease.Revision == tried.Revision:
			return Forwarded{}, f.fail(tried, last)
		}
		holder := owner.Lease.Holder
		if busy := f.places.take(holder, q.Key, q.Places); busy != nil {
			return Forwarded{}, f.fail(tried, busy)
		}
		tried = Forwarded{Holder: holder, Revision: owner.Lease.Revision, Attempts: tried.Attempts + 1}
		reply, failed := f.attempt(ctx, q, tried)
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

// attempt sends the request once and gives its places back (F1, F5).
func (f *Forwarder) attempt(ctx context.Context, q Forward, to Forwarded) ([]byte, *kinds.Error) {
	defer f.places.leave(to.Holder, q.Key, q.Places)
	left := time.Until(q.Until).Milliseconds()
	if left < 1 {
		return nil, kinds.Errorf(kinds.OwnerUnavailable, "the time was over before the request could be sent to the owner")
	}
	msg := nats.NewMsg(f.inbox + "." + to.Holder + "." + q.Key)
	msg.Data = q.Payload
	msg.Header[HeaderFence] = []string{strconv.FormatUint(to.Revision, 10)}
	msg.Header[HeaderDeadline] = []string{strconv.FormatInt(left, 10)}
	for name, values := range q.Header {
		if traceHeader(name) {
			msg.Header[name] = values
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
		return nil, kinds.Errorf(kinds.RequestTooLarge, "the payload of %d bytes does not fit the service's connection, whose limit is %d bytes a message with its headers", len(q.Payload), f.nc.MaxPayload())
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
	if room := q.Room(to); len(reply.Data) > room {
		f.obs.ForwardAttempt(AttemptReplyTooLarge)
		return nil, kinds.Errorf(kinds.ReplyTooLarge, "the owner processed the request, but its reply of %d bytes is larger than the %d bytes that fit into the answer", len(reply.Data), room)
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
