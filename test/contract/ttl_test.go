package contract

import (
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// freeWithin is how long after its end a key may still look held.
const freeWithin = time.Second

// watchEnd asks again and again until the key of the lease that was granted
// between sent and came is free, and checks when that was: not before its time
// from the sending of the call, not later than a second after its time from
// the reply. taker, if not empty, asks by acquiring; else the owner is asked.
func (r *rig) watchEnd(l *reply, sent, came time.Time, ttl time.Duration, taker string) {
	r.t.Helper()
	for {
		var got *reply
		var err error
		if taker == "" {
			got, err = r.ask("owner", request{Key: l.Key})
		} else {
			got, err = r.ask("acquire", request{Key: l.Key, Holder: taker, TTL: 60000})
		}
		if err != nil {
			r.t.Error(err)
			return
		}
		switch got.kind {
		case kinds.Held, kinds.Denied:
			if got.lease() != l.lease() {
				r.t.Errorf("%s: shows %s, the lease is %s", l.Key, got.raw, l.raw)
				return
			}
			if late := got.sent.Sub(came.Add(ttl)); late > freeWithin {
				r.t.Errorf("%s: still held %v after its end", l.Key, late)
				return
			}
		case kinds.Free, kinds.Granted:
			if early := sent.Add(ttl).Sub(got.came); early > 0 {
				r.t.Errorf("%s: free %v before its end", l.Key, early)
			}
			return
		default:
			r.t.Errorf("%s: %s", l.Key, got.raw)
			return
		}
		time.Sleep(20 * time.Millisecond) // the rate of asking, not luck
	}
}

// wantTTL checks the Nats-TTL of the key's message.
func (r *rig) wantTTL(l *reply, want string) {
	r.t.Helper()
	m := r.stored(l.Key)
	if m == nil || m.Sequence != l.Revision {
		r.t.Fatalf("%s: stored is %+v, the reply says revision %d", l.Key, m, l.Revision)
	}
	if got := m.Header.Get("Nats-TTL"); got != want {
		r.t.Errorf("%s: stored Nats-TTL is %q, want %q", l.Key, got, want)
	}
}

// TestLeasesLiveTheirTime lives through leases of 1, 2 and 5 s: new, renewed
// for as long, longer and shorter, taken after a longer one; seen by owner and
// by a rival (P14).
func TestLeasesLiveTheirTime(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	var wg sync.WaitGroup
	for _, ttl := range []int64{1000, 2000, 5000} {
		for _, taker := range []string{"", "rival"} {
			for name, begin := range map[string]func(key string) *reply{
				"new":      func(key string) *reply { return r.acquire(key, "A", ttl) },
				"renewed":  func(key string) *reply { return r.renew(r.acquire(key, "A", ttl), ttl) },
				"longer":   func(key string) *reply { return r.renew(r.acquire(key, "A", 1000), ttl) },
				"shorter":  func(key string) *reply { return r.renew(r.acquire(key, "A", 600000), ttl) },
				"second":   func(key string) *reply { r.release(r.acquire(key, "B", 600000)); return r.acquire(key, "A", ttl) },
				"shortest": func(key string) *reply { return r.renew(r.renew(r.acquire(key, "A", 600000), 7000), ttl) },
			} {
				l := begin(fmt.Sprintf("%s-%d-%s", name, ttl, taker))
				switch name {
				case "shorter", "second", "shortest":
				default:
					r.wantTTL(l, fmt.Sprintf("%ds", ttl/1000))
				}
				wg.Go(func() { r.watchEnd(l, l.sent, l.came, time.Duration(ttl)*time.Millisecond, taker) })
			}
		}
	}
	wg.Wait()
}

// TestStoredTTLIsExact: Nats-TTL of what is stored, on acquire and on every
// renewal that does not shorten, up to 600 s. It is the server that frees keys.
func TestStoredTTLIsExact(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	for _, ttl := range []int64{1000, 2000, 3000, 59000, 60000, 61000, 599000, 600000} {
		key := fmt.Sprintf("k-%d", ttl)
		l := r.acquire(key, "A", ttl)
		want := fmt.Sprintf("%ds", ttl/1000)
		r.wantTTL(l, want)
		for range 3 {
			l = r.renew(l, ttl)
			r.wantTTL(l, want)
		}
		l = r.renew(l, 600000)
		r.wantTTL(l, "600s")
		if l.TTL != 600000 || !l.ExpiresAt.After(l.AcquiredAt.Add(599*time.Second)) {
			t.Errorf("%s: renewed to 600 s: %s", key, l.raw)
		}
		var rec struct {
			TTL     int64 `json:"ttl_ms"`
			Horizon string
		}
		if err := json.Unmarshal(r.stored(key).Data, &rec); err != nil || rec.TTL != 600000 || rec.Horizon != "" {
			t.Errorf("%s: stored is %s, %v", key, r.stored(key).Data, err)
		}
	}
}

// TestShortenedLeaseIsStoredPastItsHorizon: a message whose key had a later end
// outlives its own lease, so that no crash can bring the older one back.
func TestShortenedLeaseIsStoredPastItsHorizon(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	ttlOf := func(key string) time.Duration {
		t.Helper()
		d, err := time.ParseDuration(r.stored(key).Header.Get("Nats-TTL"))
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	within := func(key string, low, high time.Duration) {
		t.Helper()
		if got := ttlOf(key); got < low || got > high {
			t.Errorf("%s: stored for %v, want %v to %v", key, got, low, high)
		}
	}
	short := r.renew(r.acquire("shortened", "A", 600000), 1000)
	within("shortened", 600*time.Second, 603*time.Second)
	released := r.acquire("released", "A", 300000)
	r.release(released)
	within("released", 330*time.Second, 334*time.Second)
	r.acquire("released", "B", 2000)
	within("released", 300*time.Second, 303*time.Second)
	plain := r.acquire("plain", "A", 1000)
	r.release(plain)
	within("plain", 32*time.Second, 34*time.Second)
	// The end of the shortened lease is told by the service, and its tombstone
	// lives past the horizon too.
	testnats.Eventually(t, 5*time.Second, func() bool { return r.stored("shortened").Header.Get(eventHeader) == "expired" }, "no expired event")
	within("shortened", 628*time.Second, 634*time.Second)
	if r.owner("shortened").kind != kinds.Free {
		t.Error("the shortened lease is still held")
	}
	r.want(kinds.Lost, "renew", request{Key: "shortened", Holder: "A", Revision: short.Revision, TTL: 1000})
}

// TestL06RenewedLeaseStillDies: a renewal without TTL would make it immortal.
func TestL06RenewedLeaseStillDies(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	first := r.acquire("k", "A", 2000)
	r.wantTTL(first, "2s")
	second := r.renew(first, 2000)
	r.wantTTL(second, "2s")
	r.watchEnd(second, second.sent, second.came, 2*time.Second, "")
	testnats.Eventually(t, 5*time.Second, func() bool {
		m := r.stored("k")
		return m != nil && m.Header.Get(eventHeader) == "expired"
	}, "the end is not told")
	if got := r.owner("k"); got.kind != kinds.Free {
		t.Errorf("owner after the end: %s", got.raw)
	}
}

// TestLeasesAreRenewedForLongerThanTheirTTL: renewals every third keep a lease
// of 1 s for 4 s, with one tenure, while a rival asks all the time (H4).
func TestLeasesAreRenewedForLongerThanTheirTTL(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{instances: 2})
	l := r.acquire("k", "A", 1000)
	began := l.AcquiredAt
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			got, err := r.ask("acquire", request{Key: "k", Holder: "B", TTL: 1000})
			if err != nil || got.kind != kinds.Denied || got.Holder != "A" {
				t.Errorf("a rival of a renewed lease: %+v, %v", got, err)
				return
			}
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
	for range 12 {
		next := r.renew(l, 1000)
		if next.Revision <= l.Revision || !next.AcquiredAt.Equal(began) {
			t.Errorf("renewed: %s after %s", next.raw, l.raw)
		}
		l = next
		time.Sleep(time.Second / 3) // a holder renews every third of its TTL
	}
	close(stop)
	wg.Wait()
	r.renew(l, 1000)
}

// TestT06TTLBounds: whole seconds from 1 s to 10 min, and no rounding (P5).
func TestT06TTLBounds(t *testing.T) {
	t.Parallel()
	r := newRig(t, setup{})
	l := r.acquire("held", "A", 60000)
	for _, c := range []struct {
		ttl string
		ok  bool
	}{
		{"999", false}, {"1000", true}, {"1001", false}, {"1500", false}, {"1999", false}, {"600000", true}, {"600001", false}, {"601000", false},
		{"0", false}, {"-1", false}, {"-1000", false}, {`"1000"`, false}, {"null", false}, {"true", false}, {"1e3", true}, {"2000.0", true}, {"1500.5", false},
	} {
		before := r.stream().LastSeq
		bodies := map[string]string{
			"acquire": fmt.Sprintf(`{"key":"new%d","holder":"A","ttl_ms":%s}`, before, c.ttl),
			"renew":   fmt.Sprintf(`{"key":"held","holder":"A","revision":%d,"ttl_ms":%s}`, l.Revision, c.ttl),
		}
		for call, body := range bodies {
			if !c.ok {
				got := r.want(kinds.Invalid, call, body)
				if diff := cmp.Diff(before, r.stream().LastSeq); diff != "" || got.Error == "" {
					t.Errorf("%s %s moved the stream: %s", call, c.ttl, diff)
				}
				continue
			}
			got := r.call(call, body)
			if got.kind != kinds.Granted && got.kind != kinds.Renewed {
				t.Fatalf("%s %s: %s", call, c.ttl, got.raw)
			}
			if call == "renew" {
				l = r.renew(got, 60000)
			}
		}
	}
}
