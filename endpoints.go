package leased

import (
	"context"
	"fmt"

	"github.com/leased/leased/schemas"
	"github.com/leased/leased/service"
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
	// lease is the lease call that a request is; ok is false if serve is to answer
	// it. A row has one of the two, or both.
	lease func(r *request) (c service.Command, ok bool)
	serve handler
}

// handler answers one valid request, and may wait. An error becomes an error reply
// of its kind.
type handler func(ctx context.Context, s *Service, r *request) (answer, error)

// answer is the body of a reply and the kind it is counted as. A call that
// answers for many leases counts each, in counts, and has no kind of its own.
type answer struct {
	kind   kinds.Kind
	counts []kinds.Kind
	body   []byte
	text   string // the sentence of an error
	// unheard is called if nobody hears it and NATS knows that; nil: it does not matter.
	// It must not block.
	unheard func()
}

// request is one decoded request.
type request struct {
	schemas.Request
	incoming
	// park gives the call's place among the calls in flight to another: it waits.
	park func()
}

// always are the errors that every call can answer.
var always = []kinds.Kind{kinds.Invalid, kinds.Unsupported, kinds.Busy, kinds.Unavailable, kinds.Internal}

func answers(own ...kinds.Kind) []kinds.Kind { return append(own, always...) }

// table is the service.
var table = []Row{
	{
		Name:  "acquire",
		Does:  "Grants a key to a holder for ttl_ms if nobody holds it; says who holds it otherwise; returns the caller's own lease unchanged.",
		Kinds: answers(kinds.Granted, kinds.Denied, kinds.OverQuota, kinds.Unknown),
		lease: func(r *request) (service.Command, bool) { return acquire(r), r.Wait == 0 },
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return s.leaseAnswer(s.leases.AcquireWait(ctx, acquire(r), r.received.Add(r.Wait), service.CallerOf(r.reply), r.park))
		},
	},
	{
		Name:  "renew",
		Does:  "Extends a lease to ttl_ms from now if holder and revision are the current pair; the reply has the new revision.",
		Kinds: answers(kinds.Renewed, kinds.Lost, kinds.Unknown),
		lease: func(r *request) (service.Command, bool) {
			return service.Command{Op: service.OpRenew, Key: r.Key, Holder: r.Holder, Revision: r.Revision, TTL: r.TTL}, true
		},
	},
	{
		Name:  "release",
		Does:  "Frees a key if holder and revision are the current pair.",
		Kinds: answers(kinds.Released, kinds.Lost, kinds.Unknown),
		lease: func(r *request) (service.Command, bool) {
			return service.Command{Op: service.OpRelease, Key: r.Key, Holder: r.Holder, Revision: r.Revision}, true
		},
	},
	{
		Name:  "owner",
		Does:  "Says who holds a key, read through the stream leader, or that nobody does.",
		Kinds: answers(kinds.Held, kinds.Free),
		lease: func(r *request) (service.Command, bool) {
			return service.Command{Op: service.OpOwner, Key: r.Key}, true
		},
	},
	{
		Name: "forward",
		Does: "Sends payload to the inbox of whoever holds a key and returns the owner's reply; sent again only after proof that the owner did not process it.",
		Slow: true,
		Kinds: answers(kinds.Forwarded, kinds.NotHeld, kinds.OwnerUnavailable, kinds.OwnerRejected, kinds.OwnerTimeout,
			kinds.RequestTooLarge, kinds.ReplyTooLarge),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return forwardAnswer(s.leases.Forward(ctx, service.Forward{Key: r.Key, Payload: r.Payload, Header: r.header,
				Until: r.received.Add(r.Timeout), Places: int(r.places), Room: s.forwardRoom}))
		},
	},
	{
		Name:  "list",
		Does:  "A page of the leases that the answering instance sees, sorted by key.",
		Kinds: answers(kinds.Listed),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return s.lists.run(ctx, r.park, func() (answer, error) {
				return s.listAnswer(s.leases.List(r.Prefix, r.Holder, r.After, r.Limit))
			})
		},
	},
	{
		Name:  "evict",
		Does:  "Frees a key whoever holds it, if revision is the current one; for operators.",
		Kinds: answers(kinds.Evicted, kinds.Lost, kinds.Unknown),
		lease: func(r *request) (service.Command, bool) {
			return service.Command{Op: service.OpEvict, Key: r.Key, Revision: r.Revision}, true
		},
	},
	{
		Name: "renew_many",
		Does: "Renews up to 1000 leases of one holder; each gets the reply that renew would give it, in order.",
		// Counted lease by lease, as renew is.
		Kinds: answers(kinds.Renewed, kinds.Lost, kinds.Unknown, kinds.ReplyTooLarge),
		serve: func(ctx context.Context, s *Service, r *request) (answer, error) {
			return s.renewMany(ctx, r)
		},
	},
}

func acquire(r *request) service.Command {
	return service.Command{Op: service.OpAcquire, Key: r.Key, Holder: r.Holder, TTL: r.TTL, Meta: r.Meta}
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
