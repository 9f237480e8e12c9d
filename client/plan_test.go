package client

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestPlanReachesFairSharesWithTheFewestMoves lets members join, leave and die at
// random and act one after another on true views, until nobody moves.
func TestPlanReachesFairSharesWithTheFewestMoves(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		keys, free := 1+rng.IntN(100), 0
		free = keys
		counts := map[string]int{}
		for step := range 12 {
			if len(counts) == 0 || len(counts) < 9 && rng.IntN(2) == 0 {
				counts[fmt.Sprintf("m%03d", rng.IntN(1000))] += 0
			} else {
				ids := slices.Sorted(maps.Keys(counts))
				id := ids[rng.IntN(len(ids))]
				free += counts[id]
				delete(counts, id)
			}
			if len(counts) == 0 {
				continue
			}
			needed, moves := fewestMoves(counts, keys), 0
			for settled := false; !settled; {
				settled = true
				ids := slices.Sorted(maps.Keys(counts))
				rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
				for _, id := range ids {
					give, take := shares{self: id, counts: counts, free: free}.plan()
					if give > 0 && take > 0 {
						t.Fatalf("seed %d: %s gives %d and takes %d", seed, id, give, take)
					}
					counts[id] += take - give
					free += give - take
					moves += take
					settled = settled && give == 0 && take == 0
				}
				if moves > 1000 {
					t.Fatalf("seed %d step %d: it never settles: %v", seed, step, counts)
				}
			}
			least, most := slices.Min(slices.Collect(maps.Values(counts))), slices.Max(slices.Collect(maps.Values(counts)))
			if free != 0 || most-least > 1 {
				t.Fatalf("seed %d step %d: %d keys free, shares %v", seed, step, free, counts)
			}
			if moves != needed {
				t.Fatalf("seed %d step %d: %d moves, %d were needed", seed, step, moves, needed)
			}
		}
	}
}

// fewestMoves is the number of keys that must change hands until shares are fair:
// the members with most keep the odd ones.
func fewestMoves(counts map[string]int, keys int) (moves int) {
	n := slices.Sorted(maps.Values(counts))
	slices.Reverse(n)
	for i, have := range n {
		want := keys / len(n)
		if i < keys%len(n) {
			want++
		}
		moves += max(0, want-have)
	}
	return moves
}

// TestPlanSettlesOnOldViews: members act on lists of a moment ago, as look reads
// them. Shares become fair all the same.
func TestPlanSettlesOnOldViews(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 2))
		owners := make([]string, 1+rng.IntN(80)) // "" is free
		var ids []string
		for i := range 1 + rng.IntN(8) {
			ids = append(ids, fmt.Sprint("m", i))
		}
		for k := range owners {
			owners[k] = append(ids, "")[rng.IntN(len(ids)+1)]
		}
		lists := [][]string{slices.Clone(owners), slices.Clone(owners), slices.Clone(owners)}
		for still, rounds := 0, 0; still < 4; rounds++ {
			if rounds == 200 {
				t.Fatalf("seed %d: it never settles: %v", seed, owners)
			}
			moved := false
			for _, id := range ids {
				list := lists[rng.IntN(len(lists))]
				s := shares{self: id, counts: map[string]int{}}
				for _, other := range ids {
					s.counts[other] = 0
				}
				var mine, free []int
				for k, owner := range list {
					switch {
					case owners[k] == id:
						s.counts[id]++
						mine = append(mine, k)
					case owner == "" || owner == id:
						s.free++
						free = append(free, k)
					default:
						s.counts[owner]++
					}
				}
				give, take := s.plan()
				for _, k := range mine[:give] {
					owners[k], moved = "", true
				}
				for _, k := range free {
					if take > 0 && owners[k] == "" {
						owners[k], moved = id, true
						take--
					}
				}
			}
			lists = append(lists[1:], slices.Clone(owners))
			still++
			if moved {
				still = 0
			}
		}
		counts := map[string]int{}
		for _, id := range ids {
			counts[id] = 0
		}
		for _, owner := range owners {
			counts[owner]++
		}
		free := counts[""]
		delete(counts, "")
		n := slices.Sorted(maps.Values(counts))
		if free != 0 || n[len(n)-1]-n[0] > 1 {
			t.Fatalf("seed %d: settled on %v, %d free", seed, counts, free)
		}
	}
}
