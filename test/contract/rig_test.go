package contract

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"go.uber.org/goleak"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/metrics"
	"github.com/leased/leased/schemas"
	"github.com/leased/leased/service/kinds"
)

// Names of the wire, as the contract has them and not as the code spells them.
const (
	api           = "api.leases."
	events        = "dagnats.lease.changed."
	inbox         = "dagnats.lease.inbox."
	bucketStream  = "KV_leases"
	bucketSubject = "$KV.leases."
	microName     = "dagnats-api"
	queueGroup    = "dagnats-leases"

	errorHeader     = "Nats-Service-Error"
	errorCodeHeader = "Nats-Service-Error-Code"
	eventHeader     = "Dagnats-Lease-Event"
	fenceHeader     = "Dagnats-Lease-Fence"
	deadlineHeader  = "Dagnats-Lease-Deadline-Ms"
	rejectHeader    = "Dagnats-Lease-Reject"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, testnats.ServersOwn())
}

// setup says how a rig differs from one server and one instance.
type setup struct {
	instances int // 0: one; -1: none
	inFlight  int // limit of calls, 0 for the default
	forwards  int
	leases    int // limit of leases, 0 for none
	each      int // of one holder, likewise
	nats      []testnats.Option
	node      *testnats.Node // use this server
	replicas  int
	domain    string // of JetStream
	// dial tells where a connection ("front", "store", "hop") of an instance
	// goes, "" for the server itself.
	dial func(instance int, connection string) string
	// faulty: errors in the log of the service are what the test is about.
	faulty bool
	// unready: do not wait until the instances are ready.
	unready bool
	// uncounted: the test sends requests that the rig does not see.
	uncounted bool
}

// rig is a NATS server, instances of the service on it, and a client.
type rig struct {
	t testing.TB
	setup
	node    *testnats.Node
	nc      *nats.Conn // the test as a client
	js      jetstream.JetStream
	set     *schemas.Set
	all     []*instance
	replies *nats.Subscription
	inbox   string
	next    atomic.Uint64

	mu      sync.Mutex
	pending map[string]chan *nats.Msg
	seen    tally
}

// tally counts replies by endpoint and kind.
type tally map[string]map[kinds.Kind]uint64

func (t tally) add(endpoint string, k kinds.Kind, n uint64) {
	if t[endpoint] == nil {
		t[endpoint] = map[kinds.Kind]uint64{}
	}
	t[endpoint][k] += n
}

// instance is one running service.
type instance struct {
	*leased.Service
	metrics           *metrics.Metrics
	front, store, hop *nats.Conn
	log               *logs
	gone              bool
}

func newRig(t testing.TB, o setup) *rig {
	t.Helper()
	set, err := schemas.Load()
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, setup: o, set: set, seen: tally{}, pending: map[string]chan *nats.Msg{}, node: o.node}
	if r.node == nil {
		r.node = testnats.Server(t, o.nats...)
	}
	r.nc = r.connect()
	if r.js, err = jetstream.New(r.nc); err != nil {
		t.Fatal(err)
	}
	r.inbox = "_INBOX." + nuid.Next() + "."
	if r.replies, err = r.nc.Subscribe(r.inbox+"*", r.take); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.replies.Unsubscribe() })
	for range max(1, o.instances) {
		if o.instances >= 0 {
			r.start()
		}
	}
	if !o.unready {
		for _, i := range r.all {
			r.ready(i)
		}
	}
	t.Cleanup(r.check)
	return r
}

func (r *rig) connect(opts ...nats.Option) *nats.Conn {
	r.t.Helper()
	return testnats.Connect(r.t, r.node.URL, opts...)
}

// start runs one more instance.
func (r *rig) start() *instance {
	r.t.Helper()
	n := len(r.all)
	i := &instance{log: &logs{}}
	dial := func(name string, opts ...nats.Option) *nats.Conn {
		url := r.node.URL
		if r.dial != nil {
			if u := r.dial(n, name); u != "" {
				url = u
			}
		}
		nc, err := nats.Connect(url, append([]nats.Option{nats.Name(fmt.Sprintf("%s-%d", name, n)), nats.MaxReconnects(-1),
			nats.ReconnectWait(50 * time.Millisecond), nats.ReconnectJitter(0, 0), nats.RetryOnFailedConnect(true),
			nats.ReconnectHandler(func(*nats.Conn) {
				if i.Service != nil {
					i.Look()
				}
			}),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { i.log.line(slog.LevelWarn, "nats: "+err.Error()) })}, opts...)...)
		if err != nil {
			r.t.Fatal(err)
		}
		return nc
	}
	i.front, i.store, i.hop = dial("front"), dial("store", nats.ReconnectBufSize(-1)), dial("hop", nats.ReconnectBufSize(-1))
	i.metrics = newMetrics()
	svc, err := leased.Start(leased.Options{
		Front: i.front, Store: i.store, Hop: i.hop, JSDomain: r.domain, Replicas: max(1, r.replicas), APIPrefix: leased.DefaultAPIPrefix, EventPrefix: leased.DefaultEventPrefix,
		MaxInFlight: orDefault(r.inFlight, leased.DefaultMaxInFlight), MaxForwards: orDefault(r.forwards, leased.DefaultMaxForwards), MaxLeases: r.leases, MaxLeasesPerHolder: r.each,
		Version: "0.0.1-contract", Logger: slog.New(i.log), Metrics: i.metrics,
	})
	if err != nil {
		r.t.Fatal(err)
	}
	i.Service = svc
	r.all = append(r.all, i)
	r.t.Cleanup(func() {
		r.leave(i, 10*time.Second)
		if r.t.Failed() {
			r.t.Logf("log of instance %d:\n%s", n, i.log)
		}
	})
	return i
}

func newMetrics() *metrics.Metrics {
	var rows []metrics.Endpoint
	for _, row := range leased.Endpoints() {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	return metrics.New(rows, metrics.Build{Version: "0.0.1-contract"})
}

func orDefault(n, def int) int {
	if n == 0 {
		return def
	}
	return n
}

// ready waits until i serves.
func (r *rig) ready(i *instance) {
	r.t.Helper()
	testnats.Eventually(r.t, 15*time.Second, func() bool {
		for _, c := range i.Ready() {
			if !c.OK {
				return false
			}
		}
		return true
	}, "the instance is not ready; its log follows")
}

// leave drains i and closes its connections.
func (r *rig) leave(i *instance, within time.Duration) {
	if i.gone {
		return
	}
	i.gone = true
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	if err := i.Drain(ctx); err != nil {
		r.t.Errorf("draining an instance: %v", err)
	}
	i.close()
}

// kill takes an instance away as kill -9 does: nothing it sends arrives any
// more. Its replies so far no longer count.
func (r *rig) kill(i *instance) {
	i.gone = true
	i.close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = i.Drain(ctx)
}

func (i *instance) close() {
	for _, nc := range []*nats.Conn{i.store, i.hop, i.front} {
		nc.Close()
	}
}

// request is one body for all calls.
type request struct {
	Key      string `json:"key"`
	Holder   string `json:"holder,omitempty"`
	TTL      int64  `json:"ttl_ms,omitempty"`
	Revision uint64 `json:"revision,omitempty"`
	Timeout  int64  `json:"timeout_ms,omitempty"`
	Payload  []byte `json:"payload,omitempty"`
	Leases   []pair `json:"leases,omitempty"`
	Meta     string `json:"meta,omitempty"`
}

// pair is one lease of a renew_many.
type pair struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"`
}

// reply is one body for all replies, with what the rig knows about it.
type reply struct {
	Granted    *bool     `json:"granted"`
	Held       *bool     `json:"held"`
	Released   bool      `json:"released"`
	Key        string    `json:"key"`
	Holder     string    `json:"holder"`
	Revision   uint64    `json:"revision"`
	AcquiredAt time.Time `json:"acquired_at"`
	ExpiresAt  time.Time `json:"expires_at"`
	TTL        int64     `json:"ttl_ms"`
	Left       int64     `json:"left_ms"`
	Payload    *[]byte   `json:"payload"`
	Attempts   int       `json:"attempts"`
	Meta       string    `json:"meta"`
	Error      string    `json:"error"`
	ErrorKind  string    `json:"kind"`
	Leases     *[]*reply `json:"leases"`

	// kind of a renew_many is that of its leases, if they are of one kind.
	kind       kinds.Kind
	raw        string
	sent, came time.Time
}

func (r *reply) String() string {
	if r == nil {
		return "no reply"
	}
	return fmt.Sprintf("%s after %v: %.500s", r.kind, r.took(), r.raw)
}

func (r *reply) took() time.Duration { return r.came.Sub(r.sent) }

// lease is the part of a reply that any two replies about one revision share.
func (r *reply) lease() string {
	return fmt.Sprintf("%s %s %d %s %s %d", r.Key, r.Holder, r.Revision, r.AcquiredAt, r.ExpiresAt, r.TTL)
}

func (r *reply) kindOf(endpoint string) kinds.Kind {
	yes := func(b *bool) bool { return b != nil && *b }
	switch {
	case r.ErrorKind != "":
		return kinds.Kind(r.ErrorKind)
	case endpoint == "acquire" && yes(r.Granted):
		return kinds.Granted
	case endpoint == "acquire" && r.Granted != nil:
		return kinds.Denied
	case endpoint == "renew" && yes(r.Granted):
		return kinds.Renewed
	case endpoint == "release" && r.Released:
		return kinds.Released
	case endpoint == "evict" && r.Released:
		return kinds.Evicted
	case endpoint == "list" && r.Leases != nil:
		return kinds.Listed
	case endpoint == "renew_many" && r.Leases != nil:
		kind := kinds.Kind("mixed")
		for n, l := range *r.Leases {
			l.kind = l.kindOf("renew")
			if kind = l.kind; l.kind != (*r.Leases)[0].kind {
				return "mixed"
			}
			if n == 0 {
				r.Error = l.Error
			}
		}
		return kind
	case endpoint == "owner" && yes(r.Held):
		return kinds.Held
	case endpoint == "owner" && r.Held != nil:
		return kinds.Free
	case endpoint == "forward" && r.Payload != nil:
		return kinds.Forwarded
	}
	return "malformed"
}

// take hands a message to whoever asked, and complains about a second one.
func (r *rig) take(m *nats.Msg) {
	token := strings.TrimPrefix(m.Subject, r.inbox)
	r.mu.Lock()
	ch, waiting := r.pending[token]
	r.mu.Unlock()
	if waiting {
		select {
		case ch <- m:
			return
		default:
		}
	}
	r.t.Errorf("a second reply came to request %s: %q", token, m.Data)
}

// patience is how long a request waits for its reply beyond what it asks for.
const patience = 8 * time.Second

// ask sends body (a request, a string or bytes) to an endpoint and checks the
// one reply. It may be called from any goroutine.
func (r *rig) ask(endpoint string, body any, header ...nats.Header) (*reply, error) {
	return r.askOn(r.nc, endpoint, body, header...)
}

func (r *rig) askOn(nc *nats.Conn, endpoint string, body any, header ...nats.Header) (*reply, error) {
	token := strconv.FormatUint(r.next.Add(1), 10)
	ch := make(chan *nats.Msg, 1)
	r.mu.Lock()
	r.pending[token] = ch
	r.mu.Unlock()
	msg := &nats.Msg{Subject: api + endpoint, Reply: r.inbox + token, Data: raw(body)}
	for _, h := range header {
		msg.Header = h
	}
	sent := time.Now()
	if err := nc.PublishMsg(msg); err != nil {
		return nil, err
	}
	wait := patience
	if q, ok := body.(request); ok {
		wait += time.Duration(q.Timeout) * time.Millisecond
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case m := <-ch:
		return r.read(endpoint, m, sent, time.Now())
	case <-timer.C:
		return nil, fmt.Errorf("no reply of %s to %.200q within %v", endpoint, msg.Data, wait)
	}
}

func raw(body any) []byte {
	switch b := body.(type) {
	case []byte:
		return b
	case string:
		return []byte(b)
	}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	return b
}

// read checks everything that holds for any reply of the endpoint.
func (r *rig) read(endpoint string, m *nats.Msg, sent, came time.Time) (*reply, error) {
	if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return nil, nats.ErrNoResponders
	}
	got := &reply{raw: string(m.Data), sent: sent, came: came}
	if err := r.set.Reply(endpoint).Validate(m.Data); err != nil {
		return nil, fmt.Errorf("reply of %s breaks its schema: %w: %s", endpoint, err, cut(m.Data))
	}
	if err := json.Unmarshal(m.Data, got); err != nil {
		return nil, fmt.Errorf("reply of %s: %w: %s", endpoint, err, cut(m.Data))
	}
	got.kind = got.kindOf(endpoint)
	counted := []*reply{got}
	var want nats.Header
	switch {
	case endpoint == "renew_many" && got.Leases != nil:
		counted = *got.Leases // one by one, as renew is
	case codes[got.kind] != "":
		want = nats.Header{errorHeader: {got.Error}, errorCodeHeader: {codes[got.kind]}}
	}
	for _, c := range counted {
		r.mu.Lock()
		r.seen.add(endpoint, c.kind, 1)
		r.mu.Unlock()
		if !slices.Contains(row(endpoint).Kinds, c.kind) {
			return nil, fmt.Errorf("%s answered %s, which its row does not list: %s", endpoint, c.kind, cut(m.Data))
		}
	}
	if diff := cmp.Diff(want, m.Header, cmpopts.EquateEmpty()); diff != "" {
		return nil, fmt.Errorf("headers of %s %s: %s", endpoint, got.kind, diff)
	}
	if strings.ContainsFunc(got.Error, unicode.IsControl) {
		return nil, fmt.Errorf("%s: control characters in %q", endpoint, got.Error)
	}
	return got, nil
}

func cut(b []byte) string {
	if len(b) > 400 {
		return string(b[:400]) + "..."
	}
	return string(b)
}

func row(endpoint string) leased.Row {
	for _, row := range leased.Endpoints() {
		if row.Name == endpoint {
			return row
		}
	}
	return leased.Row{}
}

// call asks and fails the test if the reply is not one that the contract knows.
func (r *rig) call(endpoint string, body any, header ...nats.Header) *reply {
	r.t.Helper()
	got, err := r.ask(endpoint, body, header...)
	if err != nil {
		r.t.Fatal(err)
	}
	return got
}

// want asks and fails the test if the reply is of another kind.
func (r *rig) want(k kinds.Kind, endpoint string, body any, header ...nats.Header) *reply {
	r.t.Helper()
	got := r.call(endpoint, body, header...)
	if got.kind != k {
		r.t.Fatalf("%s %.200s: got %s, want %s: %.300s", endpoint, raw(body), got.kind, k, got.raw)
	}
	return got
}

// acquire expects to be granted the key.
func (r *rig) acquire(key, holder string, ttl int64) *reply {
	r.t.Helper()
	return r.want(kinds.Granted, "acquire", request{Key: key, Holder: holder, TTL: ttl})
}

// renew expects to keep the lease l.
func (r *rig) renew(l *reply, ttl int64) *reply {
	r.t.Helper()
	return r.want(kinds.Renewed, "renew", request{Key: l.Key, Holder: l.Holder, Revision: l.Revision, TTL: ttl})
}

// release expects to free the lease l.
func (r *rig) release(l *reply) *reply {
	r.t.Helper()
	return r.want(kinds.Released, "release", request{Key: l.Key, Holder: l.Holder, Revision: l.Revision})
}

// owner is who holds the key, or free.
func (r *rig) owner(key string) *reply {
	r.t.Helper()
	got := r.call("owner", request{Key: key})
	if got.kind != kinds.Held && got.kind != kinds.Free {
		r.t.Fatalf("owner of %s: %s", key, got.raw)
	}
	return got
}

// stored is the key's message, nil when there is none.
func (r *rig) stored(key string) *jetstream.RawStreamMsg {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := r.js.Stream(ctx, bucketStream)
	if err != nil {
		r.t.Fatal(err)
	}
	m, err := s.GetLastMsgForSubject(ctx, bucketSubject+key)
	if err == jetstream.ErrMsgNotFound {
		return nil
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// stream is the state of the bucket.
func (r *rig) stream() jetstream.StreamState {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := r.js.Stream(ctx, bucketStream)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.CachedInfo().State
}

// written is what was stored after sequence before, ends of earlier leases
// aside: they come when they come.
func (r *rig) written(before uint64) (subjects []string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := r.js.Stream(ctx, bucketStream)
	if err != nil {
		r.t.Fatal(err)
	}
	for seq := before + 1; seq <= s.CachedInfo().State.LastSeq; seq++ {
		m, err := s.GetMsg(ctx, seq)
		switch {
		case err == nil && m.Header.Get(eventHeader) != "expired":
			subjects = append(subjects, m.Subject)
		case err != nil && err != jetstream.ErrMsgNotFound:
			r.t.Fatal(err)
		}
	}
	return subjects
}

// counted is what the instances that are still there have counted, by
// Prometheus, with zeros left out.
func (r *rig) counted() tally {
	r.t.Helper()
	sum := tally{}
	for _, i := range r.all {
		if i.gone {
			continue
		}
		families, err := i.metrics.Gatherer().Gather()
		if err != nil {
			r.t.Fatal(err)
		}
		for _, f := range families {
			switch f.GetName() {
			case "leased_replies_total":
				for _, m := range f.GetMetric() {
					label := map[string]string{}
					for _, l := range m.GetLabel() {
						label[l.GetName()] = l.GetValue()
					}
					if n := uint64(m.GetCounter().GetValue()); n > 0 {
						sum.add(label["endpoint"], kinds.Kind(label["kind"]), n)
					}
				}
			case "leased_unlisted_replies_total", "leased_panics_total":
				if n := f.GetMetric()[0].GetCounter().GetValue(); n != 0 {
					r.t.Errorf("%s is %v", f.GetName(), n)
				}
			}
		}
	}
	return sum
}

// endpointStats is one endpoint in the reply of $SRV.STATS.
type endpointStats struct {
	Name           string        `json:"name"`
	QueueGroup     string        `json:"queue_group"`
	Subject        string        `json:"subject"`
	NumRequests    uint64        `json:"num_requests"`
	ProcessingTime time.Duration `json:"processing_time"`
	Data           struct {
		Replies  map[kinds.Kind]uint64 `json:"replies"`
		Errors   uint64                `json:"errors"`
		InFlight int64                 `json:"in_flight"`
		P50      float64               `json:"p50_ms"`
		P99      float64               `json:"p99_ms"`
	} `json:"data"`
}

// stats asks every instance for its $SRV.STATS.
func (r *rig) stats(instances int) (all []endpointStats) {
	r.t.Helper()
	for _, body := range r.discover("STATS", instances) {
		var s struct {
			Endpoints []endpointStats `json:"endpoints"`
		}
		if err := json.Unmarshal(body, &s); err != nil {
			r.t.Fatal(err)
		}
		all = append(all, s.Endpoints...)
	}
	return all
}

// discover sends $SRV.verb and gathers so many answers.
func (r *rig) discover(verb string, instances int) (all [][]byte) {
	r.t.Helper()
	sub, err := r.nc.SubscribeSync(nats.NewInbox())
	if err != nil {
		r.t.Fatal(err)
	}
	defer sub.Unsubscribe()
	if err := r.nc.PublishRequest("$SRV."+verb+"."+microName, sub.Subject, nil); err != nil {
		r.t.Fatal(err)
	}
	for range instances {
		m, err := sub.NextMsg(5 * time.Second)
		if err != nil {
			r.t.Fatalf("$SRV.%s: %v", verb, err)
		}
		all = append(all, m.Data)
	}
	return all
}

// check holds what the instances counted against what the rig saw.
func (r *rig) check() {
	if r.t.Failed() {
		return
	}
	alive := 0
	for n, i := range r.all {
		if !i.gone {
			alive++
		}
		if lines := i.log.errors(); len(lines) > 0 && !r.faulty {
			r.t.Errorf("instance %d logged errors:\n%s", n, strings.Join(lines, "\n"))
		}
	}
	if r.uncounted || alive == 0 || alive < len(r.all) {
		return
	}
	r.mu.Lock()
	seen := r.seen
	r.mu.Unlock()
	if diff := cmp.Diff(seen, r.counted()); diff != "" {
		r.t.Errorf("replies the test saw (-) and leased_replies_total (+):\n%s", diff)
	}
	if !r.all[0].front.IsConnected() {
		return
	}
	inStats := tally{}
	for _, e := range r.stats(alive) {
		var sum uint64
		for k, n := range e.Data.Replies {
			if n > 0 {
				inStats.add(e.Name, k, n)
			}
			sum += n
		}
		if e.NumRequests != sum && e.Name != "renew_many" {
			r.t.Errorf("%s: num_requests is %d, the replies add up to %d", e.Name, e.NumRequests, sum)
		}
		if e.Data.InFlight != 0 {
			r.t.Errorf("%s: in_flight is %d when all is over", e.Name, e.Data.InFlight)
		}
		if got, want := slices.Sorted(maps.Keys(e.Data.Replies)), append(slices.Clone(row(e.Name).Kinds), kinds.NoReply); !sameSet(got, want) {
			r.t.Errorf("%s: $SRV.STATS counts %v, the row lists %v", e.Name, got, want)
		}
	}
	if diff := cmp.Diff(seen, inStats); diff != "" {
		r.t.Errorf("replies the test saw (-) and $SRV.STATS (+):\n%s", diff)
	}
}

func sameSet[T ~string](a, b []T) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}

// logs keeps what an instance logs.
type logs struct {
	mu    sync.Mutex
	text  bytes.Buffer
	error []string
}

func (l *logs) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (l *logs) Handle(_ context.Context, rec slog.Record) error {
	var b strings.Builder
	b.WriteString(rec.Message)
	rec.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	})
	l.line(rec.Level, b.String())
	return nil
}

func (l *logs) line(level slog.Level, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	line := fmt.Sprintf("%s %s %s", time.Now().Format("15:04:05.000"), level, text)
	if l.text.Len() < 64<<10 {
		fmt.Fprintln(&l.text, line)
	}
	if level >= slog.LevelError {
		l.error = append(l.error, line)
	}
}

func (l *logs) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l *logs) WithGroup(string) slog.Handler      { return l }

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func (l *logs) errors() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.error)
}
