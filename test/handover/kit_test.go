package handover

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/client"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

var long = os.Getenv("LEASED_LONG") != ""

// size is full with LEASED_LONG, else slice.
func size(slice, full int) int {
	if long {
		return full
	}
	return slice
}

// atMost holds a figure to its limit with LEASED_LONG, and to a far wider one
// without.
func atMost(t *testing.T, what string, got, limit time.Duration) {
	t.Helper()
	if !long {
		limit *= 20
	}
	if got > limit {
		t.Errorf("%s is %v, want at most %v", what, got, limit)
	}
}

// times are measured by many.
type times struct {
	mu  sync.Mutex
	all []time.Duration
}

func (d *times) add(t time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, t)
}

// quantile is the smallest time that at least the share q does not exceed.
func (d *times) quantile(q float64) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.all) == 0 {
		return 0
	}
	slices.Sort(d.all)
	return d.all[min(max(int(math.Ceil(q*float64(len(d.all)))), 1), len(d.all))-1]
}

func (d *times) String() string {
	return fmt.Sprintf("%d times: least %v, p50 %v, p99 %v, most %v", len(d.all), d.quantile(0), d.quantile(0.5), d.quantile(0.99), d.quantile(1))
}

// caller makes calls over a connection of its own.
func caller(t testing.TB, url string) *client.Client {
	t.Helper()
	return client.New(testnats.Connect(t, url), client.Options{Timeout: 20 * time.Second})
}

// grant waits in line until holder has key, and returns the grant.
func grant(ctx context.Context, c *client.Client, key, holder string, ttl time.Duration) (client.Result, error) {
	for {
		r, err := c.Acquire(ctx, client.AcquireRequest{Key: key, Holder: holder, TTL: ttl, Wait: 30 * time.Second})
		if err != nil || r.Kind == kinds.Granted {
			return r, err
		}
	}
}

// lastSequence is the number of the bucket's last write.
func lastSequence(t testing.TB, nc *nats.Conn) uint64 {
	t.Helper()
	var info struct {
		State struct {
			Last uint64 `json:"last_seq"`
		}
	}
	if err := ask(nc, "$JS.API.STREAM.INFO.KV_leases", "", &info); err != nil {
		t.Fatal(err)
	}
	return info.State.Last
}

// storedAt is the server's time of a write of the bucket, by the leader.
func storedAt(nc *nats.Conn, revision uint64) (time.Time, error) {
	var got struct{ Message struct{ Time time.Time } }
	err := ask(nc, "$JS.API.STREAM.MSG.GET.KV_leases", fmt.Sprintf(`{"seq":%d}`, revision), &got)
	if err == nil && got.Message.Time.IsZero() {
		err = fmt.Errorf("no message %d", revision)
	}
	return got.Message.Time, err
}

func ask(nc *nats.Conn, subject, body string, answer any) error {
	m, err := nc.Request(subject, []byte(body), 20*time.Second)
	if err != nil {
		return fmt.Errorf("%s: %w", subject, err)
	}
	return json.Unmarshal(m.Data, answer)
}
