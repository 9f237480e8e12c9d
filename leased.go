// Package leased is the lease service: a NATS micro service whose calls stand
// in one table. endpoints.go holds the table, dispatch.go the one way in and
// out, package service what a lease is and how it is kept safe.
package leased

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/leased/leased/metrics"
	"github.com/leased/leased/service"
)

// Service is a running lease service.
type Service struct {
	opts    Options
	front   *nats.Conn
	leases  *service.Instance
	metrics *metrics.Metrics
	log     *slog.Logger

	replies     replySubjects
	heard       *service.Replies // those that are of use only if somebody hears them
	quick, slow *limit
	workers     *workers
	lists       *pace
	helpers     chan struct{} // goroutines of renew_many
	calls       sync.WaitGroup
	away        atomic.Bool // front or store is not connected
	callCtx     context.Context
	abort       context.CancelCauseFunc // ends calls in flight
	endpoints   sync.Map                // name -> *endpoint

	joined chan struct{} // closed when the micro service is there or never will be
	stop   context.CancelFunc
	leave  sync.Once
	left   error         // of the Drain
	micro  micro.Service // set before joined is closed; nil if leaving came first
}

// Start begins to serve and returns at once, also when NATS is not reachable
// or cannot keep leases: it goes on trying, and Ready tells how far it is.
func Start(o Options) (*Service, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	rows, err := contracts()
	if err != nil {
		return nil, err
	}
	s := &Service{opts: o, front: o.Front, metrics: o.Metrics, log: o.Logger, replies: newReplySubjects(o), heard: service.NewReplies(o.Front), lists: newPace(),
		quick: &limit{places: int64(o.MaxInFlight), bytes: callBytes}, slow: &limit{places: int64(o.MaxForwards), bytes: forwardBytes}, joined: make(chan struct{}), workers: newWorkers(), helpers: make(chan struct{}, helpersOfRenewMany)}
	s.callCtx, s.abort = context.WithCancelCause(context.Background())
	s.leases, err = service.Open(service.Options{
		Store: o.Store, Hop: o.Hop, Dial: o.Dial, JSDomain: o.JSDomain, JSAPIPrefix: o.JSAPIPrefix, Replicas: o.Replicas, GroupCommit: o.GroupCommit,
		APIPrefix: o.APIPrefix, EventPrefix: o.EventPrefix, MaxForwards: o.MaxForwards, MaxLeases: o.MaxLeases, MaxLeasesPerHolder: o.MaxLeasesPerHolder, MicroName: MicroName, Observer: observer{o.Metrics}, Logger: o.Logger,
	})
	if err != nil {
		return nil, err
	}
	o.Metrics.SetService(metrics.Service{
		LeasesHeld:   func() int { return int(s.leases.Held()) },
		Waiters:      s.leases.Waiting,
		Queued:       s.leases.Queued,
		Ends:         s.ends,
		HighestFence: s.leases.Fence,
		ClockOffset:  s.leases.ClockOffset,
		ClockSpread:  s.leases.ClockSpread,
		Listeners: func() (on []metrics.Subjects) {
			for _, l := range s.leases.Listeners() {
				if l.Others {
					on = append(on, metrics.Subjects(l.On))
				}
			}
			return on
		},
		Bucket: func() (metrics.BucketState, []metrics.Warning) {
			h := s.leases.Health()
			w := make([]metrics.Warning, len(h.Warnings))
			for i, name := range h.Warnings {
				w[i] = metrics.Warning(name)
			}
			return metrics.BucketState(h.Verdict), w
		},
	})
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.away.Store(true)
	go s.watchConns(ctx)
	go func() {
		defer close(s.joined)
		if err := s.join(ctx, rows); err != nil && ctx.Err() == nil {
			s.log.Error("the micro service could not be registered", "error", err)
		}
	}()
	return s, nil
}

// ends is what has become of the leases that ran out.
func (s *Service) ends() metrics.Ends {
	e := s.leases.Ends()
	within := make(map[float64]uint64, len(e.Within))
	for i, n := range e.Within {
		within[service.DelayBounds[i]] = n
	}
	return metrics.Ends{Waiting: e.Waiting, Late: e.Late, Unseen: e.Unseen, Told: e.Told, Delay: e.Delay.Seconds(), Within: within}
}

// watchConns keeps away until ctx is done. It may not ask a connection that is being
// dialled: that waits.
func (s *Service) watchConns(ctx context.Context) {
	front, store := s.front.StatusChanged(), s.opts.Store.StatusChanged()
	defer s.front.RemoveStatusListener(front)
	defer s.opts.Store.RemoveStatusListener(store)
	frontUp, storeUp := s.front.IsConnected(), s.opts.Store.IsConnected()
	for {
		s.away.Store(!frontUp || !storeUp)
		select {
		case <-ctx.Done():
			return
		case st := <-front:
			frontUp = st == nats.CONNECTED
		case st := <-store:
			storeUp = st == nats.CONNECTED
		}
	}
}

// joinAfter is how long the endpoints wait for a verdict on the bucket, so that
// the first requests of a new instance are not answered unavailable for want
// of a look.
const joinAfter = 5 * time.Second

// join registers the micro service once NATS is there.
func (s *Service) join(ctx context.Context, rows []contract) error {
	for poll := 10 * time.Millisecond; !s.front.IsConnected(); poll = min(2*poll, 200*time.Millisecond) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.leases.Judged():
	case <-time.After(joinAfter):
	}
	if err := s.heard.Listen(); err != nil {
		return err
	}
	svc, err := micro.AddService(s.front, micro.Config{
		Name:        MicroName,
		Version:     s.opts.Version,
		Description: "Leases over NATS: one holder a key for a bounded time, with a fencing token, and requests to whoever holds it.",
		QueueGroup:  QueueGroup,
		Metadata: map[string]string{
			"bucket":         service.Bucket,
			"events":         s.opts.EventPrefix + ".changed.<key>",
			"inbox":          s.opts.EventPrefix + ".inbox.<holder>.<key>",
			"server_version": s.front.ConnectedServerVersion(),
		},
		StatsHandler: s.stats,
	})
	if err != nil {
		return err
	}
	s.micro = svc
	if err := s.register(svc, rows); err != nil {
		return err
	}
	// Registered means that the server knows: a request sent now finds us.
	flushed, cancel := context.WithTimeout(ctx, joinAfter)
	defer cancel()
	return s.front.FlushWithContext(flushed)
}

// Check is one line of the service's readiness.
type Check struct {
	Name   string
	OK     bool
	Warn   bool // OK, and somebody should look at it
	Detail string
}

// Ready says what the service needs and whether it is there.
func (s *Service) Ready() []Check {
	h, refused := s.leases.Health(), s.leases.Refused()
	checks := []Check{
		{Name: "connected", OK: s.front.IsConnected() && s.opts.Store.IsConnected() && s.opts.Hop.IsConnected()},
		{Name: "registered", OK: s.registered()},
		{Name: "supported", OK: h.Verdict != service.Unsupported && h.Verdict != service.Unseen},
		{Name: "bucket", OK: h.Verdict == service.Sound, Detail: string(h.Verdict)},
		{Name: "leader", OK: h.Leader},
		{Name: "view", OK: s.leases.Viewing()},
		{Name: "writes", OK: refused == "", Detail: refused},
	}
	if h.Reason != "" {
		checks[3].Detail += ": " + h.Reason
	}
	checks = append(checks, s.alone())
	if why := s.leases.ClockTrouble(); why != "" {
		checks = append(checks, Check{Name: "clock", OK: true, Warn: true, Detail: why})
	}
	for _, w := range h.Warnings {
		checks = append(checks, Check{Name: w, OK: true, Warn: true, Detail: service.WarningText(w)})
	}
	return checks
}

// alone is the check that nobody else listens where only the service or an owner should.
// It is a warning: what others answer cannot be kept from callers here.
func (s *Service) alone() Check {
	c := Check{Name: "alone", OK: true}
	var details []string
	for _, l := range s.leases.Listeners() {
		c.Warn = c.Warn || l.Others
		if l.Detail != "" {
			details = append(details, l.On+": "+l.Detail)
		}
	}
	c.Detail = strings.Join(details, "; ")
	return c
}

func (s *Service) registered() bool {
	select {
	case <-s.joined:
		return s.micro != nil && !s.micro.Stopped()
	default:
		return false
	}
}

// Look asks for a check of the bucket now, because a connection came back, say.
func (s *Service) Look() { s.leases.Look() }

// Drain takes no more requests, answers those already received and ends the
// service. A call that is not answered when ctx is done is ended and answered
// internal; the error then says that it came to that. Leases stay. It happens once:
// another Drain waits for the first one and returns what that returned.
func (s *Service) Drain(ctx context.Context) error {
	s.leave.Do(func() { s.left = s.drain(ctx) })
	return s.left
}

func (s *Service) drain(ctx context.Context) error {
	s.stop()
	<-s.joined
	defer s.leases.Close()
	defer s.workers.close()
	var err error
	if s.micro != nil {
		err = s.drainRequests(ctx)
	}
	s.leases.Leaving()
	if ended := s.answering(ctx); ended != nil {
		s.abort(service.ErrStopping)
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		err = errors.Join(err, fmt.Errorf("calls were still in flight after the time to leave: %w", ended), s.answering(last))
	}
	s.abort(service.ErrStopping)
	if s.front.IsConnected() {
		err = errors.Join(err, s.front.FlushTimeout(2*time.Second))
	}
	return err
}

// drainRequests unsubscribes and waits until every request that the server had
// already delivered has been handed to its handler.
func (s *Service) drainRequests(ctx context.Context) error {
	if err := s.micro.Stop(); err != nil {
		return err
	}
	if !s.front.IsConnected() {
		return nil
	}
	// All subscriptions of this connection but one are micro's; nats.go takes each
	// off the list when its queue is empty.
	gone := time.Now().Add(time.Second)
	for s.front.NumSubscriptions() > 1 {
		if s.front.IsConnected() {
			gone = time.Now().Add(time.Second)
		} else if time.Now().After(gone) {
			return nil // without NATS the list never empties, and nobody can be answered
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}

// observer turns what the service does into counts.
type observer struct{ m *metrics.Metrics }

func (o observer) Conflict()                { o.m.WriteConflict() }
func (o observer) TakenBack()               { o.m.TakenBack() }
func (o observer) NoVerdict()               { o.m.WriteAmbiguous() }
func (o observer) ForwardAttempt(to string) { o.m.ForwardAttempt(metrics.Outcome(to)) }
func (o observer) Change(event string)      { o.m.Change(metrics.Event(event)) }
func (o observer) Refused()                 { o.m.WriteRefused() }
func (o observer) ClockStep()               { o.m.ClockStep() }
func (o observer) UnknownAnswer()           { o.m.UnknownAnswer() }
func (o observer) Panic()                   { o.m.Panic() }
