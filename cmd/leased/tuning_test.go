package main

import "testing"

func TestGCPercent(t *testing.T) {
	for _, c := range []struct {
		live, most uint64
		want       int
	}{
		{0, garbage, 1600}, {4 << 20, garbage, 1600}, {16 << 20, garbage, 400}, {64 << 20, garbage, 100}, {200 << 20, garbage, 32}, {1 << 30, garbage, 25},
		{4 << 20, garbageInside, 1600}, {16 << 20, garbageInside, 400}, {32 << 20, garbageInside, 200}, {100 << 20, garbageInside, 200}, {256 << 20, garbageInside, 100}, {2 << 30, garbageInside, 25},
	} {
		if got := gcPercent(c.live, c.most); got != c.want {
			t.Errorf("with %d bytes live, at most %d of garbage: %d, want %d", c.live, c.most, got, c.want)
		}
	}
}
