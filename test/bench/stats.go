//go:build linux

package main

import (
	"math"
	"slices"
	"time"
)

// quantile is the nearest-rank q-quantile of sorted: the smallest value that
// at least the share q of all values does not exceed. 0 of nothing is 0.
func quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median is the middle of values, the mean of the middle two when their number
// is even, and NaN of nothing. values keeps its order.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// ratios divides a by b round by round. A round that one of them lacks, or in
// which b is 0, is left out: only neighbours in time are compared.
func ratios(a, b map[int]float64) map[int]float64 {
	out := map[int]float64{}
	for round, x := range a {
		if y, ok := b[round]; ok && y != 0 {
			out[round] = x / y
		}
	}
	return out
}

// interleave is the order of the n contestants in one round: every round
// starts with another of them, so that none always runs after the same one.
func interleave(n, round int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = (i + round) % n
	}
	return order
}
