package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"golang.org/x/time/rate"

	"github.com/leased/leased/metrics"
)

// links are the connections of the running service, one for each kind of
// traffic, so that none waits behind another.
type links struct {
	front, store, hop *nats.Conn
}

func (l *links) all() []*nats.Conn { return []*nats.Conn{l.front, l.store, l.hop} }

// connector opens a connection to the one NATS that serve uses.
type connector func(options ...nats.Option) (*nats.Conn, error)

// openLinks opens all connections. A NATS that is not there, or refuses who we
// are, is no error: the connections keep trying for ever. Each time that one of
// them stands, up is called.
func openLinks(connect connector, log *slog.Logger, m *metrics.Metrics, up func()) (*links, error) {
	var l links
	var wg sync.WaitGroup
	errs := make([]error, 3)
	for i, c := range []struct {
		name metrics.Connection
		to   **nats.Conn
		// What could not be sent must not be sent after its caller gave up.
		options []nats.Option
	}{
		{metrics.Front, &l.front, nil},
		{metrics.Store, &l.store, []nats.Option{nats.ReconnectBufSize(-1)}},
		{metrics.Hop, &l.hop, []nats.Option{nats.ReconnectBufSize(-1)}},
	} {
		wg.Go(func() {
			*c.to, errs[i] = openLink(c.name, connect, log, m, up, c.options)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		l.close()
		return nil, err
	}
	return &l, nil
}

func openLink(name metrics.Connection, connect connector, log *slog.Logger, m *metrics.Metrics, up func(), options []nats.Option) (*nats.Conn, error) {
	r := &reporter{name: name, up: up, log: log.With("connection", "leased-"+string(name)), metrics: m, limit: rate.NewLimiter(1, 10)}
	nc, err := connect(append([]nats.Option{
		nats.Name("leased-" + string(name)),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		// Credentials and permissions can be mended while we run.
		nats.IgnoreAuthErrorAbort(),
		nats.ReconnectWait(200 * time.Millisecond),
		nats.ReconnectJitter(300*time.Millisecond, 300*time.Millisecond),
		// A server that went silent is given up after 15 s to 20 s.
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(3),
		nats.NoCallbacksAfterClientClose(),
		nats.ConnectHandler(r.connected),
		nats.ReconnectHandler(r.connected),
		nats.DisconnectErrHandler(r.disconnected),
		nats.ReconnectErrHandler(r.notConnected),
		nats.ErrorHandler(r.error),
		nats.LameDuckModeHandler(func(nc *nats.Conn) {
			r.log.Info("NATS server is going to stop", "nats", nc.ConnectedUrlRedacted())
		}),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("NATS connection leased-%s: %w", name, err)
	}
	m.SetConnection(name, func() metrics.ConnectionState {
		return metrics.ConnectionState{Connected: nc.IsConnected(), Reconnects: nc.Stats().Reconnects}
	})
	return nc, nil
}

// connected tells whether every connection stands.
func (l *links) connected() bool {
	for _, nc := range l.all() {
		if !nc.IsConnected() {
			return false
		}
	}
	return true
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

// watch says now and then that NATS is still not there, until ctx ends: nats.go
// is silent about an attempt that the server refuses before the first success.
func (l *links) watch(ctx context.Context, log *slog.Logger) {
	const most = time.Minute
	every := 5 * time.Second
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
		}
		if l.connected() {
			every = 5 * time.Second
			continue
		}
		for _, nc := range l.all() {
			if !nc.IsConnected() {
				attrs := []any{"connection", nc.Opts.Name}
				if err := nc.LastError(); err != nil {
					attrs = append(attrs, "error", err)
				}
				log.Warn("still not connected to NATS", attrs...)
			}
		}
		every = min(2*every, most)
	}
}

// reporter turns what happens to a connection into log lines and counts.
type reporter struct {
	name    metrics.Connection
	up      func()
	log     *slog.Logger
	metrics *metrics.Metrics
	limit   *rate.Limiter // of lines about errors that may come with every message

	mu        sync.Mutex
	lastError string // of an attempt to connect, to say it once
}

func (r *reporter) connected(nc *nats.Conn) {
	r.mu.Lock()
	r.lastError = ""
	r.mu.Unlock()
	if r.name == metrics.Front {
		r.metrics.SetNATSServer(nc.ConnectedServerVersion())
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

func (r *reporter) error(_ *nats.Conn, sub *nats.Subscription, err error) {
	switch {
	case errors.Is(err, nats.ErrPermissionViolation):
		r.metrics.ConnError(r.name, metrics.ConnPermission)
		if r.limit.Allow() {
			action, subject := violation(err)
			r.log.Error("not permitted by NATS", "action", action, "subject", subject)
		}
	case authError(err):
		r.refused(err)
	case errors.Is(err, nats.ErrSlowConsumer):
		r.metrics.ConnError(r.name, metrics.ConnSlowConsumer)
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

var violationText = regexp.MustCompile(`(?i)(publication|subscription) to "([^"]*)"`)

// violation reads action and subject from the server's words.
func violation(err error) (action, subject string) {
	m := violationText.FindStringSubmatch(err.Error())
	switch {
	case m == nil:
		return "unknown", err.Error()
	case strings.EqualFold(m[1], "publication"):
		return "publish", m[2]
	default:
		return "subscribe", m[2]
	}
}
