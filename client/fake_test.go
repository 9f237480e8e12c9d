package client

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// world is a lease service on a bad network, inside a synctest bubble. It keeps
// leases by the contract; what happens to each message is scripted or random.
type world struct {
	t  *testing.T
	mu sync.Mutex

	rng     *rand.Rand
	script  map[string][]fault   // by endpoint, used up in order
	random  bool                 // faults at random when no script is left
	noWait  bool                 // an older service: wait_ms is unknown
	noBatch bool                 // and so is renew_many
	noLeft  bool                 // and left_ms; then no request arrives twice, see fault
	stale   bool                 // owner knows of no lease
	written map[uint64]time.Time // the acquired_at of each revision
	shift   time.Duration        // of the server's wall clock
	fast    float64              // part by which the server's clock runs fast

	keys     map[string]*record
	sequence uint64
	lastSub  int
	subs     map[int]sub
	calls    []string // endpoints, as they are decided
	sent     map[string][]time.Time
	faults   map[string]int

	// passing is called, under mu, at the moment a key becomes holder's.
	passing func(key, holder string)
}

type record struct {
	holder   string
	revision uint64
	acquired time.Time
	end      time.Time // on the true clock
	ttl      time.Duration
	meta     string
}

type sub struct {
	subject string
	f       func(*nats.Msg)
}

// fault is what happens to one call. The zero value: nothing.
type fault struct {
	lose  bool          // the request never arrives
	late  time.Duration // it arrives late
	twice time.Duration // it arrives again so much later; the first answer is lost
	mute  bool          // the reply is lost
	slow  time.Duration // the reply is slow
	kind  kinds.Kind    // the service answers this error and did nothing, unless:
	land  time.Duration // unknown, and the write is applied so much later
	never bool          // unknown, and it is never applied
}

func newWorld(t *testing.T) *world {
	return &world{
		t: t, keys: map[string]*record{}, sequence: 100, subs: map[int]sub{}, script: map[string][]fault{},
		sent: map[string][]time.Time{}, written: map[uint64]time.Time{}, faults: map[string]int{}, rng: rand.New(rand.NewPCG(1, 1)),
		passing: func(string, string) {},
	}
}

// process is the connection of one process.
func (w *world) process() *process { return &process{world: w} }

type process struct {
	world *world
	mu    sync.Mutex
	down  bool
	last  string // endpoint that answered last

	closed atomic.Bool // the connection, for good
}

// kill makes every further call of the process fail, as if it were dead.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = true
}

func (p *process) dead() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.down
}

func (p *process) request(ctx context.Context, subject string, body []byte) ([]byte, error) {
	if p.dead() {
		return nil, kinds.Errorf(kinds.Unavailable, "dead")
	}
	if p.closed.Load() {
		return nil, kinds.Errorf(kinds.Unavailable, "closed: %w", nats.ErrConnectionClosed)
	}
	w := p.world
	endpoint := subject[strings.LastIndex(subject, ".")+1:]
	var q request
	if err := json.Unmarshal(body, &q); err != nil {
		w.t.Errorf("%s: %v", endpoint, err)
	}
	w.mu.Lock()
	f := w.fault(endpoint)
	w.sent[endpoint] = append(w.sent[endpoint], time.Now())
	w.mu.Unlock()

	answer := make(chan reply, 1)
	switch {
	case f.kind == kinds.Unavailable && f.late == 0:
		return nil, kinds.Errorf(kinds.Unavailable, "no responders: %w", nats.ErrNoResponders)
	case f.lose:
	default:
		go func() {
			time.Sleep(f.late)
			a := w.decide(endpoint, q, f)
			if f.twice > 0 {
				time.Sleep(f.twice)
				a = w.decide(endpoint, q, fault{})
			}
			time.Sleep(f.slow)
			if !f.mute {
				answer <- a
			}
		}()
	}
	select {
	case a := <-answer:
		p.mu.Lock()
		p.last = endpoint
		p.mu.Unlock()
		if p.dead() {
			break
		}
		out, err := json.Marshal(a)
		if err != nil {
			w.t.Error(err)
		}
		return out, nil
	case <-ctx.Done():
	}
	return nil, kinds.Errorf(kinds.Unknown, "no reply")
}

// fault picks what happens to the next call. Under mu.
func (w *world) fault(endpoint string) (f fault) {
	if s := w.script[endpoint]; len(s) > 0 {
		w.script[endpoint] = s[1:]
		return s[0]
	}
	if !w.random || w.rng.IntN(100) < 55 {
		return f
	}
	some := func(most time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(most))) }
	name := ""
	switch w.rng.IntN(10) {
	case 0:
		name, f.lose = "request lost", true
	case 1, 2:
		name, f.mute = "reply lost", true
	case 3:
		name, f.late = "request late", some(4*time.Second)
	case 4:
		name, f.slow = "reply late", some(2*time.Second)
	case 5:
		// Two copies of one acquire can only be told apart by left_ms. NATS makes no copies.
		if w.noLeft {
			return f
		}
		name, f.twice = "request twice", some(3*time.Second)
	case 6:
		name, f.kind = "unavailable", kinds.Unavailable
	case 7:
		name, f.kind = "busy", kinds.Busy
	case 8:
		name, f.kind, f.land = "unknown, lands", kinds.Unknown, some(5*time.Second)
	case 9:
		name, f.kind, f.never = "unknown, does not land", kinds.Unknown, true
	}
	w.faults[name]++
	return f
}

// decide is the service: one request, one answer.
func (w *world) decide(endpoint string, q request, f fault) reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.kind != "" && f.kind != kinds.Unknown {
		return reply{Error: "scripted", Kind: string(f.kind)}
	}
	w.calls = append(w.calls, endpoint)
	if w.noBatch && endpoint == "renew_many" {
		return reply{Error: "no such endpoint", Kind: string(kinds.Invalid)}
	}
	if w.noWait && q.Wait > 0 {
		return reply{Error: `unknown member "wait_ms"`, Kind: string(kinds.Invalid)}
	}
	for end := time.Now().Add(time.Duration(q.Wait)); endpoint == "acquire" && w.live(q.Key) != nil &&
		w.live(q.Key).holder != q.Holder && time.Now().Before(end); {
		w.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		w.mu.Lock()
	}
	r := w.live(q.Key)
	write := func(holder string, acquired time.Time) func() reply {
		var replaces uint64
		if w.keys[q.Key] != nil {
			replaces = w.keys[q.Key].revision
		}
		return func() reply {
			old := w.keys[q.Key]
			if old != nil && old.revision != replaces && w.live(q.Key) != nil || endpoint == "renew" && (old == nil || old.revision != replaces) {
				return reply{Error: "lost a race", Kind: string(kinds.Lost)}
			}
			w.sequence++
			if endpoint == "acquire" {
				acquired = time.Now().Add(w.shift)
			}
			ttl, meta := time.Duration(q.TTL), q.Meta
			if endpoint == "renew" {
				meta = old.meta
			}
			w.keys[q.Key] = &record{holder, w.sequence, acquired, time.Now().Add(ttl - time.Duration(float64(ttl)*w.fast)), ttl, meta}
			w.written[w.sequence] = acquired
			if endpoint == "acquire" {
				w.passing(q.Key, holder)
			}
			w.event(q.Key, map[string]string{"acquire": "acquired", "renew": "renewed"}[endpoint])
			return w.tell(q.Key, reply{Granted: true})
		}
	}
	var do func() reply
	switch endpoint {
	case "acquire":
		if r != nil {
			return w.tell(q.Key, reply{Granted: r.holder == q.Holder})
		}
		do = write(q.Holder, time.Time{})
	case "renew":
		if r == nil || r.holder != q.Holder || r.revision != q.Revision {
			return reply{Error: "not the current pair", Kind: string(kinds.Lost)}
		}
		do = write(r.holder, r.acquired)
	case "renew_many":
		var a reply
		for _, l := range q.Leases {
			w.mu.Unlock()
			one := w.decide("renew", request{Key: l.Key, Revision: l.Revision, Holder: q.Holder, TTL: q.TTL}, fault{})
			w.mu.Lock()
			one.Key = l.Key
			a.Leases = append(a.Leases, one)
		}
		return a
	case "release":
		if r == nil || r.holder != q.Holder || r.revision != q.Revision {
			return reply{Error: "not the current pair", Kind: string(kinds.Lost)}
		}
		do = func() reply {
			if now := w.live(q.Key); now == nil || now.revision != q.Revision {
				return reply{Error: "lost a race", Kind: string(kinds.Lost)}
			}
			w.sequence++
			delete(w.keys, q.Key)
			w.event(q.Key, "released")
			return reply{Released: true, Key: q.Key, Holder: q.Holder, Revision: q.Revision}
		}
	case "owner":
		if w.stale {
			return reply{Key: q.Key}
		}
		return w.tell(q.Key, reply{})
	case "list":
		var a reply
		for k := range w.keys {
			if strings.HasPrefix(k, q.Prefix) && w.live(k) != nil {
				a.Leases = append(a.Leases, w.tell(k, reply{}))
			}
		}
		return a
	default:
		w.t.Errorf("unexpected call of %s", endpoint)
		return reply{}
	}
	if f.kind != kinds.Unknown {
		return do()
	}
	if !f.never {
		go func() {
			time.Sleep(f.land)
			w.mu.Lock()
			defer w.mu.Unlock()
			do()
		}()
	}
	return reply{Error: "no verdict", Kind: string(kinds.Unknown)}
}

// live is the lease of key, nil when it is free. Under mu.
func (w *world) live(key string) *record {
	if r := w.keys[key]; r != nil && time.Now().Before(r.end) {
		return r
	}
	return nil
}

func (w *world) tell(key string, a reply) reply {
	a.Key = key
	if r := w.live(key); r != nil {
		a.Held, a.Holder, a.Revision, a.TTL, a.Meta = true, r.holder, r.revision, ms(r.ttl), r.meta
		a.AcquiredAt, a.ExpiresAt, a.Left = r.acquired, r.end.Add(w.shift), ms(time.Until(r.end))
		if w.noLeft {
			a.Left = 0
		}
	}
	return a
}

// owner is the holder of key now.
func (w *world) owner(key string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r := w.live(key); r != nil {
		return r.holder
	}
	return ""
}

// seize gives key to another holder, as an operator's evict and a third party's
// acquire would, with all events lost.
func (w *world) seize(key, holder string, ttl time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sequence++
	w.keys[key] = &record{holder, w.sequence, time.Now().Add(w.shift), time.Now().Add(ttl), ttl, ""}
}

// evict frees key, as an operator does.
func (w *world) evict(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sequence++
	delete(w.keys, key)
	w.tellEvent(key, w.sequence, "released", `{"evicted":true}`)
}

// forge tells of an event that nothing caused.
func (w *world) forge(key string, revision uint64, event, body string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tellEvent(key, revision, event, body)
}

// play scripts the next calls of an endpoint.
func (w *world) play(endpoint string, f ...fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.script[endpoint] = f
}

// set sets the server's wall clock.
func (w *world) set(shift time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shift = shift
}

// decided is what the service had to decide, in order.
func (w *world) decided() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.calls)
}

// call is when the nth call of an endpoint was sent.
func (w *world) call(endpoint string, n int) time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sent[endpoint][n]
}

func (w *world) count(endpoint string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.sent[endpoint])
}

// event tells subscribers, in their own time. Under mu.
func (w *world) event(key, event string) { w.tellEvent(key, w.sequence, event, "{}") }

func (w *world) tellEvent(key string, revision uint64, event, body string) {
	w.deliver(&nats.Msg{
		Subject: "dagnats.lease.changed." + key, Data: []byte(body),
		Header: nats.Header{"Dagnats-Lease-Event": {event}, "Nats-Sequence": {fmt.Sprint(revision)}},
	})
}

func message(subject, event string) *nats.Msg {
	return &nats.Msg{Subject: subject, Header: nats.Header{"Dagnats-Lease-Event": {event}}}
}

func (w *world) deliver(m *nats.Msg) {
	for _, s := range w.subs {
		if s.subject == m.Subject || strings.HasSuffix(s.subject, ">") && strings.HasPrefix(m.Subject, strings.TrimSuffix(s.subject, ">")) {
			go s.f(m)
		}
	}
}

func (p *process) subscribe(subject string, f func(*nats.Msg), _ func(error)) (func(), error) {
	w := p.world
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastSub++
	id := w.lastSub
	w.subs[id] = sub{subject, f}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.subs, id)
	}, nil
}

func (p *process) publish(m *nats.Msg) error {
	p.world.mu.Lock()
	defer p.world.mu.Unlock()
	p.world.deliver(m)
	return nil
}

func (p *process) flush() error { return nil }

func (p *process) place() any { return p }
