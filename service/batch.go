package service

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nuid"
)

// Headers of an atomic batch (nats-server 2.12 and newer).
const (
	headerBatchID     = "Nats-Batch-Id"
	headerBatchSeq    = "Nats-Batch-Sequence"
	headerBatchCommit = "Nats-Batch-Commit"
)

// Bounds of one batch. The server takes 1000 writes, and makes a store of its
// own on disk for each batch, which costs as much as a dozen flushes.
const (
	minBatch = 12
	maxBatch = 512
)

// committer groups conditional writes where each one costs the server a flush
// to disk: while one flush is under way the writes that come in gather, and go
// out as one atomic batch when it is done. A lone write goes out at once and
// alone, so that it is not slower than without grouping.
//
// A batch is all or nothing: one condition that does not hold stores nothing
// and does not say whose it was. So a write whose condition contradicts what is
// known goes alone, a key stands at most once in a batch, and of a batch that was
// refused the keys are read: the writes at fault are told, the others go out
// again together. Cutting it in halves would cost a flush for each piece.
type committer struct {
	js  *js
	sup *supervisor
	// current says whether w's condition agrees with what is known of its key.
	current func(w *Write) bool

	mu     sync.Mutex
	queue  []*pendingWrite
	flying bool          // a flush is under way
	want   int           // fly waits for so many, 0: it does not
	full   chan struct{} // closed when they are there
}

type pendingWrite struct {
	w     *Write
	done  func(uint64, error)
	timer *time.Timer // until the caller waits no longer; nil: as long as it takes
	told  atomic.Bool // nobody waits any more
}

// finish tells the verdict, if none has been told.
func (p *pendingWrite) finish(rev uint64, err error) {
	if !p.told.CompareAndSwap(false, true) {
		return
	}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.done(rev, err)
}

// start stores w like js.startOne, perhaps together with others.
func (c *committer) start(w *Write, wait time.Duration, done func(uint64, error)) {
	if !c.current(w) {
		c.js.startOne(w, wait, done)
		return
	}
	c.mu.Lock()
	if c.flying {
		c.enqueue(c.pending(w, wait, done))
		c.mu.Unlock()
		return
	}
	c.flying = true
	c.mu.Unlock()
	c.js.startOne(w, wait, func(rev uint64, err error) {
		c.mu.Lock()
		if len(c.queue) == 0 {
			c.flying = false
		} else {
			go c.launch()
		}
		c.mu.Unlock()
		done(rev, err)
	})
}

// queued is how many wait for the next batch.
func (c *committer) queued() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.queue)
}

// pending makes w ready for the line. c.mu is held.
func (c *committer) pending(w *Write, wait time.Duration, done func(uint64, error)) *pendingWrite {
	p := &pendingWrite{w: w, done: done}
	p.timer = time.AfterFunc(wait, func() { c.expired(p) })
	return p
}

// expired ends p at the end of its time. A write that is still in the line is
// taken off it.
func (c *committer) expired(p *pendingWrite) {
	c.mu.Lock()
	i := slices.Index(c.queue, p)
	if i >= 0 {
		c.queue = slices.Delete(c.queue, i, i+1)
	}
	c.mu.Unlock()
	if i >= 0 {
		p.finish(0, notStored(errTooLate))
		return
	}
	p.finish(0, fmt.Errorf("%w: %w", ErrNoVerdict, context.DeadlineExceeded))
}

// startMany stores writes of different keys like start.
func (c *committer) startMany(ws []*Write, wait time.Duration, done func(int, uint64, error)) {
	var aside []int
	c.mu.Lock()
	for i, w := range ws {
		if !c.current(w) {
			aside = append(aside, i)
			continue
		}
		c.enqueue(c.pending(w, wait, func(rev uint64, err error) { done(i, rev, err) }))
	}
	if !c.flying && len(c.queue) > 0 {
		c.flying = true
		go c.launch()
	}
	c.mu.Unlock()
	for _, i := range aside {
		c.js.startOne(ws[i], wait, func(rev uint64, err error) { done(i, rev, err) })
	}
}

// enqueue puts p in line. c.mu is held.
func (c *committer) enqueue(p *pendingWrite) {
	c.queue = append(c.queue, p)
	if c.want > 0 && len(c.queue) >= c.want {
		c.want = 0
		close(c.full)
	}
}

// maxGather bounds how long a batch waits for more, where a batch takes very long.
const maxGather = 20 * time.Millisecond

// errPanicked is why writes that wait in line are not sent.
var errPanicked = errors.New("the service failed where it stores writes; its log says how")

// launch is fly, and after a panic in it those in line are told; those that were sent end
// with their time.
func (c *committer) launch() {
	defer c.sup.rescue("committer", func() {
		c.mu.Lock()
		line := c.queue
		c.queue, c.want, c.flying = nil, 0, false
		c.mu.Unlock()
		for _, p := range line {
			p.finish(0, notStored(errPanicked))
		}
	})
	c.fly()
}

// fly sends batches until nothing is left to send. The callers of one batch come
// back together: the next waits for as many more, but not longer than half the
// time the last one took. Without that two halves of the callers would take
// turns, each paying for a flush.
func (c *committer) fly() {
	var last int
	var took time.Duration
	for {
		if last > 1 {
			c.gather(last, min(took/2, maxGather))
		}
		batch := c.next()
		if len(batch) == 0 {
			return
		}
		began := time.Now()
		c.send(batch)
		last, took = len(batch), time.Since(began)
	}
}

// gather waits until n more writes are in line, at most so long.
func (c *committer) gather(n int, wait time.Duration) {
	c.mu.Lock()
	c.want = min(len(c.queue)+n, maxBatch)
	if len(c.queue) >= c.want {
		c.want = 0
		c.mu.Unlock()
		return
	}
	full := make(chan struct{})
	c.full = full
	c.mu.Unlock()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-full:
	case <-t.C:
	}
	c.mu.Lock()
	c.want = 0
	c.mu.Unlock()
}

// next is the batch to send now; with none the flight is over.
func (c *committer) next() []*pendingWrite {
	c.mu.Lock()
	defer c.mu.Unlock()
	batch := c.take()
	c.flying = len(batch) > 0
	return batch
}

// take cuts the next batch off the queue, no key twice. What the key's last
// write has overtaken meanwhile goes alone, now. c.mu is held.
func (c *committer) take() []*pendingWrite {
	if len(c.queue) == 1 {
		batch := c.queue
		c.queue = nil
		return batch
	}
	var batch, rest, stale []*pendingWrite
	keys := make(map[string]bool, min(len(c.queue), maxBatch))
	for _, p := range c.queue {
		if !c.current(p.w) {
			stale = append(stale, p)
			continue
		}
		if len(batch) == maxBatch || keys[p.w.Key] {
			rest = append(rest, p)
			continue
		}
		keys[p.w.Key] = true
		batch = append(batch, p)
	}
	c.queue = rest
	if len(stale) > 0 {
		go c.sup.once("committer", func() { c.alone(stale) }, nil)
	}
	return batch
}

// maxRefused is how often the rest of a refused batch is tried as a batch again.
const maxRefused = 3

// send stores the writes of batch, together if that succeeds.
func (c *committer) send(batch []*pendingWrite) {
	for range maxRefused {
		if len(batch) < minBatch {
			break
		}
		ctx, cancel := context.WithTimeout(context.Background(), tryTimeout)
		last, err := c.js.putAll(ctx, batch)
		cancel()
		switch {
		case err == nil:
			go c.sup.once("committer", func() { // the next batch does not wait for the replies
				for i, p := range batch {
					p.finish(last-uint64(len(batch)-1-i), nil)
				}
			}, nil)
			return
		case errors.Is(err, errBatchRefused):
			c.alone(batch)
			return
		case !errors.Is(err, ErrConflict):
			for _, p := range batch {
				p.finish(0, err)
			}
			return
		}
		var faulty []*pendingWrite
		if batch, faulty = c.sift(batch); len(faulty) == 0 {
			break // a write in flight, say
		}
		for _, p := range faulty {
			p.finish(0, ErrConflict)
		}
	}
	c.alone(batch)
}

// sift takes out of a refused batch the writes whose conditions do not hold, by
// a read of each key: reads are not flushed. Nobody's write goes out late: what
// is not waited for any more ends here.
func (c *committer) sift(batch []*pendingWrite) (good, faulty []*pendingWrite) {
	holds := make([]bool, len(batch))
	var wg sync.WaitGroup
	for i, p := range batch {
		holds[i] = true
		wg.Go(func() {
			defer c.sup.rescue("committer", nil)
			e, err := c.js.Get(context.Background(), p.w.Key)
			holds[i] = err != nil || e.Revision == p.w.Expect
		})
	}
	wg.Wait()
	for i, p := range batch {
		switch {
		case !holds[i]:
			faulty = append(faulty, p)
		case p.told.Load():
		default:
			good = append(good, p)
		}
	}
	return good, faulty
}

// alone stores writes side by side, each by itself.
func (c *committer) alone(ps []*pendingWrite) {
	var writes []*Write
	var waited []*pendingWrite
	for _, p := range ps {
		if !p.told.Load() {
			waited, writes = append(waited, p), append(writes, p.w)
		}
	}
	results := awaitAll(len(writes), func(done func(int, uint64, error)) { c.js.startEach(writes, tryTimeout, done) })
	for i, r := range results {
		waited[i].finish(r.Revision, r.Err)
	}
}

// errBatchRefused says that a batch was refused as such, or because there is no room for
// all of it: its writes are tried alone. What of it was stored all the same is found by
// their conditions.
var errBatchRefused = errors.New("the batch was refused")

// putAll stores the writes of batch atomically and returns the revision of the
// last; the others' are the numbers before it.
func (j *js) putAll(ctx context.Context, batch []*pendingWrite) (last uint64, err error) {
	id, way := nuid.Next(), j.way()
	for i, p := range batch {
		msg := j.message(p.w)
		msg.Header[headerBatchID] = []string{id}
		msg.Header[headerBatchSeq] = []string{strconv.Itoa(i + 1)}
		if i < len(batch)-1 {
			if err := way.nc.PublishMsg(msg); err != nil {
				return 0, notStored(err) // never committed
			}
			continue
		}
		msg.Header[headerBatchCommit] = []string{"1"}
		last, err = j.send(ctx, way, msg, len(batch))
	}
	return last, err
}
