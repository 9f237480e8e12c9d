package service

import (
	"context"
	"log/slog"
	"runtime/debug"
	"time"
)

// supervisor keeps the parts of an instance going that nobody waits for. A panic in one
// would end the process, and with it every call that could still be answered: it is
// counted and logged instead, and the part starts again from a state that is safe. A
// panic while a call is answered is the call's (caught). A nil supervisor lets panics go
// on, for tests.
type supervisor struct {
	obs Observer
	log *slog.Logger
}

// How soon a part starts again, longer each time; one that ran for restartMost starts
// soon again.
const (
	restartLeast = 100 * time.Millisecond
	restartMost  = 30 * time.Second
)

// keep runs a part until ctx is done. After a panic safe, if it is not nil, is called
// before anything else.
func (s *supervisor) keep(ctx context.Context, part string, run func(context.Context), safe func()) {
	backoff := restartLeast
	for {
		began := time.Now()
		s.once(part, func() { run(ctx) }, safe)
		if time.Since(began) > restartMost {
			backoff = restartLeast
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, restartMost)
	}
}

// once runs f, which may panic; then safe is called.
func (s *supervisor) once(part string, f, safe func()) {
	defer s.rescue(part, safe)
	f()
}

// rescue is deferred where a part may panic.
func (s *supervisor) rescue(part string, safe func()) {
	p := recover()
	if p == nil {
		return
	}
	stack := debug.Stack()
	if safe != nil {
		safe()
	}
	if s == nil {
		panic(p)
	}
	s.obs.Panic()
	s.log.Error("a part of the service panicked and starts again", "part", part, "panic", p, "stack", string(stack))
}
