package main

import (
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// TestHangup: SIGHUP, which nats-server takes as "reload" and a terminal sends when it
// closes, ends nothing, again and again, with a call in flight or none.
func TestHangup(t *testing.T) {
	p := start(t, cleanEnv(t), anyPorts(t)...)
	s := p.serving()
	nc := dial(t, s.NATS)
	p.signal(syscall.SIGHUP)
	p.line("SIGHUP: nothing is read again")
	got := make(chan *nats.Msg, 1)
	if _, err := nc.Subscribe("dagnats.lease.inbox.a.k", func(m *nats.Msg) { got <- m }); err != nil {
		t.Fatal(err)
	}
	if m, err := nc.Request("api.leases.acquire", []byte(`{"key":"k","holder":"a","ttl_ms":60000}`), patience); err != nil {
		t.Fatal(m, err)
	}
	answered := make(chan error, 1)
	go func() {
		_, err := nc.Request("api.leases.forward", []byte(`{"key":"k","timeout_ms":20000}`), patience)
		answered <- err
	}()
	select {
	case m := <-got:
		p.signal(syscall.SIGHUP)
		if err := m.Respond(nil); err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("the owner got no forward")
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
