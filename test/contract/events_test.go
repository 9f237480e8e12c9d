package contract

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// change is one change event, or what a consumer of the stream saw of it.
type change struct {
	Key        string
	Seq, After uint64 // Nats-Sequence and Nats-Last-Sequence
	Header     nats.Header
	came       time.Time

	V          int       `json:"v"`
	BodyKey    string    `json:"key"`
	Holder     string    `json:"holder"`
	TTL        int64     `json:"ttl_ms"`
	AcquiredAt time.Time `json:"acquired_at"`
	WrittenAt  time.Time `json:"written_at"`
	Event      string    `json:"event"`
	Nonce      string    `json:"nonce"`
	Horizon    string    `json:"horizon"`
	Revision   uint64    `json:"revision"`
	Previous   *struct {
		Holder   string `json:"holder"`
		Revision uint64 `json:"revision"`
		Ended    string `json:"ended"`
	} `json:"previous"`
}

func (c *change) String() string {
	s := fmt.Sprintf("%s %s %d %s (after %d, revision %d)", c.Key, c.Event, c.Seq, c.Holder, c.After, c.Revision)
	if c.Previous != nil {
		s += fmt.Sprintf(" previous %+v", *c.Previous)
	}
	return s
}

// listener hears change events and checks what holds for each of them: headers,
// schema, and an order that only grows.
type listener struct {
	r   *rig
	sub *nats.Subscription

	mu   sync.Mutex
	list []*change
	last map[string]uint64 // sequence, by key
	lag  time.Duration     // the longest from the estimate before a write to its event
}

// listen subscribes to the changes of all keys.
func (r *rig) listen() *listener {
	r.t.Helper()
	l := &listener{r: r, last: map[string]uint64{}}
	nc := r.connect(nats.Name("listener"))
	var err error
	if l.sub, err = nc.Subscribe(events+">", l.hear); err != nil {
		r.t.Fatal(err)
	}
	if err := l.sub.SetPendingLimits(-1, -1); err != nil {
		r.t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		r.t.Fatal(err)
	}
	return l
}

// read decodes a change and checks it on its own.
func (r *rig) readChange(key string, seq uint64, header nats.Header, data []byte) *change {
	c := &change{Key: key, Seq: seq, Header: header, came: time.Now()}
	if err := r.set.Event().Validate(data); err != nil {
		r.t.Errorf("event of %s breaks its schema: %v: %s", key, err, data)
	}
	if err := json.Unmarshal(data, c); err != nil {
		r.t.Errorf("event of %s: %v: %s", key, err, data)
	}
	if c.BodyKey != key || c.Event != header.Get(eventHeader) {
		r.t.Errorf("event of %s says key %s, header %q, event %q", key, c.BodyKey, header.Get(eventHeader), c.Event)
	}
	gone := c.Event == "released" || c.Event == "expired"
	if op := header.Get("KV-Operation"); (op == "PURGE") != gone || (op == "") == gone {
		r.t.Errorf("event %s of %s has KV-Operation %q", c.Event, key, op)
	}
	if gone != (c.Revision != 0) {
		r.t.Errorf("event %s of %s names the revision %d that ended", c.Event, key, c.Revision)
	}
	return c
}

func (l *listener) hear(m *nats.Msg) {
	key := strings.TrimPrefix(m.Subject, events)
	seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
	after, err2 := strconv.ParseUint(m.Header.Get("Nats-Last-Sequence"), 10, 64)
	if err != nil || err2 != nil {
		l.r.t.Errorf("event of %s without sequences: %v", key, m.Header)
		return
	}
	c := l.r.readChange(key, seq, m.Header, m.Data)
	c.After = after
	if got := m.Header.Get("Nats-Subject"); got != bucketSubject+key {
		l.r.t.Errorf("event of %s has Nats-Subject %q", key, got)
	}
	at, err := time.Parse(time.RFC3339Nano, m.Header.Get("Nats-Time-Stamp"))
	if err != nil || c.WrittenAt.After(at) {
		l.r.t.Errorf("event of %s: Nats-Time-Stamp %q, written_at %s", key, m.Header.Get("Nats-Time-Stamp"), c.WrittenAt)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq <= l.last[key] {
		l.r.t.Errorf("event %d of %s comes after %d", seq, key, l.last[key])
	}
	// 0 only says that nothing was stored just before.
	if c.After != 0 && c.After != l.last[key] && l.last[key] != 0 {
		l.r.t.Errorf("event %d of %s follows %d, the last one heard is %d", seq, key, c.After, l.last[key])
	}
	l.last[key] = seq
	l.list = append(l.list, c)
	l.lag = max(l.lag, c.came.Sub(c.WrittenAt))
}

// of lists the events of a key so far.
func (l *listener) of(key string) (list []*change) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.list {
		if c.Key == key {
			list = append(list, c)
		}
	}
	return list
}

func (l *listener) all() []*change {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.list)
}

// wait until the key has n events.
func (l *listener) wait(key string, n int, within time.Duration) []*change {
	l.r.t.Helper()
	testnats.Eventually(l.r.t, within, func() bool { return len(l.of(key)) >= n }, fmt.Sprintf("%s has no %d events", key, n))
	return l.of(key)
}

// lives is what the changes so far make of the lives of leases.
type lives struct {
	expired, previous int       // ends told by an event, by the previous of the next lease
	open              []*change // leases without an end yet
	wrong             []string
}

// lives checks that the changes of every key make sense: every lease ends once,
// renewed or freed by its holder or told as expired, by an event or, if the key
// was taken before that, by the previous of the next lease.
func (l *listener) lives() (v lives) {
	wrong := func(format string, args ...any) { v.wrong = append(v.wrong, fmt.Sprintf(format, args...)) }
	lease := map[string]*change{} // the key's present lease
	for _, c := range l.all() {
		old := lease[c.Key]
		var ended uint64 // the revision that the change says has expired
		if c.Previous != nil && c.Previous.Ended == "expired" {
			ended = c.Previous.Revision
		}
		switch {
		case c.Event == "acquired" && old == nil && ended != 0:
			wrong("%s tells an end that was told before", c)
		case c.Event == "acquired" && old != nil && (ended != old.Seq || c.Previous.Holder != old.Holder):
			wrong("%s does not tell the end of %s", c, old)
		case c.Event == "acquired" && old != nil:
			v.previous++
		case c.Event == "acquired":
		case old == nil:
			wrong("%s of a key that is free", c)
		case c.Event == "renewed" && (c.Holder != old.Holder || !c.AcquiredAt.Equal(old.AcquiredAt)):
			wrong("%s renews %s", c, old)
		case c.Event == "renewed":
		case c.Revision != old.Seq || c.Holder != old.Holder:
			wrong("%s ends %s", c, old)
		case c.Event == "expired":
			v.expired++
		}
		lease[c.Key] = nil
		if c.Event == "acquired" || c.Event == "renewed" {
			lease[c.Key] = c
		}
	}
	for _, c := range lease {
		if c != nil {
			v.open = append(v.open, c)
		}
	}
	return v
}

// over waits until every lease has been told to be over.
func (l *listener) over() bool {
	deadline := time.Now().Add(12 * time.Second)
	for time.Now().Before(deadline) {
		if len(l.lives().open) == 0 {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

// settled waits until every lease has been told to be over, and then for those
// who would tell it again: they have 2 s of jitter. It returns what is wrong.
func (l *listener) settled() (wrong []string) {
	if !l.over() {
		for _, c := range l.lives().open {
			wrong = append(wrong, fmt.Sprintf("the end of %s is not told", c))
		}
	}
	time.Sleep(3 * time.Second)
	v := l.lives()
	l.r.t.Logf("%d ends were told as expired, %d as previous", v.expired, v.previous)
	if v.expired == 0 {
		wrong = append(wrong, "no end was told as expired")
	}
	return append(wrong, v.wrong...)
}

// healthy is how long a call or an event may take for the promises about events
// to be strict: each end once, within 3 s. A pause between a check and the write
// that it allows may repeat one; an instance that lags may not know what to tell.
const healthy = 400 * time.Millisecond

// onHealthyMachine runs try until one run was right, or wrong without having
// been disturbed by the machine, or wrong every time: both fail the test.
func onHealthyMachine(t *testing.T, try func(t *testing.T) (wrong []string, worst time.Duration)) {
	const tries = 5
	for range tries {
		wrong, worst := try(t)
		switch {
		case t.Failed() || len(wrong) == 0:
			return
		case worst <= healthy:
			t.Errorf("the slowest answer or event took %v, and:\n%s", worst, strings.Join(wrong, "\n"))
			return
		}
		t.Logf("this machine held something up for %v, and:\n%s", worst, strings.Join(wrong, "\n"))
	}
	t.Errorf("in each of %d runs something was wrong, and something was held up for more than %v", tries, healthy)
}

// TestEventsOfOneKey: every change once, in order, with what the reply said (E1).
func TestEventsOfOneKey(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 3})
	l := r.listen()
	var replies []*reply
	a := r.acquire("k", "A", 60000)
	replies = append(replies, a)
	for range 3 {
		a = r.renew(a, 60000)
		replies = append(replies, a)
	}
	r.release(a)
	b := r.acquire("k", "B", 60000)
	short := r.renew(b, 1000)
	list := l.wait("k", 8, 5*time.Second)

	want := []struct {
		event    string
		lease    *reply
		revision uint64
		ended    string
	}{
		{"acquired", replies[0], 0, ""}, {"renewed", replies[1], 0, ""}, {"renewed", replies[2], 0, ""}, {"renewed", replies[3], 0, ""},
		{"released", a, a.Revision, ""}, {"acquired", b, 0, "released"}, {"renewed", short, 0, ""}, {"expired", short, short.Revision, ""},
	}
	var before uint64
	for n, w := range want {
		c := list[n]
		if c.Event != w.event || c.Holder != w.lease.Holder || c.Revision != w.revision || !c.AcquiredAt.Equal(w.lease.AcquiredAt) || c.TTL != w.lease.TTL {
			t.Errorf("event %d is %s, want %s of %s", n, c, w.event, w.lease.raw)
		}
		if w.revision == 0 {
			if c.Seq != w.lease.Revision || !c.WrittenAt.Add(time.Duration(c.TTL)*time.Millisecond).Equal(w.lease.ExpiresAt) {
				t.Errorf("event %d is %s written at %s, the reply says %s", n, c, c.WrittenAt, w.lease.raw)
			}
		}
		if c.After != before {
			t.Errorf("event %d follows %d, want %d", n, c.After, before)
		}
		before = c.Seq
		switch {
		case w.ended == "" && c.Previous != nil:
			t.Errorf("event %d has a previous: %s", n, c)
		case w.ended != "" && (c.Previous == nil || c.Previous.Ended != w.ended || c.Previous.Holder != "A" || c.Previous.Revision != a.Revision):
			t.Errorf("event %d does not name its previous: %s", n, c)
		}
	}
	if len(list) != len(want) {
		t.Errorf("%d events, want %d", len(list), len(want))
	}
}

// TestE02ExpiryIsAnnounced: exactly one expired for the fence, within 3 s, told
// apart from a release and from a put (E3).
func TestE02ExpiryIsAnnounced(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	l := r.listen()
	lapsed, freed := r.acquire("lapses", "A", 1000), r.acquire("freed", "A", 1000)
	r.release(freed)
	list := l.wait("lapses", 2, 6*time.Second)
	if c := list[1]; c.Event != "expired" || c.Revision != lapsed.Revision || c.Holder != "A" || len(c.Header.Get("KV-Operation")) == 0 {
		t.Errorf("the end is told by %s, %v", c, c.Header)
	}
	if late := list[1].came.Sub(lapsed.came.Add(time.Second)); late > 3*time.Second {
		t.Errorf("the end is told %v after it", late)
	}
	if c := l.wait("freed", 2, time.Second)[1]; c.Event != "released" || c.Revision != freed.Revision {
		t.Errorf("the release is told by %s", c)
	}
	// Long enough for all others to tell it too, were they to.
	time.Sleep(3 * time.Second)
	if n, m := len(l.of("lapses")), len(l.of("freed")); n != 2 || m != 2 {
		t.Errorf("%d and %d events, want 2 of each: %v", n, m, l.all())
	}
}

// TestExpiryIsToldOnce, as expired or as previous, however many instances run,
// whoever wrote the lease last, and whoever takes the key when.
func TestExpiryIsToldOnce(t *testing.T) {
	t.Parallel()
	for _, instances := range []int{2, 5} {
		t.Run(fmt.Sprint(instances, " instances"), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, setup{instances: instances})
			round := 0
			onHealthyMachine(t, func(t *testing.T) ([]string, time.Duration) {
				round++
				l := r.listen()
				defer l.sub.Unsubscribe()
				worst := lapse(r, fmt.Sprintf("r%d-", round), 60)
				wrong := l.settled()
				return wrong, max(worst, l.lag)
			})
		})
	}
}

// lapse has leases lapse in every way, and rivals take half of the keys then.
// It returns how long the slowest call took. Whatever the machine does to the
// times here: each call may come too late, and what then happens is as good.
func lapse(r *rig, prefix string, keys int) time.Duration {
	var worst atomic.Int64
	ask := func(call, key, holder string, revision uint64, ttl int64) *reply {
		got, err := r.ask(call, request{Key: key, Holder: holder, Revision: max(1, revision), TTL: ttl})
		if err != nil || !slices.Contains([]kinds.Kind{kinds.Granted, kinds.Denied, kinds.Renewed, kinds.Lost, kinds.Unknown, kinds.Unavailable}, got.kind) {
			r.t.Errorf("%s %s: %v, %v", call, key, got, err)
			return &reply{kind: kinds.Granted}
		}
		for {
			old := worst.Load()
			if int64(got.took()) <= old || worst.CompareAndSwap(old, int64(got.took())) {
				return got
			}
		}
	}
	var wg sync.WaitGroup
	for n := range keys {
		wg.Go(func() {
			key := fmt.Sprintf("%s%d", prefix, n)
			a := ask("acquire", key, "A", 0, 1000)
			if n%3 == 1 { // written last by another instance, perhaps
				a = ask("renew", key, "A", a.Revision, 1000)
			}
			if n%3 == 2 { // its message outlives it
				a = ask("renew", key, "A", a.Revision, 2000)
				a = ask("renew", key, "A", a.Revision, 1000)
			}
			// Half are left alone; for the others rivals race at once, or when the
			// server has removed the key and nobody has told it yet.
			if n%2 == 0 {
				return
			}
			time.Sleep(time.Until(a.came.Add(900*time.Millisecond + time.Duration(n)*15*time.Millisecond)))
			for range 2 { // the second time a lease lapses whose holder is back at once
				for won := false; !won; {
					for _, holder := range []string{"B", "A"} {
						got := ask("acquire", key, holder, 0, 1000)
						if won = got.kind == kinds.Granted && got.Revision != a.Revision; won {
							a = got
							break
						}
						time.Sleep(2 * time.Millisecond) // the rate of asking
					}
				}
			}
		})
	}
	wg.Wait()
	return time.Duration(worst.Load())
}

// TestExpiryIsToldWhenTheWriterIsGone: the instance that wrote the leases last
// is killed; of the others one tells, within 3 s.
func TestExpiryIsToldWhenTheWriterIsGone(t *testing.T) {
	t.Parallel()
	onHealthyMachine(t, func(t *testing.T) (wrong []string, worst time.Duration) {
		r := newRig(t, setup{uncounted: true})
		l := r.listen()
		writer := r.all[0]
		// The writer is alone until it has written.
		var last time.Time
		for n := range 20 {
			a := r.acquire(fmt.Sprintf("k%d", n), "A", 3000)
			if n%2 == 1 {
				a = r.renew(a, 2000)
			}
			last = a.came
			worst = max(worst, a.took())
		}
		for range 4 {
			r.start()
		}
		r.kill(writer)
		for _, i := range r.all[1:] {
			r.ready(i)
		}
		l.over()
		if late := time.Since(last.Add(3 * time.Second)); late > 3*time.Second {
			wrong = append(wrong, fmt.Sprintf("all is told %v after the last end", late))
		}
		wrong = append(wrong, l.settled()...)
		return wrong, max(worst, l.lag)
	})
}

// TestDurableConsumerSeesTheSame: at a rate that it can follow, a durable
// consumer of the stream gets every change that is published, in order.
func TestDurableConsumerSeesTheSame(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	l := r.listen()
	ctx := t.Context()
	cons, err := r.js.CreateOrUpdateConsumer(ctx, bucketStream, jetstream.ConsumerConfig{Durable: "watcher", AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverAllPolicy})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	consumed := map[string][]string{}
	count := 0
	describe := func(c *change) string { return fmt.Sprintf("%s %d %s %d", c.Event, c.Seq, c.Holder, c.Revision) }
	cc, err := cons.Consume(func(m jetstream.Msg) {
		meta, err := m.Metadata()
		if err != nil {
			t.Error(err)
			return
		}
		c := r.readChange(strings.TrimPrefix(m.Subject(), bucketSubject), meta.Sequence.Stream, m.Headers(), m.Data())
		mu.Lock()
		consumed[c.Key] = append(consumed[c.Key], describe(c))
		count++
		mu.Unlock()
		m.Ack()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cc.Stop(); <-cc.Closed() }()

	changes := 0
	follow := func(more int) { // history is 1: a change that nobody fetched yet may be replaced
		t.Helper()
		changes += more
		testnats.Eventually(t, 15*time.Second, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return count >= changes && len(l.all()) >= changes
		}, "the consumer does not follow")
	}
	for n := range 50 {
		key := fmt.Sprintf("k%d", n%10)
		a := r.acquire(key, "A", 60000)
		follow(1)
		a = r.renew(a, 60000)
		follow(1)
		r.release(a)
		follow(1)
	}
	for n := range 10 {
		r.acquire(fmt.Sprintf("k%d", n), "B", 3000)
	}
	follow(10)
	follow(10) // their ends
	heard := map[string][]string{}
	for _, c := range l.all() {
		heard[c.Key] = append(heard[c.Key], describe(c))
	}
	mu.Lock()
	defer mu.Unlock()
	if len(heard) != 10 {
		t.Errorf("changes of %d keys", len(heard))
	}
	for _, key := range slices.Sorted(maps.Keys(heard)) {
		if !slices.Equal(heard[key], consumed[key]) {
			t.Errorf("%s: published %v, consumed %v", key, heard[key], consumed[key])
		}
	}
}

// TestE01GapsAreVisible: a subscriber that falls behind loses events. It sees
// so in Nats-Last-Sequence, and owner gives it the state that is stored (E2).
func TestE01GapsAreVisible(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	slow := r.connect(nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	blocked, started := make(chan struct{}), make(chan struct{})
	var once sync.Once
	last := map[string]uint64{}
	gaps := map[string]bool{}
	heard := make(chan uint64, 100_000)
	sub, err := slow.Subscribe(events+">", func(m *nats.Msg) {
		once.Do(func() { close(started) })
		<-blocked
		key := strings.TrimPrefix(m.Subject, events)
		seq, _ := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
		after, _ := strconv.ParseUint(m.Header.Get("Nats-Last-Sequence"), 10, 64)
		if after != last[key] {
			gaps[key] = true
		}
		last[key] = seq
		heard <- seq
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(64, -1); err != nil {
		t.Fatal(err)
	}
	if err := slow.Flush(); err != nil {
		t.Fatal(err)
	}
	leases := map[string]*reply{}
	for n := range 8 {
		key := fmt.Sprintf("k%d", n)
		leases[key] = r.acquire(key, "A", 60000)
	}
	<-started
	for range 50 {
		for key, l := range leases {
			leases[key] = r.renew(l, 60000)
		}
	}
	if err := slow.Flush(); err != nil {
		t.Fatal(err)
	}
	close(blocked)
	if dropped, err := sub.Dropped(); err != nil || dropped == 0 {
		t.Fatalf("the subscriber lost %d events, %v", dropped, err)
	}
	// One more change of every key, which it hears.
	final := map[string]*reply{}
	testnats.Eventually(t, 5*time.Second, func() bool { n, _, _ := sub.Pending(); return n == 0 }, "the subscriber does not catch up")
	for key, l := range leases {
		final[key] = r.renew(l, 60000)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for hear := len(final); hear > 0; {
		select {
		case seq := <-heard:
			for _, l := range final {
				if l.Revision == seq {
					hear--
				}
			}
		case <-ctx.Done():
			t.Fatal("the last changes are not heard")
		}
	}
	if err := sub.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	for key, l := range final {
		if !gaps[key] {
			t.Errorf("%s: no gap to be seen", key)
		}
		if now := r.owner(key); now.lease() != l.lease() || now.Revision != last[key] {
			t.Errorf("%s: owner shows %s, the last event is %d", key, now.raw, last[key])
		}
	}
}
