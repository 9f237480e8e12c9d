//go:build !race

package contract

// slowness is what the race detector costs, for limits on time.
const slowness = 1
