package leased

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// dialer dials, or hangs as if packets to the address were dropped.
type dialer struct {
	mu    sync.Mutex
	conns []net.Conn
	hangs chan struct{} // nil: it does not; closed when it goes on
	dials atomic.Int64  // that hang
}

func (d *dialer) Dial(network, address string) (net.Conn, error) {
	d.mu.Lock()
	hangs := d.hangs
	d.mu.Unlock()
	if hangs != nil {
		d.dials.Add(1)
		<-hangs
	}
	c, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.conns = append(d.conns, c)
	return c, nil
}

// lose closes what was dialled and makes the next dial hang until goOn is called.
func (d *dialer) lose() (goOn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hangs = make(chan struct{})
	for _, c := range d.conns {
		c.Close()
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		close(d.hangs)
		d.hangs = nil
	})
}

// TestFrontIsDialled: while the connection that takes replies is being dialled,
// nats.go blocks whoever publishes on it. That holds up the replies, and nothing
// else: the replies of the store arrive.
func TestFrontIsDialled(t *testing.T) {
	node := testnats.Server(t)
	front := &dialer{}
	relay := testnats.Relay(t, node.URL)
	r := runOn(t, node, nil, node.Connect(nats.SetCustomDialer(front), nats.ReconnectWait(time.Millisecond), nats.ReconnectJitter(0, 0), nats.MaxReconnects(-1)),
		testnats.Connect(t, relay.URL(), nats.ReconnectBufSize(-1)))

	// A read is out when the front is lost, and is answered while it is dialled.
	relay.Set(testnats.Stall, testnats.Down)
	sub, err := r.nc.SubscribeSync(nats.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	if err := r.nc.PublishRequest(DefaultAPIPrefix+".owner", sub.Subject, []byte(`{"key":"a"}`)); err != nil {
		t.Fatal(err)
	}
	testnats.Eventually(t, 5*time.Second, func() bool { return r.counter("leased_requests_in_flight", "owner") == 1 }, "the request did not come in")
	goOn := front.lose()
	defer goOn()
	testnats.Eventually(t, 5*time.Second, func() bool { return front.dials.Load() > 0 && r.svc.away.Load() }, "the front is not dialled")
	relay.Set(testnats.Pass)

	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	began := time.Now()
	res, err := r.svc.leases.Do(ctx, service.Command{Op: service.OpAcquire, Key: "b", Holder: "B", TTL: time.Minute})
	if err != nil || res.Kind != kinds.Granted {
		t.Errorf("a call beside it: %v %v after %v", res.Kind, err, time.Since(began))
	}
	goOn()
	if _, err := sub.NextMsg(10 * time.Second); err != nil {
		t.Errorf("the reply that was held up: %v", err)
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return !r.svc.away.Load() }, "the front is still away")
	if m, kind := r.call("owner", `{"key":"b"}`); kind != "" {
		t.Errorf("afterwards: %s", m.Data)
	}
}
