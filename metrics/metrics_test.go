package metrics

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"

	"github.com/leased/leased/service/kinds"
)

// failures are what every endpoint can answer beside its own kinds.
var failures = []kinds.Kind{kinds.Invalid, kinds.Unsupported, kinds.Busy, kinds.Unavailable, kinds.Internal}

func testRows() []Endpoint {
	row := func(name string, own ...kinds.Kind) Endpoint {
		return Endpoint{Name: name, Kinds: append(own, failures...)}
	}
	return []Endpoint{
		row("acquire", kinds.Granted, kinds.Denied, kinds.OverQuota, kinds.Unknown),
		row("renew", kinds.Renewed, kinds.Lost, kinds.Unknown),
		row("release", kinds.Released, kinds.Lost, kinds.Unknown),
		row("owner", kinds.Held, kinds.Free),
		row("forward", kinds.Forwarded, kinds.NotHeld, kinds.OwnerUnavailable, kinds.OwnerRejected,
			kinds.OwnerTimeout, kinds.RequestTooLarge, kinds.ReplyTooLarge),
	}
}

func newTest(t *testing.T) *Metrics {
	t.Helper()
	return New(testRows(), Build{Version: "v1.2.3", NATSServer: "2.15.3"})
}

// series lists every series as name{label="value",...} with its value; a
// histogram stands as its count.
func series(t *testing.T, m *Metrics) map[string]float64 {
	t.Helper()
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, s := range f.GetMetric() {
			var labels []string
			for _, l := range s.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			name := f.GetName()
			if labels != nil {
				name += "{" + strings.Join(labels, ",") + "}"
			}
			out[name] = value(f.GetType(), s)
		}
	}
	return out
}

func value(t dto.MetricType, s *dto.Metric) float64 {
	switch t {
	case dto.MetricType_COUNTER:
		return s.GetCounter().GetValue()
	case dto.MetricType_GAUGE:
		return s.GetGauge().GetValue()
	case dto.MetricType_HISTOGRAM:
		return float64(s.GetHistogram().GetSampleCount())
	}
	return 0
}

func ours(all map[string]float64) map[string]float64 {
	out := map[string]float64{}
	for k, v := range all {
		if strings.HasPrefix(k, "leased_") {
			out[k] = v
		}
	}
	return out
}

func TestEverySeriesIsThereAtZero(t *testing.T) {
	want := map[string]float64{
		"leased_panics_total":                         0,
		"leased_unlisted_replies_total":               0,
		"leased_write_ambiguous_total":                0,
		"leased_writes_refused_total":                 0,
		"leased_unknown_answers_total":                0,
		"leased_write_conflicts_total":                0,
		"leased_grants_taken_back_total":              0,
		"leased_leases_held":                          0,
		"leased_log_dropped_total":                    0,
		"leased_waiters":                              0,
		"leased_writes_queued":                        0,
		"leased_ends_waiting":                         0,
		"leased_end_delay_seconds":                    0,
		`leased_ends_untold_total{reason="too_late"}`: 0,
		`leased_ends_untold_total{reason="unseen"}`:   0,
		"leased_highest_fence":                        0,
		"leased_clock_offset_seconds":                 0,
		"leased_clock_spread_seconds":                 0,
		"leased_clock_steps_total":                    0,
		"leased_ready":                                0,
		fmt.Sprintf("leased_build_info{goversion=%q,nats_server=%q,version=%q}", runtime.Version(), "2.15.3", "v1.2.3"): 1,
	}
	for _, row := range testRows() {
		for _, k := range append(row.Kinds, kinds.NoReply) {
			want[fmt.Sprintf("leased_replies_total{endpoint=%q,kind=%q}", row.Name, k)] = 0
		}
		want[fmt.Sprintf("leased_request_duration_seconds{endpoint=%q}", row.Name)] = 0
		want[fmt.Sprintf("leased_requests_in_flight{endpoint=%q}", row.Name)] = 0
	}
	for _, o := range Outcomes() {
		want[fmt.Sprintf("leased_forward_attempts_total{outcome=%q}", o)] = 0
	}
	for _, e := range Events() {
		want[fmt.Sprintf("leased_changes_total{event=%q}", e)] = 0
	}
	for _, s := range BucketStates() {
		want[fmt.Sprintf("leased_bucket_state{state=%q}", s)] = number(s == BucketUnseen)
	}
	for _, w := range Warnings() {
		want[fmt.Sprintf("leased_bucket_warning{warning=%q}", w)] = 0
	}
	for _, on := range AllSubjects() {
		want[fmt.Sprintf("leased_foreign_listener{on=%q}", on)] = 0
	}
	for _, c := range Connections() {
		want[fmt.Sprintf("leased_nats_connected{connection=%q}", c)] = 0
		want[fmt.Sprintf("leased_nats_reconnects_total{connection=%q}", c)] = 0
		want[fmt.Sprintf("leased_nats_dropped_total{connection=%q}", c)] = 0
		for _, e := range ConnErrors() {
			want[fmt.Sprintf("leased_nats_errors_total{connection=%q,error=%q}", c, e)] = 0
		}
	}
	if diff := cmp.Diff(want, ours(series(t, newTest(t)))); diff != "" {
		t.Errorf("series at the start (-want +got):\n%s", diff)
	}
}

func TestCounting(t *testing.T) {
	m := newTest(t)
	before := series(t, m)
	acquire := m.Endpoint("acquire")
	for range 3 {
		acquire.Begin()
		acquire.Reply(kinds.Granted, 2*time.Millisecond)
		acquire.End()
	}
	acquire.Begin()
	acquire.Reply(kinds.Invalid, 2*time.Millisecond)
	acquire.Reply(kinds.Forwarded, 2*time.Millisecond) // not in acquire's row
	acquire.Reply("\xff no such kind", 2*time.Millisecond)
	m.ForwardAttempt(AttemptTimeout)
	m.ForwardAttempt("\xff")
	m.Change(Renewed)
	m.Change("a header that anyone can send")
	m.ConnError(Store, ConnPermission)
	m.ConnError("\xff", "\xff")
	m.Panic()
	m.WriteConflict()
	m.TakenBack()
	m.WriteAmbiguous()
	m.WriteRefused()
	m.ClockStep()
	m.UnknownAnswer()
	m.SetService(Service{
		LeasesHeld: func() int { return 7 },
		Waiters:    func() int { return 2 },
		Queued:     func() int { return 3 },
		Ends: func() Ends {
			return Ends{Waiting: 4, Late: 5, Unseen: 6, Told: 3, Delay: 2.5, Within: map[float64]uint64{1: 2, 3: 3}}
		},
		HighestFence: func() uint64 { return 1_700_000_000_000_001 },
		ClockOffset:  func() time.Duration { return -1500 * time.Millisecond },
		ClockSpread:  func() time.Duration { return 2500 * time.Millisecond },
		Bucket:       func() (BucketState, []Warning) { return BucketSound, []Warning{WarnReplicas, "\xff"} },
	})
	m.SetReady(func() bool { return true })
	m.SetConnection(Hop, func() ConnectionState { return ConnectionState{Connected: true, Reconnects: 4, Dropped: 5} })
	m.SetConnection("\xff", func() ConnectionState { return ConnectionState{Connected: true} })

	after := series(t, m)
	changed := map[string]float64{}
	for k, v := range ours(after) {
		if before[k] != v {
			changed[k] = v
		}
	}
	want := map[string]float64{
		`leased_replies_total{endpoint="acquire",kind="granted"}`:         3,
		`leased_replies_total{endpoint="acquire",kind="invalid"}`:         1,
		`leased_unlisted_replies_total`:                                   2,
		`leased_request_duration_seconds{endpoint="acquire"}`:             6,
		`leased_requests_in_flight{endpoint="acquire"}`:                   1,
		`leased_forward_attempts_total{outcome="timeout"}`:                1,
		`leased_forward_attempts_total{outcome="error"}`:                  1,
		`leased_changes_total{event="renewed"}`:                           1,
		`leased_changes_total{event="foreign"}`:                           1,
		`leased_nats_errors_total{connection="store",error="permission"}`: 1,
		`leased_panics_total`:                                             1,
		`leased_write_conflicts_total`:                                    1,
		`leased_grants_taken_back_total`:                                  1,
		`leased_write_ambiguous_total`:                                    1,
		`leased_writes_refused_total`:                                     1,
		`leased_unknown_answers_total`:                                    1,
		`leased_leases_held`:                                              7,
		`leased_ends_waiting`:                                             4,
		`leased_ends_untold_total{reason="too_late"}`:                     5,
		`leased_ends_untold_total{reason="unseen"}`:                       6,
		`leased_end_delay_seconds`:                                        3,
		`leased_waiters`:                                                  2,
		`leased_writes_queued`:                                            3,
		`leased_highest_fence`:                                            1_700_000_000_000_001,
		`leased_clock_offset_seconds`:                                     -1.5,
		`leased_clock_spread_seconds`:                                     2.5,
		`leased_clock_steps_total`:                                        1,
		`leased_bucket_state{state="sound"}`:                              1,
		`leased_bucket_state{state="unseen"}`:                             0,
		`leased_bucket_warning{warning="replicas"}`:                       1,
		`leased_ready`:                                                    1,
		`leased_nats_connected{connection="hop"}`:                         1,
		`leased_nats_reconnects_total{connection="hop"}`:                  4,
		`leased_nats_dropped_total{connection="hop"}`:                     5,
	}
	if diff := cmp.Diff(want, changed); diff != "" {
		t.Errorf("what changed (-want +got):\n%s", diff)
	}
	if len(ours(after)) != len(ours(before)) {
		t.Errorf("series went from %d to %d", len(ours(before)), len(ours(after)))
	}

	snap := acquire.Snapshot()
	if snap.Replies[kinds.Granted] != 3 || snap.Errors != 1 || snap.InFlight != 1 || len(snap.Replies) != len(testRows()[0].Kinds)+1 {
		t.Errorf("snapshot %+v", snap)
	}
}

func TestServerVersionFollowsTheConnection(t *testing.T) {
	m := New(testRows(), Build{Version: "v1"})
	m.SetNATSServer("2.14.0\xff" + strings.Repeat("x", 100))
	n := 0
	for k := range series(t, m) {
		if strings.HasPrefix(k, "leased_build_info{") {
			n++
			if !strings.Contains(k, `nats_server="2.14.0?xxx`) || len(k) > 200 {
				t.Error(k)
			}
		}
	}
	if n != 1 {
		t.Errorf("%d build infos", n)
	}
}

func TestQuantiles(t *testing.T) {
	m := newTest(t)
	e := m.Endpoint("renew")
	if s := e.Snapshot(); s.P50 != 0 || s.P99 != 0 {
		t.Errorf("before the first reply: %v %v", s.P50, s.P99)
	}
	for i := 1; i <= 1000; i++ { // 10 us .. 10 ms
		e.Reply(kinds.Renewed, time.Duration(i)*10*time.Microsecond)
	}
	s := e.Snapshot()
	for _, c := range []struct{ got, want time.Duration }{{s.P50, 5 * time.Millisecond}, {s.P99, 9900 * time.Microsecond}} {
		if off := c.got.Seconds()/c.want.Seconds() - 1; off < -0.05 || off > 0.05 {
			t.Errorf("quantile %v, want %v within 5 %%", c.got, c.want)
		}
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	m := newTest(t)
	e := m.Endpoint("renew")
	for name, f := range map[string]func(){
		"request":  func() { e.Begin(); e.Reply(kinds.Renewed, 300*time.Microsecond); e.End() },
		"unlisted": func() { e.Reply(kinds.Forwarded, 300*time.Microsecond) },
		"change":   func() { m.Change(Renewed) },
		"attempt":  func() { m.ForwardAttempt(AttemptForwarded) },
		"write":    func() { m.WriteConflict(); m.TakenBack() },
	} {
		if n := testing.AllocsPerRun(1000, f); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	m := newTest(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			e := m.Endpoint("owner")
			for i := range 500 {
				e.Begin()
				e.Reply(kinds.Held, time.Duration(i)*time.Microsecond)
				e.End()
				m.SetNATSServer("2.15.3")
				m.SetService(Service{LeasesHeld: func() int { return i }})
				if i%100 == 0 {
					e.Snapshot()
					series(t, m)
				}
			}
		})
	}
	wg.Wait()
	if s := m.Endpoint("owner").Snapshot(); s.Replies[kinds.Held] != 4000 || s.InFlight != 0 {
		t.Errorf("%+v", s)
	}
}

// scrape reads /metrics as a scraper that accepts the given format does.
func scrape(t *testing.T, m *Metrics, accept string) (body []byte, contentType string) {
	t.Helper()
	server := httptest.NewServer(m.Handler(nil))
	defer server.Close()
	req, err := http.NewRequest("GET", server.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	resp, err := server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s %v", resp.Status, err)
	}
	return body, resp.Header.Get("Content-Type")
}

func TestHistogramsAreClassicAndNative(t *testing.T) {
	m := newTest(t)
	m.Endpoint("owner").Reply(kinds.Free, time.Millisecond)
	text, _ := scrape(t, m, "text/plain")
	for _, line := range []string{
		`leased_request_duration_seconds_bucket{endpoint="owner",le="0.001"} 1`,
		`leased_request_duration_seconds_bucket{endpoint="forward",le="+Inf"} 0`,
	} {
		if !bytes.Contains(text, []byte(line+"\n")) {
			t.Errorf("text has no line %s", line)
		}
	}
	if _, ct := scrape(t, m, "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"); !strings.HasPrefix(ct, "application/vnd.google.protobuf") {
		t.Errorf("asked for protobuf, got %s", ct)
	}
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "leased_request_duration_seconds" {
			for _, s := range f.GetMetric() {
				if s.GetHistogram().Schema == nil {
					t.Errorf("%v has no native histogram", s.GetLabel())
				}
			}
		}
	}
}

// promtool runs Debian's promtool and returns what it printed. Without one the
// test fails in CI and is skipped elsewhere.
func promtool(t *testing.T, stdin []byte, args ...string) (string, error) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		const reason = "promtool is not on PATH (Debian: apt-get install prometheus)"
		if os.Getenv("CI") == "true" {
			t.Fatal(reason)
		}
		t.Skip(reason)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestPromtoolCheckMetricsIsSilent(t *testing.T) {
	m := newTest(t)
	text, _ := scrape(t, m, "text/plain")
	if out, err := promtool(t, text, "check", "metrics"); err != nil || out != "" {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}

func TestPromtoolAcceptsAndProvesTheAlerts(t *testing.T) {
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		if out, err := promtool(t, nil, args...); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
}
