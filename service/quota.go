package service

import (
	"sync"

	"github.com/leased/leased/service/kinds"
)

// quota limits the leases in all and those of one holder, as the view counts them. What
// this instance is writing itself counts from before it is sent; what others write counts
// when it is seen. A nil quota limits nothing.
type quota struct {
	view      *view
	all, each int // 0: no limit

	mu   sync.Mutex
	open map[*attempt]struct{} // to acquire
}

func newQuota(v *view, all, each int) *quota {
	if all == 0 && each == 0 {
		return nil
	}
	if each > 0 {
		v.holders = &holders{of: map[string]int{}}
	}
	return &quota{view: v, all: all, each: each, open: map[*attempt]struct{}{}}
}

// take lets a be written or says what it would exceed. What takes a key whose lease still
// counts, for the same holder, adds nothing.
func (q *quota) take(a *attempt) *kinds.Error {
	if q == nil || a.d.Write.Event != Acquired {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	counted, same := q.view.counts(a.w.Key, a.rec.Holder)
	switch {
	case q.all > 0 && !counted && !q.fits(q.all, func() int { return int(q.view.held.Load()) }, ""):
		return kinds.Errorf(kinds.OverQuota, "the limit of %d leases is reached", q.all) // P21
	case q.each > 0 && !same && !q.fits(q.each, func() int { return q.view.holders.count(a.rec.Holder) }, a.rec.Holder):
		return kinds.Errorf(kinds.OverQuota, "the limit of %d leases of one holder is reached", q.each)
	}
	q.open[a] = struct{}{}
	return nil
}

// fits says that one more is within limit when count is what the view counts: leases of
// holder, or all for "". Of the attempts that are open those are added that the view does not
// show yet. One that comes to be shown meanwhile may be missing or be there twice: then it
// is looked at again, and in the end counted rather twice than not.
func (q *quota) fits(limit int, count func() int, holder string) bool {
	if count()+len(q.open) < limit {
		return true
	}
	for try := 0; ; try++ {
		before, n := count(), 0
		if before >= limit {
			return false
		}
		for a := range q.open {
			switch counted, same := q.view.counts(a.w.Key, a.rec.Holder); {
			case holder == "" && !counted, holder == a.rec.Holder && !same:
				n++
			}
		}
		if after := count(); after == before || try == 3 {
			return after+n < limit
		}
	}
}

// leave ends a, nil for none: the view shows what came of it.
func (q *quota) leave(a *attempt) {
	if q == nil || a == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.open, a)
}

// holders counts the leases of each. A nil one does not.
type holders struct {
	mu sync.Mutex
	of map[string]int
}

func (h *holders) add(holder string, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.of[holder] += n; h.of[holder] == 0 {
		delete(h.of, holder)
	}
}

func (h *holders) count(holder string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.of[holder]
}
