package leased

import "sync/atomic"

const (
	// callBytes and forwardBytes are what the request of one call, or forward, may be
	// long for one place among those in flight. A longer one takes more places, so that
	// with the number of requests their bytes are limited: at the defaults to 64 MiB of either.
	callBytes    = 16 << 10
	forwardBytes = 128 << 10
	// longRequest is what is read apart from the goroutine that takes the requests of a call:
	// 1000 leases with the longest keys take 170 KiB.
	longRequest = 256 << 10
	// pendingBytes is what nats.go keeps of an endpoint's requests until take has them, and
	// drops above. Nothing waits in take, but where a crowd sends, what reads from the
	// connection may run for longer than take does.
	pendingBytes = 256 << 20
)

// limit bounds the requests that are being answered, and their bytes (P9).
type limit struct {
	places int64
	bytes  int // that go with one place
	taken  atomic.Int64
}

// enter takes the places for a request of size bytes, if they are free. What takes more
// than one leaves a quarter of them to those that take one: a crowd of long requests does not
// keep the others out. A request that would need more than that takes as many.
func (l *limit) enter(size int) (places int64, ok bool) {
	places, most := 1+int64(max(0, size-1)/l.bytes), l.places
	if places > 1 {
		most -= most / 4
		places = min(places, most)
	}
	for {
		taken := l.taken.Load()
		if taken+places > most {
			return 0, false
		}
		if l.taken.CompareAndSwap(taken, taken+places) {
			return places, true
		}
	}
}

// leave gives places back.
func (l *limit) leave(places int64) { l.taken.Add(-places) }
