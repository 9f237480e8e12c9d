package leased

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/leased/leased/metrics"
	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// Names on the wire.
const (
	MicroName  = "dagnats-api"
	QueueGroup = "dagnats-leases"
)

// endpoint is a row in service: its contract, its counters and its limit.
type endpoint struct {
	contract
	s     *Service
	count *metrics.EndpointMetrics
	limit *limit // of calls in flight, shared by all calls of one speed
}

// register makes micro endpoints of the table. This loop is the only place
// where a call meets a subject.
func (s *Service) register(svc micro.Service, rows []contract) error {
	for _, row := range rows {
		ep := &endpoint{contract: row, s: s, count: s.metrics.Endpoint(row.Name), limit: s.quick}
		if row.Slow {
			ep.limit = s.slow
		}
		s.endpoints.Store(row.Name, ep)
		err := svc.AddEndpoint(row.Name, micro.HandlerFunc(ep.take),
			micro.WithEndpointSubject(s.opts.APIPrefix+"."+row.Name),
			micro.WithEndpointQueueGroup(QueueGroup),
			micro.WithEndpointPendingLimits(nats.DefaultSubPendingMsgsLimit, pendingBytes),
			micro.WithEndpointMetadata(map[string]string{
				"description":    row.Does,
				"request_schema": row.request.Text(),
				"reply_schema":   row.reply.Text(),
				"kinds":          joinKinds(row.Kinds),
			}))
		if err != nil {
			return fmt.Errorf("endpoint %s: %w", row.Name, err)
		}
	}
	return nil
}

func joinKinds(ks []kinds.Kind) string {
	names := make([]string, len(ks))
	for i, k := range ks {
		names[i] = string(k)
	}
	return strings.Join(names, ",")
}

// take receives one request on micro's goroutine, which serves one request of
// an endpoint after the other: what may wait goes on elsewhere. Only plain values
// leave this function; micro reads its Request again when it returns.
func (ep *endpoint) take(m micro.Request) {
	s := ep.s
	in := incoming{reply: m.Reply(), data: m.Data(), received: time.Now()}
	header := nats.Header(m.Headers())
	size := len(in.data) + lengthOf(header)
	if ep.Slow { // the others have no use for it
		in.header = header
	}
	ep.count.Begin()
	if !s.replies.allow(in.reply) { // P7
		ep.finish(in.received, answer{kind: kinds.NoReply})
		return
	}
	if err := s.leases.Allow(service.OpOwner); kinds.Of(err) == kinds.Unsupported { // P8: unsupported before busy before invalid
		ep.fail(in, err)
		return
	}
	places, ok := ep.limit.enter(size)
	if !ok {
		ep.fail(in, kinds.Errorf(kinds.Busy, "the limit of calls in flight is reached: %d places, one for each %d bytes of a request", ep.limit.places, ep.limit.bytes))
		return
	}
	in.places = places
	s.calls.Add(1)
	if !ep.start(in) {
		s.workers.run(func() { ep.handle(in) })
	}
}

// lengthOf is about what h takes in a message.
func lengthOf(h nats.Header) (n int) {
	for name, values := range h {
		for _, v := range values {
			n += len(name) + len(v) + len(": \r\n")
		}
	}
	return n
}

// incoming is a request as it came in.
type incoming struct {
	reply    string
	data     []byte
	header   nats.Header
	received time.Time
	places   int64 // in flight, that it has
}

// start begins a lease call whose request is in plain form: nothing waits for it,
// the store's reply goes on with it. Any other request, and so every refusal, is
// left to handle; so are long requests, which take longer to read than others may
// wait; so is everything while a connection is away, because publishing on it then
// waits for as long as it is dialled.
func (ep *endpoint) start(in incoming) (begun bool) {
	if ep.lease == nil || len(in.data) > longRequest || ep.s.away.Load() {
		return false
	}
	var c service.Command
	err := ep.s.safely(ep.Name, func() error {
		if decoded, plain := ep.request.DecodePlain(in.data); plain {
			c, begun = ep.lease(&request{Request: decoded})
		}
		return nil
	})
	switch {
	case err != nil:
		defer ep.s.calls.Done()
		ep.leave(in)
		ep.fail(in, err)
		return true
	case begun:
		ep.s.leases.Start(c, func(call *service.Call) {
			finish := func() {
				defer ep.s.calls.Done()
				ep.answer(in, func() { ep.leave(in) }, func() (answer, error) { return ep.s.leaseAnswer(call.Finish(ep.s.callCtx)) })
			}
			if call.Waits() || ep.s.away.Load() {
				ep.s.workers.run(finish)
				return
			}
			finish()
		})
	}
	return begun
}

// leave gives a call's places in flight to others.
func (ep *endpoint) leave(in incoming) { ep.limit.leave(in.places) }

// handle takes one request from its bytes to its reply, waiting as need be.
func (ep *endpoint) handle(in incoming) {
	defer ep.s.calls.Done()
	park := sync.OnceFunc(func() { ep.leave(in) })
	data := in.data
	in.data = nil // nothing keeps it while the call waits
	ep.answer(in, park, func() (answer, error) {
		decoded, err := ep.request.Decode(data)
		if err != nil {
			return answer{}, kinds.Errorf(kinds.Invalid, "%w", err)
		}
		data = nil
		r := &request{decoded, in, park}
		if ep.lease != nil {
			if c, ok := ep.lease(r); ok {
				return ep.s.leaseAnswer(ep.s.leases.Do(ep.s.callCtx, c))
			}
		}
		return ep.serve(ep.s.callCtx, ep.s, r)
	})
}

// answer replies with what f gives. The place in flight is free before, so that who
// has the reply can send the next request.
func (ep *endpoint) answer(in incoming, leave func(), f func() (answer, error)) {
	var a answer
	err := ep.s.safely(ep.Name, func() (err error) {
		a, err = f()
		return err
	})
	leave()
	if err != nil {
		ep.fail(in, err)
		return
	}
	ep.reply(in, a)
}

// safely runs f; a panic in it becomes an internal error, logged with its stack
// and counted, and the service lives.
func (s *Service) safely(endpoint string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			s.metrics.Panic()
			s.log.Error("a handler panicked", "endpoint", endpoint, "panic", p, "stack", string(debug.Stack()))
			err = &kinds.Error{Kind: kinds.Internal, Text: "the service failed on this request; its log says how"}
		}
	}()
	return f()
}

// fail answers with the error's kind.
func (ep *endpoint) fail(in incoming, err error) {
	a := errorAnswer(err)
	if a.kind == kinds.Internal {
		ep.s.log.Error("a call failed", "endpoint", ep.Name, "error", err)
	}
	ep.reply(in, a)
}

// reply is the one way out: count, then send.
func (ep *endpoint) reply(in incoming, a answer) {
	msg := a.message(in.reply)
	if most := int(ep.s.front.MaxPayload()); payload(msg) > most {
		a = ep.instead(a, most)
		msg = a.message(in.reply)
	}
	ep.finish(in.received, a)
	send := ep.s.front.PublishMsg
	if a.unheard != nil {
		send = func(msg *nats.Msg) error { return ep.s.heard.Send(msg, a.unheard) }
	}
	if err := send(msg); err != nil {
		ep.s.log.Warn("a reply could not be sent", "endpoint", ep.Name, "kind", string(a.kind), "error", err)
	}
}

// message is a on its way to a subject.
func (a answer) message(to string) *nats.Msg {
	msg := &nats.Msg{Subject: to, Data: a.body}
	if a.text != "" {
		msg.Header = nats.Header{micro.ErrorHeader: []string{a.text}, micro.ErrorCodeHeader: []string{a.kind.Code()}}
	}
	return msg
}

// payload is the length of msg as max_payload limits it.
func payload(msg *nats.Msg) int { return msg.Size() - len(msg.Subject) }

// instead is what is answered where a, without all that can be left out, does not fit a
// message of at most most bytes: silence would say less. What a write came to is not told
// then, as if no verdict had come.
func (ep *endpoint) instead(a answer, most int) answer {
	ep.s.log.Error("a reply does not fit a message of NATS", "endpoint", ep.Name, "kind", string(a.kind), "bytes", len(a.body), "max_payload", most)
	if a.text != "" {
		return errorAnswer(&kinds.Error{Kind: a.kind, Text: a.text[:min(len(a.text), shortSentence)]})
	}
	kind := kinds.Internal
	if ep.lease != nil && slices.Contains(ep.Kinds, kinds.Unknown) {
		kind = kinds.Unknown
	}
	return errorAnswer(kinds.Errorf(kind, "a reply of %d bytes does not fit", len(a.body)))
}

func (ep *endpoint) finish(received time.Time, a answer) {
	took := time.Since(received)
	if a.kind != "" {
		ep.count.Reply(a.kind, took)
	}
	for _, k := range a.counts {
		ep.count.Reply(k, took)
	}
	ep.count.End()
}

// endpointStats is what an endpoint shows as data in $SRV.STATS. micro's own
// counts see only the hand-over of a request, not its answer.
type endpointStats struct {
	Replies  map[kinds.Kind]uint64 `json:"replies"`
	Errors   uint64                `json:"errors"`
	InFlight int64                 `json:"in_flight"`
	P50      json.Number           `json:"p50_ms"`
	P99      json.Number           `json:"p99_ms"`
	service.PeerStats
}

// stats is micro's StatsHandler. micro calls it with its own lock held, so
// nothing here may ask micro anything.
func (s *Service) stats(e *micro.Endpoint) any {
	v, ok := s.endpoints.Load(e.Name)
	if !ok {
		return nil
	}
	snap := v.(*endpoint).count.Snapshot()
	return endpointStats{snap.Replies, snap.Errors, snap.InFlight, ms(snap.P50), ms(snap.P99), s.leases.PeerStats(e.Name == table[0].Name)}
}

// answering waits until ctx is done or every call in flight has been answered.
func (s *Service) answering(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		s.calls.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
	}
	select { // both may have been ready
	case <-done:
		return nil
	default:
		return context.Cause(ctx)
	}
}
