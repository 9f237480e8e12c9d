package main

import "testing"

func TestGCPercent(t *testing.T) {
	for live, want := range map[uint64]int{0: 1600, 4 << 20: 1600, 16 << 20: 400, 64 << 20: 100, 200 << 20: 32, 1 << 30: 25} {
		if got := gcPercent(live); got != want {
			t.Errorf("with %d bytes live: %d, want %d", live, got, want)
		}
	}
}
