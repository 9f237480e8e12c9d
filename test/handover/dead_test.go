package handover

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leased/leased/client"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestDeadHolder: when a holder renews no more, the one who waits is granted the
// key within 350 ms of the lease's end and never before it, also when it waits
// with another process than the one that wrote the lease.
func TestDeadHolder(t *testing.T) {
	t.Run("R1", func(t *testing.T) {
		ns := testnats.Server(t)
		deadHolders(t, "1", ns.URL)
	})
	t.Run("R3", func(t *testing.T) {
		nodes := testnats.Cluster(t, 3)
		var urls []string
		for _, n := range nodes.Servers {
			urls = append(urls, n.URL)
		}
		deadHolders(t, "3", urls...)
	})
}

func deadHolders(t *testing.T, replicas string, urls ...string) {
	deaths := size(30, 500)
	for i := range 2 {
		testnats.Leased(t, "serve", "--server", strings.Join(append(urls[i%len(urls):], urls[:i%len(urls)]...), ","), "--replicas", replicas, "--http-listen=127.0.0.1:0")
	}
	nc := testnats.Connect(t, urls[0])
	var clients []*client.Client
	for i := range 4 {
		clients = append(clients, caller(t, urls[i%len(urls)]))
	}

	var stored, told times
	var all sync.WaitGroup
	limit := make(chan struct{}, 60)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	for i := range deaths {
		limit <- struct{}{}
		all.Go(func() {
			defer func() { <-limit }()
			key, c := fmt.Sprintf("dead-%d", i), clients[i%len(clients)]
			ttl := time.Duration(1+i%2) * time.Second
			dead, err := c.Acquire(ctx, client.AcquireRequest{Key: key, Holder: "dead", TTL: ttl})
			if err == nil && i%3 == 0 { // one that renewed before it died
				dead, err = c.Renew(ctx, dead.Lease)
			}
			if err != nil || dead.Kind != kinds.Granted && dead.Kind != kinds.Renewed {
				t.Errorf("%s: %v %v", key, dead.Kind, err)
				return
			}
			written, err := storedAt(nc, dead.Revision)
			if err != nil {
				t.Errorf("%s: %v", key, err)
				return
			}
			end := written.Add(ttl)
			g, err := grant(ctx, c, key, "next", time.Minute)
			now := time.Now()
			if err != nil {
				t.Errorf("%s: %v", key, err)
				return
			}
			if written, err = storedAt(nc, g.Revision); err != nil {
				t.Errorf("%s: %v", key, err)
				return
			}
			stored.add(written.Sub(end))
			told.add(now.Sub(end))
		})
		time.Sleep(10 * time.Millisecond) // they do not die together
	}
	all.Wait()
	t.Logf("from the lease's end to the grant on the server's clock: %v", &stored)
	t.Logf("from the lease's end to the reply: %v", &told)
	if least := stored.quantile(0); least < 0 {
		t.Errorf("a grant is %v before the end of the lease", -least)
	}
	atMost(t, "p99 from the lease's end to the reply", told.quantile(0.99), 350*time.Millisecond)
}
