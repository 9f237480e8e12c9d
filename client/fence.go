package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// StaleError says that a write came under a fence lower than one seen before: its
// writer lost the lease, whatever it believes.
type StaleError struct {
	Resource string
	Fence    uint64
	Highest  uint64
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("fence %d is stale: %s has seen %d", e.Fence, e.Resource, e.Highest)
}

// FenceStore remembers the highest fence of each resource.
type FenceStore interface {
	// Raise makes fence the highest of resource unless a higher one is stored, in
	// one atomic step, and returns what is the highest then.
	Raise(ctx context.Context, resource string, fence uint64) (highest uint64, err error)
}

// Fence is the guard in front of a resource: it admits a write whose fence is at
// least the highest one seen, and refuses lower ones. The fence of a write is the
// Tenure of the Hold under which it is made: the same for all its writes, in
// whatever order they come, and higher than that of every holder before. The zero value remembers in
// memory, one number for each resource, for as long as the process lives; that is
// right when the resource lives no longer.
//
// A check and a write that are two steps leave a gap for a paused writer. So Do
// runs the write while no other of the same resource runs; and a resource behind
// a network must check by itself, in the same step as the write: see FenceTableSQL,
// PutFenced, or for an object store: read the object's metadata, compare the
// fence kept there, and put data and fence together on the condition that the
// object is still the one read (If-Match with its ETag, If-None-Match: * for the
// first); on a failed condition read again.
//
// client/testdata/fence has the rules as test vectors for other languages.
type Fence struct {
	Store FenceStore // memory if nil

	mu        sync.Mutex
	resources map[string]*fenced
}

type fenced struct {
	mu      sync.Mutex
	highest uint64
}

// Do runs write, which may be nil, if fence is not stale: otherwise it returns a
// *StaleError. Writes to one resource run one after another (H6).
func (f *Fence) Do(ctx context.Context, resource string, fence uint64, write func() error) error {
	f.mu.Lock()
	if f.resources == nil {
		f.resources = map[string]*fenced{}
	}
	r := f.resources[resource]
	if r == nil {
		r = &fenced{}
		f.resources[resource] = r
	}
	f.mu.Unlock()

	r.mu.Lock()
	defer r.mu.Unlock()
	if fence >= r.highest && fence > 0 && f.Store != nil {
		highest, err := f.Store.Raise(ctx, resource, fence)
		if err != nil {
			return err
		}
		r.highest = max(r.highest, highest)
	}
	if fence < r.highest || fence == 0 {
		return &StaleError{resource, fence, r.highest}
	}
	r.highest = fence
	if write == nil {
		return nil
	}
	return write()
}

// SQL for a fence beside the data, for PostgreSQL and SQLite (3.24 or newer).
// Revisions fit a BIGINT: they begin at microseconds since 1970.
//
// Run FenceAdmitSQL first in the transaction that writes, with the resource and
// the fence. If it affects no row, the fence is stale: roll back. If it affects
// one, its lock on the row keeps a later owner's transaction waiting until this
// one has ended, so nothing can come between.
//
// A table with one row a resource can do without: give it a column fence and write
//
//	UPDATE thing SET value = $1, fence = $2 WHERE id = $3 AND fence <= $2
const (
	FenceTableSQL = `CREATE TABLE IF NOT EXISTS lease_fence (resource TEXT PRIMARY KEY, fence BIGINT NOT NULL CHECK (fence > 0))`
	FenceAdmitSQL = `INSERT INTO lease_fence (resource, fence) VALUES ($1, $2)
ON CONFLICT (resource) DO UPDATE SET fence = excluded.fence WHERE lease_fence.fence <= excluded.fence`
)

// fencedValue is what PutFenced stores.
type fencedValue struct {
	Fence uint64 `json:"fence"`
	Data  []byte `json:"data"`
}

// PutFenced writes data to a key of a NATS KV bucket together with fence, unless
// the key has a higher one: then it returns a *StaleError. The value stored is
// {"fence":n,"data":"base64"}. All writers of the key must use it, and must not
// delete the key, as the fence would go with it.
func PutFenced(ctx context.Context, kv jetstream.KeyValue, key string, fence uint64, data []byte) error {
	if fence == 0 {
		return &StaleError{Resource: key} // no revision
	}
	value, err := json.Marshal(fencedValue{fence, data})
	if err != nil {
		return err
	}
	for {
		_, highest, revision, err := getFenced(ctx, kv, key)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
			_, err = kv.Create(ctx, key, value)
		case err != nil:
			return err
		case fence < highest:
			return &StaleError{key, fence, highest}
		default:
			_, err = kv.Update(ctx, key, value, revision)
		}
		if !errors.Is(err, jetstream.ErrKeyExists) && !errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
			return err
		}
		if !sleep(ctx, jitter(10*time.Millisecond, 1)) {
			return context.Cause(ctx)
		}
	}
}

// GetFenced reads what PutFenced wrote.
func GetFenced(ctx context.Context, kv jetstream.KeyValue, key string) (data []byte, fence uint64, err error) {
	data, fence, _, err = getFenced(ctx, kv, key)
	return data, fence, err
}

func getFenced(ctx context.Context, kv jetstream.KeyValue, key string) (data []byte, fence, revision uint64, err error) {
	e, err := kv.Get(ctx, key)
	if err != nil {
		return nil, 0, 0, err
	}
	var v fencedValue
	if err := json.Unmarshal(e.Value(), &v); err != nil || v.Fence == 0 {
		return nil, 0, 0, fmt.Errorf("key %s of bucket %s was not written under a fence", key, kv.Bucket())
	}
	return v.Data, v.Fence, e.Revision(), nil
}
