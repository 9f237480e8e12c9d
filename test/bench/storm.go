//go:build linux

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// What a storm asks for: many leases that end within one second.
const (
	stormLead   = 5 * time.Second  // from the last grant that is planned to the first end
	stormLength = 10 * time.Second // of the renewals that are measured, from the first end on
	stormOver   = 45 * time.Second // after the first end nothing is told any more
	stormInTime = 3 * time.Second  // as E3 of wire-protocol.md says
)

// ends is what was told of the leases of a storm.
type ends struct {
	All    int           `json:"all"`
	InTime int           `json:"in_time"` // within stormInTime of the end
	Late   int           `json:"late"`
	Untold int           `json:"untold"`
	P50    time.Duration `json:"p50_ns"` // from the earliest that the lease can have ended
	Max    time.Duration `json:"max_ns"`
}

func (e *ends) String() string {
	if e == nil {
		return ""
	}
	return fmt.Sprintf("  of %d ends %d told within %v, %d later, %d never; p50 %s, last after %s", e.All, e.InTime, stormInTime, e.Late, e.Untold, short(e.P50), short(e.Max))
}

// storm lets many leases that nobody renews end within one second, and measures the
// renewals of others beside it: those from the first end on.
func storm(ctx context.Context, r *run, callers, n int) cell {
	fail := func(err error) cell { return cell{Callers: callers, Errors: 1, FirstError: err.Error()} }
	nc, err := nats.Connect(r.system.(interface{ address() string }).address())
	if err != nil {
		return fail(err)
	}
	defer nc.Close()
	id := r.serial.Add(1)
	prefix := fmt.Sprintf("storm-%d-", id)
	type lease struct {
		sent time.Time // when it was asked for
		ttl  time.Duration
		told atomic.Int64 // ns after sent + ttl; 0: not yet
	}
	leases := make([]lease, n)
	var told atomic.Int64
	sub, err := nc.Subscribe("dagnats.lease.changed.>", func(m *nats.Msg) {
		name, ours := strings.CutPrefix(m.Subject, "dagnats.lease.changed."+prefix)
		var i int
		if !ours || m.Header.Get("Dagnats-Lease-Event") != "expired" {
			return
		}
		if _, err := fmt.Sscanf(name, "%d", &i); err != nil || i >= n {
			return
		}
		l := &leases[i]
		if l.told.CompareAndSwap(0, int64(max(1, time.Since(l.sent.Add(l.ttl))))) {
			told.Add(1)
		}
	})
	if err == nil {
		err = sub.SetPendingLimits(-1, -1)
	}
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		return fail(err)
	}
	// A twentieth of them says how long the rest will take.
	grant := func(from, to int, end time.Time) error {
		return parallel(ctx, len(r.callers), from, to, func(w, i int) error {
			l := &leases[i]
			l.sent = time.Now()
			l.ttl = min(max(end.Sub(l.sent).Truncate(time.Second)+time.Second, time.Second), heldTTL)
			_, err := r.callers[w].acquire(fmt.Sprintf("%s%d", prefix, i), "storm-holder", l.ttl)
			return err
		})
	}
	began := time.Now()
	err = parallel(ctx, len(r.callers), 0, n/20, func(w, i int) error {
		rev, err := r.callers[w].acquire(fmt.Sprintf("trial-%d-%d", id, i), "storm-holder", heldTTL)
		if err == nil {
			err = r.callers[w].release(fmt.Sprintf("trial-%d-%d", id, i), "storm-holder", rev)
		}
		return err
	})
	if err != nil {
		return fail(err)
	}
	first := time.Now().Add(20*time.Since(began) + stormLead)
	if err := grant(0, n, first); err != nil {
		return fail(err)
	}
	if time.Now().After(first) {
		return fail(fmt.Errorf("the leases ended before the last was granted"))
	}
	c := drive(ctx, callers, time.Until(first), stormLength, r.system.procs(), renewUnit(r, callers))
	for told.Load() < int64(n) && time.Since(first) < stormOver && ctx.Err() == nil {
		pause(ctx, 100*time.Millisecond)
	}
	e := &ends{All: n}
	var late []time.Duration
	for i := range leases {
		switch d := time.Duration(leases[i].told.Load()); {
		case d == 0:
			e.Untold++
			continue
		case d <= stormInTime:
			e.InTime++
			late = append(late, d)
		default:
			e.Late++
			late = append(late, d)
		}
	}
	slices.Sort(late)
	e.P50, e.Max = quantile(late, 0.5), quantile(late, 1)
	c.Ends = e
	return c
}
