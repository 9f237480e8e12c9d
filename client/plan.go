package client

import "sort"

// shares is who has what of the keys of a group, as one member sees it.
type shares struct {
	self string
	// counts has every live member, self too, with the number of keys it holds.
	counts map[string]int
	free   int // keys that nobody holds
	gone   int // keys on their way to be free: held by no member, or being given up
}

// plan says how many keys self should give up and how many free ones it should
// take. Every member computes it from its own view; views that agree give plans
// that fit together, and views that do not are mended in the next round.
//
// The aim: each of N members holds floor(M/N) keys, and M mod N of them one more.
// It is reached with the fewest moves: what exceeds ceil(M/N) is given up, and a
// member with ceil gives one more only if those below the floor could not be
// filled otherwise. Who gives or takes the odd ones is decided by the order of the
// holder ids, never by who is quicker.
func (s shares) plan() (give, take int) {
	total, missing, above := s.free+s.gone, 0, 0
	for _, n := range s.counts {
		total += n
	}
	members := len(s.counts)
	floor := total / members
	ceil := floor
	if total%members > 0 {
		ceil++
	}
	var full, even []string // at least ceil; exactly floor
	for id, n := range s.counts {
		missing += max(0, floor-n)
		above += max(0, n-ceil)
		if n >= ceil {
			full = append(full, id)
		} else if n == floor {
			even = append(even, id)
		}
	}
	mine := s.counts[s.self]

	give = max(0, mine-ceil)
	if ceil > floor && first(full, missing-above-s.free-s.gone, s.self) {
		give++
	}
	switch {
	case mine < floor:
		take = min(floor-mine, s.free)
	case first(even, s.free-missing, s.self):
		take = min(1, s.free)
	}
	return give, take
}

// first says whether id is among the first n of ids in order.
func first(ids []string, n int, id string) bool {
	sort.Strings(ids)
	for i, other := range ids {
		if other == id {
			return i < n
		}
	}
	return false
}
