package storage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/metrics"
)

// long asks for the full length of the runs that are cut to a slice by default.
var long = os.Getenv("LEASED_LONG") != ""

func TestMain(m *testing.M) {
	flag.Parse()
	// Most tests here wait for ends of leases: more of them than there are
	// processors can do that at the same time.
	if flag.Lookup("test.parallel").Value.String() == flag.Lookup("test.parallel").DefValue {
		flag.Set("test.parallel", "6")
	}
	code := m.Run()
	os.RemoveAll(skewed.dir)
	if err := goleak.Find(testnats.ServersOwn()); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// instance is the service inside the test process.
type instance struct {
	*leased.Service
	metrics *metrics.Metrics
	log     *logged
}

// serve starts the service on the NATS at url, which need not be there, and
// ends it with the test.
func serve(t testing.TB, url string, change ...func(*leased.Options)) *instance {
	t.Helper()
	in, stop := serveUntil(t, url, change...)
	t.Cleanup(stop)
	return in
}

// serveUntil is serve with its end in the hands of the caller.
func serveUntil(t testing.TB, url string, change ...func(*leased.Options)) (in *instance, stop func()) {
	t.Helper()
	var rows []metrics.Endpoint
	for _, row := range leased.Endpoints() {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	in = &instance{metrics: metrics.New(rows, metrics.Build{Version: "0.0.0"}), log: &logged{}}
	var conns []*nats.Conn
	connect := func() *nats.Conn {
		nc, err := nats.Connect(url, nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond),
			nats.ReconnectJitter(10*time.Millisecond, 10*time.Millisecond), nats.ReconnectBufSize(-1), nats.Timeout(5*time.Second),
			nats.PingInterval(5*time.Second), nats.MaxPingsOutstanding(3), nats.IgnoreAuthErrorAbort(),
			nats.ConnectHandler(func(*nats.Conn) { in.look() }), nats.ReconnectHandler(func(*nats.Conn) { in.look() }),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { in.log.asyncError(err) }))
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, nc)
		return nc
	}
	o := leased.Options{
		Front: connect(), Store: connect(), Hop: connect(), Replicas: 1,
		APIPrefix: leased.DefaultAPIPrefix, EventPrefix: leased.DefaultEventPrefix,
		MaxInFlight: leased.DefaultMaxInFlight, MaxForwards: leased.DefaultMaxForwards,
		Version: "0.0.0", Logger: slog.New(slog.NewTextHandler(in.log, nil)), Metrics: in.metrics,
	}
	for _, f := range change {
		f(&o)
	}
	svc, err := leased.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	in.log.svc.Store(svc)
	in.Service = svc
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the service:\n%s", in.log)
		}
	})
	return in, sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := svc.Drain(ctx); err != nil {
			t.Logf("drain: %v", err)
		}
		for _, nc := range conns {
			nc.Close()
		}
	})
}

// late is text that is made when it is printed.
type late = testnats.Lazy

func replicas(n int) func(*leased.Options) { return func(o *leased.Options) { o.Replicas = n } }

func apiPrefix(s string) func(*leased.Options) {
	return func(o *leased.Options) { o.APIPrefix = s }
}

// look is what cmd/leased does on a connection that came back.
func (in *instance) look() {
	if svc := in.log.svc.Load(); svc != nil {
		svc.Look()
	}
}

// failing names the checks of Ready that fail, with their details.
func (in *instance) failing() (names []string) {
	for _, c := range in.Ready() {
		if !c.OK {
			names = append(names, c.Name+" "+c.Detail)
		}
	}
	return names
}

// warnings names the warnings of Ready.
func (in *instance) warnings() (names []string) {
	for _, c := range in.Ready() {
		if c.OK && c.Warn {
			names = append(names, c.Name)
		}
	}
	slices.Sort(names)
	return names
}

// bucket is the detail of the check of that name.
func (in *instance) bucket() string {
	for _, c := range in.Ready() {
		if c.Name == "bucket" {
			return c.Detail
		}
	}
	return ""
}

func (in *instance) waitReady(t testing.TB) *instance {
	t.Helper()
	testnats.Eventually(t, 20*time.Second, func() bool { return len(in.failing()) == 0 }, "not ready: ", late(func() string { return fmt.Sprint(in.failing()) }))
	return in
}

// logged keeps what the service logs.
type logged struct {
	svc  atomic.Pointer[leased.Service]
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte(`msg="lease `)) { // hand-overs, thousands of them
		return len(p), nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.text.String()
	if const20k := 20 << 10; len(s) > const20k {
		s = "[...]" + s[len(s)-const20k:]
	}
	return s
}

func (l *logged) asyncError(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(&l.text, "nats.go: %v\n", err)
}

// errors are the lines at level error.
func (l *logged) errors() (lines []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.SplitSeq(l.text.String(), "\n") {
		if strings.Contains(line, "level=ERROR") {
			lines = append(lines, line)
		}
	}
	return lines
}

// caller makes calls on the wire.
type caller struct {
	t  testing.TB
	nc *nats.Conn
}

func callerOn(t testing.TB, url string) *caller { return &caller{t, testnats.Connect(t, url)} }

// reply is any reply of the service, and when its call was made.
type reply struct {
	Granted  *bool     `json:"granted"`
	Held     bool      `json:"held"`
	Released bool      `json:"released"`
	Key      string    `json:"key"`
	Holder   string    `json:"holder"`
	Revision uint64    `json:"revision"`
	Acquired time.Time `json:"acquired_at"`
	Expires  time.Time `json:"expires_at"`
	TTL      int64     `json:"ttl_ms"`
	Left     int64     `json:"left_ms"`
	Payload  *[]byte   `json:"payload"`
	Error    string    `json:"error"`
	Kind     string    `json:"kind"`

	sent, got time.Time
}

// Kinds that only the test gives: nothing came back, or nobody was there.
const (
	noAnswer     = "no answer"
	noResponders = "no responders"
)

// callTimeout is longer than the service needs for any answer (4 s).
const callTimeout = 6 * time.Second

func (c *caller) call(name string, body map[string]any) reply {
	r, err := call(c.nc, name, body)
	if err != nil {
		c.t.Errorf("%s %v: %v", name, body, err)
	}
	return r
}

// call makes one call; its error says that the reply is not one.
func call(nc *nats.Conn, name string, body map[string]any) (reply, error) {
	return callAt(nc, leased.DefaultAPIPrefix, name, body)
}

func callAt(nc *nats.Conn, prefix, name string, body map[string]any) (r reply, err error) {
	data, err := json.Marshal(body)
	if err != nil {
		return r, err
	}
	r.sent = time.Now()
	msg, err := nc.Request(prefix+"."+name, data, callTimeout)
	r.got = time.Now()
	switch {
	case errors.Is(err, nats.ErrNoResponders), errors.Is(err, nats.ErrReconnectBufExceeded):
		r.Kind = noResponders
		return r, nil
	case err != nil:
		r.Kind, r.Error = noAnswer, err.Error()
		return r, nil
	}
	if err := json.Unmarshal(msg.Data, &r); err != nil {
		return r, fmt.Errorf("reply %q: %w", msg.Data, err)
	}
	if r.Kind != "" {
		return r, nil
	}
	switch {
	case r.Released:
		r.Kind = "released"
	case r.Payload != nil:
		r.Kind = "forwarded"
	case name == "acquire" && r.Granted != nil && *r.Granted:
		r.Kind = "granted"
	case name == "acquire" && r.Granted != nil:
		r.Kind = "denied"
	case name == "renew" && r.Granted != nil && *r.Granted:
		r.Kind = "renewed"
	case name == "owner" && r.Held:
		r.Kind = "held"
	case name == "owner":
		r.Kind = "free"
	default:
		return r, fmt.Errorf("reply %q is of no kind", msg.Data)
	}
	return r, nil
}

func (c *caller) acquire(key, holder string, ttl time.Duration) reply {
	c.t.Helper()
	return c.call("acquire", map[string]any{"key": key, "holder": holder, "ttl_ms": ttl.Milliseconds()})
}

func (c *caller) renew(l reply, ttl time.Duration) reply {
	c.t.Helper()
	return c.call("renew", map[string]any{"key": l.Key, "holder": l.Holder, "revision": l.Revision, "ttl_ms": ttl.Milliseconds()})
}

func (c *caller) release(l reply) reply {
	c.t.Helper()
	return c.call("release", map[string]any{"key": l.Key, "holder": l.Holder, "revision": l.Revision})
}

func (c *caller) owner(key string) reply {
	c.t.Helper()
	return c.call("owner", map[string]any{"key": key})
}

func (c *caller) forward(key string, payload string, timeout time.Duration) reply {
	c.t.Helper()
	return c.call("forward", map[string]any{"key": key, "payload": []byte(payload), "timeout_ms": timeout.Milliseconds()})
}

// want fails the test unless r is of one of the kinds.
func (c *caller) want(r reply, kinds ...string) reply {
	c.t.Helper()
	if !slices.Contains(kinds, r.Kind) {
		c.t.Fatalf("got %s (%s) %+v, want %s", r.Kind, r.Error, r, strings.Join(kinds, " or "))
	}
	return r
}

// grant takes a key that must be free.
func (c *caller) grant(key, holder string, ttl time.Duration) reply {
	c.t.Helper()
	return c.want(c.acquire(key, holder, ttl), "granted")
}

// stream is a STREAM.INFO reply.
type stream struct {
	Config  map[string]any `json:"config"`
	Created time.Time      `json:"created"`
	State   struct {
		Messages  uint64 `json:"messages"`
		FirstSeq  uint64 `json:"first_seq"`
		LastSeq   uint64 `json:"last_seq"`
		Subjects  uint64 `json:"num_subjects"`
		Consumers int    `json:"consumer_count"`
	} `json:"state"`
	Now time.Time `json:"ts"`
}

// api makes a raw request to the JetStream API.
func api(nc *nats.Conn, subject string, body, into any) error {
	return apiAt(nc, "$JS.API.", subject, body, into)
}

func apiAt(nc *nats.Conn, prefix, subject string, body, into any) error {
	var data []byte
	if body != nil {
		var err error
		if data, err = json.Marshal(body); err != nil {
			return err
		}
	}
	msg, err := nc.Request(prefix+subject, data, 5*time.Second)
	if err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}
	var failed struct {
		Error *struct {
			Code int    `json:"err_code"`
			Text string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(msg.Data, &failed); err != nil {
		return err
	}
	if failed.Error != nil {
		return fmt.Errorf("%s: %d %s", subject, failed.Error.Code, failed.Error.Text)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(msg.Data, into)
}

// bucketOf reads the bucket's state.
func bucketOf(t testing.TB, nc *nats.Conn) stream {
	t.Helper()
	var s stream
	var err error
	testnats.Eventually(t, 10*time.Second, func() bool {
		err = api(nc, "STREAM.INFO.KV_leases", nil, &s)
		return err == nil
	}, late(func() string { return fmt.Sprint(err) }))
	return s
}

// stored is the last message of a key, as it stands in the bucket.
type stored struct {
	Seq    uint64    `json:"seq"`
	Hdrs   []byte    `json:"hdrs"`
	Data   []byte    `json:"data"`
	Time   time.Time `json:"time"`
	header nats.Header
}

// lastOf reads a key's last message; nil when there is none.
func lastOf(t testing.TB, nc *nats.Conn, key string) *stored {
	t.Helper()
	var got struct {
		Message stored `json:"message"`
	}
	err := api(nc, "STREAM.MSG.GET.KV_leases", map[string]any{"last_by_subj": "$KV.leases." + key}, &got)
	if err != nil && strings.Contains(err.Error(), "10037") {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Message.Hdrs) > 0 {
		if got.Message.header, err = nats.DecodeHeadersMsg(got.Message.Hdrs); err != nil {
			t.Fatal(err)
		}
	}
	return &got.Message
}

// tally counts outcomes by kind, from many goroutines.
type tally struct {
	mu sync.Mutex
	n  map[string]int
}

func (t *tally) add(kind string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n == nil {
		t.n = map[string]int{}
	}
	t.n[kind]++
}

func (t *tally) get(kind string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n[kind]
}

func (t *tally) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fmt.Sprint(t.n)
}

func mustJSON(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// gauge reads a series without labels from the service's metrics, -1 if it is
// not there.
func (in *instance) gauge(name string) float64 {
	rec := httptest.NewRecorder()
	in.metrics.Handler(slog.New(slog.DiscardHandler)).ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	for line := range strings.SplitSeq(rec.Body.String(), "\n") {
		if text, ok := strings.CutPrefix(line, name+" "); ok {
			if v, err := strconv.ParseFloat(text, 64); err == nil {
				return v
			}
		}
	}
	return -1
}

// highest is the highest revision that the instance has seen, to the precision
// of a metric.
func (in *instance) highest() uint64 { return uint64(in.gauge("leased_highest_fence")) }
