package leased

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/schemas"
	"github.com/leased/leased/service/kinds"
)

// Row is one call of the service: everything dispatch, discovery, metrics and
// the documents know about it stands here and nowhere else.
type Row struct {
	Name string // endpoint name; the subject is the API prefix, a dot and the name
	Does string // one sentence for a stranger, in $SRV.INFO
	// Slow calls wait for somebody outside the service and have a limit of their
	// own, so that they never delay the others.
	Slow  bool
	Kinds []kinds.Kind // all it can answer, no_reply aside
	serve handler
}

// handler answers one valid request. An error becomes an error reply of its kind.
type handler func(ctx context.Context, s *Service, r *request) (answer, error)

// answer is the body of a reply and the kind it is counted as.
type answer struct {
	kind kinds.Kind
	body []byte
}

// request is one decoded request.
type request struct {
	schemas.Request
	header   nats.Header
	received time.Time
}

// always are the errors that every call can answer.
var always = []kinds.Kind{kinds.Invalid, kinds.Unsupported, kinds.Busy, kinds.Unavailable, kinds.Internal}

func answers(own ...kinds.Kind) []kinds.Kind { return append(own, always...) }

// table is the service.
var table = []Row{
	{
		Name:  "acquire",
		Does:  "Grants a key to a holder for ttl_ms if nobody holds it; says who holds it otherwise; returns the caller's own lease unchanged.",
		Kinds: answers(kinds.Granted, kinds.Denied, kinds.Unknown),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return leaseAnswer(s.leases.Acquire(ctx, r.Key, r.Holder, r.TTL, ""))
		},
	},
	{
		Name:  "renew",
		Does:  "Extends a lease to ttl_ms from now if holder and revision are the current pair; the reply has the new revision.",
		Kinds: answers(kinds.Renewed, kinds.Lost, kinds.Unknown),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return leaseAnswer(s.leases.Renew(ctx, r.Key, r.Holder, r.Revision, r.TTL))
		},
	},
	{
		Name:  "release",
		Does:  "Frees a key if holder and revision are the current pair.",
		Kinds: answers(kinds.Released, kinds.Lost, kinds.Unknown),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return leaseAnswer(s.leases.Release(ctx, r.Key, r.Holder, r.Revision))
		},
	},
	{
		Name:  "owner",
		Does:  "Says who holds a key, read through the stream leader, or that nobody does.",
		Kinds: answers(kinds.Held, kinds.Free),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return leaseAnswer(s.leases.Owner(ctx, r.Key))
		},
	},
	{
		Name: "forward",
		Does: "Sends payload to the inbox of whoever holds a key and returns the owner's reply; sent again only after proof that the owner did not process it.",
		Slow: true,
		Kinds: answers(kinds.Forwarded, kinds.NotHeld, kinds.OwnerUnavailable, kinds.OwnerRejected, kinds.OwnerTimeout,
			kinds.RequestTooLarge, kinds.ReplyTooLarge),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return s.forwardAnswer(s.leases.Forward(ctx, r.Key, r.Payload, r.header, r.received.Add(r.Timeout)))
		},
	},
}

// Endpoints is a copy of the table.
func Endpoints() []Row { return append([]Row(nil), table...) }

// contract is a row with its schemas: what the one loop registers.
type contract struct {
	Row
	request, reply *schemas.Schema
}

// contracts joins the table with the schemas.
func contracts() ([]contract, error) {
	set, err := schemas.Load()
	if err != nil {
		return nil, err
	}
	rows := make([]contract, 0, len(table))
	for _, row := range table {
		c := contract{row, set.Request(row.Name), set.Reply(row.Name)}
		if c.request == nil || c.reply == nil {
			return nil, fmt.Errorf("schemas: the call %s has no request or no reply schema", row.Name)
		}
		rows = append(rows, c)
	}
	return rows, nil
}
