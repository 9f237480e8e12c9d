// Package metrics holds the series of the lease service and their help texts.
//
// Every label value comes from a closed set that is known when New returns: no
// key, holder, subject or error text of a client ever becomes one. So every
// series is there, at 0, from the first scrape, and their number never changes.
//
// What is counted is counted as it happens, by methods that do not allocate and
// may be called from any goroutine. What is a state (leases held, the bucket's
// verdict, the NATS connections) is asked for at each scrape: see SetService,
// SetConnection and SetReady.
//
// dashboard.json and alerts.yml beside this file use these series.
package metrics

import (
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/leased/leased/service/kinds"
)

// Endpoint is one row of the table of calls: its name on $SRV.INFO and the
// kinds it can answer. NoReply is added where the row leaves it out.
type Endpoint struct {
	Name  string
	Kinds []kinds.Kind
}

// Build is what leased_build_info says about the binary.
type Build struct {
	Version    string // of leased
	NATSServer string // version of the embedded server, "" without one
}

// Outcome is how one attempt of a forward ended.
type Outcome string

// The outcomes of an attempt.
const (
	AttemptForwarded       Outcome = "forwarded"         // the owner answered
	AttemptNoResponders    Outcome = "no_responders"     // nobody on the owner's inbox
	AttemptRejected        Outcome = "rejected"          // Dagnats-Lease-Reject
	AttemptTimeout         Outcome = "timeout"           // no reply within the call's time
	AttemptReplyTooLarge   Outcome = "reply_too_large"   // the answer does not fit our reply
	AttemptRequestTooLarge Outcome = "request_too_large" // nothing was sent
	AttemptError           Outcome = "error"             // not connected, or stopping
)

// Outcomes lists every Outcome.
func Outcomes() []Outcome {
	return []Outcome{AttemptForwarded, AttemptNoResponders, AttemptRejected, AttemptTimeout,
		AttemptReplyTooLarge, AttemptRequestTooLarge, AttemptError}
}

// Event is a change of the bucket as its consumer saw it: the value of the
// Dagnats-Lease-Event header, or Foreign for a message without one of ours.
type Event string

// The events.
const (
	Acquired Event = "acquired"
	Renewed  Event = "renewed"
	Released Event = "released"
	Expired  Event = "expired"
	Foreign  Event = "foreign"
)

// Events lists every Event.
func Events() []Event { return []Event{Acquired, Renewed, Released, Expired, Foreign} }

// Metrics is the service's own registry and everything in it.
type Metrics struct {
	registry *prometheus.Registry

	endpoints  map[string]*EndpointMetrics
	attempts   map[Outcome]prometheus.Counter
	changes    map[Event]prometheus.Counter
	connErrors map[Connection]map[ConnError]prometheus.Counter

	panics, unlisted                 prometheus.Counter
	takenBack                        prometheus.Counter
	writeConflicts, writesWithoutAck prometheus.Counter
	writesRefused, unknownAnswers    prometheus.Counter
	clockSteps                       prometheus.Counter

	build      Build
	natsServer atomic.Pointer[string]
	states     states
}

// New makes the registry with one set of series for each of rows. Two rows of
// one name, or a kind that stands twice in a row, are bugs of the caller and
// panic.
func New(rows []Endpoint, build Build) *Metrics {
	m := &Metrics{
		registry:   prometheus.NewRegistry(),
		endpoints:  make(map[string]*EndpointMetrics, len(rows)),
		attempts:   map[Outcome]prometheus.Counter{},
		changes:    map[Event]prometheus.Counter{},
		connErrors: map[Connection]map[ConnError]prometheus.Counter{},
		build:      build,
	}
	m.SetNATSServer(build.NATSServer)

	replies := m.counters("leased_replies_total", "Requests by endpoint and how they were answered; kind no_reply named no reply subject, or one that no caller may name.", "endpoint", "kind")
	durations := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "leased_request_duration_seconds",
		Help: "Time from the receipt of a request to its reply.",
		// From one cached write on loopback to the longest forward.
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},

		NativeHistogramBucketFactor:     1.1,
		NativeHistogramMaxBucketNumber:  160,
		NativeHistogramMinResetDuration: time.Hour,
	}, []string{"endpoint"})
	inFlight := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "leased_requests_in_flight",
		Help: "Requests received and not yet answered.",
	}, []string{"endpoint"})
	m.registry.MustRegister(durations, inFlight)

	m.panics = m.counter("leased_panics_total", "Panics caught, each logged with its stack: in a handler, which answered internal, or in a part of the service, which started again.")
	m.unlisted = m.counter("leased_unlisted_replies_total", "Replies of a kind that their endpoint does not list: a bug in leased.")
	for _, row := range rows {
		m.endpoints[row.Name] = newEndpoint(row, replies, durations, inFlight, m.unlisted)
	}

	attempts := m.counters("leased_forward_attempts_total", "Requests sent to owners of leases, by outcome.", "outcome")
	for _, o := range Outcomes() {
		m.attempts[o] = attempts.WithLabelValues(string(o))
	}
	changes := m.counters("leased_changes_total", "Changes of the bucket seen by this instance, whoever made them; foreign ones are not of this service.", "event")
	for _, e := range Events() {
		m.changes[e] = changes.WithLabelValues(string(e))
	}
	connErrors := m.counters("leased_nats_errors_total", "Errors that NATS reported on a connection.", "connection", "error")
	for _, c := range Connections() {
		m.connErrors[c] = map[ConnError]prometheus.Counter{}
		for _, e := range ConnErrors() {
			m.connErrors[c][e] = connErrors.WithLabelValues(string(c), string(e))
		}
	}

	m.writeConflicts = m.counter("leased_write_conflicts_total", "Writes that lost against another write of the same key.")
	m.writesWithoutAck = m.counter("leased_write_ambiguous_total", "Tries of writes whose verdict did not come back in time; each is sent again, unchanged, or answered unknown.")

	m.takenBack = m.counter("leased_grants_taken_back_total", "Leases granted to acquires that had waited and taken back at once, because NATS said that nobody heard the reply.")
	m.writesRefused = m.counter("leased_writes_refused_total", "Writes that JetStream refused for a reason that somebody has to mend: no storage left, an account limit, a setting of the bucket; each was answered unavailable.")
	m.unknownAnswers = m.counter("leased_unknown_answers_total", "Errors that JetStream answered with a code that leased does not know; a write that met one counts as without a verdict.")

	m.clockSteps = m.counter("leased_clock_steps_total", "Times the clock of the NATS server that leads the bucket was set by more than a second.")

	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&stateCollector{m: m, descs: newStateDescs()},
	)
	return m
}

func (m *Metrics) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	m.registry.MustRegister(c)
	return c
}

func (m *Metrics) counters(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(c)
	return c
}

// Endpoint finds the series of one endpoint, nil for a name that was not in the
// rows given to New. Callers look it up once, not on every request.
func (m *Metrics) Endpoint(name string) *EndpointMetrics { return m.endpoints[name] }

// ForwardAttempt counts one attempt of a forward.
func (m *Metrics) ForwardAttempt(o Outcome) {
	c, ok := m.attempts[o]
	if !ok {
		c = m.attempts[AttemptError]
	}
	c.Inc()
}

// Change counts one message of the bucket. Any value that is not an Event
// counts as Foreign.
func (m *Metrics) Change(e Event) {
	c, ok := m.changes[e]
	if !ok {
		c = m.changes[Foreign]
	}
	c.Inc()
}

// Panic counts a panic caught in a handler or in a part of the service.
func (m *Metrics) Panic() { m.panics.Inc() }

// WriteConflict counts a write that lost against another.
func (m *Metrics) WriteConflict() { m.writeConflicts.Inc() }

// WriteAmbiguous counts a try of a write whose verdict did not come back in time.
func (m *Metrics) WriteAmbiguous() { m.writesWithoutAck.Inc() }

// WriteRefused counts a write that JetStream refused for a reason that lasts.
func (m *Metrics) WriteRefused() { m.writesRefused.Inc() }

// TakenBack counts a grant that was taken back because nobody heard it.
func (m *Metrics) TakenBack() { m.takenBack.Inc() }

// ClockStep counts a setting of the NATS server's clock.
func (m *Metrics) ClockStep() { m.clockSteps.Inc() }

// UnknownAnswer counts an error of JetStream that is not known.
func (m *Metrics) UnknownAnswer() { m.unknownAnswers.Inc() }

// ConnError counts what NATS reported on connection c.
func (m *Metrics) ConnError(c Connection, e ConnError) {
	if n, ok := m.connErrors[c][e]; ok {
		n.Inc()
	}
}

// SetNATSServer sets the version of NATS that leased_build_info shows: that of
// the server the service is connected to now.
func (m *Metrics) SetNATSServer(version string) {
	if len(version) > 64 {
		version = version[:64]
	}
	version = strings.ToValidUTF8(version, "?")
	m.natsServer.Store(&version)
}

// Gatherer gives the registry to whoever serves or reads the series.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler serves the series in the format the scraper asks for; native
// histograms need the protobuf one. Failures of a collector go to log.
func (m *Metrics) Handler(log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelError),
		ErrorHandling: promhttp.ContinueOnError,
		// A scrape asks the service for its state: a few at once are plenty.
		MaxRequestsInFlight: 8,
	})
}

func (m *Metrics) buildLabels() []string {
	return []string{m.build.Version, runtime.Version(), *m.natsServer.Load()}
}
