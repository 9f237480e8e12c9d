package service

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
)

// PeerStats is what an instance shows of itself in the data of its $SRV.STATS,
// as far as other instances read it.
type PeerStats struct {
	Instance string `json:"instance"`
	// Fence is the highest revision it has seen in the bucket itself, never one that
	// it was told.
	Fence uint64 `json:"fence"`
	// HeldMillis, on the endpoint acquire, is how long the last lease it knows
	// lasts, in milliseconds from the sending.
	HeldMillis int64 `json:"held_ms,omitempty"`
	// WaitMillis, there too, is for how long it grants nothing because leases are gone
	// from the bucket before their end.
	WaitMillis int64 `json:"wait_ms,omitempty"`
}

// PeerStats tells what the other instances may want to know of this one; leases
// says whether to look through all of them.
func (i *Instance) PeerStats(leases bool) PeerStats {
	p := PeerStats{Instance: i.id, Fence: i.Fence()}
	if !leases {
		return p
	}
	end := i.keeper.lastEnd()
	if hold := i.keeper.hold(); hold.After(end) {
		end = hold
	}
	if left := time.Until(end); left > 0 {
		p.HeldMillis = min(left, MaxTTL).Milliseconds() + 1
	}
	if s := i.keeper.early.Load(); s != nil {
		p.WaitMillis = max(0, time.Until(s.until).Milliseconds())
	}
	return p
}

// What another instance says is a claim: anybody who can answer the question can
// make one. It is believed up to what can be true, for as long as it can matter, and
// never passed on as this instance's own.
const (
	// claimAhead is how far above the bucket's last revision and the server's clock a
	// revision can be that was issued: a bucket begins at the microsecond of the clock of
	// the instance that makes it, which may be wrong by a time zone.
	claimAhead = 24 * time.Hour
	// claimFor is how long a claim stands after it was made last: as long as a lease
	// can last that was granted under the revision claimed.
	claimFor = MaxTTL
)

// credible is the highest revision that can have been issued, by now on the server's
// clock, in a bucket whose last revision is last; both as far as they are known.
func credible(last uint64, now time.Time) uint64 {
	return max(last, uint64(max(0, now.UnixMicro()))) + uint64(claimAhead.Microseconds())
}

// claim is a revision that another instance says was issued.
type claim struct {
	fence uint64
	who   string // as it names itself, for the log
}

// peerNews is what the other instances show.
type peerNews struct {
	heard   bool      // somebody answered
	highest claim     // the highest that can be true
	end     time.Time // local: when the last lease they know is over, at most MaxTTL from now
	wait    time.Time // local: until when one of them grants nothing, at most MaxTTL from now
	waiting string    // who that is
	absurd  claim     // the highest that cannot be true, no fence if there was none
	endless string    // who named a lease longer than MaxTTL
}

// hear takes over one answer. Claims above most cannot be true.
func (n *peerNews) hear(data []byte, self string, most uint64) {
	var stats struct {
		ID        string `json:"id"`
		Endpoints []struct {
			Data PeerStats `json:"data"`
		} `json:"endpoints"`
	}
	if json.Unmarshal(data, &stats) != nil {
		return
	}
	for _, e := range stats.Endpoints {
		if e.Data.Instance == self || e.Data.Instance == "" {
			continue
		}
		n.heard = true
		c := claim{e.Data.Fence, fmt.Sprintf("%.64q (micro service %.64q)", e.Data.Instance, stats.ID)}
		switch {
		case c.fence > most:
			if c.fence > n.absurd.fence {
				n.absurd = c
			}
		case c.fence > n.highest.fence:
			n.highest = c
		}
		if e.Data.HeldMillis > MaxTTL.Milliseconds()+1 { // rounded up
			n.endless = c.who
		}
		held := time.Duration(min(e.Data.HeldMillis, MaxTTL.Milliseconds())) * time.Millisecond
		if end := time.Now().Add(held); end.After(n.end) {
			n.end = end
		}
		waits := time.Duration(min(e.Data.WaitMillis, MaxTTL.Milliseconds())) * time.Millisecond
		if wait := time.Now().Add(waits); waits > 0 && wait.After(n.wait) {
			n.wait, n.waiting = wait, c.who
		}
	}
}

// report logs what cannot be true.
func (n *peerNews) report(log *slog.Logger, most uint64) {
	if n.absurd.fence != 0 {
		log.Warn("an instance claims a revision that cannot have been issued; it is not believed", "instance", n.absurd.who, "claims", n.absurd.fence, "at_most", most)
	}
	if n.endless != "" {
		log.Warn("an instance claims a lease that lasts longer than a lease can; it is believed up to that", "instance", n.endless, "at_most", MaxTTL)
	}
}

// PeersInbox is where the other instances answer, below the connection's inbox prefix. Their answers
// are published by the connection that publishes wherever a caller says, and that one
// need not be allowed to reach any other inbox of the service.
const PeersInbox = "peers."

// askPeers gathers what the other instances show, as long as wait; nobody may be
// there. Revisions above most are not believed.
func askPeers(ctx context.Context, nc *nats.Conn, name, self string, wait time.Duration, most uint64) (news peerNews) {
	inbox := newInbox(nc, PeersInbox)
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return news
	}
	defer sub.Unsubscribe()
	if err := nc.PublishRequest("$SRV.STATS."+name, inbox, nil); err != nil {
		return news
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		msg, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return news
		}
		news.hear(msg.Data, self, most)
	}
}
