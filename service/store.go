package service

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"
)

// Store is the bucket as the lease service needs it: one register per key,
// written by compare-and-set, read through the one node that orders the writes.
type Store interface {
	// StartGet reads the key's last message through the stream leader, never from
	// a replica and never from memory. A key that holds nothing is an Entry with
	// Revision 0 and no error. The answer was true at some instant between the
	// start and done unless the leader was cut off from its peers: then it can be
	// stale for seconds, which only a later write finds out.
	//
	// An error says nothing about the key. ErrNoBucket is proof that the bucket
	// is gone.
	//
	// known, if it is not nil, is asked for the revision and time that were found; what
	// it has is told in place of what is stored. (A revision alone does not say which
	// message it is: a restored bucket issues it again.)
	//
	// Start functions return without waiting. done is called once, within wait,
	// perhaps before they return; it must not block.
	StartGet(key string, wait time.Duration, known Known, done func(Entry, error))

	// StartPut stores w on condition that the key's last sequence is w.Expect (0:
	// nothing is stored) and tells the revision of what was stored.
	//
	//	nil           stored, exactly once, under the revision told
	//	ErrConflict   not stored: the condition does not hold, or another write of
	//	              the key is in flight (which may yet fail)
	//	ErrNotStored  not stored, for a reason that has nothing to do with the key
	//	ErrNoVerdict  sent, and nobody answered in time: it may be stored now,
	//	              later or never. A read that shows the old revision does not
	//	              prove that it failed. Putting the SAME w again is safe: the
	//	              condition lets at most one of them in.
	//
	// The verdict is told by deadline, and at most tryTimeout after w was sent. Where
	// many writes come at once w may have to wait for others; it is not sent if that
	// leaves it little time.
	StartPut(w *Write, deadline time.Time, done func(revision uint64, err error))

	// PutMany stores writes of different keys side by side and returns the verdicts
	// that StartPut would tell, in order.
	PutMany(ws []*Write, deadline time.Time) []PutResult

	// Head asks the stream leader, after the call began, for its clock and for the
	// last sequence of the bucket.
	Head(ctx context.Context) (Head, error)
}

// Head is where the bucket stands.
type Head struct {
	Now  time.Time
	Last uint64
}

// Known gives the stored message of a revision without reading it; ok is false
// where that is not known.
type Known func(key string, revision uint64, at time.Time) (e Entry, ok bool)

// Write is one conditional message.
type Write struct {
	Key       string
	Expect    uint64
	Event     Event
	Body      []byte
	Nonce     string
	TTL       time.Duration // whole seconds: when the server removes the message
	Tombstone bool
}

// PutResult is what StartPut tells.
type PutResult struct {
	Revision uint64
	Err      error
}

// The verdicts of a Store. Test with errors.Is.
var (
	ErrConflict  = errors.New("another write of this key came first")
	ErrNotStored = errors.New("not stored")
	ErrNoVerdict = errors.New("no verdict came back in time")
	ErrNoBucket  = errors.New("the bucket does not exist")
	ErrNoAnswer  = errors.New("JetStream did not answer")
)

// conflict is an ErrConflict with what the refuser has as the key's last sequence,
// nil where it does not say.
type conflict struct {
	last  *uint64
	cause error
}

func (c *conflict) Error() string   { return fmt.Sprintf("%v: %v", ErrConflict, c.cause) }
func (c *conflict) Unwrap() []error { return []error{ErrConflict, c.cause} }

// notStored wraps cause as a write that was provably not stored.
func notStored(cause error) error { return fmt.Errorf("%w: %w", ErrNotStored, cause) }

// await waits for what start tells; start sees to it that it does.
func await[T any](start func(done func(T, error))) (T, error) {
	type outcome struct {
		v   T
		err error
	}
	told := make(chan outcome, 1)
	start(func(v T, err error) { told <- outcome{v, err} })
	o := <-told
	rethrow(o.err)
	return o.v, o.err
}

// panicked is a panic on its way to those who asked: it goes on as theirs.
type panicked struct {
	value any
	stack []byte
}

func (p *panicked) Error() string { return fmt.Sprintf("%v, at\n%s", p.value, p.stack) }

// caught calls f and makes an error of a panic in it.
func caught[T any](f func() (T, error)) (v T, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicked{p, debug.Stack()}
		}
	}()
	return f()
}

// rethrow panics if err is a panic that was caught.
func rethrow(err error) {
	if p, ok := errors.AsType[*panicked](err); ok {
		panic(p)
	}
}
