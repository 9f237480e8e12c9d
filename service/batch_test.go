package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/embedded"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// openBatching starts an instance that groups its writes on a server of its own
// that syncs each one.
func openBatching(t *testing.T) *Instance {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	s, err := embedded.Start(embedded.Options{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), SyncAlways: true, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	nc, err := s.Connect("", nats.ReconnectBufSize(-1))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	i, err := Open(Options{Store: nc, Hop: nc, Replicas: 1, GroupCommit: true, APIPrefix: "api.leases", EventPrefix: "dagnats.lease", MicroName: "m", Observer: openGuard{}, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.Close)
	testnats.Eventually(t, 20*time.Second, func() bool { return i.Health().Verdict == Sound && i.Viewing() }, testnats.Lazy(func() string { return fmt.Sprintf("not ready: %+v", i.Health()) }))
	if !i.js.atomic.Load() {
		t.Fatal("the bucket takes no batches")
	}
	return i
}

// testWrite is an acquire of key on condition expect.
func testWrite(key string, expect uint64) *Write {
	rec := &Record{V: recordVersion, Key: key, Holder: "h", TTLMillis: 60_000, AcquiredAt: 1, WrittenAt: 1, Event: Acquired, Nonce: newNonce()}
	return &Write{Key: key, Expect: expect, Event: Acquired, Body: rec.encode(), Nonce: rec.Nonce, TTL: time.Minute}
}

// queued is a write in the committer's line, and its verdict once it is told.
type queued struct {
	*pendingWrite
	told chan struct{}
	rev  uint64
	err  error
}

func newQueued(w *Write) *queued {
	q := &queued{told: make(chan struct{})}
	q.pendingWrite = &pendingWrite{w: w, done: func(rev uint64, err error) {
		q.rev, q.err = rev, err
		close(q.told)
	}}
	return q
}

func pendingOf(qs []*queued) (ps []*pendingWrite) {
	for _, q := range qs {
		ps = append(ps, q.pendingWrite)
	}
	return ps
}

// checkPut compares a verdict with what is stored.
func checkPut(t *testing.T, i *Instance, w *Write, rev uint64, err error) {
	t.Helper()
	e, getErr := i.js.Get(t.Context(), w.Key)
	if getErr != nil {
		t.Fatal(getErr)
	}
	mine := e.Record != nil && e.Record.Nonce == w.Nonce
	switch {
	case err == nil && (!mine || e.Revision != rev):
		t.Errorf("%s: told stored as %d, there is %+v", w.Key, rev, e)
	case err != nil && mine:
		t.Errorf("%s: told %v, and it is stored", w.Key, err)
	case err != nil && !errors.Is(err, ErrConflict):
		t.Errorf("%s: %v", w.Key, err)
	}
}

// TestBatchVerdicts: in a batch each write gets its own verdict and its own
// revision, whatever becomes of its neighbours.
func TestBatchVerdicts(t *testing.T) {
	i := openBatching(t)
	for _, bad := range [][]int{nil, {0}, {63}, {5, 6}, {0, 31, 32, 63}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}} {
		name := fmt.Sprint(len(bad), "-", time.Now().UnixNano())
		var pending []*queued
		for n := range 64 {
			pending = append(pending, newQueued(testWrite(fmt.Sprintf("b%s-%d", strings.ReplaceAll(name, " ", ""), n), 0)))
		}
		for _, n := range bad {
			pending[n].w.Expect = 7 // nothing of theirs is stored
		}
		began := time.Now()
		i.js.group.send(pendingOf(pending))
		if took := time.Since(began); took > tryTimeout {
			t.Logf("bad %v: skipped, the disk took %v", bad, took)
			continue
		}
		for n, p := range pending {
			<-p.told
			checkPut(t, i, p.w, p.rev, p.err)
			if wrong := p.w.Expect != 0; wrong != (p.err != nil) {
				t.Errorf("bad %v, write %d: %v", bad, n, p.err)
			}
		}
	}
}

// TestBatchKeyOnce: two writes of a key that wait together, the second made
// after the first, as two callers would: both verdicts are true.
func TestBatchKeyOnce(t *testing.T) {
	i := openBatching(t)
	c := i.js.group
	twice := []*queued{}
	for n := range 8 {
		for range 2 {
			twice = append(twice, newQueued(testWrite(fmt.Sprintf("k%d", n), 0)))
		}
	}
	c.mu.Lock()
	c.queue = append(c.queue, pendingOf(twice)...)
	batch := c.take()
	keys := map[string]bool{}
	for _, p := range batch {
		if keys[p.w.Key] {
			t.Errorf("%s stands twice in a batch", p.w.Key)
		}
		keys[p.w.Key] = true
	}
	c.queue = append(batch, c.queue...)
	c.flying = true
	c.mu.Unlock()
	c.fly()
	stored := map[string]int{}
	for _, p := range twice {
		<-p.told
		checkPut(t, i, p.w, p.rev, p.err)
		if p.err == nil {
			stored[p.w.Key]++
		}
	}
	for n := range 8 {
		if k := fmt.Sprintf("k%d", n); stored[k] != 1 {
			t.Errorf("%s was stored %d times", k, stored[k])
		}
	}
}

// TestBatchConcurrent: callers that renew and take side by side, some with a
// revision that is over, get what each would get alone.
func TestBatchConcurrent(t *testing.T) {
	i := openBatching(t)
	ctx := t.Context()
	var rounds, unknown atomic.Int64
	failed := func(what string, err error) {
		if kinds.Of(err) == kinds.Unknown { // the disk took seconds
			unknown.Add(1)
			return
		}
		t.Errorf("%s: %v", what, err)
	}
	var wg sync.WaitGroup
	for n := range 64 {
		wg.Go(func() {
			key := fmt.Sprintf("c%d", n/2) // two callers a key
			holder := fmt.Sprintf("h%d", n)
			for range 6 {
				res, err := i.Acquire(ctx, key, holder, time.Minute, "")
				if err != nil {
					failed("acquire", err)
					return
				}
				if res.Lease.Holder != holder {
					continue
				}
				old := res.Lease.Revision
				if res, err = i.Renew(ctx, key, holder, old, time.Minute); err != nil {
					failed("renew", err)
					return
				}
				if again, err := i.Renew(ctx, key, holder, old, time.Minute); err == nil {
					t.Errorf("the old revision %d was renewed as %d after %d", old, again.Lease.Revision, res.Lease.Revision)
				}
				if owner, err := i.Owner(ctx, key); err != nil || owner.Lease.Revision != res.Lease.Revision {
					t.Errorf("owner: %+v %v, want %d", owner, err, res.Lease.Revision)
				}
				if _, err := i.Release(ctx, key, holder, res.Lease.Revision); err != nil {
					failed("release", err)
					return
				}
				rounds.Add(1)
			}
		})
	}
	wg.Wait()
	t.Logf("%d rounds, %d unknown", rounds.Load(), unknown.Load())
	if rounds.Load() == 0 {
		t.Error("not one round came to its end")
	}
}

// TestBatchInQueue: a write whose time is over before it was sent is not sent.
func TestBatchInQueue(t *testing.T) {
	i := openBatching(t)
	c := i.js.group
	c.mu.Lock()
	c.flying = true // nobody flies
	c.mu.Unlock()
	_, err := await(func(done func(uint64, error)) { c.start(testWrite("late", 0), 20*time.Millisecond, done) })
	if !errors.Is(err, ErrNotStored) {
		t.Fatalf("got %v", err)
	}
	other := newQueued(testWrite("next", 0))
	c.mu.Lock()
	c.queue = append(c.queue, other.pendingWrite)
	c.mu.Unlock()
	c.fly()
	<-other.told
	checkPut(t, i, other.w, other.rev, other.err)
	if e, err := i.js.Get(t.Context(), "late"); err != nil || e.Revision != 0 {
		t.Errorf("%+v %v", e, err)
	}
}

// TestViewIsNoTruth: what the view shows is not what owner and a refused acquire
// say, when the key has moved on and the view does not know yet.
func TestViewIsNoTruth(t *testing.T) {
	i := openBatching(t)
	ctx := t.Context()
	res, err := i.Acquire(ctx, "k", "first", time.Minute, "")
	if err != nil {
		t.Fatal(err)
	}
	// Another instance frees the key, and its message is not here yet: the view
	// is put back to what it was.
	shown := func() (item, Entry) {
		sh, it := i.view.lock("k")
		defer sh.mu.Unlock()
		return it.item, sh.entry("k", it)
	}
	before, e := shown()
	a := i.prepare("k", Decision{Write: tombstone(&e, e.Revision, Released)}, 0)
	if _, err := await(func(done func(uint64, error)) { i.js.StartPut(a.w, time.Now().Add(tryTimeout), done) }); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 5*time.Second, func() bool { after, _ := shown(); return after.rev != res.Lease.Revision }, "the view does not see the release")
	sh, it := i.view.lock("k")
	it.item = before
	sh.describe(it, e.Record.Holder, e.Record.Meta)
	sh.mu.Unlock()
	if owner, err := i.Owner(ctx, "k"); err != nil || owner.Lease.Holder != "" {
		t.Errorf("owner says %+v %v of a free key", owner, err)
	}
	if owner, err := do(i.Leases, Command{Op: OpOwner, Key: "k"}); err != nil || owner.Lease.Holder != "" {
		t.Errorf("an endpoint's owner says %+v %v of a free key", owner, err)
	}
	if res, err := do(i.Leases, Command{Op: OpAcquire, Key: "k", Holder: "second", TTL: time.Minute}); err != nil || res.Lease.Holder != "second" {
		t.Errorf("an endpoint's acquire says %+v %v of a free key", res, err)
	}
}

// do is a call as the endpoints make it.
func do(l *Leases, c Command) (Result, error) {
	ready := make(chan *Call, 1)
	l.Start(c, func(c *Call) { ready <- c })
	return (<-ready).Finish(context.Background())
}
