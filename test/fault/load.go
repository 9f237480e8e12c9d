package fault

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// Load is the traffic of a run: clients in groups of a few, each group on a key
// of its own that is left for a new one before its history gets too long or too
// uncertain to be judged.
type Load struct {
	Seed    uint64
	Clients int
	Pace    time.Duration // mean pause between two calls of one client
	MinTTL  time.Duration // whole seconds
	MaxTTL  time.Duration

	// Edge makes holders renew at the end of their lease: between 50 ms before
	// and 300 ms after it.
	Edge bool
	// NoForward leaves forwards out.
	NoForward bool
	// Waits lets acquires wait for the key now and then.
	Waits bool
	// Evicts lets clients evict now and then.
	Evicts bool
	// Prefix starts every key and holder name of the load.
	Prefix string
}

// Sizes up to which a key's history is judged in milliseconds.
const (
	clientsPerKey  = 5
	opsPerKey      = 200
	unknownsPerKey = 8
)

// slot is the place of one key after the other.
type slot struct {
	name string

	mu       sync.Mutex
	gen      int
	ops      int
	unknowns int
	pairs    []pair // of the present key, right at some time
}

type pair struct {
	holder string
	rev    uint64
}

// key is the present key of the slot.
func (s *slot) key() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nameLocked()
}

func (s *slot) nameLocked() string { return s.name + "-" + strconv.Itoa(s.gen) }

// done counts op and moves on to a new key when the present one has had enough.
func (s *slot) done(op Op) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if op.Key != s.nameLocked() {
		return
	}
	s.ops++
	if op.Outcome == Unknown && op.Call.writes() {
		s.unknowns++
	}
	if op.Outcome == OK && op.Call != Owner && op.Got.Rev != 0 {
		s.pairs = append(s.pairs, pair{op.Got.Holder, op.Got.Rev})
	}
	if s.ops >= opsPerKey || s.unknowns >= unknownsPerKey {
		s.nextLocked()
	}
}

func (s *slot) nextLocked() { s.gen, s.ops, s.unknowns, s.pairs = s.gen+1, 0, 0, nil }

// oldPair is a pair of the present key that has been superseded, newest the one
// that most likely has not.
func (s *slot) oldPair(r *rand.Rand) (old, newest pair, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.pairs) < 2 {
		return pair{}, pair{}, false
	}
	sorted := append([]pair(nil), s.pairs...)
	sort.Slice(sorted, func(i, j int) bool { return sorted[i].rev < sorted[j].rev })
	old, newest = sorted[r.IntN(len(sorted)-1)], sorted[len(sorted)-1]
	return old, newest, old.rev < newest.rev
}

// Inbox collects what reached all holders of a run.
type Inbox struct {
	mu  sync.Mutex
	log []Delivery
}

func (b *Inbox) add(d Delivery) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.log = append(b.log, d)
}

// Deliveries is a copy of the log.
func (b *Inbox) Deliveries() []Delivery {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]Delivery(nil), b.log...)
}

// Start runs the load until ctx ends and returns a function that waits until
// its last call has returned. connect makes the connection of client i.
func (l Load) Start(ctx context.Context, rec *Recorder, box *Inbox, connect func(i int) (*nats.Conn, error)) (wait func(), err error) {
	var slots []*slot
	var wg sync.WaitGroup
	var conns []*nats.Conn
	for i := range l.Clients {
		if i%clientsPerKey == 0 {
			slots = append(slots, &slot{name: fmt.Sprintf("%sk%d", l.Prefix, len(slots))})
		}
		nc, err := connect(i)
		if err != nil {
			for _, c := range conns {
				c.Close()
			}
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
		conns = append(conns, nc)
	}
	for i, nc := range conns {
		w := &worker{
			load: l, slot: slots[i/clientsPerKey], inbox: box,
			client: Client{ID: i, Conn: nc, Record: rec},
			rng:    rand.New(rand.NewPCG(l.Seed, uint64(i))),
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer nc.Close()
			w.run(ctx)
		}()
	}
	return wg.Wait, nil
}

// worker is one client: now and then a holder, and then with an inbox.
type worker struct {
	load   Load
	slot   *slot
	inbox  *Inbox
	client Client
	rng    *rand.Rand
	named  int
	asked  int

	mu   sync.Mutex // guards hold, which the inbox reads
	hold *tenure
	sub  *nats.Subscription
	last string // the holder name used last
}

// tenure is what a holder knows of the lease it believes to hold.
type tenure struct {
	key, holder string
	fence       uint64 // revision its acquire returned
	rev         uint64
	until       int64 // may act until then
	acquired    time.Time
}

func (w *worker) now() int64 { return w.client.Record.Clock.Now() }

func (w *worker) run(ctx context.Context) {
	defer w.drop()
	for ctx.Err() == nil {
		w.step(ctx)
		w.sleep(ctx, time.Duration(w.rng.ExpFloat64()*float64(w.load.Pace)))
	}
}

func (w *worker) sleep(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

func (w *worker) do(op Op, mode string) Op {
	op = w.client.do(op, mode)
	w.slot.done(op)
	return op
}

func (w *worker) tenure() (tenure, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hold == nil {
		return tenure{}, false
	}
	return *w.hold, true
}

func (w *worker) set(t *tenure) {
	w.mu.Lock()
	w.hold = t
	w.mu.Unlock()
}

// drop stops acting as owner.
func (w *worker) drop() { w.set(nil) }

func (w *worker) step(ctx context.Context) {
	key := w.slot.key()
	t, holding := w.tenure()
	if holding && (t.key != key || w.now() >= t.until && !w.load.Edge) {
		w.drop()
		holding = false
	}
	n := w.rng.IntN(100)
	switch {
	case holding && w.load.Edge:
		w.sleep(ctx, time.Duration(t.until-w.now())-50*time.Millisecond+time.Duration(w.rng.Int64N(int64(350*time.Millisecond))))
		w.renew(ctx, t)
	case holding && n < 45:
		w.renew(ctx, t)
	case holding && n < 57:
		w.release(ctx, t)
	case holding && n < 64: // hold on, but say nothing more
		w.drop()
	case holding && n < 70:
		// Its own lease again: the same revision, no new time.
		w.do(Op{Call: Acquire, Key: key, Holder: t.holder, TTL: w.ttl()}, "")
	case !holding && n < 55:
		w.acquire(ctx, key)
	case n < 72:
		w.do(Op{Call: Owner, Key: key}, "")
	case n < 90 && !w.load.NoForward:
		w.forward(key)
	case n < 96:
		w.wrongPair(key)
	case n < 98 && w.load.Evicts:
		w.evict(key)
	default:
		w.acquire(ctx, key)
	}
}

func (w *worker) ttl() time.Duration {
	lo, hi := int(w.load.MinTTL/time.Second), int(w.load.MaxTTL/time.Second)
	return time.Duration(lo+w.rng.IntN(hi-lo+1)) * time.Second
}

// name is the holder name for the next acquire: a new one for every try to
// become the owner, or now and then the last one, whose lease may still stand.
func (w *worker) name() string {
	if w.last != "" && w.rng.IntN(5) == 0 {
		return w.last
	}
	w.named++
	return fmt.Sprintf("%sh%d-%d", w.load.Prefix, w.client.ID, w.named)
}

func (w *worker) acquire(ctx context.Context, key string) {
	if t, ok := w.tenure(); ok {
		w.do(Op{Call: Acquire, Key: key, Holder: t.holder, TTL: w.ttl()}, "")
		return
	}
	holder, ttl := w.name(), w.ttl()
	again := holder == w.last
	w.listen(holder)
	var sent int64
	var wait time.Duration
	if w.load.Waits && w.rng.IntN(3) == 0 {
		wait = time.Duration(200+w.rng.IntN(2000)) * time.Millisecond
	}
	for try := range 4 {
		op := w.do(Op{Call: Acquire, Key: key, Holder: holder, TTL: ttl, Wait: wait}, "")
		if try == 0 {
			sent = op.Start
		}
		switch op.Outcome {
		case OK:
			t := &tenure{key: key, holder: holder, fence: op.Got.Rev, rev: op.Got.Rev, until: sent + int64(op.Got.TTL), acquired: op.Got.Acquired}
			if again || wait > 0 {
				// The revision may be one it was told long ago, or the time of
				// sending be long past, so it starts no time: only a renewal does.
				t.until = w.now()
				w.set(t)
				w.renew(ctx, *t)
				return
			}
			w.set(t)
			return
		case Refused:
			if w.rng.IntN(2) == 0 {
				w.sleep(ctx, min(op.Got.Left, time.Second)*time.Duration(80+w.rng.IntN(40))/100)
			}
			return
		case Busy:
			return
		}
		if ctx.Err() != nil || w.rng.IntN(10) < 3 || key != w.slot.key() {
			return
		}
	}
}

func (w *worker) renew(ctx context.Context, t tenure) {
	op := w.do(Op{Call: Renew, Key: t.key, Holder: t.holder, Revision: t.rev, TTL: w.ttl()}, "")
	switch op.Outcome {
	case OK:
		t.rev, t.until = op.Got.Rev, op.Start+int64(op.TTL)
		w.set(&t)
		return
	case Busy:
		return
	case Refused:
		w.drop()
		return
	}
	// No verdict: ask who owns the key, and go on only with its own tenure.
	for ctx.Err() == nil && w.now() < max(t.until, op.Start+int64(op.TTL)) {
		own := w.do(Op{Call: Owner, Key: t.key, Holder: t.holder}, "")
		if own.Outcome != OK {
			w.sleep(ctx, 100*time.Millisecond)
			continue
		}
		if own.Got.Holder == t.holder && own.Got.Acquired.Equal(t.acquired) {
			if own.Got.Rev != t.rev {
				t.rev, t.until = own.Got.Rev, op.Start+int64(own.Got.TTL)
			}
			w.set(&t)
			return
		}
		break
	}
	w.drop()
}

func (w *worker) release(ctx context.Context, t tenure) {
	w.drop()
	for range 3 {
		op := w.do(Op{Call: Release, Key: t.key, Holder: t.holder, Revision: t.rev}, "")
		if op.Outcome != Unknown || ctx.Err() != nil || w.rng.IntN(2) == 0 {
			return
		}
	}
}

func (w *worker) evict(key string) {
	op := w.do(Op{Call: Owner, Key: key}, "")
	if op.Outcome == OK && op.Got.Held {
		w.do(Op{Call: Evict, Key: key, Revision: op.Got.Rev}, "")
	}
}

// wrongPair renews or releases with a pair that is not right: a stranger's name
// with the owner's revision, or a revision that has been superseded.
func (w *worker) wrongPair(key string) {
	p, newest, ok := w.slot.oldPair(w.rng)
	if !ok {
		return
	}
	if w.rng.IntN(2) == 0 {
		p = pair{w.load.Prefix + "stranger", newest.rev}
	}
	op := Op{Call: Release, Key: key, Holder: p.holder, Revision: p.rev, Bogus: true}
	if w.rng.IntN(2) == 0 {
		op.Call, op.TTL = Renew, w.ttl()
	}
	w.do(op, "")
}

func (w *worker) forward(key string) {
	w.asked++
	mode := modeAnswer
	switch w.rng.IntN(20) {
	case 0:
		mode = modeHang
	case 1, 2:
		mode = modeTwice
	}
	w.do(Op{Call: Forward, Key: key, ForwardID: fmt.Sprintf("%sf%d-%d", w.load.Prefix, w.client.ID, w.asked), Timeout: 500 * time.Millisecond}, mode)
}

// listen makes holder's inbox the one this client answers on.
func (w *worker) listen(holder string) {
	if w.last == holder {
		return
	}
	if w.sub != nil {
		_ = w.sub.Unsubscribe()
	}
	w.last = holder
	sub, err := w.client.Conn.Subscribe(inboxPrefix+holder+".>", func(m *nats.Msg) { w.serve(holder, m) })
	if err == nil {
		w.sub = sub
	}
}

// serve is the owner's side of a forward: the contract's three reasons to
// reject, a log of every attempt, and the behaviour that was asked for.
func (w *worker) serve(holder string, m *nats.Msg) {
	var q ask
	_ = json.Unmarshal(m.Data, &q)
	d := Delivery{ForwardID: q.ID, Holder: holder, Key: strings.TrimPrefix(m.Subject, inboxPrefix+holder+"."), Fence: m.Header.Get(hdrFence), At: w.now()}
	for name := range m.Header {
		if name != hdrFence && name != hdrDeadline && name != "traceparent" && name != "tracestate" {
			d.Extra += name + " "
		}
	}
	t, holding := w.tenure()
	fence, err := strconv.ParseUint(d.Fence, 10, 64)
	if !holding || t.key != d.Key || t.holder != holder || w.now() >= t.until || err != nil || fence < t.fence {
		w.inbox.add(d)
		no := nats.NewMsg(m.Reply)
		no.Header.Set(hdrReject, "stale")
		_ = w.client.Conn.PublishMsg(no)
		return
	}
	d.Processed = true
	d.Tag = fmt.Sprintf("%s by %s at %d", q.ID, holder, d.At)
	w.inbox.add(d)
	switch q.Mode {
	case modeHang:
	case modeTwice:
		_ = m.Respond([]byte(d.Tag))
		_ = m.Respond([]byte("a second answer to " + q.ID))
	default:
		_ = m.Respond([]byte(d.Tag))
	}
}

// countKinds sums up how operations ended, for the table at the end of a run.
func countKinds(ops []Op) map[kinds.Kind]int {
	n := map[kinds.Kind]int{}
	for i := range ops {
		n[ops[i].Kind]++
	}
	return n
}
