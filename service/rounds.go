package service

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// rounds let the acquires of one key that meet in this instance share one write and
// one read. While a write that takes or frees a key is under way, acquires of that
// key stand in line. When its verdict is there, those that came before it was sent
// are answered by it if it took the key; the others look again, with one read for all
// of them, and the first whom the key is free for writes next.
//
// A round ends with the verdict, which the Store tells in time, and after tryTimeout
// at the latest where somebody stands in line: nobody sleeps on because of another.
type rounds struct {
	shards [64]struct {
		mu   sync.Mutex
		open map[string]*round
	}
}

// round is the time of one write of a key, or of one read for those in line and the
// rest after it.
type round struct {
	line  []sitter
	limit *time.Timer // once somebody stands in line
	rests bool
}

// rest is how long after several were told that the key is held those who came since
// wait for the next read. A crowd that asks without a pause would have one under way all
// the time. The rest ends when the key is freed.
const rest = 5 * time.Millisecond

// sitter is an acquire that can stand in line.
type sitter interface {
	came() time.Time
	// next goes on with it, on whatever goroutine, and must not block.
	next(outcome)
}

// outcome is how a round ended for one in line. The zero outcome says: look again.
type outcome struct {
	won  *attempt // stored, and sent after it came
	read bool     // entry and err are what was read, from after it came
	Entry
	seen uint64 // how far the bucket had been seen before that
	err  error
}

// enter opens a round for a write of key; or puts who in the line of the round that is
// open and reports false. Without a t nothing is opened, without a who nobody stands
// in line.
func (l *Leases) enter(key string, t *round, who sitter) bool {
	shard, _ := l.view.place(key)
	sh := &l.rounds.shards[shard]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	now := sh.open[key]
	if now != nil && now.rests && t != nil && who == nil { // it is being freed
		t.line = now.line
		sh.open[key] = t
		now.limit.Stop()
		if len(t.line) > 0 {
			l.limitRound(key, t, tryTimeout)
		}
		return true
	}
	switch {
	case now == nil && t != nil:
		if sh.open == nil {
			sh.open = make(map[string]*round)
		}
		sh.open[key] = t
		return true
	case now == nil:
		return true
	case who == nil:
		return false
	}
	now.line = append(now.line, who)
	if now.limit == nil {
		l.limitRound(key, now, tryTimeout)
	}
	return false
}

// limitRound ends t after d at the latest. Its shard is locked.
func (l *Leases) limitRound(key string, t *round, d time.Duration) {
	t.limit = time.AfterFunc(d, func() {
		defer l.sup.rescue("rounds", nil)
		l.endRound(key, t, nil)
	})
}

// restRound makes t the rest after a round. Its shard is locked.
func (l *Leases) restRound(key string, t *round) {
	shard, _ := l.view.place(key)
	l.rounds.shards[shard].open[key] = t
	t.rests = true
	l.limitRound(key, t, rest)
}

// endRest ends the rest of a key that was freed, if there is one.
func (l *Leases) endRest(key string) {
	shard, _ := l.view.place(key)
	sh := &l.rounds.shards[shard]
	sh.mu.Lock()
	now := sh.open[key]
	rests := now != nil && now.rests
	sh.mu.Unlock()
	if rests {
		l.endRound(key, now, nil)
	}
}

// endRound ends t, if it is open still. won is the write, if it took the key and
// stands.
func (l *Leases) endRound(key string, t *round, won *attempt) {
	shard, _ := l.view.place(key)
	sh := &l.rounds.shards[shard]
	sh.mu.Lock()
	if sh.open[key] != t {
		sh.mu.Unlock()
		return
	}
	line := t.line
	if len(line) == 0 {
		delete(sh.open, key)
		sh.mu.Unlock()
		return
	}
	if t.limit != nil {
		t.limit.Stop()
	}
	slices.SortStableFunc(line, func(a, b sitter) int { return a.came().Compare(b.came()) })
	beaten := 0
	if won != nil {
		beaten, _ = slices.BinarySearchFunc(line, won.sent, func(s sitter, sent time.Time) int {
			return cmp.Or(s.came().Compare(sent), -1) // at the same time is before
		})
	}
	waiting := line[beaten:]
	var reading *round
	_, free := l.guess(Command{Op: OpAcquire, Key: key})
	switch {
	case beaten > 1:
		l.restRound(key, &round{line: waiting})
		waiting = nil
	case free || len(waiting) == 0:
		delete(sh.open, key)
	default: // who comes from now on waits for the read
		reading = &round{}
		sh.open[key] = reading
	}
	sh.mu.Unlock()
	for _, s := range line[:beaten] {
		s.next(outcome{won: won})
	}
	if reading == nil {
		for _, s := range waiting {
			s.next(outcome{})
		}
		return
	}
	seen := l.view.position.Load()
	l.startRead(key, func(e Entry, err error) {
		sh.mu.Lock()
		var late []sitter
		if reading.limit != nil {
			reading.limit.Stop()
		}
		if sh.open[key] == reading { // else it ended, for the read took long
			if _, left := l.view.last(key, time.Now()); left > 0 && err == nil && e.isLease() && len(waiting) > 1 {
				l.restRound(key, reading)
			} else {
				late = reading.line
				delete(sh.open, key)
			}
		}
		sh.mu.Unlock()
		for _, s := range waiting {
			s.next(outcome{read: true, Entry: e, seen: seen, err: err})
		}
		for _, s := range late {
			s.next(outcome{})
		}
	})
}

// beaten answers c by a write that was sent after c came and is stored: at that
// instant the key was the winner's. ok is false when there is none or it is too long ago.
func beaten(c Command, won *attempt) (res Result, ok bool) {
	if won == nil {
		return Result{}, false
	}
	left := won.rec.TTL() - time.Since(won.sent)
	if left <= 0 {
		return Result{}, false
	}
	res = Result{Kind: kinds.Denied, Lease: leaseOf(won.rec, won.rev, left)}
	if won.rec.Holder == c.Holder {
		res.Kind = kinds.Granted
	}
	return res, true
}

// visitor is a sitter that somebody waits for.
type visitor struct {
	at   time.Time
	told chan outcome // capacity 1
}

func (v visitor) came() time.Time { return v.at }

func (v visitor) next(o outcome) { v.told <- o }

// lineUp opens the round t for the write of c, which came then, if it takes or frees
// the key. leads is false if it stood in line instead: out is how that ended.
func (l *Leases) lineUp(ctx context.Context, c Command, came time.Time, t *round) (leads bool, out outcome, err error) {
	switch c.Op {
	case OpAcquire:
	case OpRelease, OpEvict: // they wait for nobody
		l.enter(c.Key, t, nil)
		return true, outcome{}, nil
	default:
		return true, outcome{}, nil
	}
	v := visitor{came, make(chan outcome, 1)}
	if l.enter(c.Key, t, v) {
		return true, outcome{}, nil
	}
	select {
	case out = <-v.told:
		rethrow(out.err)
		return false, out, nil
	case <-ctx.Done():
		return false, outcome{}, callError(ctx, context.Cause(ctx))
	}
}
