package service

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// handoversLogged is how many changes of ownership are logged one by one in a second.
const handoversLogged = 100

// handovers logs changes of ownership: a line each, and where there are more than
// handoversLogged in a second, one line that counts the rest when it is over. note is
// called where the store's replies are delivered, so it costs next to nothing then.
type handovers struct {
	log *slog.Logger

	mu    sync.Mutex
	began time.Time // of the second that lines counts in
	lines int
	rest  map[Event]int // what has no line of its own; nil: nothing
}

// note logs that a lease was acquired, released or expired.
func (h *handovers) note(event Event, key, holder string, revision uint64, cause Op) {
	if !h.log.Enabled(context.Background(), slog.LevelInfo) || !h.single(event, time.Now()) {
		return
	}
	h.log.LogAttrs(context.Background(), slog.LevelInfo, "lease "+string(event), slog.String("key", key), slog.String("holder", holder),
		slog.Uint64("revision", revision), slog.String("cause", cause.String()))
}

// single tells whether event is to have a line of its own, and counts it if not.
func (h *handovers) single(event Event, now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rest == nil && now.Sub(h.began) >= time.Second {
		h.began, h.lines = now, 0
	}
	if h.lines < handoversLogged {
		h.lines++
		return true
	}
	if h.rest == nil {
		h.rest = map[Event]int{}
		time.AfterFunc(time.Second-now.Sub(h.began), h.sum)
	}
	h.rest[event]++
	return false
}

// sum logs what had no line of its own, and begins another second.
func (h *handovers) sum() {
	h.mu.Lock()
	rest := h.rest
	h.began, h.lines, h.rest = time.Now(), 0, nil
	h.mu.Unlock()
	h.log.LogAttrs(context.Background(), slog.LevelInfo, "leases changed hands too fast for a line each",
		slog.Int("acquired", rest[Acquired]), slog.Int("released", rest[Released]), slog.Int("expired", rest[Expired]))
}
