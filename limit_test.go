package leased

import "testing"

// TestLimit: long requests take places for their length, leave some to short ones, and a
// limit of any size lets one of any length in. P9.
func TestLimit(t *testing.T) {
	for _, c := range []struct{ places, long, each, short int64 }{
		{4096, 48, 64, 1024}, // of 1 MiB
		{64, 1, 48, 16},
		{3, 1, 3, 0},
		{1, 1, 1, 0},
	} {
		l := &limit{places: c.places, bytes: callBytes}
		count := func(size int, each int64) (n int64) {
			for {
				places, ok := l.enter(size)
				if !ok {
					return n
				}
				if n++; places != each {
					t.Fatalf("of %d places a request of %d bytes takes %d, want %d", c.places, size, places, each)
				}
			}
		}
		if n := count(1<<20, c.each); n != c.long {
			t.Errorf("%d places: %d long requests are let in, want %d", c.places, n, c.long)
		}
		if n := count(callBytes, 1); n != c.short {
			t.Errorf("%d places: %d short requests are let in beside, want %d", c.places, n, c.short)
		}
		l.leave(c.each * c.long)
		l.leave(c.short)
		if n := count(0, 1); n != c.places {
			t.Errorf("%d places: %d short requests are let in alone", c.places, n)
		}
	}
}
