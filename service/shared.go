package service

import (
	"context"
	"sync"
)

// shared lets callers that want the same answer at the same time share one
// request, on the condition that the request began after they asked: a caller
// never gets an answer older than its question. Callers that come while a
// request for their key is under way share the next one.
type shared[T any] struct {
	mu     sync.Mutex
	flying map[string][]func(T, error) // a request under way, and who waits for the next
}

// start calls begin, now or when the request under way for key is answered, and
// then done with what begin tells. It returns without waiting.
func (s *shared[T]) start(key string, begin func(done func(T, error)), done func(T, error)) {
	s.mu.Lock()
	next, flying := s.flying[key]
	if flying {
		s.flying[key] = append(next, done)
		s.mu.Unlock()
		return
	}
	if s.flying == nil {
		s.flying = make(map[string][]func(T, error))
	}
	s.flying[key] = nil
	s.mu.Unlock()
	s.fly(key, begin, done)
}

// fly makes one request for those who wait, and then one for those who came
// meanwhile.
func (s *shared[T]) fly(key string, begin func(done func(T, error)), waiting ...func(T, error)) {
	begin(func(v T, err error) {
		s.mu.Lock()
		next := s.flying[key]
		if next == nil {
			delete(s.flying, key)
		} else {
			s.flying[key] = nil
		}
		s.mu.Unlock()
		if next != nil {
			s.fly(key, begin, next...)
		}
		for _, done := range waiting {
			done(v, err)
		}
	})
}

// ask is start for who can wait, with a request that blocks and is the only one of s.
func (s *shared[T]) ask(ctx context.Context, request func() (T, error)) (T, error) {
	begin := func(done func(T, error)) {
		go func() { done(caught(request)) }()
	}
	return within(ctx, func(done func(T, error)) { s.start("", begin, done) })
}
