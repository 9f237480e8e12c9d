//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	leaseTTL = 10 * time.Second // of leases that come and go
	heldTTL  = 600 * time.Second
	// heldFresh is how long held leases may go without a renewal before all of
	// them are renewed outside the measurement.
	heldFresh    = 240 * time.Second
	pollInterval = 5 * time.Millisecond
	batchSize    = 100
	payloadSize  = 1024
)

// A workload is something callers do over and over.
type workload struct {
	name    string
	about   string
	callers []int         // nil: as the -c flag says
	held    int           // leases that somebody holds meanwhile
	length  time.Duration // at least this long, 0: as the -duration flag says
	// only names the targets it has, nil: all that grant leases.
	only   []string
	owners bool   // the holders must answer forwards
	base   string // what the ratios are to; "" is raw
	// group is shared by workloads one after the other that are compared with each
	// other: they run in the same rounds, each on contestants of its own.
	group string
	// with is the workload whose contestants this one shares: it runs whenever that
	// one does, in the same rounds.
	with    string
	storm   bool // renewals are measured while many other leases end
	listers int  // who follow the pages of all leases meanwhile, and begin again
	hung    bool // forwards go to an owner who never answers meanwhile
	unit    func(r *run, callers int) func(ctx context.Context, w *worker) error
}

func (w workload) baseline() string {
	if w.base == "" {
		return "raw"
	}
	return w.base
}

func workloads() []workload {
	at64 := []int{64}
	renewOver := func(name string, n int) workload {
		return workload{name: name, about: fmt.Sprintf("renew, %d leases held", n), callers: at64, held: n, group: "renew", unit: renewUnit}
	}
	listOver := func(name, with, about string, listers int) workload {
		return workload{name: name, about: "renew, leases held as in renew1m, " + about, callers: at64, group: "list", with: with,
			listers: listers, only: []string{"leased-before", "leased", "embedded"}, base: "leased", unit: renewUnit}
	}
	hungBeside := func(name, with, about string, hung bool) workload {
		return workload{name: name, about: "1 KB to the holder and back, " + about, callers: at64, held: 1_000, group: "hung", with: with, hung: hung,
			only: []string{"leased-before", "leased", "embedded"}, base: "leased", owners: true, unit: forwardUnit}
	}
	return []workload{
		{name: "cycle", about: "acquire a free key, 3 renewals, release; each call is one operation", unit: cycleUnit},
		renewOver("renew1k", 1_000),
		renewOver("renew10k", 10_000),
		renewOver("renew100k", 100_000),
		{name: "renew1m", about: "renew, 1000000 leases held (or as -held says)", callers: at64, unit: renewUnit},
		{name: "renewmany", about: fmt.Sprintf("renewals of 25600 held leases, %d a call where the target can; p50 and p99 are of a call", batchSize),
			callers: []int{16, 64}, held: 25_600, unit: renewManyUnit},
		{name: "owner", about: "read the holder of 1000 keys", callers: at64, held: 1_000, unit: ownerUnit(1_000)},
		{name: "owner8", about: "read the holder of 8 keys", callers: at64, held: 1_000, unit: ownerUnit(8)},
		{name: "contended", about: "64 callers want 8 keys; an operation is a grant, released at once", callers: at64, unit: contendedUnit},
		{name: "poll", about: "64 callers ask for 8 keys without a pause; ops/s are grants, released at once; p50 and p99 are of one acquire, granted or denied",
			callers: at64, only: []string{"raw", "kv", "naive", "leased-before", "leased", "embedded", "redis"}, unit: pollUnit},
		{name: "handover", about: fmt.Sprintf("release to the grant of one who waits (or asks every %v)", pollInterval), callers: []int{8}, unit: handoverUnit},
		{name: "expiry", about: fmt.Sprintf("end of a lease of 1 s to the grant of one who waits (or asks every %v)", pollInterval),
			callers: []int{32}, length: 6 * time.Second, unit: expiryUnit},
		{name: "forward", about: "1 KB to the holder and back", callers: at64, held: 1_000,
			only: []string{"proxy", "leased-before", "leased", "embedded"}, base: "proxy", owners: true, unit: forwardUnit},
		listOver("list1m", "", "nobody lists them", 0),
		listOver("list1m-1", "list1m", "one lists them", 1),
		listOver("list1m-64", "list1m", "64 list them", 64),
		{name: "expire300k", about: "renew, while 300000 other leases (or as -ends says) end within a second", callers: []int{16}, held: 1_000, storm: true,
			only: []string{"leased-before", "leased", "embedded"}, base: "leased"},
		hungBeside("hungowner", "", "and nothing else", false),
		hungBeside("hungowner-600", "hungowner", "while 600 at once and 17/s more, of 30 s each, go to an owner who never answers", true),
		{name: "restart", about: "from SIGTERM to ready, leases held as in renew1m; p50 is the time", callers: []int{1},
			only: []string{"leased-before", "leased", "embedded"}},
	}
}

// A run is a system under all the workloads of one topology.
type run struct {
	env     *env
	target  target
	system  system
	callers []caller
	serial  atomic.Uint64

	keys      []string // of the held leases
	revisions []uint64
	renewed   time.Time // none of them was renewed before
	answers   bool      // their holder answers forwards

}

// heldKey and heldHolder have 20 bytes.
func heldKey(i int) string { return fmt.Sprintf("held-%015d", i) }

const heldHolder = "holder-0000000000001"

// session is the caller of a worker.
func (r *run) session(i int) caller { return r.callers[i] }

// prepare opens a session a caller and holds the leases that w wants held.
func (r *run) prepare(ctx context.Context, callers int, w workload) error {
	const fillers = 128
	for len(r.callers) < max(callers, fillers) {
		c, err := r.system.caller(len(r.callers))
		if err != nil {
			return err
		}
		r.callers = append(r.callers, c)
	}
	if w.held == 0 {
		return nil
	}
	if w.owners && !r.answers {
		if err := r.system.(answerer).answerForwards(); err != nil {
			return err
		}
		r.answers = true
	}
	from := len(r.keys)
	for i := from; i < w.held; i++ {
		r.keys = append(r.keys, heldKey(i))
		r.revisions = append(r.revisions, 0)
	}
	if r.target.grantless {
		return nil
	}
	if time.Since(r.renewed) > heldFresh {
		from = 0
		r.renewed = time.Now()
	}
	return parallel(ctx, fillers, from, len(r.keys), func(w, i int) error {
		c := r.callers[w]
		if r.revisions[i] != 0 {
			if rev, err := c.renew(r.keys[i], heldHolder, r.revisions[i], heldTTL); err == nil {
				r.revisions[i] = rev
				return nil
			}
		}
		rev, err := c.acquire(r.keys[i], heldHolder, heldTTL)
		r.revisions[i] = rev
		return err
	})
}

// parallel calls f for every number from from to to, in n goroutines.
func parallel(ctx context.Context, n, from, to int, f func(w, i int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	for w := range n {
		all.Go(func() {
			for i := from + w; i < to && ctx.Err() == nil; i += n {
				if err := f(w, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	all.Wait()
	return context.Cause(ctx)
}

// A pager reads one page of the leases.
type pager interface {
	list(after string, limit int) (next string, err error)
}

// list lets n callers read the pages of all leases until the end is called, which tells
// how many pages there were. Where a page is refused it is asked for again.
func (r *run) list(ctx context.Context, n int) (end func() (pages int)) {
	ctx, cancel := context.WithCancel(ctx)
	var pages atomic.Int64
	var all sync.WaitGroup
	for i := range n {
		c := r.callers[i].(pager)
		all.Go(func() {
			for after := ""; ctx.Err() == nil; {
				next, err := c.list(after, 100)
				if err == nil {
					after = next
					pages.Add(1)
				}
			}
		})
	}
	return func() int {
		cancel()
		all.Wait()
		return int(pages.Load())
	}
}

// restart is one restart as a cell.
func restart(ctx context.Context, s system) cell {
	start := time.Now()
	err := s.(interface{ restart(context.Context) error }).restart(ctx)
	took := time.Since(start)
	c := cell{Callers: 1, Ops: 1, OpsPerSec: 1 / took.Seconds(), P50: took, P99: took, Max: took, RSSByName: map[string]int64{}}
	if err != nil {
		c.Errors, c.FirstError = 1, err.Error()
	}
	for i, u := range usage(s.procs()) {
		c.RSS += u.rss
		c.RSSByName[s.procs()[i].name] += u.rss
	}
	return c
}

// fresh is a key that nobody has used.
func (r *run) fresh() string { return fmt.Sprintf("key-%016d", r.serial.Add(1)) }

func holderOf(w *worker) string { return fmt.Sprintf("holder-%013d", w.id) }

func cycleUnit(r *run, _ int) func(context.Context, *worker) error {
	return func(_ context.Context, w *worker) error {
		c, key, holder := r.session(w.id), r.fresh(), holderOf(w)
		var revision uint64
		err := w.timed(1, func() (err error) {
			revision, err = c.acquire(key, holder, leaseTTL)
			return err
		})
		for i := 0; i < 3 && err == nil; i++ {
			err = w.timed(1, func() (err error) {
				revision, err = c.renew(key, holder, revision, leaseTTL)
				return err
			})
		}
		if err != nil {
			return err
		}
		return w.timed(1, func() error { return c.release(key, holder, revision) })
	}
}

// turns deals the held leases out to the callers of one cell: each has its own
// share and goes round in it.
func turns(held, callers, batch int) func(w *worker) (from, to int) {
	next := make([]int, callers)
	share := held / callers
	return func(w *worker) (int, int) {
		from := next[w.id]
		if from+batch > share {
			from = 0
		}
		next[w.id] = from + batch
		return w.id*share + from, w.id*share + min(from+batch, share)
	}
}

func renewUnit(r *run, callers int) func(context.Context, *worker) error {
	turn := turns(len(r.keys), callers, 1)
	return func(_ context.Context, w *worker) error {
		i, _ := turn(w)
		return w.timed(1, func() error { return r.renewHeld(r.session(w.id), i) })
	}
}

func (r *run) renewHeld(c caller, i int) error {
	revision, err := c.renew(r.keys[i], heldHolder, r.revisions[i], heldTTL)
	if err == nil {
		r.revisions[i] = revision
	}
	return err
}

func renewManyUnit(r *run, callers int) func(context.Context, *worker) error {
	turn := turns(len(r.keys), callers, batchSize)
	return func(_ context.Context, w *worker) error {
		from, to := turn(w)
		c := r.session(w.id)
		many, ok := c.(batcher)
		if !ok || !many.batches() {
			for i := from; i < to; i++ {
				if err := w.timed(1, func() error { return r.renewHeld(c, i) }); err != nil {
					return err
				}
			}
			return nil
		}
		return w.timed(to-from, func() error {
			revisions, err := many.renewMany(heldHolder, r.keys[from:to], r.revisions[from:to], heldTTL)
			if err != nil {
				return err
			}
			copy(r.revisions[from:to], revisions)
			return nil
		})
	}
}

func ownerUnit(n int) func(*run, int) func(context.Context, *worker) error {
	return func(r *run, callers int) func(context.Context, *worker) error {
		next := make([]int, callers)
		return func(_ context.Context, w *worker) error {
			next[w.id]++
			key := r.keys[(w.id*17+next[w.id])%n]
			return w.timed(1, func() error {
				holder, err := r.session(w.id).owner(key)
				if err == nil && holder != heldHolder {
					return fmt.Errorf("owner of %s is %q", key, holder)
				}
				return err
			})
		}
	}
}

func contendedUnit(r *run, _ int) func(context.Context, *worker) error {
	return func(ctx context.Context, w *worker) error {
		c, key, holder := r.session(w.id), fmt.Sprintf("hot-%d", w.id%8), holderOf(w)
		var revision uint64
		err := w.timed(1, func() (err error) {
			revision, err = c.contend(ctx, key, holder, leaseTTL, 0)
			return err
		})
		if err != nil {
			return err
		}
		return c.release(key, holder, revision)
	}
}

// pollUnit is one acquire, and the release if it was granted.
func pollUnit(r *run, _ int) func(context.Context, *worker) error {
	return func(_ context.Context, w *worker) error {
		c, key, holder := r.session(w.id), fmt.Sprintf("polled-%d", w.id%8), holderOf(w)
		start := time.Now()
		revision, err := ask(c, key, holder, leaseTTL)
		switch took := time.Since(start); {
		case errors.Is(err, errHeld):
			w.record(0, took, nil)
			return nil
		case err != nil:
			w.record(0, took, err)
			return err
		default:
			w.record(1, took, nil)
			return c.release(key, holder, revision)
		}
	}
}

// ask asks once for a key that somebody may hold.
func ask(c caller, key, holder string, ttl time.Duration) (uint64, error) {
	if p, ok := c.(poller); ok {
		return p.poll(key, holder, ttl)
	}
	return c.acquire(key, holder, ttl)
}

// handoverUnit has two sessions a worker; the one that waits is the next to
// release.
func handoverUnit(r *run, _ int) func(context.Context, *worker) error {
	return func(ctx context.Context, w *worker) error {
		key := r.fresh()
		holders := [2]string{"a-" + key, "b-" + key}
		sessions := [2]caller{r.session(2 * w.id), r.session(2*w.id + 1)}
		revision, err := sessions[0].acquire(key, holders[0], leaseTTL)
		for turn := 0; err == nil && ctx.Err() == nil; turn++ {
			var granted uint64
			var at time.Time
			var failed error
			var waiter sync.WaitGroup
			waiter.Go(func() {
				granted, failed = sessions[(turn+1)%2].contend(ctx, key, holders[(turn+1)%2], leaseTTL, pollInterval)
				at = time.Now()
			})
			pause(ctx, 17*time.Millisecond) // the waiter is in line, at no fixed place between two of its polls
			released := time.Now()
			err = sessions[turn%2].release(key, holders[turn%2], revision)
			waiter.Wait()
			if ctx.Err() != nil {
				return nil
			}
			if err == nil {
				err = failed
			}
			w.record(1, at.Sub(released), err)
			revision = granted
		}
		return err
	}
}

// expiryUnit counts from one second after the grant was received, which is at
// most one reply later than the end of the lease.
func expiryUnit(r *run, _ int) func(context.Context, *worker) error {
	return func(ctx context.Context, w *worker) error {
		const ttl = time.Second
		c, key := r.session(w.id), r.fresh()
		_, err := c.acquire(key, "a-"+key, ttl)
		if err != nil {
			return err
		}
		end := time.Now().Add(ttl)
		_, err = c.contend(ctx, key, "b-"+key, leaseTTL, pollInterval)
		if ctx.Err() != nil {
			return nil
		}
		w.record(1, time.Since(end), err)
		return err
	}
}

func forwardUnit(r *run, callers int) func(context.Context, *worker) error {
	payload := []byte(strings.Repeat("x", payloadSize))
	next := make([]int, callers)
	return func(_ context.Context, w *worker) error {
		next[w.id]++
		key := r.keys[(w.id*17+next[w.id])%1_000]
		return w.timed(1, func() error {
			return r.session(w.id).(forwarder).forward(key, heldHolder, payload)
		})
	}
}

// A hanger can have an owner that does not answer.
type hanger interface {
	hang(ctx context.Context) (end func(), err error)
}

// hang sends forwards to an owner who does not answer before end is called: a crowd at
// once, and then as many as take all of 512 places for good where each takes one for 30 s.
func (s *natsSystem) hang(ctx context.Context) (end func(), err error) {
	nc, err := nats.Connect(s.urls[0])
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var unanswered []*nats.Msg
	over := false
	var refused atomic.Int64
	_, err = nc.Subscribe("dagnats.lease.inbox.hung.>", func(m *nats.Msg) {
		mu.Lock()
		defer mu.Unlock()
		if over {
			_ = m.Respond(nil)
			return
		}
		unanswered = append(unanswered, m)
	})
	if err == nil {
		_, err = nc.Request("api.leases.acquire", []byte(`{"key":"hung","holder":"hung","ttl_ms":600000}`), opTimeout)
	}
	var replies *nats.Subscription
	inbox := nc.NewInbox()
	if err == nil {
		replies, err = nc.Subscribe(inbox, func(*nats.Msg) { refused.Add(1) })
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	send := func(n int) {
		for range n {
			_ = nc.PublishRequest("api.leases.forward", inbox, []byte(`{"key":"hung","timeout_ms":30000}`))
		}
	}
	const crowd = 600
	send(crowd)
	taken := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(unanswered) + int(refused.Load())
	}
	for limit := time.Now().Add(opTimeout); taken() < crowd && time.Now().Before(limit) && ctx.Err() == nil; {
		pause(ctx, time.Millisecond)
	}
	ctx, cancel := context.WithCancel(ctx)
	var more sync.WaitGroup
	more.Go(func() {
		for ctx.Err() == nil {
			pause(ctx, time.Second/17)
			send(1)
		}
	})
	return func() {
		cancel()
		more.Wait()
		mu.Lock()
		over = true
		for _, m := range unanswered {
			_ = m.Respond(nil)
		}
		mu.Unlock()
		_ = replies.Unsubscribe()
		_ = nc.Flush()
		nc.Close()
	}, nil
}

// answerForwards opens the connection of the owner of all held leases, who
// sends back what he gets.
func (s *natsSystem) answerForwards() error {
	nc, err := nats.Connect(s.urls[0])
	if err != nil {
		return err
	}
	s.ncs = append(s.ncs, nc)
	_, err = nc.Subscribe("dagnats.lease.inbox."+heldHolder+".>", func(m *nats.Msg) {
		_ = m.Respond(m.Data)
	})
	if err != nil {
		return err
	}
	return nc.Flush()
}
