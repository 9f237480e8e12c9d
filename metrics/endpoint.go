package metrics

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/leased/leased/service/kinds"
)

// EndpointMetrics counts the requests of one endpoint. Around each request:
// Begin, then Reply with what it was answered, then End.
type EndpointMetrics struct {
	replies  map[kinds.Kind]prometheus.Counter // never changes after New
	duration prometheus.Histogram
	inFlight prometheus.Gauge
	unlisted prometheus.Counter

	// running is the gauge's value once more, for readers in this process.
	running atomic.Int64
}

func newEndpoint(row Endpoint, replies *prometheus.CounterVec, durations *prometheus.HistogramVec, inFlight *prometheus.GaugeVec, unlisted prometheus.Counter) *EndpointMetrics {
	e := &EndpointMetrics{
		replies:  make(map[kinds.Kind]prometheus.Counter, len(row.Kinds)+1),
		duration: durations.WithLabelValues(row.Name).(prometheus.Histogram),
		inFlight: inFlight.WithLabelValues(row.Name),
		unlisted: unlisted,
	}
	for _, k := range row.Kinds {
		e.replies[k] = replies.WithLabelValues(row.Name, string(k))
	}
	e.replies[kinds.NoReply] = replies.WithLabelValues(row.Name, string(kinds.NoReply))
	return e
}

// Begin notes that a request was received.
func (e *EndpointMetrics) Begin() {
	e.running.Add(1)
	e.inFlight.Inc()
}

// End notes that a request is over, replied to or not.
func (e *EndpointMetrics) End() {
	e.running.Add(-1)
	e.inFlight.Dec()
}

// Reply counts one answer of kind k, d after its request was received. A kind
// outside the endpoint's row is counted in leased_unlisted_replies_total
// instead, so that the fault shows and the set of series stays closed.
func (e *EndpointMetrics) Reply(k kinds.Kind, d time.Duration) {
	c, ok := e.replies[k]
	if !ok {
		c = e.unlisted
	}
	c.Inc()
	e.duration.Observe(d.Seconds())
}

// Snapshot is what one endpoint has counted since the process started, or, for
// P50 and P99, since its histogram was last reset (an hour or more ago, and
// only when it had outgrown its buckets).
type Snapshot struct {
	Replies  map[kinds.Kind]uint64 // every kind of the endpoint, zeros too
	Errors   uint64                // replies of kinds that are errors
	InFlight int64
	P50, P99 time.Duration // within 5 % of the truth; 0 before the first reply
}

// Snapshot reads the same counters that are scraped. It allocates: for
// $SRV.STATS, not for every request.
func (e *EndpointMetrics) Snapshot() Snapshot {
	s := Snapshot{Replies: make(map[kinds.Kind]uint64, len(e.replies)), InFlight: e.running.Load()}
	for k, c := range e.replies {
		var m dto.Metric
		if c.Write(&m) != nil {
			continue
		}
		n := uint64(m.GetCounter().GetValue())
		s.Replies[k] = n
		if k.IsError() {
			s.Errors += n
		}
	}
	var m dto.Metric
	if e.duration.Write(&m) == nil {
		s.P50 = quantile(m.GetHistogram(), 0.50)
		s.P99 = quantile(m.GetHistogram(), 0.99)
	}
	return s
}

// quantile reads the q-quantile from the native buckets of a histogram of
// seconds: the geometric middle of the bucket that the rank falls into.
func quantile(h *dto.Histogram, q float64) time.Duration {
	// The deltas chain over all spans; a span starts Offset buckets after the
	// end of the one before it.
	var buckets []struct {
		index int32
		count int64
	}
	var index int32
	var count int64
	total := int64(h.GetZeroCount())
	deltas := h.GetPositiveDelta()
	for _, span := range h.GetPositiveSpan() {
		index += span.GetOffset()
		for range span.GetLength() {
			count += deltas[0]
			deltas = deltas[1:]
			buckets = append(buckets, struct {
				index int32
				count int64
			}{index, count})
			total += count
			index++
		}
	}
	if total == 0 {
		return 0
	}
	rank := int64(math.Ceil(q * float64(total)))
	seen := int64(h.GetZeroCount())
	if seen >= rank {
		return 0
	}
	base := math.Exp2(math.Exp2(-float64(h.GetSchema())))
	for _, b := range buckets {
		if seen += b.count; seen >= rank {
			middle := math.Pow(base, float64(b.index)-0.5)
			return time.Duration(middle * float64(time.Second))
		}
	}
	return 0
}
