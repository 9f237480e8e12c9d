package service

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// answerOf is what an instance answers that shows these.
func answerOf(t *testing.T, ps ...PeerStats) []byte {
	t.Helper()
	var endpoints []any
	for _, p := range ps {
		endpoints = append(endpoints, map[string]any{"name": "acquire", "data": p})
	}
	body, err := json.Marshal(map[string]any{"id": "micro-1", "endpoints": endpoints})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// TestPeerNews: of what others claim that is believed which can be true, and who
// claimed the rest is known.
func TestPeerNews(t *testing.T) {
	now := time.Now()
	const last = 1_796_000_000_000_000
	most := credible(last, now)
	if ahead := credible(uint64(now.Add(time.Hour).UnixMicro()), now); ahead <= most {
		t.Errorf("the bucket's own last revision does not count: %d", ahead)
	}
	for _, fence := range []uint64{most + 1, 1 << 63, math.MaxUint64 - 1, math.MaxUint64} {
		var n peerNews
		n.hear(answerOf(t, PeerStats{Instance: "honest", Fence: last + 5}), "me", most)
		n.hear(answerOf(t, PeerStats{Instance: "liar", Fence: fence}), "me", most)
		n.hear(answerOf(t, PeerStats{Instance: "me", Fence: last + 7}), "me", most)
		if n.highest.fence != last+5 || !strings.Contains(n.highest.who, "honest") || !n.heard {
			t.Errorf("%d is claimed, believed is %+v", fence, n.highest)
		}
		if n.absurd.fence != fence || !strings.Contains(n.absurd.who, "liar") || !strings.Contains(n.absurd.who, "micro-1") {
			t.Errorf("%d is claimed, told is %+v", fence, n.absurd)
		}
	}
	for _, held := range []int64{9_000_000_000_000, math.MaxInt64, MaxTTL.Milliseconds() + 2} {
		var n peerNews
		n.hear(answerOf(t, PeerStats{Instance: "liar", HeldMillis: held}), "me", most)
		if left := time.Until(n.end); left > MaxTTL || left < MaxTTL-time.Minute || n.endless == "" {
			t.Errorf("held_ms %d holds for %v, named %q", held, left, n.endless)
		}
	}
	for _, wait := range []int64{math.MaxInt64, 60_000, 0, -1, math.MinInt64} {
		var n peerNews
		n.hear(answerOf(t, PeerStats{Instance: "one", WaitMillis: wait}), "me", most)
		left, want := time.Until(n.wait), min(time.Duration(max(0, min(wait, 600_000)))*time.Millisecond, MaxTTL)
		if want > 0 && (left > want || left < want-time.Second) || (want > 0) != (n.waiting != "") {
			t.Errorf("wait_ms %d waits for %v, named %q", wait, left, n.waiting)
		}
	}
	for _, held := range []int64{-1, math.MinInt64, 0} {
		var n peerNews
		n.hear(answerOf(t, PeerStats{Instance: "liar", HeldMillis: held}), "me", most)
		if left := time.Until(n.end); left > 0 || n.endless != "" {
			t.Errorf("held_ms %d holds for %v", held, left)
		}
	}
}

// TestHoldOfABucket: what a bucket says of the one before it ends with the longest
// lease that was granted there.
func TestHoldOfABucket(t *testing.T) {
	created := time.Now()
	for text, want := range map[string]time.Time{
		"":                       {},
		"soon":                   {},
		"2312-01-01T00:00:00Z":   created.Add(MaxTTL),
		"292277-01-01T00:00:00Z": {},
		created.Add(time.Minute).UTC().Format(time.RFC3339Nano): created.Add(time.Minute),
	} {
		if got := holdOf(map[string]string{holdKey: text}, created); !got.Equal(want) {
			t.Errorf("%q holds until %v, want %v", text, got, want)
		}
	}
}

// TestClaimLapses: what one instance claims that can be true is believed for as long
// as a lease lasts after it was said last, and never becomes this instance's own
// word (H5).
func TestClaimLapses(t *testing.T) {
	server := testnats.Server(t)
	nc := server.Connect(nats.ReconnectBufSize(-1))
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	j, err := newJS(nc, "", "", &clock{})
	if err != nil {
		t.Fatal(err)
	}
	v := newView(j.clock, nil)
	var claimed uint64
	k := newKeeper(j, v, 1, "x.changed", func(context.Context, time.Duration, uint64) (n peerNews) {
		if claimed != 0 {
			n.heard, n.highest = true, claim{claimed, "liar"}
		}
		return n
	}, log)
	look := func(want Verdict) {
		t.Helper()
		testnats.Eventually(t, 10*time.Second, func() bool { k.check(t.Context()); return k.health.Load().Verdict == want }, testnats.Lazy(func() string { return fmt.Sprint(*k.health.Load()) }))
	}
	look(Sound)
	own := v.highest.Load()
	claimed, k.asked = own+1000, false
	look(Distrusted)
	if why := k.health.Load().Reason; !strings.Contains(why, "liar") {
		t.Errorf("it does not say who claims it: %s", why)
	}
	claimed = 0 // said once
	k.check(t.Context())
	look(Distrusted)
	k.claimedAt = time.Now().Add(-claimFor)
	look(Sound)
	if now := v.highest.Load(); now != own {
		t.Errorf("the highest revision seen was %d and is %d, by hearsay", own, now)
	}
}
