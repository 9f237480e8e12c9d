package hostile

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// attack is one family of hostile acts.
type attack struct {
	name string
	does string
	// least is how often a minute must have tried at the least: about half of what
	// the attack's pace comes to, as the machine may be busy.
	least int
	run   func(ctx context.Context, s *stage, t *tally)

	tally   tally
	mustTry int
}

// attacks are all families; each is in the file that its comment names.
func attacks() []*attack {
	return []*attack{
		// weapon_test.go
		{name: "reply", does: "requests whose reply subject is a key, JetStream's API, an inbox, the API itself or a wildcard", least: 1000, run: replySubjects},
		{name: "direct", does: "writes to the bucket, JetStream's API, evictions and forged changes, by roles that have no business there", least: 500, run: direct},
		// sniff_test.go
		{name: "sniff", does: "subscriptions to everybody's inboxes, and forged replies on all that is heard", least: 100, run: sniff},
		{name: "liar", does: "forged answers to $SRV.STATS with fences of 2^64-1 and leases of centuries", least: 100, run: liar},
		// text_test.go
		{name: "text", does: "control characters in meta, keys, holders and headers, read back with leased ls", least: 100, run: text},
		{name: "garbage", does: "the corpus of bad requests, deep nesting, random bytes, requests without reply", least: 500, run: garbage},
		// crowd_test.go
		{name: "pollers", does: "64 pollers that ask for 8 fresh keys at the same instant", least: 2500, run: pollers},
		{name: "snatch", does: "acquires, renewals and releases of honest keys with wrong pairs", least: 250, run: snatch},
		{name: "ghosts", does: "thousands of waiting acquires of connections that are closed at once", least: 15000, run: ghosts},
		{name: "hung", does: "forwards of 30 s to an owner that never answers", least: 1000, run: hungOwner},
		// bulk_test.go
		{name: "list", does: "readers of whole lists", least: 200, run: listers},
		{name: "expiry", does: "thousands of leases that end in the same second", least: 4000, run: massExpiry},
		{name: "huge", does: "bursts of requests of 1 MB", least: 15, run: huge},
		{name: "renew_many", does: "renewals of hundreds whose reply does not fit", least: 10, run: bigReplies},
		// stderr_test.go
		{name: "stderr", does: "an instance whose log nobody reads, for 15 s of each minute", least: 1, run: blockedLog},
		{name: "join", does: "an instance that leaves and joins, so that peers are asked", least: 1, run: joining},
	}
}

// every calls f at the pace until ctx ends; a pace that cannot be kept is not made
// up for.
func every(ctx context.Context, pace time.Duration, f func()) {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f()
		}
	}
}

// together runs n of f and waits for all.
func together(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

// answer is what attackers read of any reply.
type answer struct {
	Kind     string            `json:"kind"`
	Granted  *bool             `json:"granted"`
	Held     *bool             `json:"held"`
	Released *bool             `json:"released"`
	Key      string            `json:"key"`
	Holder   string            `json:"holder"`
	Revision uint64            `json:"revision"`
	Next     string            `json:"next"`
	Leases   []json.RawMessage `json:"leases"`
	Error    string            `json:"error"`

	how string
	raw []byte
}

// ask makes one call and counts how it ended.
func (t *tally) ask(nc *nats.Conn, call string, body any, wait time.Duration) answer {
	data, raw := body.([]byte)
	if !raw {
		data, _ = json.Marshal(body)
	}
	t.try(1)
	sent := time.Now()
	msg, err := nc.Request("api.leases."+call, data, wait)
	var a answer
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		a.how = "nobody there"
	case errors.Is(err, nats.ErrTimeout):
		a.how = "silence"
	case err != nil:
		a.how = "no connection"
	case json.Unmarshal(msg.Data, &a) != nil:
		a.how, a.raw = "no JSON", msg.Data
	default:
		t.took(time.Since(sent))
		a.how, a.raw = a.outcome(), msg.Data
	}
	t.end(a.how)
	return a
}

func (a *answer) outcome() string {
	switch {
	case a.Kind != "":
		return a.Kind
	case a.Granted != nil && *a.Granted:
		return "granted"
	case a.Granted != nil:
		return "denied"
	case a.Released != nil:
		return "released"
	case a.Leases != nil:
		return "leases"
	case a.Held != nil && *a.Held:
		return "held"
	case a.Held != nil:
		return "free"
	}
	return "other"
}

type object = map[string]any

// name makes a name that no other has.
func name(prefix string) string { return fmt.Sprintf("%s-%08x", prefix, rand.Uint32()) }
