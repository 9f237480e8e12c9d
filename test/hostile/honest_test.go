package hostile

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/client"
	"github.com/leased/leased/test/fault"
)

// The honest: 40 holders that keep a lease each and speak the wire by themselves,
// 10 that take leases from each other, wait in line and forward, as the clients of
// test/fault do, and two candidates for one office with package client.
const (
	keepers   = 40
	handovers = 10
	ttl       = 10 * time.Second

	honestPrefix = "honest-"
	officeKey    = "office"
)

// honest is what the honest did.
type honest struct {
	judge *judge
	rec   *fault.Recorder
	box   *fault.Inbox
}

// keeper is a holder that keeps its lease.
type keeper struct {
	*honest
	client      fault.Client
	key, holder string

	rev      uint64
	acquired time.Time
	until    int64 // may act until then, on the recorder's clock
	doubt    int64 // when the earliest renewal without a verdict was sent; 0: none
}

func keeperKey(i int) string    { return fmt.Sprintf("%skeeper-%d", honestPrefix, i) }
func keeperHolder(i int) string { return fmt.Sprintf("%sholder-%d", honestPrefix, i) }

// start has everybody hold, and returns when each of the keepers does. wait returns
// when ctx has ended and all of them have.
func (h *honest) start(ctx context.Context, s *stage) (wait func()) {
	t := s.t
	t.Helper()
	own := s.roles[honestRole]
	connect := func(i int) (*nats.Conn, error) {
		// A second answer to one forward is not permitted, and not missed.
		quiet := nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})
		return nats.Connect(strings.Join(s.urls, ","), append(options(own, fmt.Sprintf("honest-%d", i)), quiet)...)
	}
	var wg, ready sync.WaitGroup
	for i := range keepers {
		nc, err := connect(i)
		if err != nil {
			t.Fatalf("honest holder %d: %v", i, err)
		}
		k := &keeper{honest: h, client: fault.Client{ID: i, Conn: nc, Record: h.rec, Timeout: 2 * time.Second}, key: keeperKey(i), holder: keeperHolder(i)}
		if _, err := nc.Subscribe("dagnats.lease.inbox."+k.holder+".>", k.forwarded); err != nil {
			t.Fatalf("honest holder %d: %v", i, err)
		}
		ready.Add(1)
		wg.Go(func() {
			defer nc.Close()
			k.hold(ctx, ready.Done)
		})
	}
	ready.Wait()
	load := fault.Load{Seed: 1, Clients: handovers, Pace: 500 * time.Millisecond, MinTTL: ttl, MaxTTL: ttl, Waits: true, Prefix: honestPrefix}
	loaded, err := load.Start(ctx, h.rec, h.box, func(i int) (*nats.Conn, error) { return connect(keepers + i) })
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		nc, err := connect(keepers + handovers + i)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			defer nc.Close()
			h.stand(ctx, client.New(nc, client.Options{}))
		})
	}
	return func() {
		wg.Wait()
		loaded()
	}
}

func (k *keeper) now() int64 { return k.client.Record.Clock.Now() }

// hold takes the lease and keeps it until ctx ends.
func (k *keeper) hold(ctx context.Context, ready func()) {
	k.acquire(ctx)
	ready()
	// Spread over the third in which they renew.
	pause(ctx, time.Duration(k.client.ID)*ttl/3/keepers)
	for ctx.Err() == nil {
		next := k.now() + int64(ttl/3)
		if !k.renew(ctx) {
			k.acquire(ctx)
		}
		pause(ctx, time.Duration(next-k.now()))
	}
	k.client.Do(fault.Op{Call: fault.Release, Key: k.key, Holder: k.holder, Revision: k.rev})
}

func (k *keeper) acquire(ctx context.Context) {
	for tries := 0; ctx.Err() == nil; tries++ {
		op := k.client.Do(fault.Op{Call: fault.Acquire, Key: k.key, Holder: k.holder, TTL: ttl})
		if op.Outcome == fault.OK {
			k.rev, k.acquired, k.until, k.doubt = op.Got.Rev, op.Got.Acquired, op.Start+int64(ttl), 0
			if tries > 0 {
				k.until = k.now() // an acquire before may have written it: renew first (H3)
			}
			return
		}
		pause(ctx, 200*time.Millisecond)
	}
}

// renew renews, again until there is a verdict. It returns false when the lease is
// lost, and says so to the judge.
func (k *keeper) renew(ctx context.Context) bool {
	for {
		op := k.client.Do(fault.Op{Call: fault.Renew, Key: k.key, Holder: k.holder, Revision: k.rev, TTL: ttl})
		switch op.Outcome {
		case fault.OK:
			if op.End > k.until {
				k.judge.found("lease lost", "%s: renewed %v after its deadline: %v", k.key, time.Duration(op.End-k.until), &op)
			}
			k.rev, k.until, k.doubt = op.Got.Rev, op.Start+int64(ttl), 0
			return true
		case fault.Refused:
			if k.doubt == 0 {
				k.judge.found("lease lost", "%s: %v %s", k.key, &op, op.Text)
				return false
			}
		case fault.Unknown:
			if k.doubt == 0 {
				k.doubt = op.Start
			}
		}
		if k.doubt != 0 && !k.ask() {
			return false
		}
		if k.now() > k.until {
			k.judge.found("lease lost", "%s: no renewal before its deadline, the last try was %v %s", k.key, &op, op.Text)
			return false
		}
		if ctx.Err() != nil {
			return true
		}
		pause(ctx, 100*time.Millisecond)
	}
}

// ask finds out what became of renewals without a verdict (H5). It returns false
// when another has the key.
func (k *keeper) ask() bool {
	op := k.client.Do(fault.Op{Call: fault.Owner, Key: k.key, Holder: k.holder})
	switch {
	case op.Outcome != fault.OK:
		return true
	case !op.Got.Held || op.Got.Holder != k.holder || !op.Got.Acquired.Equal(k.acquired):
		k.judge.found("lease lost", "%s: after a renewal without a verdict %v", k.key, &op)
		return false
	case op.Got.Rev > k.rev:
		k.rev, k.until, k.doubt = op.Got.Rev, k.doubt+int64(ttl), 0
	}
	return true
}

// forwarded answers what came by way of the service. What did not is an effect of
// somebody's forgery: only the service may publish there.
func (k *keeper) forwarded(m *nats.Msg) {
	if m.Header.Get("Dagnats-Lease-Fence") == "" {
		k.judge.found("forged effect", "the inbox of %s was sent %q without a fence", k.holder, clip(m.Data))
		return
	}
	_ = m.Respond([]byte("done"))
}

// stand runs for the office until ctx ends; who has it steps down now and then.
func (h *honest) stand(ctx context.Context, c *client.Client) {
	err := c.Elect(ctx, officeKey, client.ElectOptions{
		HoldOptions: client.HoldOptions{TTL: ttl},
		OnElected: func(ctx context.Context, hold *client.Hold) {
			h.judge.elected(hold)
			pause(ctx, 15*time.Second)
			h.judge.resigns(hold)
		},
		OnLost: func(cause error) {
			if ctx.Err() == nil && cause != client.ErrResigned {
				h.judge.found("lease lost", "the office: %v", cause)
			}
		},
	})
	if ctx.Err() == nil {
		h.judge.found("lease lost", "an election ended: %v", err)
	}
}

// renewals are how long the keepers waited for each renewal that they sent at a time of
// [from, to], the shortest first, and how many took longer than the bound in which second.
func (h *honest) renewals(from, to int64) (ds []time.Duration, slow string) {
	in := map[int64]int{}
	for _, op := range h.rec.Ops() {
		if op.Call != fault.Renew || op.Client >= keepers || op.Start < from || op.Start > to {
			continue
		}
		took := time.Duration(op.End - op.Start)
		if ds = append(ds, took); took > *flagP99 {
			in[op.Start/int64(time.Second)]++
		}
	}
	slices.Sort(ds)
	for _, second := range slices.Sorted(maps.Keys(in)) {
		slow += fmt.Sprintf(" %d s: %d", second, in[second])
	}
	return ds, slow
}

// quantile of sorted durations.
func quantile(ds []time.Duration, q float64) time.Duration {
	if len(ds) == 0 {
		return 0
	}
	return ds[min(int(q*float64(len(ds))), len(ds)-1)]
}

// pause sleeps for d unless ctx ends before.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// clip cuts what is shown of a message.
func clip(b []byte) []byte { return b[:min(len(b), 200)] }
