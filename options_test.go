package leased

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// TestOptions: three connections are enough, and what cannot be is refused by its name.
func TestOptions(t *testing.T) {
	node := testnats.Server(t)
	least := Options{Front: node.Connect(), Store: node.Connect(nats.ReconnectBufSize(-1)), Hop: node.Connect(nats.ReconnectBufSize(-1))}
	for want, change := range map[string]func(*Options){
		"options: Front: a connection is needed":                           func(o *Options) { o.Front = nil },
		"options: Store: a connection is needed":                           func(o *Options) { o.Store = nil },
		"options: Hop: a connection is needed":                             func(o *Options) { o.Hop = nil },
		"options: Front: must be used for nothing else":                    func(o *Options) { o.Front = o.Store },
		"options: Replicas 2: must be 1, 3 or 5":                           func(o *Options) { o.Replicas = 2 },
		"options: MaxInFlight -1: must be 1 to 1000000":                    func(o *Options) { o.MaxInFlight = -1 },
		"options: MaxForwards 1000001: must be 1 to 1000000":               func(o *Options) { o.MaxForwards = 1_000_001 },
		"options: MaxLeases -1: must be 1 to 1000000000, or 0":             func(o *Options) { o.MaxLeases = -1 },
		"options: MaxLeasesPerHolder -2: must be 1 to 1000000000":          func(o *Options) { o.MaxLeasesPerHolder = -2 },
		"options: APIPrefix a.*: must be a subject of at most 128 bytes":   func(o *Options) { o.APIPrefix = "a.*" },
		"options: EventPrefix a..b: must be a subject of at most 128 byte": func(o *Options) { o.EventPrefix = "a..b" },
	} {
		o := least
		change(&o)
		if svc, err := Start(o); svc != nil || err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	svc, err := Start(least)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := svc.Drain(ctx); err != nil {
			t.Error(err)
		}
	}()
	testnats.Eventually(t, 15*time.Second, svc.registered, "it does not register")
	m, err := node.Connect().Request(DefaultAPIPrefix+".acquire", []byte(`{"key":"k","holder":"A","ttl_ms":1000}`), 5*time.Second)
	if err != nil || !strings.Contains(string(m.Data), `"granted":true`) {
		t.Errorf("%v %v", m, err)
	}
}

// TestInternalOfManyIsLogged: a renewal among many that fails inside is in the log, by its key,
// as one alone is, and one call makes one line.
func TestInternalOfManyIsLogged(t *testing.T) {
	r := run(t, nil)
	for _, key := range []string{"bad", "worse"} {
		if _, err := r.nc.Request("$KV.leases."+key, []byte("not a lease"), 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	m, _ := r.call("renew_many", `{"holder":"A","ttl_ms":5000,"leases":[{"key":"bad","revision":1},{"key":"fine","revision":1},{"key":"worse","revision":1}]}`)
	var reply struct{ Leases []struct{ Kind kinds.Kind } }
	if err := json.Unmarshal(m.Data, &reply); err != nil || len(reply.Leases) != 3 || reply.Leases[0].Kind != kinds.Internal || reply.Leases[1].Kind != kinds.Lost {
		t.Fatalf("%s %v", m.Data, err)
	}
	lines := r.log.lines(t, slog.LevelError)
	if len(lines) != 1 || lines[0]["endpoint"] != "renew_many" || lines[0]["key"] != "bad" || lines[0]["leases"] != 2.0 || lines[0]["error"] == nil {
		t.Errorf("logged: %v", lines)
	}
}
