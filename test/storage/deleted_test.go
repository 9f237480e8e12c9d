package storage

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// A bucket that is deleted while it is used must not make two holders of one
// key: whatever was granted in it holds until its time is over.

// deleted is what clients saw around a deletion of the bucket.
type deleted struct {
	at    time.Time // the delete was acknowledged
	mu    sync.Mutex
	seen  []reply // in order of arrival
	names []string
}

func (d *deleted) add(name string, r reply) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.seen, d.names = append(d.seen, r), append(d.names, name)
}

// TestBucketDeletedUnderLoad is rows P04 and 16: each call is answered within a
// second, nothing is granted until all known leases are over, and the service
// comes back by itself.
func TestBucketDeletedUnderLoad(t *testing.T) {
	for _, c := range []struct {
		name                string
		replicas, instances int
	}{{"one", 1, 1}, {"three instances", 1, 3}, {"three replicas, two instances", 3, 2}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var url string
			if c.replicas == 1 {
				url = testnats.Server(t).URL
			} else {
				url = testnats.Cluster(t, c.replicas).URL()
			}
			var ins []*instance
			for range c.instances {
				in, stop := serveUntil(t, url, replicas(c.replicas))
				defer stop()
				ins = append(ins, in)
			}
			for _, in := range ins {
				in.waitReady(t)
			}
			admin := callerOn(t, url)
			const hold = 6 * time.Second
			held := admin.grant("held", "A", hold)
			for i := range 50 {
				admin.grant(fmt.Sprintf("old-%d", i), "A", 3*time.Second)
			}
			highest := bucketOf(t, admin.nc).State.LastSeq

			var d deleted
			stop := make(chan struct{})
			var wg sync.WaitGroup
			for w := range 16 {
				nc := testnats.Connect(t, url)
				wg.Go(func() {
					for i := 0; ; i++ {
						select {
						case <-stop:
							return
						default:
						}
						// Half of them fight for the key that is held, half take new keys.
						key := "held"
						if w%2 == 0 {
							key = fmt.Sprintf("new-%d-%d", w, i)
						}
						r, err := call(nc, "acquire", map[string]any{"key": key, "holder": fmt.Sprintf("w%d", w), "ttl_ms": 1000})
						if err != nil {
							t.Error(err)
							return
						}
						d.add(key, r)
						time.Sleep(time.Millisecond)
					}
				})
			}
			time.Sleep(300 * time.Millisecond)
			before := time.Now()
			if err := api(admin.nc, "STREAM.DELETE.KV_leases", nil, nil); err != nil {
				t.Fatal(err)
			}
			d.at = time.Now()
			end := held.sent.Add(hold)
			ended := held.got.Add(hold)
			if last := d.at.Add(time.Second); last.After(ended) { // of the loops below
				ended = last
			}

			testnats.Eventually(t, 12*time.Second, func() bool { return admin.acquire("probe", "P", time.Second).Kind == "granted" }, "no grant any more")
			back := time.Now()
			first := uint64(bucketOf(t, admin.nc).Config["first_seq"].(float64)) // of the new bucket
			for _, in := range ins {
				in.waitReady(t)
			}
			close(stop)
			wg.Wait()

			if back.Before(end) {
				t.Errorf("a key was granted %v before the last known lease was over", end.Sub(back))
			}
			if back.Sub(ended) > 4*time.Second {
				t.Errorf("granted again only %v after the last known lease was over", back.Sub(ended))
			}
			if back.Sub(d.at) > 10*time.Second {
				t.Errorf("back after %v", back.Sub(d.at))
			}
			early, slow := 0, time.Duration(0)
			kinds := map[string]int{}
			for i, r := range d.seen {
				if r.got.Before(before) {
					continue
				}
				// A write that was on its way when the bucket went is lost without a
				// word, and that takes a second to find out.
				if r.sent.After(d.at) {
					slow = max(slow, r.got.Sub(r.sent))
				} else if took := r.got.Sub(r.sent); took > 1500*time.Millisecond*time.Duration(c.replicas) {
					t.Errorf("a call that was on its way when the bucket was deleted took %v: %s", took, r.Kind)
				}
				switch {
				case r.Kind == "granted" && r.Revision >= first && r.got.Before(end):
					if early++; early <= 3 {
						t.Errorf("%s granted to %s, revision %d, %v after the deletion and %v before the old leases are over",
							d.names[i], r.Holder, r.Revision, r.got.Sub(d.at), end.Sub(r.got))
					}
				case r.Kind == "granted" && d.names[i] == "held" && r.got.Before(end):
					t.Errorf("two holders: %s and %s of the key", held.Holder, r.Holder)
				}
				if r.got.Before(end) {
					kinds[r.Kind]++
				}
				if r.Kind == "granted" && r.sent.After(d.at) && r.Revision <= highest {
					t.Errorf("revision %d after %d", r.Revision, highest)
				}
			}
			if early > 3 {
				t.Errorf("%d early grants in all", early)
			}
			// On replicas it takes a moment until nobody leads what is deleted.
			if limit := time.Second * time.Duration(c.replicas); slow > limit {
				t.Errorf("the slowest call took %v", slow)
			}
			t.Logf("answers between the deletion and the end of the old leases: %v; slowest %v; back after %v", kinds, slow, back.Sub(d.at))
		})
	}
}

// TestBucketDeletedWhileIdle: without a call that finds out, the bucket is made
// again by itself, and an instance that only starts then knows what to wait for.
func TestBucketDeletedWhileIdle(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	in, stop := serveUntil(t, n.URL)
	in.waitReady(t)
	const ttl = 7 * time.Second
	c := callerOn(t, n.URL)
	held := c.grant("k", "A", ttl)
	deleteBucket(t, c.nc)
	testnats.Eventually(t, 5*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, late(in.bucket))
	stop()
	young := serve(t, n.URL)
	end := held.sent.Add(ttl)
	var r reply
	testnats.Eventually(t, 10*time.Second, func() bool {
		r = c.acquire("k", "B", time.Second)
		return r.Kind == "granted"
	}, late(func() string { return fmt.Sprint(r.Kind, " ", r.Error, young.failing()) }))
	if left := end.Sub(r.got); left > 0 {
		t.Errorf("two holders: B got the key %v before the end of A's lease", left)
	}
	if late := r.got.Sub(held.got.Add(ttl)); late > 3*time.Second {
		t.Errorf("granted only %v after the end of A's lease", late)
	}
}

// TestBucketDeletedTwice: what must be waited for is handed on, from bucket to
// bucket and from one instance to the next that never knew the lease.
func TestBucketDeletedTwice(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	old, stopOld := serveUntil(t, n.URL, apiPrefix("old"))
	old.waitReady(t)
	nc := testnats.Connect(t, n.URL)
	const ttl = 9 * time.Second
	held := at{t, nc, "old"}.grant("k", "A", ttl)
	end := held.sent.Add(ttl)
	waits := func(in *instance) {
		t.Helper()
		testnats.Eventually(t, 5*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, late(in.bucket))
	}
	deleteBucket(t, nc)
	waits(old)
	stopOld()
	young, stopYoung := serveUntil(t, n.URL, apiPrefix("young"))
	waits(young)
	testnats.Eventually(t, 5*time.Second, func() bool { return len(young.failing()) == 1 }, late(func() string { return fmt.Sprint(young.failing()) })) // it waits, and no more
	deleteBucket(t, nc)
	created := func() (at time.Time) {
		var s stream
		if api(nc, "STREAM.INFO.KV_leases", nil, &s) == nil {
			at = s.Created
		}
		return at
	}
	testnats.Eventually(t, 5*time.Second, func() bool { return !created().IsZero() }, "not made again")
	defer stopYoung()
	youngest := serve(t, n.URL, apiPrefix("youngest"))
	for {
		for _, prefix := range []string{"young", "youngest"} {
			r := at{t, nc, prefix}.acquire("k", "B", time.Second)
			if r.Kind != "granted" {
				continue
			}
			if left := end.Sub(r.got); left > 0 {
				t.Errorf("two holders: %s gave B the key %v before the end of A's lease", prefix, left)
			}
			return
		}
		if time.Since(end) > 5*time.Second {
			t.Fatalf("never granted again: %v %v", young.failing(), youngest.failing())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// TestBucketDeletedWhilePaused: an instance that stood still while the bucket
// was deleted and made again wakes up with all that it knew of the old one.
func TestBucketDeletedWhilePaused(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	sleeper := testnats.Leased(t, "serve", "--server", n.URL, "--http-listen", "", "--api-prefix", "sleeper")
	in := serve(t, n.URL, apiPrefix("other")).waitReady(t)
	nc := testnats.Connect(t, n.URL)
	asleep, other := at{t, nc, "sleeper"}, at{t, nc, "other"}
	const ttl = 8 * time.Second
	held := asleep.grant("k", "A", ttl)
	end := held.sent.Add(ttl)
	testnats.Eventually(t, 5*time.Second, func() bool { return in.highest() >= held.Revision }, "the other instance does not see it")
	sleeper.Pause()
	deleteBucket(t, nc)
	testnats.Eventually(t, 5*time.Second, func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, late(in.bucket))
	sleeper.Resume()
	kinds := map[string]int{}
	for i := 0; time.Now().Before(end); i++ {
		for _, a := range []at{asleep, other} {
			for _, key := range []string{"k", fmt.Sprintf("new-%d", i)} {
				r := a.acquire(key, "B", time.Second)
				kinds[r.Kind]++
				if r.Kind == "granted" && r.got.Before(end) {
					t.Fatalf("%s granted %s, %v before the end of A's lease", a.prefix, key, end.Sub(r.got))
				}
			}
		}
		// Its own lease is not in this bucket.
		if r := asleep.renew(held, ttl); r.Kind == "renewed" {
			t.Fatalf("renewed with revision %d in another bucket", r.Revision)
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Log(kinds)
	asleep.grant("k", "B", time.Second)
}

// TestStoreCopiedBack: a store that is put back by hand under running instances
// is found out by their memory, and deleting that bucket does not make them
// forget what they granted in it.
func TestStoreCopiedBack(t *testing.T) {
	t.Parallel()
	store := filepath.Join(t.TempDir(), "store")
	n := testnats.Child(t, testnats.ChildOptions{StoreDir: store})
	in, stop := serveUntil(t, n.URL)
	defer stop()
	in.waitReady(t)
	c := callerOn(t, n.URL)
	c.grant("before", "A", time.Minute)
	n.Kill()
	saved := filepath.Join(t.TempDir(), "saved")
	copyTree(t, store, saved)
	n.Restart()
	in.waitReady(t)
	const ttl = 25 * time.Second
	var held reply
	testnats.Eventually(t, 10*time.Second, func() bool { held = c.acquire("k", "A", ttl); return held.Kind == "granted" }, late(func() string { return held.Error }))
	end := held.sent.Add(ttl)
	for range 20 {
		held = c.want(c.renew(held, ttl), "renewed")
	}
	n.Kill()
	if err := os.RemoveAll(store); err != nil {
		t.Fatal(err)
	}
	copyTree(t, saved, store)
	n.Restart()
	refused := func(until func() bool, what string) {
		t.Helper()
		testnats.Eventually(t, 15*time.Second, func() bool {
			for _, key := range []string{"k", "free"} {
				if r := c.acquire(key, "B", time.Second); r.Kind == "granted" && r.got.Before(end) {
					t.Fatalf("%s granted with revision %d (%d was issued), %v before the end of A's lease", key, r.Revision, held.Revision, end.Sub(r.got))
				}
			}
			return until()
		}, what, ": ", late(in.bucket))
	}
	refused(func() bool { return strings.HasPrefix(in.bucket(), "distrusted") }, "not distrusted")
	deleteBucket(t, c.nc)
	refused(func() bool { return strings.HasPrefix(in.bucket(), "waiting") }, "does not wait")
	if r := c.acquire("k", "B", time.Second); r.Kind != "unavailable" {
		t.Errorf("acquire: %s", r.Kind)
	}
}

func copyTree(t *testing.T, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatal(err)
	}
}

// TestBucketDeletedAndNewInstance: an instance that starts when the bucket has
// just been deleted makes no second holder while its peers know of a first one.
func TestBucketDeletedAndNewInstance(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	// The peer looks at the bucket late: its connections are slow, not cut.
	link := testnats.Relay(t, n.URL)
	serve(t, link.URL()).waitReady(t)
	const ttl = 8 * time.Second
	c := callerOn(t, n.URL)
	held := c.grant("k", "A", ttl)
	end := held.sent.Add(ttl)
	link.Delay(50*time.Millisecond, 0)
	if err := api(c.nc, "STREAM.DELETE.KV_leases", nil, nil); err != nil {
		t.Fatal(err)
	}
	young := serve(t, n.URL, apiPrefix("young"))
	for {
		r, err := callAt(c.nc, "young", "acquire", map[string]any{"key": "k", "holder": "B", "ttl_ms": 1000})
		if err != nil {
			t.Fatal(err)
		}
		if r.Kind == "granted" {
			if left := end.Sub(r.got); left > 0 {
				t.Errorf("two holders: B got the key %v before the end of A's lease", left)
			}
			break
		}
		if time.Since(end) > 5*time.Second {
			t.Fatalf("still %s: %s; %v", r.Kind, r.Error, young.failing())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// TestBucketMadeByTwo: what one instance grants in a new bucket survives that
// the other one, which made it, hears of it late.
func TestBucketMadeByTwo(t *testing.T) {
	t.Parallel()
	n := testnats.Server(t)
	link := testnats.Relay(t, n.URL)
	link.Delay(500*time.Millisecond, 0, testnats.Down)
	far := serve(t, link.URL(), apiPrefix("far"))
	c := callerOn(t, n.URL)
	testnats.Eventually(t, 10*time.Second, func() bool { return api(c.nc, "STREAM.INFO.KV_leases", nil, nil) == nil }, "no bucket")
	serve(t, n.URL).waitReady(t)
	var held []reply
	for i := range 20 {
		held = append(held, c.grant(fmt.Sprintf("k-%d", i), "A", 20*time.Second))
	}
	link.Delay(0, 0)
	far.waitReady(t)
	for _, l := range held {
		if r := c.owner(l.Key); r.Revision != l.Revision {
			t.Errorf("%s: granted with revision %d, now %s %d", l.Key, l.Revision, r.Kind, r.Revision)
		}
	}
}
