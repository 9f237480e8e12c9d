package client

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go"
)

// follow takes hints from the events of the key until stop is called. They can be
// lost, and forged by whoever may publish them: what a hint leads to is a question.
func (h *Hold) follow() (stop func()) {
	deaf := func(err error) {
		h.client.deaf.Do(func() {
			h.options.OnError(fmt.Errorf("the events of leases cannot be followed, of %s for one: that a lease was ended is noticed with its next renewal: %w", h.claim.key, err))
		})
	}
	stop, err := h.client.wire.subscribe(h.client.options.EventPrefix+".changed."+h.claim.key, h.heard, deaf)
	if err != nil {
		deaf(err)
		return func() {}
	}
	return stop
}

// heard takes one event. The server puts the revision on each; one that is not
// higher than ours is older than our lease, or our own (H8, E2).
func (h *Hold) heard(m *nats.Msg) {
	revision, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
	if err != nil || m.Header.Get("Dagnats-Lease-Event") == "renewed" {
		return
	}
	var record struct{ Evicted bool }
	_ = json.Unmarshal(m.Data, &record) // a deletion by hand has no record
	h.mu.Lock()
	news := revision > h.claim.revision
	if news && record.Evicted {
		h.evicted = true
	}
	h.mu.Unlock()
	if news {
		h.stir()
	}
}

func (h *Hold) stir() {
	select {
	case h.hint <- struct{}{}:
	default:
	}
}

// stands asks who holds the key. A read can be stale, so that it says no is not the
// end: the renewal that follows is.
func (h *Hold) stands() bool {
	ctx, cancel := context.WithTimeout(h.calls, h.patience())
	defer cancel()
	o, err := h.client.Owner(ctx, h.claim.key)
	if err != nil {
		h.stir() // ask again
		return true
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if o.Kind == kinds.Held {
		if stands, _ := h.claim.owner(o); stands {
			h.evicted = false
			return true
		}
	}
	return false
}
