//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// opTimeout bounds every single operation.
const opTimeout = 5 * time.Second

// errHeld is what acquire answers when another holder has the key.
var errHeld = errors.New("held by another")

// errNotHeld is what renew and release answer when the lease is not the
// caller's any more.
var errNotHeld = errors.New("not the holder")

// A target is a contestant: something that grants leases.
type target struct {
	name       string
	about      string   // one line for the report
	topologies []string // those it can run in
	maxHeld    int      // more held leases take it minutes to grant; 0: no limit
	grantless  bool     // it grants no leases and is in a workload only by name
	// missing says why the target cannot run here, "" when it can.
	missing func(e *env) string
	start   func(ctx context.Context, e *env, t topology) (system, error)
}

// A system is a target with its processes running.
type system interface {
	procs() []*child
	// caller is the session of caller i. Sessions may share connections; one
	// session is used by one goroutine at a time.
	caller(i int) (caller, error)
	close()
}

// A caller asks for leases. Revisions are the target's fences, 0 where it has
// none.
type caller interface {
	// acquire asks once for a key that is believed free.
	acquire(key, holder string, ttl time.Duration) (revision uint64, err error)
	renew(key, holder string, revision uint64, ttl time.Duration) (uint64, error)
	release(key, holder string, revision uint64) error
	// owner reads who holds the key, "" for nobody.
	owner(key string) (holder string, err error)
	// contend asks until the key is granted or ctx ends, in the best way the
	// target has: it waits in line, or asks again every poll.
	contend(ctx context.Context, key, holder string, ttl, poll time.Duration) (uint64, error)
}

// A poller asks once for a key that somebody may hold: errHeld then. Where a target
// has none, acquire says the same.
type poller interface {
	poll(key, holder string, ttl time.Duration) (revision uint64, err error)
}

// A batcher renews many leases of one holder in one call; that one of them was
// not renewed is an error.
type batcher interface {
	batches() bool // whether the service knows the call
	renewMany(holder string, keys []string, revisions []uint64, ttl time.Duration) ([]uint64, error)
}

// A forwarder sends a payload to the holder of a key, who sends it back.
type forwarder interface {
	forward(key, holder string, payload []byte) error
}

// An answerer can let the holder of the held leases answer forwards.
type answerer interface {
	answerForwards() error
}

// env is what all contestants share: options, built binaries, children.
type env struct {
	opts    options
	nursery *nursery
	dir     string // everything the run writes; removed at its end

	mu   sync.Mutex
	bins map[string]string
}

// tempDir is a new directory for one process.
func (e *env) tempDir(name string) (string, error) {
	return os.MkdirTemp(e.dir, name+"-")
}

// binary is the path of a program: as a flag gave it, or built once from pkg.
func (e *env) binary(ctx context.Context, name, given, pkg string) (string, error) {
	if given != "" {
		return filepath.Abs(given)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if bin, ok := e.bins[name]; ok {
		return bin, nil
	}
	e.opts.logf("building %s", pkg)
	bin, err := goBuild(ctx, e.dir, name, pkg)
	if err == nil {
		e.bins[name] = bin
	}
	return bin, err
}

// natsServer is the nats-server of the version in go.mod.
func (e *env) natsServer(ctx context.Context) (string, error) {
	return e.binary(ctx, "nats-server", e.opts.natsServer, "github.com/nats-io/nats-server/v2")
}

// contend asks with try until it grants.
func contend(ctx context.Context, poll time.Duration, try func() (uint64, bool, error)) (uint64, error) {
	for {
		revision, ok, err := try()
		if ok || err != nil {
			return revision, err
		}
		if poll > 0 {
			pause(ctx, poll)
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("contend: %w", ctx.Err())
		}
	}
}
