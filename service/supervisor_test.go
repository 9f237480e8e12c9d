package service

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// fragile is an Observer and a log that panic where a test says so: both are called in
// the midst of each part.
type fragile struct {
	openGuard
	slog.Handler
	panics atomic.Int64

	mu     sync.Mutex
	text   bytes.Buffer
	breaks func(what string) bool // by a change, or by a line of the log
}

func (f *fragile) hit(what string) {
	f.mu.Lock()
	broken := f.breaks != nil && f.breaks(what)
	if broken {
		f.breaks = nil
	}
	f.mu.Unlock()
	if broken {
		panic("broken: " + what)
	}
}

func (f *fragile) on(breaks func(what string) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.breaks = breaks
}

func (f *fragile) Change(event string) { f.hit("change " + event) }
func (f *fragile) Panic()              { f.panics.Add(1) }

func (f *fragile) Enabled(context.Context, slog.Level) bool { return true }
func (f *fragile) WithAttrs([]slog.Attr) slog.Handler       { return f }
func (f *fragile) WithGroup(string) slog.Handler            { return f }

func (f *fragile) Handle(ctx context.Context, r slog.Record) error {
	f.hit(r.Message)
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Handler.Handle(ctx, r)
}

// told is what is logged of panics.
func (f *fragile) told() (lines []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for line := range strings.Lines(f.text.String()) {
		if strings.Contains(line, "panicked") {
			lines = append(lines, line)
		}
	}
	return lines
}

// openFragile starts an instance with it.
func openFragile(t *testing.T, server *testnats.Node) (*Instance, *fragile) {
	t.Helper()
	f := &fragile{}
	f.Handler = slog.NewTextHandler(&f.text, nil)
	nc := server.Connect(nats.ReconnectBufSize(-1))
	i, err := Open(Options{Store: nc, Hop: nc, Replicas: 1, GroupCommit: true, EventPrefix: "dagnats.lease", MicroName: "m", Observer: f, Logger: slog.New(f)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(i.Close)
	i.ready(t)
	return i, f
}

func (i *Instance) ready(t *testing.T) {
	t.Helper()
	testnats.Eventually(t, 20*time.Second, func() bool { return i.Health().Verdict == Sound && i.Viewing() && i.Allow(OpAcquire) == nil }, testnats.Lazy(func() string { return fmt.Sprintf("not ready: %+v", i.Health()) }))
}

// once holds that one panic of part was counted and logged with its stack.
func (f *fragile) once(t *testing.T, part string) {
	t.Helper()
	testnats.Eventually(t, 10*time.Second, func() bool { return f.panics.Load() > 0 && len(f.told()) > 0 }, "no panic")
	if n := f.panics.Load(); n != 1 {
		t.Errorf("%d panics are counted", n)
	}
	if told := f.told(); len(told) != 1 || !strings.Contains(told[0], "part="+part) || !strings.Contains(told[0], "supervisor_test.go") || !strings.Contains(told[0], "level=ERROR") {
		t.Errorf("logged: %q", told)
	}
}

func acquire(t *testing.T, i *Instance, key string, ttl time.Duration) Lease {
	t.Helper()
	r, err := i.Do(t.Context(), Command{Op: OpAcquire, Key: key, Holder: "h", TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	return r.Lease
}

// TestPanicInAPart: a part that panics starts again, from a state that is safe; it is
// counted, and logged with its stack.
func TestPanicInAPart(t *testing.T) {
	t.Parallel()
	t.Run("watcher", func(t *testing.T) {
		t.Parallel()
		i, f := openFragile(t, testnats.Server(t))
		epoch := i.view.epoch.Load()
		f.on(func(what string) bool { return what == "change acquired" })
		l := acquire(t, i, "k", time.Minute)
		f.once(t, "watcher")
		i.ready(t)
		if i.view.epoch.Load() == epoch {
			t.Error("the view goes on as if nothing were missing")
		}
		if s, ok := i.view.get("k", time.Now()); !ok || s.Revision != l.Revision || !s.Unbroken {
			t.Errorf("the view has %+v", s)
		}
	})
	t.Run("keeper", func(t *testing.T) {
		t.Parallel()
		server := testnats.Server(t)
		i, f := openFragile(t, server)
		sick := make(chan error, 1)
		f.on(func(what string) bool { return strings.HasPrefix(what, "bucket ") })
		i.keeper.suspend(time.Now().Add(time.Second), "a test") // a verdict to log
		testnats.Eventually(t, 10*time.Second, func() bool {
			if f.panics.Load() == 0 {
				return false
			}
			select {
			case sick <- i.Allow(OpAcquire):
			default:
			}
			return true
		}, "no panic")
		if err := <-sick; err == nil {
			t.Error("grants go on while nobody looks at the bucket")
		}
		f.once(t, "keeper")
		i.ready(t)
		acquire(t, i, "k", time.Minute)
	})
	t.Run("expirer", func(t *testing.T) {
		t.Parallel()
		server := testnats.Server(t)
		i, f := openFragile(t, server)
		f.on(func(what string) bool { return what == "lease expired" })
		acquire(t, i, "k", time.Second)
		f.once(t, "expirer")
		// The event that met the panic is stored; the next lease's is told as ever.
		acquire(t, i, "k2", time.Second)
		testnats.Eventually(t, 10*time.Second, func() bool {
			e, err := i.js.Get(t.Context(), "k2")
			return err == nil && e.Record != nil && e.Record.Event == Expired
		}, "the end of a lease is not told after the panic")
	})
	t.Run("committer", func(t *testing.T) {
		t.Parallel()
		i := openBatching(t)
		f := &fragile{}
		f.Handler = slog.NewTextHandler(&f.text, nil)
		g := &committer{js: i.js, sup: &supervisor{f, slog.New(f)}, current: func(w *Write) bool {
			f.hit("current " + w.Key)
			return true
		}}
		var ws []*Write
		for n := range 100 {
			ws = append(ws, testWrite(fmt.Sprintf("k-%d", n), 0))
		}
		seen := false // startMany asks first, take asks again
		f.on(func(what string) bool {
			again := seen
			seen = seen || what == "current k-50"
			return again && what == "current k-50"
		})
		results := awaitAll(len(ws), func(done func(int, uint64, error)) { g.startMany(ws, 5*time.Second, done) })
		for n, r := range results {
			if !errors.Is(r.Err, ErrNotStored) {
				t.Errorf("write %d: %d, %v", n, r.Revision, r.Err)
			}
		}
		f.once(t, "committer")
		for n, r := range awaitAll(len(ws), func(done func(int, uint64, error)) { g.startMany(ws, 5*time.Second, done) }) {
			if r.Err != nil {
				t.Errorf("after the panic write %d: %v", n, r.Err)
			}
		}
	})
	t.Run("way to the leader", func(t *testing.T) {
		t.Parallel()
		server := testnats.Server(t)
		f := &fragile{}
		f.Handler = slog.NewTextHandler(&f.text, nil)
		f.on(func(what string) bool { return what == "dial" })
		store := server.Connect()
		over := make(chan struct{})
		n := newNear(store, nil, slog.New(f))
		ctx, stop := context.WithCancel(t.Context())
		sup := &supervisor{f, slog.New(f)}
		go func() {
			defer close(over)
			sup.keep(ctx, "way", func(ctx context.Context) {
				f.hit("dial")
				n.run(ctx)
			}, n.drop)
		}()
		f.once(t, "way")
		testnats.Eventually(t, 5*time.Second, func() bool { n.leads(seat{}); return len(n.news) == 0 }, "it does not follow the leader after the panic")
		stop()
		<-over
	})
}

// TestSupervisor: a part that panics each time starts again less and less often, and
// leaves when it is told to.
func TestSupervisor(t *testing.T) {
	f := &fragile{}
	f.Handler = slog.NewTextHandler(&f.text, nil)
	s := &supervisor{f, slog.New(f)}
	ctx, stop := context.WithCancel(t.Context())
	var starts []time.Time
	safe := 0
	s.keep(ctx, "part", func(context.Context) {
		if starts = append(starts, time.Now()); len(starts) == 4 {
			stop()
		}
		var nothing *supervisor
		_ = nothing.obs
	}, func() { safe++ })
	if len(starts) != 4 || safe != 4 || f.panics.Load() != 4 || len(f.told()) != 4 {
		t.Fatalf("%d starts, %d times made safe, %d counted, %d logged", len(starts), safe, f.panics.Load(), len(f.told()))
	}
	for i := range 3 {
		if d := starts[i+1].Sub(starts[i]); d < restartLeast<<i {
			t.Errorf("start %d came %v after the one before", i+2, d)
		}
	}
}
