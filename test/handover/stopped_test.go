package handover

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// TestStoppedService: the service stands still while some wait for keys whose leases
// end meanwhile. When it goes on, their time is over: they get nothing, and are told
// the truth. Who comes then gets the keys.
func TestStoppedService(t *testing.T) {
	const keys, each = 8, 5
	server := testnats.Child(t, testnats.ChildOptions{}).URL
	service := testnats.Leased(t, "serve", "--server="+server, "--http-listen=127.0.0.1:0")
	nc := testnats.Connect(t, server)
	type answer struct {
		Granted  bool
		Held     bool
		Holder   string
		Revision uint64
		Kind     string
	}
	acquire := func(key, holder, more string) (a answer) {
		t.Helper()
		if err := ask(nc, "api.leases.acquire", fmt.Sprintf(`{"key":%q,"holder":%q,"ttl_ms":%s}`, key, holder, more), &a); err != nil {
			t.Fatal(err)
		}
		return a
	}
	key := func(i int) string { return fmt.Sprintf("stopped-%d", i) }
	for i := range keys {
		if a := acquire(key(i), "before", "2000"); !a.Granted {
			t.Fatalf("%+v", a)
		}
	}
	before := lastSequence(t, nc)
	answers := make(chan *nats.Msg, keys*each)
	inbox := nc.NewInbox()
	if _, err := nc.ChanSubscribe(inbox, answers); err != nil {
		t.Fatal(err)
	}
	for i := range keys * each {
		body := fmt.Sprintf(`{"key":%q,"holder":"waits-%d","ttl_ms":60000,"wait_ms":1000}`, key(i%keys), i)
		if err := nc.PublishRequest("api.leases.acquire", inbox, []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	testnats.Eventually(t, 20*time.Second, func() bool { return waiting(t, service.HTTP()) == keys*each }, "they do not wait")
	service.Pause()
	time.Sleep(time.Duration(size(4, 60)) * time.Second) // the leases end, and then the waiting
	service.Resume()
	for range keys * each {
		select {
		case m := <-answers:
			var a answer
			if err := json.Unmarshal(m.Data, &a); err != nil || a.Granted || a.Kind != "unavailable" && !(a.Held && a.Holder != "") {
				t.Errorf("after its time one that waited is told %s", m.Data)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("somebody gets no answer")
		}
	}
	for i := range keys {
		if a := acquire(key(i), "after", "2000"); !a.Granted || a.Revision <= before {
			t.Errorf("who comes then is told %+v", a)
		}
	}
}
