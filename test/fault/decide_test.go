package fault

import (
	"fmt"
	"testing"
	"time"

	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// The pure decision is held against a register so small that it can be read at
// a glance, over every history of the steps below up to a length. Between the
// two stands a stream with one key: messages with a lifetime, which the server
// removes some time after it is over.

// ref is the register: who holds the key, under what, until when.
type ref struct {
	holder string
	rev    uint64
	end    int
}

// message is what the stream stored, with what the model knows of it.
type message struct {
	entry service.Entry
	life  int // the server may remove it from then on
	tomb  bool
}

// world is one state of the walk.
type world struct {
	now  int // seconds
	seq  uint64
	last *message // nil: the key holds nothing
	past *message // the last lease the instance saw
	ref  ref
	// lives is the latest end of any lease so far: one that was replaced can come
	// back after a crash until then, if what replaced it is gone.
	lives int
	told  uint64 // the last revision whose end was told
}

type walk struct {
	t     *testing.T
	trail []string
	nodes int
	found int
}

func (w *walk) fail(format string, args ...any) {
	w.found++
	if w.found <= 5 {
		w.t.Errorf("%s after %v", fmt.Sprintf(format, args...), w.trail)
	}
}

var zero = time.Unix(1_000_000, 0)

func second(n int) time.Time { return zero.Add(time.Duration(n) * time.Second) }

// steps are all moves: what clients do, what the clock does, what the server does.
var steps = []struct {
	name string
	cmd  service.Command
	old  bool // name the revision before the current one
}{
	{name: "acquire a 1", cmd: service.Command{Op: service.OpAcquire, Holder: "a", TTL: time.Second}},
	{name: "acquire a 3", cmd: service.Command{Op: service.OpAcquire, Holder: "a", TTL: 3 * time.Second}},
	{name: "acquire b 1", cmd: service.Command{Op: service.OpAcquire, Holder: "b", TTL: time.Second}},
	{name: "renew a 1", cmd: service.Command{Op: service.OpRenew, Holder: "a", TTL: time.Second}},
	{name: "renew a 3", cmd: service.Command{Op: service.OpRenew, Holder: "a", TTL: 3 * time.Second}},
	{name: "renew a old", cmd: service.Command{Op: service.OpRenew, Holder: "a", TTL: time.Second}, old: true},
	{name: "renew b", cmd: service.Command{Op: service.OpRenew, Holder: "b", TTL: time.Second}},
	{name: "release a", cmd: service.Command{Op: service.OpRelease, Holder: "a"}},
	{name: "release b old", cmd: service.Command{Op: service.OpRelease, Holder: "b"}, old: true},
	{name: "owner", cmd: service.Command{Op: service.OpOwner}},
	{name: "evict", cmd: service.Command{Op: service.OpEvict}},
	{name: "expire", cmd: service.Command{Op: service.OpExpire}},
	{name: "tick"},
	{name: "sweep"},
}

func (w *walk) explore(at world, depth int) {
	w.nodes++
	if depth == 0 || w.found > 5 {
		return
	}
	for _, s := range steps {
		w.trail = append(w.trail, s.name)
		next, ok := at, true
		switch s.name {
		case "tick":
			next.now++
		case "sweep":
			ok = at.last != nil && at.now >= at.last.life
			next.last = nil
		default:
			c := s.cmd
			c.Key = "k"
			c.Revision = at.seq
			if at.past != nil {
				c.Revision = at.past.entry.Revision
			}
			if s.old {
				c.Revision--
			}
			next = w.command(at, c)
		}
		if ok {
			w.explore(next, depth-1)
		}
		w.trail = w.trail[:len(w.trail)-1]
	}
}

// command lets Decide and the register judge c and applies what was decided.
func (w *walk) command(at world, c service.Command) world {
	st := service.State{Entry: service.Entry{Key: "k"}}
	if at.last != nil {
		st.Entry = at.last.entry
		st.Past = !at.last.tomb && at.now >= int(at.last.entry.End().Sub(zero)/time.Second)
	} else if at.past != nil {
		st.Prior = &at.past.entry
	}
	d := service.Decide(st, c)

	live := at.ref.holder != "" && at.now < at.ref.end
	mine := live && at.ref.holder == c.Holder
	pair := mine && at.ref.rev == c.Revision
	want, writes := kinds.Lost, false
	switch c.Op {
	case service.OpAcquire:
		switch {
		case mine:
			want = kinds.Granted
		case live:
			want = kinds.Denied
		default:
			want, writes = kinds.Granted, true
		}
	case service.OpRenew:
		if pair {
			want, writes = kinds.Renewed, true
		}
	case service.OpRelease:
		if pair {
			want, writes = kinds.Released, true
		}
	case service.OpEvict:
		if live && at.ref.rev == c.Revision {
			want, writes = kinds.Evicted, true
		}
	case service.OpOwner:
		want = kinds.Free
		if live {
			want = kinds.Held
		}
	case service.OpExpire:
		if at.ref.holder != "" && !live && at.ref.rev == c.Revision && (at.last == nil || !at.last.tomb) && at.told != c.Revision {
			want, writes = kinds.Free, true
		}
	}
	if d.Kind != want || (d.Write != nil) != writes {
		w.fail("%v: %s, write %v; want %s, write %v", c, d.Kind, d.Write != nil, want, writes)
		return at
	}
	if d.Write == nil {
		return at
	}
	return w.store(at, c, d.Write)
}

// store applies a write as the stream would and checks its conditions.
func (w *walk) store(at world, c service.Command, n *service.Next) world {
	var last uint64
	if at.last != nil {
		last = at.last.entry.Revision
	}
	if n.Expect != last {
		w.fail("%v is conditional on %d, stored is %d", c, n.Expect, last)
	}
	ttl := int(n.TTL / time.Second)
	left := 0
	if !n.Horizon.IsZero() {
		left = int(n.Horizon.Sub(second(at.now)) / time.Second)
	}
	at.seq++
	m := &message{entry: service.Entry{Key: "k", Revision: at.seq, At: second(at.now)}}
	rec := &service.Record{V: 1, Key: "k", Holder: n.Holder, TTLMillis: n.TTL.Milliseconds(), AcquiredAt: n.Tenure, Event: n.Event, Previous: n.Previous, Revision: n.Ended, Evicted: n.Evicted}
	m.entry.Record = rec
	if left > 0 {
		rec.Horizon = service.TimestampOf(n.Horizon)
	}
	switch n.Event {
	case service.Released, service.Expired:
		m.tomb, m.entry.Tombstone = true, true
		m.life = at.now + max(left, 0) + 32
		if n.Ended != at.ref.rev {
			w.fail("%v ends revision %d, held was %d", c, n.Ended, at.ref.rev)
		}
		if n.Event == service.Expired {
			at.told = n.Ended
		}
		at.ref.holder = ""
	default:
		m.life = at.now + ttl
		if n.Outlives && left > ttl {
			m.life = at.now + left + 2
		} else {
			rec.Horizon = 0
		}
		if p := n.Previous; p != nil && p.Ended == service.EndedExpired {
			if p.Revision == at.told {
				w.fail("%v tells an expiry that was told before", c)
			}
			at.told = p.Revision
		}
		if c.Op == service.OpAcquire && at.ref.holder != "" && at.told != at.ref.rev {
			w.fail("%v tells nothing of the end of revision %d", c, at.ref.rev)
		}
		at.ref = ref{n.Holder, at.seq, at.now + ttl}
		at.past = m
	}
	// Whatever was replaced may come back after a crash once this message is
	// gone: it must not live longer.
	if at.lives > m.life {
		w.fail("%v lives until %d s, something before it until %d s", c, m.life, at.lives)
	}
	if !m.tomb {
		at.lives = max(at.lives, at.now+ttl)
	}
	at.last = m
	return at
}

func TestDecideOverAllShortHistories(t *testing.T) {
	depth := 6
	if testing.Short() {
		depth = 4
	}
	w := &walk{t: t}
	start := time.Now()
	w.explore(world{seq: 4}, depth)
	t.Logf("%d states in %v", w.nodes, time.Since(start).Round(time.Millisecond))
}
