package service

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// TestOverdue: a replayed message whose own time to live is over by the server's
// clock, however that was read, is known for what it is.
func TestOverdue(t *testing.T) {
	now := time.Now()
	c := &clock{}
	c.sample("", now.Add(-time.Second), now, now.Add(30*time.Second)) // half a minute ahead, read within a second
	server := now.Add(30 * time.Second)
	for _, x := range []struct {
		ttl  string
		at   time.Time
		over bool
	}{
		{"5s", server.Add(-4 * time.Second), false},
		{"5s", server.Add(-5 * time.Second), true}, // the clock shows at least this
		{"5s", server.Add(-time.Hour), true},
		{"600s", server.Add(-time.Minute), false},
		{"", server.Add(-time.Hour), false},
		{"never", server.Add(-time.Hour), false},
	} {
		msg := nats.NewMsg("x")
		msg.Header.Set(headerTTL, x.ttl)
		if got := overdue(msg, x.at, c, now); got != x.over {
			t.Errorf("TTL %q, %v old: overdue %v, want %v", x.ttl, server.Sub(x.at), got, x.over)
		}
	}
}
