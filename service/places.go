package service

import (
	"sync"

	"github.com/leased/leased/service/kinds"
)

// places are what the forwards under way take, dealt out so that owners who do not
// answer never have them all: a holder may have as many as are free beside its own,
// and a key as many as its holder could still have. So one hung holder takes half of
// them, two a third each, and of what is left any other holder may have half. A holder
// or key that has none gets its first without that (F8).
type places struct {
	all int

	mu    sync.Mutex
	taken int
	of    map[string]int // by holder, and by holder and key with a dot between
}

func newPlaces(all int) *places { return &places{all: all, of: map[string]int{}} }

// take takes n places for a forward to holder about key, or says whose share is used up.
func (p *places) take(holder, key string, n int) *kinds.Error {
	p.mu.Lock()
	defer p.mu.Unlock()
	free, pair := p.all-p.taken, holder+"."+key
	h, k := p.of[holder], p.of[pair]
	switch {
	case h > 0 && h+n > free:
		return kinds.Errorf(kinds.Busy, "the share of forwards under way to the holder of this key is used up: it has %d of %d places", h, p.all)
	case k > 0 && k+n > free-h:
		return kinds.Errorf(kinds.Busy, "the share of forwards under way for this key is used up: it has %d of %d places", k, p.all)
	}
	p.taken += n
	p.of[holder] += n
	p.of[pair] += n
	return nil
}

// leave gives them back.
func (p *places) leave(holder, key string, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken -= n
	for _, who := range []string{holder, holder + "." + key} {
		if p.of[who] -= n; p.of[who] == 0 {
			delete(p.of, who)
		}
	}
}
