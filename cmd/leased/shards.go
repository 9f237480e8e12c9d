//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/leased/leased/client"
	"github.com/leased/leased/service/kinds"
)

const maxShards = 10_000

// shardKeys are the keys of --shards.
func (r *runCmd) shardKeys() (keys []string, err error) {
	if r.Shards == "" {
		return nil, nil
	}
	a, b, _ := strings.Cut(r.Shards, "-")
	from, err1 := strconv.ParseUint(a, 10, 32)
	to, err2 := strconv.ParseUint(b, 10, 32)
	if err1 != nil || err2 != nil || from > to || to-from >= maxShards {
		return nil, usagef("--shards %s: must be a range such as 0-63, of at most %d keys", r.Shards, maxShards)
	}
	for i := from; i <= to; i++ {
		keys = append(keys, fmt.Sprintf("%s-%d", r.Key, i))
	}
	return keys, nil
}

// shards is run with --shards.
func (w *wrapper) shards() (code int, err error) {
	ctx, leave := context.WithCancelCause(context.Background())
	defer leave(nil)
	s := &sharder{wrapper: w, leave: leave, pass: map[*leash]chan os.Signal{}}
	go s.watch(ctx)
	work := s.one
	var running sync.WaitGroup
	if w.Share {
		all := newShare(ctx, s)
		running.Go(all.run)
		work = all.work
	}
	err = w.client.Shards(ctx, w.Key, w.keys, client.ShardsOptions{
		HoldOptions: client.HoldOptions{
			Holder: w.Holder, TTL: w.TTL, Meta: w.Meta, Margin: w.Grace + w.killMargin(),
			OnError: w.complain,
		},
		Work: work,
	})
	leave(err) // it may have been refused
	running.Wait()
	var known *exitError
	switch {
	case errors.As(err, &known):
		if _, silent := errors.AsType[silentExit](known.err); silent {
			return known.code, nil
		}
		return known.code, known.err
	case kinds.Of(err) == kinds.Invalid:
		return exitUsage, err
	}
	return exitBefore, err
}

// sharder is a member of a group that shares keys.
type sharder struct {
	*wrapper
	leave context.CancelCauseFunc // with an *exitError

	mu   sync.Mutex
	pass map[*leash]chan os.Signal // to the commands that run
}

// watch ends the membership by signals that ask for it and passes others on.
func (s *sharder) watch(ctx context.Context) {
	for {
		select {
		case sig := <-s.signals:
			if asksToEnd(sig) {
				s.leave(&exitError{exitSignal + int(sig.(syscall.Signal)), fmt.Errorf("%v", sig)})
				return
			}
			s.mu.Lock()
			for _, c := range s.pass {
				select {
				case c <- sig:
				default: // its guard is stopped
				}
			}
			s.mu.Unlock()
		case err := <-s.refused:
			s.leave(&exitError{exitBefore, err})
			return
		case <-ctx.Done():
			return
		}
	}
}

// one has one command for one key.
func (s *sharder) one(ctx context.Context, h *client.Hold) {
	s.command(ctx, func() *leash {
		l := s.leash(h)
		l.term = false // there is one for all
		return l
	})
}

// command runs the command, again and again with --restart, until ctx is done or
// it was cut. A command that ends by itself ends the membership.
func (s *sharder) command(ctx context.Context, fresh func() *leash) {
	for ctx.Err() == nil {
		l, signals := fresh(), make(chan os.Signal, 16)
		l.signals = signals
		s.mu.Lock()
		s.pass[l] = signals
		s.mu.Unlock()
		r := l.run(ctx)
		s.mu.Lock()
		delete(s.pass, l)
		s.mu.Unlock()
		switch {
		case r.cut, ctx.Err() != nil, !r.started && r.code == exitLost:
			return
		case !r.started:
			s.leave(&exitError{r.code, r.err})
		case !s.Restart || !worthAnother(r.code):
			s.leave(&exitError{r.code, silentExit(r.code)})
		}
		pause(ctx, restartPause)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// share is the one command for all keys of --share.
type share struct {
	*sharder
	ctx     context.Context // of the membership
	changed chan struct{}

	mu    sync.Mutex
	news  chan struct{} // closed and made anew when anything here changes
	grips map[string]*grip
	keys  int                     // counts changes of the set of keys
	told  int                     // the last of them that the command was told of
	cut   context.CancelCauseFunc // ends the command, nil while none runs
}

// grip is a key of ours.
type grip struct {
	hold   *client.Hold
	listed bool // the command is told of it
	lost   bool // the command must be dead before it is let go
}

// gather is how long the first keys are waited for before the command is
// started.
const gather = 100 * time.Millisecond

func newShare(ctx context.Context, s *sharder) *share {
	return &share{sharder: s, ctx: ctx, changed: make(chan struct{}, 1), news: make(chan struct{}), grips: map[string]*grip{}}
}

// change changes what mu guards.
func (s *share) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.news)
	s.news = make(chan struct{})
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// await waits until ok, or ctx is done.
func (s *share) await(ctx context.Context, ok func() bool) {
	for {
		s.mu.Lock()
		so, news := ok(), s.news
		s.mu.Unlock()
		if so {
			return
		}
		select {
		case <-news:
		case <-ctx.Done():
			return
		}
	}
}

// work has one key until ctx is done and the command does without it.
func (s *share) work(ctx context.Context, h *client.Hold) {
	key, g := h.Key(), &grip{hold: h, listed: true}
	s.change(func() {
		s.grips[key] = g
		s.keys++
	})
	<-ctx.Done()
	ours := func() bool { return s.ctx.Err() == nil && h.Check() == nil }
	if ours() { // it is to move
		var version int
		s.change(func() {
			g.listed = false
			s.keys++
			version = s.keys
		})
		s.await(h.Context(), func() bool { return s.cut == nil || s.told >= version })
		pause(h.Context(), s.Grace)
	}
	s.change(func() {
		if g.lost = !ours() && s.cut != nil; g.lost {
			s.cut(fmt.Errorf("%s is lost", key))
		} else {
			delete(s.grips, key)
		}
	})
	s.await(context.Background(), func() bool { return s.grips[key] != g })
}

// run runs the command while there are keys.
func (s *share) run() {
	for {
		s.await(s.ctx, func() bool { return len(s.list()) > 0 })
		pause(s.ctx, gather)
		if s.ctx.Err() != nil {
			return
		}
		ctx, cut := context.WithCancelCause(s.ctx)
		s.change(func() { s.cut = cut })
		s.command(ctx, s.leash)
		cut(nil)
		s.change(func() {
			s.cut = nil
			maps.DeleteFunc(s.grips, func(_ string, g *grip) bool { return g.lost })
		})
	}
}

// list is what the command is told of, in the order of --shards. The caller has
// the mutex.
func (s *share) list() []held {
	list := []held{}
	for _, key := range s.wrapper.keys {
		if g := s.grips[key]; g != nil && g.listed && !g.lost {
			list = append(list, s.held(g.hold))
		}
	}
	return list
}

func (s *share) leash() *leash {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []string
	holder := s.Holder
	for _, l := range s.list() {
		keys, holder = append(keys, l.Key), l.Holder
	}
	return &leash{
		wrapper: s.wrapper, term: true, file: filepath.Join(s.dir, "keys"),
		env: []string{"LEASE_KEY=" + s.Key, "LEASE_HOLDER=" + holder, "LEASE_KEYS=" + strings.Join(keys, ",")},
		tie: s.tie, told: func(version int) { s.change(func() { s.told = version }) }, changed: s.changed,
	}
}

func (s *share) tie() tie {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := tie{lease: s.list(), keys: s.keys}
	for _, g := range s.grips {
		if until := g.hold.Deadline(); t.until.IsZero() || until.Before(t.until) {
			t.until = until
		}
	}
	return t
}
