package contract

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestAcquireIsIdempotent: the holder that asks again gets its own lease back
// as it is stored, also with another TTL, from any instance, and no more time (P10).
func TestAcquireIsIdempotent(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	const ttl = 4 * time.Second
	first := r.acquire("k", "A", ttl.Milliseconds())
	stored := r.stored("k")
	left := first.Left
	var last *reply
	for n := 0; time.Since(first.sent) < ttl/2; n++ {
		again := r.acquire("k", "A", []int64{4000, 1000, 600000}[n%3])
		if again.lease() != first.lease() {
			t.Fatalf("again: %s, first: %s", again.raw, first.raw)
		}
		if again.Left > left {
			t.Errorf("left_ms grows from %d to %d", left, again.Left)
		}
		left, last = again.Left, again
		time.Sleep(50 * time.Millisecond) // spread over the life of the lease
	}
	if diff := cmp.Diff(stored, r.stored("k")); diff != "" {
		t.Errorf("asking again changed what is stored: %s", diff)
	}
	if truth := ttl - last.sent.Sub(first.came); time.Duration(last.Left)*time.Millisecond > truth {
		t.Errorf("left_ms is %d to a call sent at most %v before the end", last.Left, truth)
	}
	r.watchEnd(first, first.sent, first.came, ttl, "B")
}

// TestL01AcquireIsSafeToRepeat: the ack of the write, or the reply, is lost;
// the same call again gives the one stored revision and a rival is refused.
func TestL01AcquireIsSafeToRepeat(t *testing.T) {
	t.Parallel()
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	r := newRig(t, setup{node: node, dial: storeVia(relay)})
	for n := range 5 {
		key := fmt.Sprintf("k%d", n)
		before := r.stream().LastSeq
		dropped := relay.DropNext(testnats.PubAck(bucketStream), testnats.Pass)
		got := r.acquire(key, "A", 60000)
		<-dropped
		if again := r.acquire(key, "A", 60000); again.lease() != got.lease() {
			t.Errorf("again: %s, first: %s", again.raw, got.raw)
		}
		denied := r.want(kinds.Denied, "acquire", request{Key: key, Holder: "B", TTL: 60000})
		if denied.lease() != got.lease() {
			t.Errorf("the rival is shown %s, the lease is %s", denied.raw, got.raw)
		}
		if after := r.stream().LastSeq; after != before+1 {
			t.Errorf("%d writes for one lease", after-before)
		}
		// The same for a renewal and a release.
		dropped = relay.DropNext(testnats.PubAck(bucketStream), testnats.Pass)
		renewed := r.renew(got, 60000)
		<-dropped
		dropped = relay.DropNext(testnats.PubAck(bucketStream), testnats.Pass)
		r.release(renewed)
		<-dropped
		if after := r.stream().LastSeq; after != before+3 {
			t.Errorf("%d writes for an acquire, a renewal and a release", after-before)
		}
	}
}

// TestTheEndIsExact: server, service and test have one clock here, so the end
// of a lease is known to the millisecond. A call sent after it never gets the
// old lease, its own holder included, and one answered before it never gets
// another. Half of the leases are shortened ones, whose message outlives them (H2).
func TestTheEndIsExact(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	var wg sync.WaitGroup
	for n := range 24 {
		key := fmt.Sprintf("k%d", n)
		l := r.acquire(key, "A", map[bool]int64{false: 1000, true: 600000}[n%2 == 0])
		if n%2 == 0 {
			l = r.renew(l, 1000)
		}
		end := r.stored(key).Time.Add(time.Second)
		if l.ExpiresAt.After(end) || end.Sub(l.ExpiresAt) > 100*time.Millisecond {
			t.Errorf("%s: expires_at is %s, it ends at %s", key, l.ExpiresAt, end)
		}
		call := []string{"acquire", "owner", "renew", "forward"}[n/2%4]
		wg.Go(func() {
			time.Sleep(time.Until(end) - 50*time.Millisecond)
			for {
				got, err := r.ask(call, request{Key: key, Holder: "A", TTL: 1000, Revision: l.Revision, Timeout: 1000})
				if err != nil {
					t.Error(err)
					return
				}
				old := false
				switch got.kind {
				case kinds.Granted, kinds.Held, kinds.OwnerUnavailable:
					old = got.Revision == l.Revision
					if got.kind == kinds.Granted && !old && got.AcquiredAt.Equal(l.AcquiredAt) {
						t.Errorf("%s: a new revision has the old acquired_at: %s", key, got.raw)
					}
				case kinds.Renewed: // just in time: all that follows is another lease
					if got.sent.After(end) {
						t.Errorf("%s: renewed by a call sent %v after the end", key, got.sent.Sub(end))
					}
					return
				case kinds.Free, kinds.Lost, kinds.NotHeld:
				default:
					t.Errorf("%s: %s", key, got.raw)
					return
				}
				left := time.Duration(got.Left) * time.Millisecond
				switch {
				case old && call != "forward" && left > end.Sub(got.sent):
					t.Errorf("%s: left_ms %d to a call sent %v before the end", key, got.Left, end.Sub(got.sent))
				case old && call != "forward" && left < end.Sub(got.came)-healthy:
					t.Errorf("%s: left_ms %d in a reply that came %v before the end", key, got.Left, end.Sub(got.came))
				}
				switch {
				case old && got.sent.After(end):
					t.Errorf("%s: %s shows the lease to a call sent %v after its end", key, call, got.sent.Sub(end))
					return
				case !old && got.came.Before(end):
					t.Errorf("%s: %s shows the lease as over %v before its end", key, call, end.Sub(got.came))
					return
				case !old:
					return
				}
			}
		})
	}
	wg.Wait()
}

// TestOwnLapsedLeaseIsNotHandedBack: after its end its own holder begins a new
// tenure: new revision, new acquired_at, previous told as expired.
func TestOwnLapsedLeaseIsNotHandedBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	for _, key := range []string{"plain", "shortened"} {
		l := r.acquire(key, "A", 1000)
		if key == "shortened" {
			r.release(l)
			l = r.renew(r.acquire(key, "A", 600000), 1000)
		}
		end := r.stored(key).Time.Add(time.Second)
		time.Sleep(time.Until(end))
		got := r.acquire(key, "A", 1000)
		if got.Revision <= l.Revision || !got.AcquiredAt.After(l.AcquiredAt) || got.Left < 900 {
			t.Errorf("%s: after the end of %s its holder gets %s", key, l.raw, got.raw)
		}
		r.want(kinds.Lost, "renew", request{Key: key, Holder: "A", Revision: l.Revision, TTL: 1000})
	}
}

// TestRefusalsNameTheHolder: granted:false shows the whole lease that stands (P11).
func TestRefusalsNameTheHolder(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	l := r.acquire("k", "holder-of-the-key", 60000)
	for n := range 10 {
		got := r.want(kinds.Denied, "acquire", request{Key: "k", Holder: fmt.Sprintf("rival-%d", n), TTL: 1000})
		if got.lease() != l.lease() || got.Left <= 0 || got.Left > 60000 {
			t.Errorf("refused with %s, the lease is %s", got.raw, l.raw)
		}
		if n%3 == 0 {
			l = r.renew(l, 60000)
		}
	}
}

// fences checks that a number grows with every call that gave one.
type fences struct {
	t       *testing.T
	highest uint64
}

func (f *fences) next(l *reply) *reply {
	f.t.Helper()
	if l.Revision <= f.highest {
		f.t.Errorf("revision %d was issued after %d: %s", l.Revision, f.highest, l.raw)
	}
	f.highest = max(f.highest, l.Revision)
	return l
}

// TestFenceGrows over every write of every key, whoever serves it, over a
// bucket that is deleted under the service and made again, and over one that
// is made again by an instance that has never seen the old one.
func TestFenceGrows(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2, faulty: true})
	f := &fences{t: t}
	held := map[string]*reply{}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		key := fmt.Sprintf("k%d", random.IntN(6))
		switch l := held[key]; {
		case l == nil:
			held[key] = f.next(r.acquire(key, fmt.Sprintf("h%d", random.IntN(3)), 60000))
		case random.IntN(3) == 0:
			r.release(l)
			delete(held, key)
		default:
			held[key] = f.next(r.renew(l, 60000))
		}
	}
	for _, l := range held {
		r.release(l)
	}

	for _, everybody := range []bool{false, true} {
		l := f.next(r.acquire("over", "A", 1000))
		time.Sleep(time.Until(l.came.Add(time.Second))) // nothing is granted in a new bucket while an old lease may stand
		if everybody {
			for _, i := range r.all {
				r.leave(i, 5*time.Second)
			}
		}
		if err := r.js.DeleteStream(t.Context(), bucketStream); err != nil {
			t.Fatal(err)
		}
		if everybody {
			r.ready(r.start())
		}
		testnats.Eventually(t, 15*time.Second, func() bool {
			got := r.call("acquire", request{Key: "over", Holder: "A", TTL: 60000})
			if got.kind == kinds.Granted && got.Revision != l.Revision {
				l = f.next(got)
				return true
			}
			return false
		}, "nothing is granted in the new bucket")
		r.release(l)
	}
}
