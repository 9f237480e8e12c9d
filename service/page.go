package service

import (
	"bytes"
	"container/heap"
	"runtime"
	"time"
)

// pageLooks bounds the keys that one page looks at: where few match the page is short,
// or empty, and the next one goes on.
const pageLooks = 10_000 // P17

// page returns the leases with the smallest keys above after that match and are
// certainly not over, sorted by key, at most limit of them. next is the after of the
// next page, "" when nothing is left. A key that is there all the time stands on
// exactly one page, whatever comes and goes beside it.
//
// Each shard is asked for its next few keys when those before them are used up, and
// no lock is held for longer than that.
func (v *view) page(now time.Time, prefix, holder, after string, limit int) (leases []Lease, next string) {
	p := pager{local: v.local(now), prefix: []byte(prefix), holder: holder}
	for i := range v.shards {
		w := &walk{shard: &v.shards[i], after: after, from: max(prefix, justAbove(after)), step: max(4, limit/32)}
		if p.fill(w); !w.done() {
			p.walks = append(p.walks, w)
		}
	}
	heap.Init(&p.walks)
	for len(p.walks) > 0 {
		w := p.walks[0]
		switch {
		case len(w.keys) > 0:
			key := w.keys[0]
			w.keys = w.keys[1:]
			l, ok := p.lease(v, key)
			if ok && len(leases) == limit {
				return leases, leases[limit-1].Key
			}
			if ok {
				leases = append(leases, l)
			}
		case p.looked >= pageLooks:
			return leases, w.after
		default:
			p.fill(w)
			runtime.Gosched() // calls go before
		}
		if w.done() {
			heap.Pop(&p.walks)
		} else {
			heap.Fix(&p.walks, 0)
		}
	}
	return leases, ""
}

// justAbove is the smallest text above key, "" for "".
func justAbove(key string) string {
	if key == "" {
		return ""
	}
	return key + "\x00"
}

// pager makes one page.
type pager struct {
	local  int64
	prefix []byte
	holder string
	looked int
	walks  walks
}

// walk goes through the keys of a shard.
type walk struct {
	shard *shard
	keys  []string // those that match and are not on the page yet
	after string   // every key up to this one has been looked at
	from  string   // what comes next is at or above this
	end   bool     // nothing comes next
	step  int      // how many keys to look at next
}

func (w *walk) done() bool { return w.end && len(w.keys) == 0 }

// head is a text at or below whatever w has still to show.
func (w *walk) head() string {
	if len(w.keys) > 0 {
		return w.keys[0]
	}
	return w.from
}

// fill looks at the next keys of w.
func (p *pager) fill(w *walk) {
	sh := w.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	left := w.step
	w.step = min(2*w.step, orderBlock)
	for it := range sh.from(w.from) {
		key := sh.key(it)
		if !bytes.HasPrefix(key, p.prefix) {
			break
		}
		if p.shows(sh, it) {
			w.keys = append(w.keys, string(key))
		}
		p.looked++
		if left--; left == 0 {
			w.after = string(key)
			w.from = justAbove(w.after)
			return
		}
	}
	w.end = true
}

// shows says that the lease in it is to be on the page.
func (p *pager) shows(sh *shard, it *slot) bool {
	return it.isLease() && p.local < it.safe && (p.holder == "" || string(sh.holder(it)) == p.holder)
}

// lease is key's, if it is still to be shown.
func (p *pager) lease(v *view, key string) (Lease, bool) {
	sh, it := v.lock(key)
	defer sh.mu.Unlock()
	if it == nil || !p.shows(sh, it) {
		return Lease{}, false
	}
	e := sh.entry(key, it)
	return leaseOf(e.Record, e.Revision, time.Duration(it.safe-p.local)), true
}

// walks is a heap by what they show next.
type walks []*walk

func (h walks) Len() int           { return len(h) }
func (h walks) Less(i, j int) bool { return h[i].head() < h[j].head() }
func (h walks) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *walks) Push(x any)        { *h = append(*h, x.(*walk)) }
func (h *walks) Pop() any {
	last := len(*h) - 1
	w := (*h)[last]
	*h = (*h)[:last]
	return w
}
