package client

import (
	"fmt"
	"sync"
)

// HeldHereError says that this process has a Hold of the key under the same holder
// id, or waits for one. To the service both are one holder and have one lease: both
// would act. The first must be resigned, or lost.
type HeldHereError struct{ Key, Holder string }

func (e *HeldHereError) Error() string {
	return fmt.Sprintf("lease %s: this process holds it as %s already, or waits for it", e.Key, e.Holder)
}

// standing are the Holds of this process that stand or wait.
var standing = struct {
	sync.Mutex
	holds map[identity]*Hold
}{holds: map[identity]*Hold{}}

// identity is what the service tells holders of one key apart by.
type identity struct {
	place               any
	prefix, key, holder string
}

func (h *Hold) identity() identity {
	return identity{h.client.wire.place(), h.client.options.Prefix, h.claim.key, h.claim.holder}
}

// enter makes h the one Hold of its identity (H1).
func (h *Hold) enter() error {
	standing.Lock()
	defer standing.Unlock()
	id := h.identity()
	if other := standing.holds[id]; other != nil && other != h {
		return &HeldHereError{id.key, id.holder}
	}
	standing.holds[id] = h
	return nil
}

// leave lets another Hold of the same identity begin.
func (h *Hold) leave() {
	standing.Lock()
	defer standing.Unlock()
	if id := h.identity(); standing.holds[id] == h {
		delete(standing.holds, id)
	}
}
