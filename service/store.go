package service

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Store is the bucket as the lease service needs it: one register per key,
// written by compare-and-set, read through the one node that orders the writes.
// storetest holds the executable form of this contract.
type Store interface {
	// Get reads the key's last message through the stream leader, never from a
	// replica and never from memory. A key that holds nothing is an Entry with
	// Revision 0 and no error. The answer was true at some instant between call
	// and return unless the leader was cut off from its peers: then it can be
	// stale for seconds, which only a later Put finds out.
	//
	// An error says nothing about the key. ErrNoBucket is proof that the bucket
	// is gone.
	//
	// Get and Put take at most tryTimeout, or until ctx's deadline if that is
	// earlier; that ctx is cancelled they may overlook as long.
	Get(ctx context.Context, key string) (Entry, error)

	// Put stores w on condition that the key's last sequence is w.Expect (0:
	// nothing is stored) and returns the revision of what was stored.
	//
	//	nil           stored, exactly once, under the returned revision
	//	ErrConflict   not stored: the condition does not hold, or another write of
	//	              the key is in flight (which may yet fail)
	//	ErrNotStored  not stored, for a reason that has nothing to do with the key
	//	ErrNoVerdict  sent, and nobody answered in time: it may be stored now,
	//	              later or never. A read that shows the old revision does not
	//	              prove that it failed. Putting the SAME w again is safe: the
	//	              condition lets at most one of them in.
	Put(ctx context.Context, w *Write) (revision uint64, err error)

	// PutMany stores writes of different keys side by side, each like Put, and
	// returns their verdicts in order.
	PutMany(ctx context.Context, ws []*Write) []PutResult

	// Now reads the clock of the stream leader, asked after the call began.
	Now(ctx context.Context) (time.Time, error)
}

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

// PutResult is what Put returns.
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

// notStored wraps cause as a write that was provably not stored.
func notStored(cause error) error { return fmt.Errorf("%w: %w", ErrNotStored, cause) }
