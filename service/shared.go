package service

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
)

// shared lets callers that want the same answer at the same time share one
// request, on the condition that the request began after they asked: a caller
// never gets an answer older than its question. Callers that come while a
// request is under way wait for the next one.
type shared[T any] struct {
	mu      sync.Mutex
	running bool
	next    *flight[T]
}

type flight[T any] struct {
	done chan struct{}
	val  T
	err  error
	// panicked is a panic of fn and its stack: every caller's, as if it had
	// called fn itself.
	panicked error
}

// do returns the result of a call of fn that began after do was called. A call
// made for its caller alone has ctx; one that is shared has none of its callers'
// limits and brings its own.
func (s *shared[T]) do(ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	s.mu.Lock()
	if !s.running {
		s.running = true
		s.mu.Unlock()
		defer s.ran(ctx, fn)
		return fn(ctx)
	}
	if s.next == nil {
		s.next = &flight[T]{done: make(chan struct{})}
	}
	f := s.next
	s.mu.Unlock()
	select {
	case <-f.done:
		if f.panicked != nil {
			panic(f.panicked)
		}
		return f.val, f.err
	case <-ctx.Done():
		var zero T
		return zero, context.Cause(ctx)
	}
}

// ran follows a call that was made for its caller alone.
func (s *shared[T]) ran(ctx context.Context, fn func(context.Context) (T, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		s.running = false
		return
	}
	go s.run(context.WithoutCancel(ctx), fn)
}

func (s *shared[T]) run(ctx context.Context, fn func(context.Context) (T, error)) {
	for {
		s.mu.Lock()
		f := s.next
		if f == nil {
			s.running = false
			s.mu.Unlock()
			return
		}
		s.next = nil
		s.mu.Unlock()
		f.call(ctx, fn)
	}
}

func (f *flight[T]) call(ctx context.Context, fn func(context.Context) (T, error)) {
	defer close(f.done)
	defer func() {
		if p := recover(); p != nil {
			f.panicked = fmt.Errorf("%v in a shared request:\n%s", p, debug.Stack())
		}
	}()
	f.val, f.err = fn(ctx)
}

// sharedReads is a set of shared requests by key, each there while it is used.
type sharedReads struct {
	mu sync.Mutex
	m  map[string]*sharedRead
}

type sharedRead struct {
	shared[Entry]
	set   *sharedReads
	key   string
	users int
}

// get returns key's shared request; its do must be called exactly once.
func (s *sharedReads) get(key string) *sharedRead {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.m[key]
	if r == nil {
		if s.m == nil {
			s.m = make(map[string]*sharedRead)
		}
		r = &sharedRead{set: s, key: key}
		s.m[key] = r
	}
	r.users++
	return r
}

func (r *sharedRead) do(ctx context.Context, fn func(context.Context) (Entry, error)) (Entry, error) {
	defer func() {
		r.set.mu.Lock()
		defer r.set.mu.Unlock()
		if r.users--; r.users == 0 {
			delete(r.set.m, r.key)
		}
	}()
	return r.shared.do(ctx, fn)
}
