package leased

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/metrics"
	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// logged keeps what a service logs, and panics itself at the line on.
type logged struct {
	slog.Handler
	on func(slog.Record) bool

	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Handle(ctx context.Context, r slog.Record) error {
	if l.on != nil && l.on(r) {
		panic("the log of " + r.Message)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Handler.Handle(ctx, r)
}

func (l *logged) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *logged) WithGroup(string) slog.Handler      { return l }

// panics is every line about one, decoded.
func (l *logged) panics(t *testing.T) []map[string]any {
	t.Helper()
	return slices.DeleteFunc(l.lines(t, slog.LevelError), func(line map[string]any) bool { return line["msg"] != "a handler panicked" })
}

// lines is every line of a level, decoded.
func (l *logged) lines(t *testing.T, level slog.Level) (all []map[string]any) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.text.String()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatal(err)
		}
		if fields["level"] == level.String() {
			all = append(all, fields)
		}
	}
	return all
}

// running is a service on a real server and a client of it.
type running struct {
	t   *testing.T
	svc *Service
	m   *metrics.Metrics
	log *logged
	nc  *nats.Conn

	broken bool // the test itself made it leave with calls in flight
}

// run starts a service that may answer two calls and one forward at a time.
func run(t *testing.T, on func(slog.Record) bool) *running {
	t.Helper()
	node := testnats.Server(t)
	return runOn(t, node, on, node.Connect(), node.Connect(nats.ReconnectBufSize(-1)))
}

// runOn is run with connections of its own.
func runOn(t *testing.T, node *testnats.Node, on func(slog.Record) bool, front, store *nats.Conn) *running {
	t.Helper()
	r := &running{t: t, log: &logged{on: on}, nc: node.Connect()}
	r.log.Handler = slog.NewJSONHandler(&r.log.text, nil)
	var rows []metrics.Endpoint
	for _, row := range table {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	r.m = metrics.New(rows, metrics.Build{})
	svc, err := Start(Options{
		Front: front, Store: store, Hop: node.Connect(nats.ReconnectBufSize(-1)),
		Replicas: 1, APIPrefix: DefaultAPIPrefix, EventPrefix: DefaultEventPrefix, MaxInFlight: 2, MaxForwards: 1,
		Version: "0.0.1", Logger: slog.New(r.log), Metrics: r.m,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.svc = svc
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := svc.Drain(ctx); err != nil && !r.broken {
			t.Error(err)
		}
	})
	testnats.Eventually(t, 15*time.Second, func() bool {
		return !slices.ContainsFunc(svc.Ready(), func(c Check) bool { return !c.OK })
	}, "the service is not ready")
	return r
}

// call sends a request and returns the reply with its body's kind.
func (r *running) call(name, body string) (*nats.Msg, kinds.Kind) {
	r.t.Helper()
	m, err := r.nc.Request(DefaultAPIPrefix+"."+name, []byte(body), 5*time.Second)
	if err != nil {
		r.t.Fatalf("%s %s: %v", name, body, err)
	}
	var reply struct{ Kind kinds.Kind }
	if err := json.Unmarshal(m.Data, &reply); err != nil {
		r.t.Fatalf("%s: %v", m.Data, err)
	}
	return m, reply.Kind
}

// internal sends a request whose handler panics and checks the reply.
func (r *running) internal(name, body string) {
	r.t.Helper()
	const text = "the service failed on this request; its log says how"
	m, _ := r.call(name, body)
	if want := fmt.Sprintf(`{"error":%q,"kind":"internal"}`, text); string(m.Data) != want {
		r.t.Errorf("%s: the body is %s, want %s", name, m.Data, want)
	}
	if got := m.Header; len(got) != 2 || got.Get("Nats-Service-Error") != text || got.Get("Nats-Service-Error-Code") != "500" {
		r.t.Errorf("%s: the headers are %v", name, got)
	}
}

// counter is the value of a series, by the value of its labels.
func (r *running) counter(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.m.Gatherer().Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if f.GetName() == name && slices.Equal(values, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	r.t.Fatalf("no series %s %v", name, labels)
	return 0
}

// TestPanicInAHandler: each call answers internal, more often than calls may be
// in flight; it is counted, in Prometheus and in $SRV.STATS, and logged with the
// stack; and the next request is answered as ever.
func TestPanicInAHandler(t *testing.T) {
	const times = 3
	original := table
	t.Cleanup(func() { table = original })
	table = slices.Clone(table)
	for i, row := range original {
		boom := func(r *request) {
			if r.Key == "panics" || r.Holder == "panics" {
				var nothing *request
				nothing.Key = "the fault of " + row.Name
			}
		}
		if row.lease != nil {
			table[i].lease = func(r *request) (service.Command, bool) {
				boom(r)
				return row.lease(r)
			}
		}
		if row.serve != nil {
			table[i].serve = func(ctx context.Context, s *Service, r *request) (answer, error) {
				boom(r)
				return row.serve(ctx, s, r)
			}
		}
	}
	r := run(t, nil)
	requests := map[string]string{
		"acquire":    `{"key":"%[1]s","holder":"A","ttl_ms":5000}`,
		"renew":      `{"key":"%[1]s","holder":"A","ttl_ms":5000,"revision":1}`,
		"release":    `{"key":"%[1]s","holder":"A","revision":1}`,
		"owner":      `{"key":"%[1]s"}`,
		"forward":    `{"key":"%[1]s"}`,
		"list":       `{"holder":"%[1]s"}`,
		"evict":      `{"key":"%[1]s","revision":1}`,
		"renew_many": `{"holder":"%[1]s","ttl_ms":5000,"leases":[{"key":"k","revision":1}]}`,
	}
	want := map[string]kinds.Kind{"renew": kinds.Lost, "release": kinds.Lost, "forward": kinds.NotHeld, "evict": kinds.Lost}
	for _, row := range table {
		for range times {
			r.internal(row.Name, fmt.Sprintf(requests[row.Name], "panics"))
		}
		if m, kind := r.call(row.Name, fmt.Sprintf(requests[row.Name], "fine-"+row.Name)); kind != want[row.Name] {
			t.Errorf("the request after the panic is answered %s", m.Data)
		}
		if n := r.counter("leased_replies_total", row.Name, string(kinds.Internal)); n != times {
			t.Errorf("%s: %v replies are counted as internal, want %d", row.Name, n, times)
		}
		testnats.Eventually(t, 5*time.Second, func() bool { return r.counter("leased_requests_in_flight", row.Name) == 0 }, row.Name, " is in flight")
	}
	if n, want := r.counter("leased_panics_total"), float64(times*len(table)); n != want {
		t.Errorf("%v panics are counted, want %v", n, want)
	}
	panics := r.log.panics(t)
	if len(panics) != times*len(table) {
		t.Fatalf("%d panics are logged, want %d", len(panics), times*len(table))
	}
	for i, line := range panics {
		if line["endpoint"] != table[i/times].Name || line["level"] != "ERROR" || line["panic"] == nil || !strings.Contains(fmt.Sprint(line["stack"]), "panic_test.go:") {
			t.Errorf("line %d about %s: %v", i, table[i/times].Name, line)
		}
	}

	m, err := r.nc.Request("$SRV.STATS."+MicroName, nil, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var stats struct {
		Endpoints []struct {
			Name string
			Data struct {
				Replies  map[kinds.Kind]uint64
				Errors   uint64
				InFlight int64 `json:"in_flight"`
			}
		}
	}
	if err := json.Unmarshal(m.Data, &stats); err != nil {
		t.Fatal(err)
	}
	if len(stats.Endpoints) != len(table) {
		t.Fatalf("$SRV.STATS shows %d endpoints", len(stats.Endpoints))
	}
	for _, e := range stats.Endpoints {
		if e.Data.Replies[kinds.Internal] != times || e.Data.Errors < times || e.Data.InFlight != 0 {
			t.Errorf("$SRV.STATS of %s: %+v", e.Name, e.Data)
		}
	}
}

// TestPanicInMidCall: what panics after the write leaves no waiter stranded, no
// key locked and no lease unreadable.
func TestPanicInMidCall(t *testing.T) {
	r := run(t, func(rec slog.Record) (boom bool) {
		rec.Attrs(func(a slog.Attr) bool {
			boom = boom || rec.Message == "lease acquired" && a.Key == "holder" && a.Value.String() == "panics"
			return true
		})
		return boom
	})
	first, _ := r.call("acquire", `{"key":"k","holder":"A","ttl_ms":60000}`)
	var lease struct{ Revision uint64 }
	if err := json.Unmarshal(first.Data, &lease); err != nil {
		t.Fatal(err)
	}
	// Two wait; the first of them panics when its turn comes.
	waiting := make(chan *nats.Msg, 2)
	wait := func(holder string) {
		sub, err := r.nc.SubscribeSync(nats.NewInbox())
		if err != nil {
			t.Fatal(err)
		}
		body := fmt.Sprintf(`{"key":"k","holder":%q,"ttl_ms":1000,"wait_ms":20000}`, holder)
		if err := r.nc.PublishRequest(DefaultAPIPrefix+".acquire", sub.Subject, []byte(body)); err != nil {
			t.Fatal(err)
		}
		go func() {
			m, err := sub.NextMsg(30 * time.Second)
			if err != nil {
				t.Error(err)
			}
			waiting <- m
		}()
	}
	wait("panics")
	testnats.Eventually(t, 5*time.Second, func() bool { return r.svc.leases.Waiting() == 1 }, "nobody waits")
	wait("B")
	testnats.Eventually(t, 5*time.Second, func() bool { return r.svc.leases.Waiting() == 2 }, "B does not wait")
	freed := time.Now()
	if m, kind := r.call("release", fmt.Sprintf(`{"key":"k","holder":"A","revision":%d}`, lease.Revision)); kind != "" {
		t.Fatalf("release: %s", m.Data)
	}
	if m := <-waiting; !strings.Contains(string(m.Data), `"kind":"internal"`) {
		t.Errorf("the waiter that panicked got %s", m.Data)
	}
	// Its lease stands and is told as any other.
	if m, _ := r.call("owner", `{"key":"k"}`); !strings.Contains(string(m.Data), `"holder":"panics"`) {
		t.Errorf("owner: %s", m.Data)
	}
	// It lapses after 1 s and the next waiter is granted the key, not at the end of its own wait.
	if m := <-waiting; !strings.Contains(string(m.Data), `"granted":true`) {
		t.Errorf("the next waiter got %s", m.Data)
	}
	if took := time.Since(freed); took > 10*time.Second {
		t.Errorf("the next waiter was granted after %v", took)
	}
	if n := r.counter("leased_panics_total"); n != 1 {
		t.Errorf("%v panics are counted", n)
	}
	if lines := r.log.panics(t); len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0]["stack"]), "AcquireWait") {
		t.Errorf("logged: %v", lines)
	}
}
