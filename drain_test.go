package leased

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestDrainTwice: a service leaves once, and whoever asks again learns how that went.
func TestDrainTwice(t *testing.T) {
	t.Run("clean", func(t *testing.T) {
		r := run(t, nil)
		both := make(chan error, 2)
		for range 2 {
			go func() { both <- r.svc.Drain(t.Context()) }()
		}
		for range 2 {
			if err := <-both; err != nil {
				t.Error(err)
			}
		}
		if err := r.svc.Drain(t.Context()); err != nil {
			t.Error(err)
		}
	})
	t.Run("broken off", func(t *testing.T) {
		r := run(t, nil)
		if msg, kind := r.call("acquire", `{"key":"k","holder":"a","ttl_ms":60000}`); kind != "" {
			t.Fatalf("%s", msg.Data)
		}
		got := make(chan struct{}, 1)
		if _, err := r.nc.Subscribe("dagnats.lease.inbox.a.k", func(*nats.Msg) { got <- struct{}{} }); err != nil {
			t.Fatal(err)
		}
		if err := r.nc.PublishRequest("api.leases.forward", r.nc.NewInbox(), []byte(`{"key":"k","timeout_ms":30000}`)); err != nil {
			t.Fatal(err)
		}
		testnats.Eventually(t, 10*time.Second, func() bool { return len(got) > 0 }, "the owner got no forward")
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		r.broken = true
		first := r.svc.Drain(ctx)
		if first == nil {
			t.Fatal("a call in flight was not broken off")
		}
		if second := r.svc.Drain(t.Context()); fmt.Sprint(second) != fmt.Sprint(first) {
			t.Errorf("first %v, then %v", first, second)
		}
	})
}
