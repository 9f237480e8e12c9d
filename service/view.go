package service

import (
	"container/heap"
	"hash/maphash"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// view is what this instance knows of every key: its own acknowledged writes
// and what a consumer of the bucket delivered, nothing else. A revision is
// immutable, so what stands here about a revision is true for ever; whether it
// is still the key's last one, only the store can tell.
//
// The view also times the ends: nothing in NATS announces that a TTL ran out.
type view struct {
	clock *clock
	start time.Time // origin of the local monotonic times below
	seed  maphash.Seed

	// epoch counts the consumers. What an older consumer delivered may have
	// been followed by messages nobody saw; such an item is true but may not be
	// used to say that nothing came after it.
	epoch    atomic.Uint32
	complete atomic.Bool   // the current consumer has delivered all there was
	alive    atomic.Int64  // local time of its last sign of life
	heard    atomic.Int64  // time on the server's clock, ns, up to which it has delivered
	position atomic.Uint64 // stream sequence up to which it has delivered
	held     atomic.Int64
	holders  *holders      // has each one's part of held, where somebody asks for it
	highest  atomic.Uint64 // the highest fence ever seen, over all buckets

	// othersTell is the local time at which another instance was last seen telling an
	// end later than it would if it kept up.
	othersTell atomic.Int64
	waits      atomic.Int64  // leases that are over and whose end is not told yet
	late       atomic.Uint64 // ends that were told by nobody, because it took too long
	unseen     atomic.Uint64 // ends that may have been told by nobody, and the view cannot know
	turn       atomic.Uint32 // the shard whose ends come next

	// changed is called after a key's item changed, outside all locks.
	changed func(key string, free bool)

	shards [64]shard
}

// shard is what is known of some keys, and when something is to be done about each.
type shard struct {
	mu sync.Mutex
	table
	due   dueHeap
	ready []uint32 // slots whose end is to be told now, in the order in which that came; those without flagReady are not any more
}

// shrink makes the shard anew when it holds far less than the most it held: tables
// and heaps keep the room they once needed. The removals before have paid for the
// copy. The numbers of slots change.
func (s *shard) shrink() {
	if !roomy(s.items, s.most) {
		return
	}
	old := s.table
	s.table, s.due, s.ready = table{seed: old.seed}, nil, nil
	for _, it := range old.all() {
		key := string(old.key(it))
		n, to := s.add(maphash.String(s.seed, key), key, string(old.holder(it)), string(old.meta(it)))
		to.item = it.item
		if it.is(flagReady) {
			s.ready = append(s.ready, n)
			continue
		}
		s.due = append(s.due, dueItem{it.sched, n})
	}
	heap.Init(&s.due)
}

// roomy says that what has had most elements is worth making anew for n.
func roomy(n, most int) bool { return most >= 64 && n <= most/8 }

// item is one key's last seen revision, compact and without pointers: there may be millions.
type item struct {
	rev      uint64
	ended    uint64 // tombstones: the revision that ended
	at       int64  // message time, ns on the server's clock; upper bound unless exact
	safe     int64  // local time before which the lease is certainly not over
	over     int64  // local time at which it is over unless clocks stepped
	next     int64  // local time of the next thing to do
	sched    int64  // the heap element that stands for next; others are stale
	acquired Timestamp
	written  Timestamp
	horizon  int32 // ms after written; 0: none
	ttl      int32 // ms
	epoch    uint32
	flags    uint16
	event    uint8 // index in events
}

// unscheduled is the sched of an item that no heap element stands for.
const unscheduled = math.MaxInt64

// events are those of a record, as an item has them.
var events = [...]Event{Acquired, Renewed, Released, Expired}

const eventExpired = 3 // in events

const (
	flagTomb    = 1 << iota
	flagForeign // not ours: no record
	flagEvicted
	flagOwn     // this instance wrote it
	flagCounted // counted in held
	flagTelling // an expired event is being written
	flagExact   // at is the message's own time
	flagWaits   // counted in waits
	flagReady   // in its shard's ready
	flagAlone   // its event was refused among others: it is written by itself
	flagTold    // nothing is left to tell
	flagUntold  // nobody has told the end, and nobody will but who takes the key
)

func (i *item) is(f uint16) bool { return i.flags&f != 0 }

func (i *item) isLease() bool { return i.flags&(flagTomb|flagForeign) == 0 }

// entry rebuilds what a reader of key would have seen.
func (s *shard) entry(key string, it *slot) Entry {
	e := Entry{Key: key, Revision: it.rev, At: time.Unix(0, it.at), Tombstone: it.is(flagTomb)}
	if it.is(flagForeign) {
		e.Foreign = errForeign.Error()
		return e
	}
	e.Record = &Record{V: recordVersion, Key: key, Holder: string(s.holder(it)), TTLMillis: int64(it.ttl), AcquiredAt: it.acquired, WrittenAt: it.written,
		Event: events[it.event], Meta: string(s.meta(it)), Revision: it.ended, Evicted: it.is(flagEvicted)}
	if it.horizon != 0 {
		e.Record.Horizon = it.written + Timestamp(it.horizon)
	}
	return e
}

func newView(c *clock, changed func(key string, free bool)) *view {
	v := &view{clock: c, start: time.Now(), seed: maphash.MakeSeed(), changed: changed}
	for i := range v.shards {
		v.shards[i].seed = v.seed
	}
	return v
}

// local is now as nanoseconds of the monotonic clock.
func (v *view) local(now time.Time) int64 { return int64(now.Sub(v.start)) }

// since is how long local time was before now.
func (v *view) since(now time.Time, local int64) time.Duration {
	return time.Duration(v.local(now) - local)
}

// place is the number of key's shard, and key's hash.
func (v *view) place(key string) (shard int, hash uint64) {
	hash = maphash.String(v.seed, key)
	return int(hash % uint64(len(v.shards))), hash
}

// lock locks key's shard and finds its slot in there, nil when it has none.
func (v *view) lock(key string) (sh *shard, it *slot) {
	i, hash := v.place(key)
	sh = &v.shards[i]
	sh.mu.Lock()
	_, it = sh.find(hash, key)
	return sh, it
}

// seen is one key's state as the view knows it.
type seen struct {
	Entry
	Unbroken  bool // nothing can have come after it unseen, but for what is on its way
	Live      bool // a lease that is certainly not over
	MayBePast bool // a lease whose end may have come
}

// get tells what is known of key; ok is false when nothing is.
func (v *view) get(key string, now time.Time) (s seen, ok bool) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	if it == nil {
		return seen{}, false
	}
	live := it.isLease() && v.local(now) < it.safe
	return seen{Entry: sh.entry(key, it), Unbroken: it.epoch == v.epoch.Load(), Live: live, MayBePast: it.isLease() && !live}, true
}

// known implements Known for what a consumer has delivered; the entry lacks what a
// view does not keep: the nonce, and how the lease before it ended.
func (v *view) known(key string, rev uint64, at time.Time) (e Entry, ok bool) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	if it == nil || it.rev != rev || it.is(flagForeign) || !it.is(flagExact) || it.at != at.UnixNano() {
		return Entry{}, false
	}
	return sh.entry(key, it), true
}

// last is key's last known revision, 0 when nothing is known of it, and a lower bound
// of what is left of the lease there, 0 when there is none.
func (v *view) last(key string, now time.Time) (rev uint64, left time.Duration) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	switch {
	case it == nil:
		return 0, 0
	case !it.isLease():
		return it.rev, 0
	}
	return it.rev, max(0, time.Duration(it.safe-v.local(now)))
}

// fresh says that the view is complete and its consumer alive: a key it does
// not know holds nothing, but for what is on its way.
func (v *view) fresh(now time.Time) bool {
	return v.complete.Load() && v.local(now)-v.alive.Load() < int64(viewStale)
}

// silent says that the consumer has missed a heartbeat: perhaps the bucket it was
// on is gone.
func (v *view) silent(now time.Time) bool {
	return v.local(now)-v.alive.Load() > int64(watchHeartbeat+watchHeartbeat/4)
}

// viewStale is how long a silent consumer is still believed to be complete: its
// heartbeats come every second.
const viewStale = 2500 * time.Millisecond

// heardWithin says that all that was stored until d ago has been delivered.
func (v *view) heardWithin(d time.Duration, now time.Time) bool {
	_, hi := v.clock.bounds(now)
	return hi.UnixNano()-v.heard.Load() <= int64(d)
}

// behind says that the consumer lags: a lease may have come and gone that the
// view does not know.
func (v *view) behind(now time.Time) bool {
	return v.complete.Load() && !(v.fresh(now) && v.heardWithin(MinTTL, now))
}

// hasSeen says that the last message of key until d ago was rev.
func (v *view) hasSeen(key string, rev uint64, d time.Duration, now time.Time) bool {
	if !v.fresh(now) || !v.heardWithin(d, now) { // before the item is looked at
		return false
	}
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	return it != nil && it.rev == rev && it.epoch == v.epoch.Load()
}

// noteFence raises the highest fence seen.
func (v *view) noteFence(rev uint64) {
	for {
		old := v.highest.Load()
		if rev <= old || v.highest.CompareAndSwap(old, rev) {
			return
		}
	}
}

// confirm takes over a consumer's message of a revision that is known already,
// and reports whether it was: then nothing of its body is needed.
func (v *view) confirm(key string, rev uint64, at time.Time, epoch uint32) bool {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	if it == nil || it.rev < rev {
		return false
	}
	if it.rev == rev {
		if it.another(at.UnixNano()) {
			return false
		}
		it.epoch = max(it.epoch, epoch)
		it.at = at.UnixNano()
		it.flags |= flagExact
	}
	return true
}

// another says that a message of i's revision and that time is not the one i is
// about: a server that lost what it had acknowledged issues its revisions again.
func (i *item) another(at int64) bool { return at > i.at || i.is(flagExact) && at != i.at }

// wrote takes over a write of this instance: sent is when it was first sent,
// acked when the ack came.
func (v *view) wrote(key string, rev uint64, rec *Record, tomb bool, ttl time.Duration, sent, acked time.Time) {
	v.noteFence(rev)
	_, hi := v.clock.bounds(acked)
	it := item{rev: rev, at: hi.UnixNano(), epoch: v.epoch.Load(), flags: flagOwn}
	it.take(rec, tomb)
	it.safe = v.local(sent) + int64(rec.TTL())
	it.over = v.local(acked) + int64(rec.TTL())
	if tomb {
		it.over = v.local(acked) + int64(ttl)
	}
	v.put(key, rec.Holder, rec.Meta, &it)
}

// delivered takes over a message of the bucket's consumer of the given epoch.
// ttl is its Nats-TTL, 0 when it has none.
func (v *view) delivered(e Entry, ttl time.Duration, epoch uint32, now time.Time) {
	v.noteFence(e.Revision)
	lo, hi := v.clock.bounds(now)
	it := item{rev: e.Revision, at: e.At.UnixNano(), epoch: epoch, flags: flagExact}
	var holder, meta string
	if e.Record != nil {
		holder, meta = e.Record.Holder, e.Record.Meta
		it.take(e.Record, e.Tombstone)
		ttl = max(ttl, e.Record.TTL())
		if !e.Tombstone {
			ttl = e.Record.TTL()
		}
	} else {
		it.flags |= flagForeign
		if e.Tombstone {
			it.flags |= flagTomb
		}
		if ttl == 0 {
			ttl = MaxTTL // looked at again then
		}
	}
	end := e.At.Add(ttl)
	it.safe = v.local(now) + int64(min(end.Sub(hi), ttl)) // the clock may have been moved since it was read
	it.over = v.local(now) + int64(end.Sub(lo))
	v.put(e.Key, holder, meta, &it)
}

// take is all of r but its texts.
func (i *item) take(r *Record, tomb bool) {
	i.ended, i.acquired, i.written, i.ttl = r.Revision, r.AcquiredAt, r.WrittenAt, int32(r.TTLMillis)
	i.event = uint8(max(0, slices.Index(events[:], r.Event)))
	if r.Horizon > r.WrittenAt { // one of ours is minutes later at most
		i.horizon = int32(min(r.Horizon-r.WrittenAt, math.MaxInt32))
	}
	if tomb {
		i.flags |= flagTomb
	}
	if r.Evicted {
		i.flags |= flagEvicted
	}
}

func (v *view) put(key, holder, meta string, it *item) {
	i, hash := v.place(key)
	sh := &v.shards[i]
	sh.mu.Lock()
	n, old := sh.find(hash, key)
	switch {
	case old == nil:
	case old.rev > it.rev:
		sh.mu.Unlock()
		return
	case old.rev == it.rev && it.is(flagExact) && old.another(it.at):
		// A revision issued again: as good as a later one.
	case old.rev == it.rev:
		// The same message from both sides, consumer and ack, in either order.
		old.epoch = max(old.epoch, it.epoch)
		old.safe = max(old.safe, it.safe) // both are lower bounds
		if it.is(flagOwn) {
			old.flags |= flagOwn
		} else {
			old.at = it.at // the exact time
			old.flags |= flagExact
		}
		sh.mu.Unlock()
		return
	}
	if old != nil {
		v.settle(&old.item)
		if it.event == eventExpired && !it.is(flagOwn) && old.isLease() && it.ended == old.rev {
			if now := v.local(time.Now()); now-old.over > int64(tellOthers+tellSpread) {
				v.othersTell.Store(now)
			}
		}
	}
	it.next = it.over
	if it.isLease() {
		it.flags |= flagCounted
		if old == nil || !old.is(flagCounted) {
			v.held.Add(1)
			v.countHolder(nil, holder)
		} else {
			v.countHolder(sh.holder(old), holder)
		}
	} else if old != nil {
		v.uncount(sh, old)
	}
	// One heap element stands for a key; when it comes up too early it is put
	// back, so a renewal costs nothing here. Only an end that moved forward needs
	// an element of its own.
	again := old == nil || old.sched > it.next
	if old == nil {
		n, old = sh.add(hash, key, holder, meta)
	} else {
		it.sched = old.sched
		sh.describe(old, holder, meta)
	}
	old.item = *it
	if again {
		sh.schedule(n, old)
	}
	free := !it.isLease()
	sh.mu.Unlock()
	if v.changed != nil {
		v.changed(key, free)
	}
}

// uncount takes it off the leases that are held, if it is one of them. Its shard sh is
// locked.
func (v *view) uncount(sh *shard, it *slot) {
	if it.is(flagCounted) {
		it.flags &^= flagCounted
		v.held.Add(-1)
		v.countHolder(sh.holder(it), "")
	}
}

// countHolder moves a lease that is held from one holder to another, if somebody asks
// for their counts; none is nil or "".
func (v *view) countHolder(from []byte, to string) {
	if v.holders == nil || string(from) == to {
		return
	}
	if len(from) > 0 {
		v.holders.add(string(from), -1)
	}
	if to != "" {
		v.holders.add(to, 1)
	}
}

// counts says whether key is among the leases that are held, and whether by holder.
func (v *view) counts(key, holder string) (counted, same bool) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	counted = it != nil && it.is(flagCounted)
	return counted, counted && string(sh.holder(it)) == holder
}

// settle takes i off the leases whose end waits to be told, if it is one of them. Its
// shard is locked.
func (v *view) settle(i *item) {
	if i.is(flagWaits) {
		i.flags &^= flagWaits
		v.waits.Add(-1)
	}
}

// restart begins a new epoch: the consumer is gone and what follows may have
// been missed. It returns the epoch of the next consumer.
func (v *view) restart() uint32 {
	v.complete.Store(false)
	v.position.Store(0)
	return v.epoch.Add(1)
}

// gone is a lease that the view knows and no consumer has delivered again.
type gone struct {
	key  string
	rev  uint64
	over time.Time
}

// unconfirmed are the leases that are certainly not over and that the consumer of epoch,
// which has delivered all there was, did not show: at most most of them, the last to
// end first.
func (v *view) unconfirmed(epoch uint32, now time.Time, most int) (all []gone) {
	local := v.local(now)
	for i := range v.shards {
		sh := &v.shards[i]
		sh.mu.Lock()
		for _, it := range sh.all() {
			if it.epoch < epoch && it.isLease() && local < it.safe {
				all = append(all, gone{string(sh.key(it)), it.rev, v.start.Add(time.Duration(it.over))})
			}
		}
		sh.mu.Unlock()
	}
	slices.SortFunc(all, func(a, b gone) int { return b.over.Compare(a.over) })
	return all[:min(len(all), most)]
}

// completed says that the consumer of epoch has delivered all there was. What no
// consumer of this epoch confirmed is no longer in the bucket. If it was a lease that
// is over, its end may have been told and the event be gone too.
func (v *view) completed(epoch uint32) {
	now := v.local(time.Now())
	for i := range v.shards {
		sh := &v.shards[i]
		sh.mu.Lock()
		for n, it := range sh.all() {
			if it.epoch >= epoch {
				continue
			}
			if it.isLease() && !it.is(flagTold|flagUntold) && it.over <= now {
				v.unseen.Add(1)
			}
			v.uncount(sh, it)
			v.settle(&it.item)
			sh.remove(n)
		}
		sh.shrink()
		sh.mu.Unlock()
	}
	if v.epoch.Load() == epoch {
		v.complete.Store(true)
	}
}

// forget drops everything: the bucket it was about is gone.
func (v *view) forget() {
	for i := range v.shards {
		sh := &v.shards[i]
		sh.mu.Lock()
		for _, it := range sh.all() {
			v.uncount(sh, it)
			v.settle(&it.item)
		}
		sh.table, sh.due, sh.ready = table{seed: v.seed}, nil, nil
		sh.mu.Unlock()
	}
}

// lastEnd is the local time at which the last known lease is over, the zero
// time when no lease is known.
func (v *view) lastEnd() time.Time {
	var last int64
	for i := range v.shards {
		sh := &v.shards[i]
		sh.mu.Lock()
		for _, it := range sh.all() {
			if it.isLease() {
				last = max(last, it.over)
			}
		}
		sh.mu.Unlock()
	}
	if last == 0 {
		return time.Time{}
	}
	return v.start.Add(time.Duration(last))
}

// Expiry in the view: the stages an ended lease goes through.
const (
	// An own lease whose removal the server times: it sweeps up to 0.3 s late.
	tellOwn = 350 * time.Millisecond
	// An own lease that the service ends, because its message outlives it.
	endOwn = 100 * time.Millisecond
	// Other instances wait, so that the last writer comes first, and not all at
	// the same moment.
	tellOthers = time.Second
	tellSpread = time.Second
	// Nobody tells an expiry later than this: the tombstone of an instance that
	// did may be gone by 32 s, and with it the proof that it was told.
	tellUntil = 20 * time.Second
	// What was told until then has been seen a moment later, and while its tombstone
	// stands that nobody did can be proved.
	tellSettled = 5 * time.Second
	tellProved  = 30 * time.Second
	// How long the key of an end that nobody told is kept, for the acquire that tells
	// it.
	tellKept = 2 * time.Minute
)

const (
	// tellWithin bounds the writing of an expired event that is conditional on an
	// empty key, and tellHeard how long ago the view heard last at its start. An
	// empty key does not say that nothing was there in between; but what was taken
	// after the view heard is not over before the write is, for a lease has MinTTL
	// at least. So the event is not told again for an end that is long past, and
	// never stands in the place of another lease's.
	tellWithin = MinTTL / 2
	tellHeard  = MinTTL - tellWithin
)

// ended is a lease that ran out and that nobody has told yet, as far as known.
type ended struct {
	Entry
	Extended bool // its message outlives it: the service has to end it
	Alone    bool // not among others
	over     int64
}

// expireStep bounds how many items are moved while a shard is locked.
const expireStep = 256

// expire moves items of shard number i forward whose time has come; more says that
// there are others. It waits for nobody: what is to be told now is ready for take.
func (v *view) expire(i int, now time.Time) (more bool) {
	sh, local := &v.shards[i], v.local(now)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for range expireStep {
		if len(sh.due) == 0 || sh.due[0].at > local {
			return false
		}
		d := heap.Pop(&sh.due).(dueItem)
		it := sh.at(d.slot)
		if it.key == 0 || it.sched != d.at {
			continue
		}
		if it.next > local {
			sh.schedule(d.slot, it)
			continue
		}
		v.uncount(sh, it)
		switch {
		case !it.isLease(), local > it.over+int64(tellUntil) && !v.tooLate(&it.item, now):
			v.settle(&it.item)
			sh.remove(d.slot)
			sh.shrink()
			continue
		case local > it.over+int64(tellUntil):
		case it.next == it.over: // just ended
			if !it.is(flagWaits) {
				it.flags |= flagWaits
				v.waits.Add(1)
			}
			it.next = it.over + int64(it.tellAfter())
		case it.is(flagTelling):
			it.next = local + int64(tellSpread)
		default:
			it.flags |= flagReady
			it.sched = unscheduled
			sh.ready = append(sh.ready, d.slot)
			continue
		}
		sh.schedule(d.slot, it)
	}
	return true
}

// tooLate sees to a lease whose end nobody tells any more by an event: it waits until
// what was told has been seen, and counts it if that is nothing. It reports whether the
// key is kept, for the acquire that tells the end yet.
func (v *view) tooLate(i *item, now time.Time) (kept bool) {
	local := v.local(now)
	switch settled := i.over + int64(tellUntil+tellSettled); {
	case i.is(flagTold), i.is(flagUntold):
		return false // its time is over
	case local < settled:
		i.next = settled
		return true
	case local > i.over+int64(tellProved), i.epoch != v.epoch.Load(), !v.fresh(now), !v.heardWithin(tellSettled-tellSettled/5, now):
		v.unseen.Add(1)
		return false
	}
	v.late.Add(1)
	v.settle(i)
	i.flags |= flagUntold
	i.next = i.over + int64(tellKept)
	return true
}

// take returns up to n leases whose end is to be told now, the first that came to that
// first, shard by shard. The events of those that are not Extended are to be written
// within tellWithin of now.
func (v *view) take(now time.Time, n int) (tell []ended) {
	local, fresh, epoch := v.local(now), v.fresh(now), v.epoch.Load()
	heard := v.heardWithin(tellHeard-tellHeard/5, now) // before an item is looked at
	others := v.othersTell.Load()
	busy := others != 0 && local-others < int64(tellSpread)
	share := max(1, n/len(v.shards))
	for idle := 0; idle < len(v.shards) && len(tell) < n; {
		sh := &v.shards[int(v.turn.Add(1))%len(v.shards)]
		had := len(tell)
		sh.mu.Lock()
		for len(sh.ready) > 0 && len(tell)-had < share && len(tell) < n {
			slot := sh.ready[0]
			it := sh.at(slot)
			tooLate := local > it.over+int64(tellUntil)
			if it.is(flagReady) && !tooLate && (!fresh || it.horizon == 0 && !heard) {
				break // soon after the next heartbeat: there may be many of them
			}
			sh.ready = sh.ready[1:]
			if !it.is(flagReady) {
				continue
			}
			it.flags &^= flagReady
			switch {
			case tooLate:
				it.next = local
			case it.epoch != epoch:
				it.next = local + int64(tellSpread/2)
			case busy && !it.is(flagOwn) && local-it.over < int64(tellUntil/2):
				it.next = local + int64(tellSpread+rand.N(tellSpread)) // whose turn it was is at it
			default:
				it.flags |= flagTelling
				it.next = local + int64(tellSpread)
				tell = append(tell, ended{sh.entry(string(sh.key(it)), it), it.horizon != 0, it.is(flagAlone), it.over})
			}
			sh.schedule(slot, it)
		}
		if len(sh.ready) == 0 {
			sh.ready = nil
		}
		sh.mu.Unlock()
		if idle++; len(tell) > had {
			idle = 0
		}
	}
	return tell
}

func (s *shard) schedule(n uint32, it *slot) {
	it.sched = it.next
	heap.Push(&s.due, dueItem{it.sched, n})
}

func (i *item) tellAfter() time.Duration {
	switch {
	case i.is(flagOwn) && i.horizon != 0:
		return endOwn
	case i.is(flagOwn):
		return tellOwn
	default:
		return tellOthers + rand.N(tellSpread)
	}
}

// told reports how writing an expired event ended: done means that there is
// nothing left to tell, alone that it is to be written by itself.
func (v *view) told(key string, rev uint64, done, alone bool) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	if it == nil || it.rev != rev {
		return
	}
	it.flags &^= flagTelling
	if alone {
		it.flags |= flagAlone
	}
	if done {
		v.settle(&it.item)
		it.flags |= flagTold
		it.next = it.over + int64(tellUntil) + 1 // kept until then as the key's past
	}
}

// dueHeap orders slots by the local time at which something is to be done.
type dueHeap []dueItem

type dueItem struct {
	at   int64
	slot uint32
}

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *dueHeap) Push(x any)        { *h = append(*h, x.(dueItem)) }
func (h *dueHeap) Pop() any {
	old := *h
	n := len(old) - 1
	x := old[n]
	*h = old[:n]
	if cap(old) >= 64 && n <= cap(old)/4 { // as with the map
		*h = append(make(dueHeap, 0, cap(old)/2), old[:n]...)
	}
	return x
}
