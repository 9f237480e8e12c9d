package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"github.com/leased/leased"
	"github.com/leased/leased/metrics"
	"github.com/leased/leased/service"
)

// links are the connections of the running service, one for each kind of
// traffic, so that none waits behind another.
type links struct {
	front, store, hop *nats.Conn

	mu      sync.Mutex
	refused map[string]time.Time // subjects of calls that NATS does not let us receive, when it last said so
	unsent  map[string]time.Time // subjects on which it did not take a request or write of ours, likewise
	reply   time.Time            // when it last did not take a reply
}

func (l *links) all() []*nats.Conn { return []*nats.Conn{l.front, l.store, l.hop} }

// connector opens a connection to the one NATS that serve uses, with the credentials of
// the kind of traffic that it is for.
type connector func(metrics.Connection, ...nats.Option) (*nats.Conn, error)

// openLinks opens all connections. A NATS that is not there, or refuses who we
// are, is no error: the connections keep trying for ever. Each time that one of
// them stands, up is called.
func openLinks(connect connector, log *slog.Logger, m *metrics.Metrics, up func()) (*links, error) {
	l := &links{refused: map[string]time.Time{}, unsent: map[string]time.Time{}}
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for i, c := range []struct {
		name    metrics.Connection
		to      **nats.Conn
		options []nats.Option
	}{
		// Replies to what was taken wait for it to come back.
		{metrics.Front, &l.front, []nats.Option{nats.ReconnectBufSize(frontWaits)}},
		// What could not be sent must not be sent after its caller gave up.
		{metrics.Store, &l.store, []nats.Option{nats.ReconnectBufSize(-1)}},
		{metrics.Hop, &l.hop, []nats.Option{nats.ReconnectBufSize(-1)}},
	} {
		wg.Go(func() {
			r := &reporter{name: c.name, links: l, up: up, log: log.With("connection", "leased-"+string(c.name)), metrics: m, limit: rate.NewLimiter(1, 10)}
			*c.to, errs[i] = r.open(connect, c.options)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// frontWaits is how many bytes of replies wait for the front to be connected again: as much as the
// requests may be long that are in flight.
const frontWaits = 64 << 20

// open makes the connection that r reports on.
func (r *reporter) open(connect connector, options []nats.Option) (*nats.Conn, error) {
	nc, err := connect(r.name, append([]nats.Option{
		nats.Name("leased-" + string(r.name)),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		// Credentials and permissions can be mended while we run.
		nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(300*time.Millisecond, 300*time.Millisecond),
		nats.PingInterval(pingEvery),
		nats.MaxPingsOutstanding(pingsMissed),
		nats.NoCallbacksAfterClientClose(),
		nats.ConnectHandler(r.connected),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			r.reconnects.Add(1)
			r.connected(nc)
		}),
		nats.DisconnectErrHandler(r.disconnected),
		nats.ReconnectErrHandler(r.notConnected),
		nats.ErrorHandler(r.error),
		nats.LameDuckModeHandler(func(nc *nats.Conn) {
			r.log.Info("NATS server is going to stop", "nats", nc.ConnectedUrlRedacted())
		}),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("NATS connection leased-%s: %w", r.name, err)
	}
	r.metrics.SetConnection(r.name, func() metrics.ConnectionState {
		return metrics.ConnectionState{Connected: nc.IsConnected(), Reconnects: r.reconnects.Load(), Dropped: r.dropped()}
	})
	return nc, nil
}

// more makes connections that come and go as the service pleases. What goes wrong on
// them counts as the store connection's.
func (l *links) more(connect connector, log *slog.Logger, m *metrics.Metrics) func(...nats.Option) (*nats.Conn, error) {
	r := &reporter{name: metrics.Store, links: l, log: log.With("connection", "leased-leader"), metrics: m, limit: rate.NewLimiter(1, 10)}
	return func(options ...nats.Option) (*nats.Conn, error) {
		return connect(metrics.Store, append([]nats.Option{
			nats.Name("leased-leader"),
			nats.PingInterval(pingEvery),
			nats.MaxPingsOutstanding(pingsMissed),
			nats.ErrorHandler(r.error),
		}, options...)...)
	}
}

// A server that went silent is given up after 15 s to 20 s.
const (
	pingEvery   = 5 * time.Second
	pingsMissed = 3
)

// connected tells whether every connection stands.
func (l *links) connected() bool {
	for _, nc := range l.all() {
		if !nc.IsConnected() {
			return false
		}
	}
	return true
}

// note takes a subject into refused, until the next connection, which subscribes again,
// or into unsent.
func (l *links) note(subjects map[string]time.Time, subject string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := subjects[subject]; known || len(subjects) < 100 {
		subjects[subject] = time.Now()
	}
}

func (l *links) forgive() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.refused)
}

// unsentShown is how long a refused request or write shows in the checks.
const unsentShown = time.Minute

// permitted is the check that NATS lets us receive every call. What it did not let us
// send is a warning here: whether calls can be answered without it, others see.
func (l *links) permitted() leased.Check {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.unsent, func(_ string, at time.Time) bool { return time.Since(at) > unsentShown })
	noReply := time.Since(l.reply) <= unsentShown
	var details []string
	if len(l.refused) > 0 {
		details = append(details, "NATS does not let this user subscribe to "+
			strings.Join(slices.Sorted(maps.Keys(l.refused)), ", ")+"; tried again within a minute")
	}
	if len(l.unsent) > 0 {
		details = append(details, "within the last minute NATS did not let this user publish to "+
			strings.Join(slices.Sorted(maps.Keys(l.unsent)), ", "))
	}
	if noReply { // a caller chose the subject: it is for the log, where it is escaped and cut
		details = append(details, "within the last minute NATS did not let this user reply where a caller said; the log names the subject")
	}
	return leased.Check{Name: "permitted", OK: len(l.refused) == 0, Warn: len(l.unsent) > 0 || noReply, Detail: strings.Join(details, "; ")}
}

// close sends what is still to be sent, for 2 s at most, and closes them all.
func (l *links) close() {
	for _, nc := range l.all() {
		if nc == nil {
			continue
		}
		if nc.IsConnected() {
			_ = nc.FlushTimeout(2 * time.Second)
		}
		nc.Close()
	}
}

// watch mends what nats.go does not, until ctx ends, ever more seldom while it
// does not help. It says that NATS is still not there, because nats.go is silent
// about an attempt that the server refuses before the first success. And where
// NATS refused a subscription it connects again, because a permission that is
// given later has no effect before.
func (l *links) watch(ctx context.Context, log *slog.Logger) {
	const least, most = 5 * time.Second, time.Minute
	for every := least; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		every = min(2*every, most)
		switch {
		case !l.connected():
			l.complain(log)
		case !l.permitted().OK:
			if err := l.front.ForceReconnect(); err != nil {
				log.Warn("cannot connect again to subscribe again", "error", err)
			}
		default:
			every = least
		}
	}
}

func (l *links) complain(log *slog.Logger) {
	for _, nc := range l.all() {
		if nc.IsConnected() {
			continue
		}
		attrs := []any{"connection", nc.Opts.Name}
		if err := nc.LastError(); err != nil {
			attrs = append(attrs, "error", err)
		}
		log.Warn("still not connected to NATS", attrs...)
	}
}

// reporter turns what happens to a connection into log lines and counts.
type reporter struct {
	name    metrics.Connection
	links   *links
	up      func()
	log     *slog.Logger
	metrics *metrics.Metrics
	limit   *rate.Limiter // of lines about errors that may come with every message

	// nats.go's own count has failed attempts in it.
	reconnects atomic.Uint64

	mu        sync.Mutex
	lastError string                        // of an attempt to connect, to say it once
	slow      map[*nats.Subscription]uint64 // those that ever dropped messages, and how many
}

// dropped is how many messages came in faster than they were handled. nats.go says once
// that a subscription began to drop them, and counts each there.
func (r *reporter) dropped() (n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for sub, last := range r.slow {
		if now, err := sub.Dropped(); err == nil { // it is not over
			last = uint64(now)
			r.slow[sub] = last
		}
		n += last
	}
	return n
}

func (r *reporter) connected(nc *nats.Conn) {
	r.mu.Lock()
	r.lastError = ""
	r.mu.Unlock()
	if r.name == metrics.Front {
		r.metrics.SetNATSServer(nc.ConnectedServerVersion())
		r.links.forgive()
	}
	where := nc.ConnectedUrlRedacted()
	if nc.Opts.InProcessServer != nil {
		where = "in process"
	}
	r.log.Info("connected to NATS", "nats", where, "server", nc.ConnectedServerName(), "nats_version", nc.ConnectedServerVersion())
	r.up()
}

func (r *reporter) disconnected(_ *nats.Conn, err error) {
	if err == nil {
		r.log.Warn("connection to NATS lost")
		return
	}
	r.log.Warn("connection to NATS lost", "error", err)
}

func (r *reporter) notConnected(_ *nats.Conn, err error) {
	if authError(err) {
		r.refused(err)
		return
	}
	r.mu.Lock()
	same := r.lastError == err.Error()
	r.lastError = err.Error()
	r.mu.Unlock()
	if same {
		return
	}
	r.log.Warn("cannot connect to NATS; trying on", "error", err)
}

func (r *reporter) refused(err error) {
	r.metrics.ConnError(r.name, metrics.ConnAuth)
	if r.limit.Allow() {
		r.log.Error("NATS refuses the credentials; trying on", "error", err)
	}
}

// replyRefused tells of a reply that NATS did not take. Its subject is a caller's inbox
// that this user should be allowed to reach, or what the caller would have us write to.
func (r *reporter) replyRefused(subject string) {
	r.metrics.ConnError(r.name, metrics.ConnReply)
	r.links.mu.Lock()
	r.links.reply = time.Now()
	r.links.mu.Unlock()
	if len(subject) > 64 {
		subject = subject[:64] + "..."
	}
	if r.limit.Allow() {
		r.log.Warn("NATS does not let this user reply where a caller said", "subject", subject)
	}
}

func (r *reporter) error(_ *nats.Conn, sub *nats.Subscription, err error) {
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		action, subject := violation(err)
		switch {
		case r.name == metrics.Front && action == "publish":
			r.replyRefused(subject)
			return
		case action == "publish" && service.Lookout(subject):
			return // the checks say so
		}
		r.metrics.ConnError(r.name, metrics.ConnPermission)
		switch {
		case r.name == metrics.Front && action == "subscribe":
			r.links.note(r.links.refused, subject)
		case r.name == metrics.Store && action == "publish":
			r.links.note(r.links.unsent, subject)
		}
		if r.limit.Allow() {
			r.log.Error("not permitted by NATS", "action", action, "subject", subject)
		}
	case authError(err):
		r.refused(err)
	case errors.Is(err, nats.ErrSlowConsumer):
		r.metrics.ConnError(r.name, metrics.ConnSlowConsumer)
		r.noteSlow(sub)
		if r.limit.Allow() {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			r.log.Error("messages were dropped: they come in faster than they are handled", "subject", subject)
		}
	default:
		r.metrics.ConnError(r.name, metrics.ConnOther)
		if r.limit.Allow() {
			r.log.Warn("NATS reports an error", "error", err)
		}
	}
}

func (r *reporter) noteSlow(sub *nats.Subscription) {
	if sub == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.slow == nil {
		r.slow = map[*nats.Subscription]uint64{}
	}
	if _, known := r.slow[sub]; !known {
		r.slow[sub] = 1
	}
}

var violationText = regexp.MustCompile(`(?i)violation for (publi|subscri)\w+ to "([^"]*)"`)

// violation reads action and subject from the server's words.
func violation(err error) (action, subject string) {
	m := violationText.FindStringSubmatch(err.Error())
	switch {
	case m == nil:
		return "unknown", err.Error()
	case strings.EqualFold(m[1], "publi"):
		return "publish", m[2]
	default:
		return "subscribe", m[2]
	}
}
