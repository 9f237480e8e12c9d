package metrics

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// BucketState is the service's verdict on the bucket.
type BucketState string

// The verdicts. Only Sound lets leases be granted.
const (
	BucketUnseen        BucketState = "unseen"        // not looked at yet, or no NATS
	BucketSound         BucketState = "sound"         // everything as it should be
	BucketUnsupported   BucketState = "unsupported"   // the server cannot expire keys or has no JetStream
	BucketUnavailable   BucketState = "unavailable"   // no leader, no answer
	BucketMissing       BucketState = "missing"       // deleted under the service
	BucketMisconfigured BucketState = "misconfigured" // a field of its config is forbidden
	BucketDistrusted    BucketState = "distrusted"    // its sequence is below what was issued before
	BucketWaiting       BucketState = "waiting"       // made again; waits until the leases of the old one have ended
)

// BucketStates lists every BucketState.
func BucketStates() []BucketState {
	return []BucketState{BucketUnseen, BucketSound, BucketUnsupported, BucketUnavailable,
		BucketMissing, BucketMisconfigured, BucketDistrusted, BucketWaiting}
}

// Warning is something about the bucket that an operator should mend and that
// does not stop the service.
type Warning string

// The warnings.
const (
	WarnAllowDirect Warning = "allow_direct" // other programs may read from replicas
	WarnRepublish   Warning = "republish"    // no change events
	WarnReplicas    Warning = "replicas"     // not as many as asked for
)

// Warnings lists every Warning.
func Warnings() []Warning { return []Warning{WarnAllowDirect, WarnRepublish, WarnReplicas} }

// Subjects are those where nobody but the service, or an owner, should listen.
type Subjects string

// The subjects.
const (
	OnCalls   Subjects = "calls"
	OnInboxes Subjects = "inboxes"
)

// AllSubjects lists every Subjects.
func AllSubjects() []Subjects { return []Subjects{OnCalls, OnInboxes} }

// Service is what the lease service tells about itself at a scrape. The
// functions are called together, from any goroutine, and must not block; a nil
// one leaves its series at 0.
type Service struct {
	LeasesHeld   func() int
	Waiters      func() int
	Queued       func() int // writes that wait for their turn
	Ends         func() Ends
	HighestFence func() uint64        // highest revision known to be issued
	ClockOffset  func() time.Duration // the NATS server's clock minus ours
	ClockSpread  func() time.Duration // between the clocks of the servers that led lately and ours
	Listeners    func() []Subjects    // where somebody else listens
	Bucket       func() (BucketState, []Warning)
}

// Ends is what has become of the leases that ran out.
type Ends struct {
	Waiting int    // over, and not told yet
	Late    uint64 // told by no event, because it took too long
	Unseen  uint64 // perhaps told by no event
	// Those this instance told: how many, how late all together in seconds, and how many
	// at most so many seconds late.
	Told   uint64
	Delay  float64
	Within map[float64]uint64
}

// SetService says whom to ask about the leases and their bucket.
func (m *Metrics) SetService(s Service) { m.states.service.Store(&s) }

// SetReady says whom to ask whether the process is ready.
func (m *Metrics) SetReady(ready func() bool) { m.states.ready.Store(&ready) }

// SetLogDropped says whom to ask how many lines of the log were dropped.
func (m *Metrics) SetLogDropped(lines func() uint64) { m.states.logDropped.Store(&lines) }

// Connection names one of the service's own NATS connections.
type Connection string

// The connections.
const (
	Front Connection = "front" // requests and replies
	Store Connection = "store" // JetStream
	Hop   Connection = "hop"   // forwards to owners
)

// Connections lists every Connection.
func Connections() []Connection { return []Connection{Front, Store, Hop} }

// ConnError is what went wrong on a connection.
type ConnError string

// The errors of connections.
const (
	ConnAuth         ConnError = "auth"          // the server refused who we are
	ConnPermission   ConnError = "permission"    // not allowed to use a subject
	ConnReply        ConnError = "reply"         // not allowed to reply where the caller said
	ConnSlowConsumer ConnError = "slow_consumer" // messages were dropped
	ConnOther        ConnError = "other"
)

// ConnErrors lists every ConnError.
func ConnErrors() []ConnError {
	return []ConnError{ConnAuth, ConnPermission, ConnReply, ConnSlowConsumer, ConnOther}
}

// ConnectionState is how a connection is doing.
type ConnectionState struct {
	Connected  bool
	Reconnects uint64 // since the process started
	Dropped    uint64 // messages that came in faster than they were handled, likewise
}

// SetConnection says whom to ask about connection c.
func (m *Metrics) SetConnection(c Connection, state func() ConnectionState) {
	if i := slices.Index(Connections(), c); i >= 0 {
		m.states.connections[i].Store(&state)
	}
}

// states is where the answers at a scrape come from.
type states struct {
	service     atomic.Pointer[Service]
	ready       atomic.Pointer[func() bool]
	logDropped  atomic.Pointer[func() uint64]
	connections [3]atomic.Pointer[func() ConnectionState]
}

type stateDescs struct {
	held, waiters, queued, ending, untold, delay, fence, offset, spread, listeners, bucket, warning, ready, connected, reconnects, dropped, logDropped, build *prometheus.Desc
}

func newStateDescs() stateDescs {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return stateDescs{
		held:       desc("leased_leases_held", "Leases in force, as this instance sees the bucket."),
		waiters:    desc("leased_waiters", "Acquires that wait for a key to become free."),
		queued:     desc("leased_writes_queued", "Writes that wait in this instance for earlier ones to have their verdict."),
		ending:     desc("leased_ends_waiting", "Leases that are over and whose end is not told yet, as this instance sees it."),
		untold:     desc("leased_ends_untold_total", "Ends of leases that no event told: too_late took too long, unseen perhaps was told while this instance did not follow the bucket. Every instance that saw the lease counts it.", "reason"),
		delay:      desc("leased_end_delay_seconds", "How long after the end of a lease this instance wrote the event that tells it."),
		fence:      desc("leased_highest_fence", "Highest revision known to be issued; it must never fall."),
		offset:     desc("leased_clock_offset_seconds", "The NATS server's clock minus this machine's; leases go by the server's."),
		listeners:  desc("leased_foreign_listener", "1 while a stream or a subscription of somebody else covers the subjects of calls, or of owners' inboxes.", "on"),
		spread:     desc("leased_clock_spread_seconds", "How far the clocks of the NATS servers that led the bucket within the last hour, and this machine's, are apart at least."),
		bucket:     desc("leased_bucket_state", "1 for the present verdict on the bucket, 0 for the others; leases are granted in state sound only.", "state"),
		warning:    desc("leased_bucket_warning", "1 for each setting of the bucket that should be mended.", "warning"),
		ready:      desc("leased_ready", "1 while /readyz says ready."),
		connected:  desc("leased_nats_connected", "1 while the connection to NATS stands.", "connection"),
		reconnects: desc("leased_nats_reconnects_total", "Times the connection to NATS was made again.", "connection"),
		dropped:    desc("leased_nats_dropped_total", "Messages that came in faster than they were handled and were dropped; on the front these are requests without a reply.", "connection"),
		logDropped: desc("leased_log_dropped_total", "Lines of the log that were dropped because stderr was read too slowly or not at all."),
		build:      desc("leased_build_info", "1, with the versions of leased, of Go and of the NATS server it uses.", "version", "goversion", "nats_server"),
	}
}

// stateCollector asks for the states at each scrape.
type stateCollector struct {
	m     *Metrics
	descs stateDescs
}

func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	d := c.descs
	for _, desc := range []*prometheus.Desc{d.held, d.waiters, d.queued, d.ending, d.untold, d.delay, d.fence, d.offset, d.spread, d.listeners, d.bucket, d.warning, d.ready, d.connected, d.reconnects, d.dropped, d.logDropped, d.build} {
		ch <- desc
	}
}

func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	d, st := c.descs, &c.m.states

	var s Service
	if p := st.service.Load(); p != nil {
		s = *p
	}
	gauge(d.held, float64(call(s.LeasesHeld)))
	gauge(d.waiters, float64(call(s.Waiters)))
	gauge(d.queued, float64(call(s.Queued)))
	ends := call(s.Ends)
	gauge(d.ending, float64(ends.Waiting))
	ch <- prometheus.MustNewConstMetric(d.untold, prometheus.CounterValue, float64(ends.Late), "too_late")
	ch <- prometheus.MustNewConstMetric(d.untold, prometheus.CounterValue, float64(ends.Unseen), "unseen")
	ch <- prometheus.MustNewConstHistogram(d.delay, ends.Told, ends.Delay, ends.Within)
	gauge(d.fence, float64(call(s.HighestFence)))
	gauge(d.offset, call(s.ClockOffset).Seconds())
	gauge(d.spread, call(s.ClockSpread).Seconds())

	listeners := call(s.Listeners)
	for _, on := range AllSubjects() {
		gauge(d.listeners, number(slices.Contains(listeners, on)), string(on))
	}
	bucket, warnings := BucketUnseen, []Warning(nil)
	if s.Bucket != nil {
		bucket, warnings = s.Bucket()
	}
	for _, b := range BucketStates() {
		gauge(d.bucket, number(b == bucket), string(b))
	}
	for _, w := range Warnings() {
		gauge(d.warning, number(slices.Contains(warnings, w)), string(w))
	}

	ready := st.ready.Load()
	gauge(d.ready, number(ready != nil && (*ready)()))

	for i, name := range Connections() {
		var cs ConnectionState
		if f := st.connections[i].Load(); f != nil {
			cs = (*f)()
		}
		gauge(d.connected, number(cs.Connected), string(name))
		ch <- prometheus.MustNewConstMetric(d.reconnects, prometheus.CounterValue, float64(cs.Reconnects), string(name))
		ch <- prometheus.MustNewConstMetric(d.dropped, prometheus.CounterValue, float64(cs.Dropped), string(name))
	}
	var dropped uint64
	if f := st.logDropped.Load(); f != nil {
		dropped = (*f)()
	}
	ch <- prometheus.MustNewConstMetric(d.logDropped, prometheus.CounterValue, float64(dropped))
	gauge(d.build, 1, c.m.buildLabels()...)
}

func call[T any](f func() T) (v T) {
	if f != nil {
		v = f()
	}
	return v
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
