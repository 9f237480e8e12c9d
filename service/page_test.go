package service

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// taken lets v see an acquire of key.
func taken(v *view, key, holder string, rev uint64, now time.Time) {
	r := &Record{V: recordVersion, Key: key, Holder: holder, TTLMillis: 600_000, AcquiredAt: 1, WrittenAt: 1, Event: Acquired}
	v.wrote(key, rev, r, false, MaxTTL, now, now)
}

// freed lets v see a release of key.
func freed(v *view, key, holder string, rev uint64, now time.Time) {
	r := &Record{V: recordVersion, Key: key, Holder: holder, TTLMillis: 600_000, AcquiredAt: 1, WrittenAt: 1, Event: Released, Revision: 1}
	v.wrote(key, rev, r, true, 32*time.Second, now, now)
}

// pages follows the pages of one listing to the end.
func pages(v *view, now time.Time, prefix, holder, after string, limit int) (keys []string, count int) {
	for {
		page, next := v.page(now, prefix, holder, after, limit)
		for _, l := range page {
			keys = append(keys, l.Key)
		}
		if count++; next == "" {
			return keys, count
		}
		after = next
	}
}

// TestPages: the pages of a listing show what a sorted map would, for any prefix,
// holder, after and limit, and none is longer than its limit.
func TestPages(t *testing.T) {
	t.Parallel()
	seed := [2]uint64{rand.Uint64(), rand.Uint64()}
	r := rand.New(rand.NewPCG(seed[0], seed[1]))
	v, now := newView(&clock{}, nil), time.Now()
	model := map[string]string{}
	rev := uint64(0)
	for range 20_000 {
		key, holder := fmt.Sprintf("%c-%d", 'a'+r.IntN(3), r.IntN(4000)), fmt.Sprintf("h%d", r.IntN(3))
		if rev++; r.IntN(3) == 0 {
			freed(v, key, holder, rev, now)
			delete(model, key)
		} else {
			taken(v, key, holder, rev, now)
			model[key] = holder
		}
	}
	taken(v, "only", "rare", rev+1, now)
	model["only"] = "rare"
	for range 300 {
		prefix := []string{"", "a", "b-", "b-1", "c-39", "d", "only"}[r.IntN(7)]
		holder := []string{"", "h0", "rare", "nobody"}[r.IntN(4)]
		after := []string{"", "", "a-2", "b-1", "bz", "c-3999", "z"}[r.IntN(7)]
		limit := []int{1, 7, 100, 1000}[r.IntN(4)]
		var want []string
		for key, h := range model {
			if strings.HasPrefix(key, prefix) && key > after && (holder == "" || h == holder) {
				want = append(want, key)
			}
		}
		slices.Sort(want)
		if limit < 10 && len(want) > 200 {
			limit = 100
		}
		got, _ := pages(v, now, prefix, holder, after, limit)
		if !slices.Equal(got, want) {
			t.Fatalf("seed %v: prefix %q, holder %q, after %q, limit %d: %d keys, want %d", seed, prefix, holder, after, limit, len(got), len(want))
		}
		if page, _ := v.page(now, prefix, holder, after, limit); len(page) > limit {
			t.Fatalf("a page of %d has %d", limit, len(page))
		}
	}
	if page, next := v.page(now, "only", "", "", 1); len(page) != 1 || next != "" {
		t.Errorf("the last page of one has %d and goes on with %q", len(page), next)
	}
}

// TestPagesWhileKeysComeAndGo: what is there all the time is on exactly one page, in
// order, whatever is taken and freed beside it (P17).
func TestPagesWhileKeysComeAndGo(t *testing.T) {
	t.Parallel()
	v, now := newView(&clock{}, nil), time.Now()
	const stay = 5000
	var want []string
	for i := range stay {
		key := fmt.Sprintf("k%05d", 2*i)
		taken(v, key, "h", uint64(i+1), now)
		want = append(want, key)
	}
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for w := range 2 {
		busy.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for rev := uint64(stay + 1); ; rev++ {
				select {
				case <-stop:
					return
				default:
				}
				key := fmt.Sprintf("k%05d", 2*r.IntN(stay)+1)
				if r.IntN(2) == 0 {
					taken(v, key, "h", 2*rev+uint64(w), now)
				} else {
					freed(v, key, "h", 2*rev+uint64(w), now)
				}
				if i := r.IntN(stay); r.IntN(4) == 0 {
					taken(v, want[i], "h", 2*rev+uint64(w), now)
				}
				expireAll(v, now.Add(40*time.Second)) // the freed ones leave the table
			}
		})
	}
	for range 20 {
		got, _ := pages(v, now, "", "", "", 100)
		if !slices.IsSorted(got) {
			t.Error("the pages are not in order")
		}
		got = slices.DeleteFunc(got, func(key string) bool { return (key[len(key)-1]-'0')%2 == 1 })
		if !slices.Equal(got, want) {
			t.Errorf("%d of %d keys that were there all the time are shown", len(got), len(want))
		}
	}
	close(stop)
	busy.Wait()
}

// TestPageCost: a page costs what its leases cost, not what all leases do; nor does
// one that nothing matches.
func TestPageCost(t *testing.T) {
	now := time.Now()
	small, large := newView(&clock{}, nil), newView(&clock{}, nil)
	for i := range 200_000 {
		key := fmt.Sprintf("key-%016d", i)
		if i < 2000 {
			taken(small, key, "h", uint64(i+1), now)
		}
		taken(large, key, "h", uint64(i+1), now)
	}
	for _, c := range []struct {
		what, prefix, holder, after string
		most                        float64 // times what it costs among 2000
	}{
		{"the first page", "", "", "", 20},
		{"a page in the middle", "", "", "key-0000000000001000", 20},
		{"a page of a prefix", "key-00000000000015", "", "", 20},
		{"a page of a holder with nothing", "", "nobody", "", 20}, // looks at pageLooks, five times as many
		{"a prefix that nothing has", "z", "", "", 20},
	} {
		cost := func(v *view) time.Duration {
			var took []time.Duration
			for range 25 {
				began := time.Now()
				v.page(now, c.prefix, c.holder, c.after, 100)
				took = append(took, time.Since(began))
			}
			return slices.MinFunc(took, cmp.Compare)
		}
		few, many := cost(small), cost(large)
		t.Logf("%s: %v among 2000 leases, %v among 200000", c.what, few, many)
		if float64(many) > c.most*float64(few) {
			t.Errorf("%s takes %v among 200000 leases, %v among 2000", c.what, many, few)
		}
	}
}

// TestPageIsBounded: a page that matches rarely ends early and says where to go on.
func TestPageIsBounded(t *testing.T) {
	v, now := newView(&clock{}, nil), time.Now()
	for i := range 4 * pageLooks {
		taken(v, fmt.Sprintf("key-%06d", i), "h", uint64(i+1), now)
	}
	taken(v, "key-999999", "rare", 1<<20, now)
	page, next := v.page(now, "", "rare", "", 1000)
	if len(page) != 0 || next == "" {
		t.Errorf("the first page has %d leases and goes on at %q", len(page), next)
	}
	keys, count := pages(v, now, "", "rare", "", 1000)
	if fmt.Sprint(keys) != "[key-999999]" || count < 4 || count > 8 {
		t.Errorf("%v on %d pages", keys, count)
	}
}
