package handover

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/leased/leased/client"
	"github.com/leased/leased/internal/testnats"
)

// TestManyWaiters: many wait for one key. Each release gives it to exactly one of
// them, the one who came first, at once and with no write but those two; other
// keys hardly notice.
func TestManyWaiters(t *testing.T) {
	waiters, rounds := size(60, 500), size(2, 4)
	service := testnats.Leased(t, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+t.TempDir())
	url := service.NATS()
	nc := testnats.Connect(t, url)
	var clients []*client.Client
	for range 8 {
		clients = append(clients, caller(t, url))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()

	// Who waits comes one after another, so that there is an order to be kept.
	first, err := grant(ctx, clients[0], "wanted", "first", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	var (
		handed  times
		holders atomic.Int32
		all     sync.WaitGroup
		mu      sync.Mutex
		order   []int
		gaveUp  time.Time // when the release was sent
	)
	for i := range waiters {
		c := clients[i%len(clients)]
		all.Go(func() {
			for range rounds {
				g, err := grant(ctx, c, "wanted", fmt.Sprintf("w-%d", i), time.Minute)
				now := time.Now()
				if err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d have the key at once", n)
				}
				mu.Lock()
				handed.add(now.Sub(gaveUp))
				order = append(order, i)
				mu.Unlock()
				holders.Add(-1)
				mu.Lock()
				gaveUp = time.Now()
				mu.Unlock()
				if _, err := c.Release(ctx, g.Lease); err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
			}
		})
		testnats.Eventually(t, 20*time.Second, func() bool { return waiting(t, service.HTTP()) == i+1 }, "waiter ", i, " does not wait")
	}

	before := lastSequence(t, nc)
	quiet := time.Now()
	time.Sleep(2 * time.Second) // they wait
	if n := lastSequence(t, nc) - before; n != 0 {
		t.Errorf("%d writes in %v of waiting", n, time.Since(quiet))
	}

	// Others use other keys meanwhile.
	busy, stop := context.WithCancel(ctx)
	var others times
	var writes atomic.Uint64
	var neighbours sync.WaitGroup
	for i := range 8 {
		c, key := clients[i], fmt.Sprintf("other-%d", i)
		neighbours.Go(func() {
			for busy.Err() == nil {
				var r client.Result
				for _, call := range []func() (client.Result, error){
					func() (client.Result, error) {
						return c.Acquire(ctx, client.AcquireRequest{Key: key, Holder: "me", TTL: time.Minute})
					},
					func() (client.Result, error) { return c.Renew(ctx, r.Lease) },
					func() (client.Result, error) { return c.Release(ctx, r.Lease) },
				} {
					began := time.Now()
					var err error
					if r, err = call(); err != nil {
						t.Error(err)
						return
					}
					others.add(time.Since(began))
					writes.Add(1)
				}
				time.Sleep(50 * time.Millisecond)
			}
		})
	}

	mu.Lock()
	gaveUp = time.Now()
	mu.Unlock()
	began := time.Now()
	if _, err := clients[0].Release(ctx, first.Lease); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	took := time.Since(began)
	stop()
	neighbours.Wait()

	grants := waiters * rounds
	if len(order) != grants {
		t.Fatalf("%d grants for %d releases", len(order), grants)
	}
	for i, who := range order[:waiters] {
		if who != i {
			t.Errorf("grant %d went to the waiter that came as number %d", i, who)
			break
		}
	}
	if n, want := lastSequence(t, nc)-before-writes.Load(), uint64(2*grants+1); n != want {
		t.Errorf("%d writes for %d grants, want %d", n, grants, want)
	}
	t.Logf("%d waiters, %d grants in %v; from release to grant: %v", waiters, grants, took, &handed)
	t.Logf("other keys meanwhile: %v", &others)
	atMost(t, "half of the hand-overs", handed.quantile(0.5), 5*time.Millisecond)
	atMost(t, "p99 of other keys", others.quantile(0.99), 100*time.Millisecond)
}

// waiting is how many acquires wait, as the service's metrics tell.
func waiting(t testing.TB, address string) int {
	t.Helper()
	page := get(t, "http://"+address+"/metrics")
	_, after, _ := strings.Cut(page, "\nleased_waiters ")
	n := -1
	_, _ = fmt.Sscan(after, &n)
	return n
}

func get(t testing.TB, url string) string {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	page, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}
