package service

import "sync"

// shared lets callers that want the same answer at the same time share one
// request, on the condition that the request began after they asked: a caller
// never gets an answer older than its question. Callers that come while a
// request for their key is under way share the next one.
type shared[T any] struct {
	mu     sync.Mutex
	flying map[string]*flight[T] // by key
}

// flight is a request under way, with those who wait for the next.
type flight[T any] struct {
	next []func(T, error)
}

// start calls begin, now or when the request under way for key is answered, and
// then done with what begin tells. It returns without waiting.
func (s *shared[T]) start(key string, begin func(done func(T, error)), done func(T, error)) {
	s.mu.Lock()
	if f := s.flying[key]; f != nil {
		f.next = append(f.next, done)
		s.mu.Unlock()
		return
	}
	if s.flying == nil {
		s.flying = make(map[string]*flight[T])
	}
	s.flying[key] = &flight[T]{}
	s.mu.Unlock()
	begin(func(v T, err error) {
		s.landed(key, begin)
		done(v, err)
	})
}

// landed follows an answer for key: it begins the request of those who came
// meanwhile.
func (s *shared[T]) landed(key string, begin func(done func(T, error))) {
	s.mu.Lock()
	f := s.flying[key]
	next := f.next
	f.next = nil
	if len(next) == 0 {
		delete(s.flying, key)
	}
	s.mu.Unlock()
	if len(next) == 0 {
		return
	}
	begin(func(v T, err error) {
		s.landed(key, begin)
		for _, done := range next {
			done(v, err)
		}
	})
}
