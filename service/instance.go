package service

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nuid"

	"github.com/leased/leased/service/kinds"
)

// Options of an Instance.
type Options struct {
	// Store carries reads and conditional writes (but see Dial), Hop the forwards. Both must
	// have been made with nats.ReconnectBufSize(-1), so that nothing is sent
	// after its caller was told that it was not.
	Store, Hop *nats.Conn
	// Dial makes one more connection like Store, for writes that go straight to the
	// server that leads the bucket's stream; nil: they go over Store.
	Dial func(...nats.Option) (*nats.Conn, error)
	// JSDomain or JSAPIPrefix say where JetStream's API is, if not at $JS.API.
	JSDomain, JSAPIPrefix string
	Replicas              int    // of the bucket, when it is made: 1, 3 or 5
	APIPrefix             string // "api.leases": the calls hang below it
	EventPrefix           string // "dagnats.lease": changes and inboxes hang below it
	// GroupCommit batches concurrent writes. It pays where the server flushes
	// each write to disk (sync_interval always) and costs a little elsewhere.
	GroupCommit                   bool
	MaxForwards                   int    // places that the forwards under way share
	MaxLeases, MaxLeasesPerHolder int    // 0: no limit
	MicroName                     string // name of the micro service, to ask its other instances
	Observer                      Observer
	Logger                        *slog.Logger
}

// Instance is one running lease service without its front door: the calls, the
// bucket's keeper, the view and the teller of ends.
type Instance struct {
	*Leases
	*Forwarder

	id      string // random, names this instance to its peers
	js      *js
	keeper  *keeper
	lookout *lookout
	expirer *expirer
	stop    context.CancelFunc
	done    sync.WaitGroup
	end     func() // of the way to the leader, when nothing is written any more
}

// Open starts an instance. It returns at once; Health says how far it is.
func Open(o Options) (*Instance, error) {
	c, id := &clock{}, nuid.Next()
	j, err := newJS(o.Store, o.JSDomain, o.JSAPIPrefix, c)
	if err != nil {
		return nil, err
	}
	if o.Dial != nil {
		j.near = newNear(o.Store, o.Dial, o.Logger)
	}
	j.heard = hearer(o.Observer, o.Logger)
	sup := &supervisor{o.Observer, o.Logger}
	v := newView(c, nil)
	if o.GroupCommit {
		j.group = &committer{js: j, sup: sup, current: func(w *Write) bool {
			s, ok := v.get(w.Key, time.Now())
			return !ok && w.Expect == 0 || ok && s.Revision == w.Expect
		}}
	}
	k := newKeeper(j, v, o.Replicas, o.EventPrefix+".changed", func(ctx context.Context, wait time.Duration, most uint64) peerNews {
		return askPeers(ctx, o.Store, o.MicroName, id, wait, most)
	}, o.Logger)
	c.stepped = func(server string, by time.Duration) {
		o.Observer.ClockStep()
		k.stepped(server, by)
	}
	l := newLeases(j, k, v, o.Observer, o.Logger)
	l.quota = newQuota(v, o.MaxLeases, o.MaxLeasesPerHolder)
	ctx, stop := context.WithCancel(context.Background())
	i := &Instance{
		Leases:    l,
		Forwarder: &Forwarder{leases: l, nc: o.Hop, out: requests{nc: o.Hop}, inbox: o.EventPrefix + ".inbox", places: newPlaces(o.MaxForwards), obs: o.Observer},
		id:        id, js: j, keeper: k, stop: stop,
		lookout: newLookout(o.Hop, j, o.APIPrefix, o.EventPrefix+".inbox", o.Logger),
	}
	w := &watcher{js: j, view: v, obs: o.Observer, log: o.Logger, sup: sup, name: "leased-" + id, lost: k.gone}
	watchable := func() bool {
		switch k.health.Load().Verdict {
		case Sound, Waiting, Distrusted:
			return o.Store.IsConnected()
		}
		return false
	}
	// Hints only: the bucket is looked at on a timer too.
	for what, tell := range map[string]func(){"DELETED": k.hint, "RESTORE_CREATE": k.hint, "UPDATED": k.look} {
		if _, err := o.Store.Subscribe("$JS.EVENT.ADVISORY.STREAM."+what+"."+StreamName, func(*nats.Msg) { tell() }); err != nil {
			stop()
			return nil, err
		}
	}
	i.expirer = &expirer{leases: l, guard: k, sup: sup}
	for _, run := range []struct {
		name string
		run  func(context.Context)
		safe func()
	}{
		{"keeper", k.run, k.failed},
		{"expirer", i.expirer.run, nil},
		{"lookout", i.lookout.run, nil},
		{"watcher", func(ctx context.Context) { w.run(ctx, watchable, k.reset) }, func() { v.restart() }},
	} {
		i.done.Go(func() { sup.keep(ctx, run.name, run.run, run.safe) })
	}
	i.end = func() {}
	if j.near != nil {
		ctx, stop := context.WithCancel(context.Background())
		var run sync.WaitGroup
		run.Go(func() { sup.keep(ctx, "way to the leader", j.near.run, j.near.drop) })
		i.end = func() {
			stop()
			run.Wait()
		}
	}
	return i, nil
}

// Close ends the background work. Leases stay.
func (i *Instance) Close() {
	i.stop()
	i.done.Wait()
	i.end()
}

// Look asks for a check of the bucket now: the connection came back, say.
func (i *Instance) Look() { i.keeper.look() }

// Judged is closed once the bucket has been judged for the first time.
func (i *Instance) Judged() <-chan struct{} { return i.keeper.first }

// Health is the last judgement of the bucket.
func (i *Instance) Health() Health { return *i.keeper.health.Load() }

// Refused says why JetStream stores no write at the moment, "" while it does.
func (i *Instance) Refused() string { return i.js.refused.text() }

// Viewing says whether the view of the bucket is complete and its consumer alive.
func (i *Instance) Viewing() bool { return i.view.fresh(time.Now()) }

// List returns a page of the leases this instance sees, by key: those whose key
// begins with prefix and, if holder is not empty, that holder has, with keys
// above after, at most limit. next is the after of the next page, "" after the last;
// a page may be short, or empty, and have a next one.
func (i *Instance) List(prefix, holder, after string, limit int) (leases []Lease, next string, err error) {
	if err := i.Allow(OpOwner); err != nil {
		return nil, "", err
	}
	now := time.Now()
	if !i.view.fresh(now) {
		return nil, "", kinds.Errorf(kinds.Unavailable, "this instance has not seen the whole bucket yet")
	}
	leases, next = i.view.page(now, prefix, holder, after, limit)
	return leases, next, nil
}

// Held is how many leases the view knows that are not over.
func (i *Instance) Held() int64 { return i.view.held.Load() }

// Ends is what has become of the leases that ran out.
func (i *Instance) Ends() Ends { return i.expirer.ends() }

// Queued is how many writes wait for others to have their verdict.
func (i *Instance) Queued() int { return i.js.queued() }

// Fence is the highest revision this instance has seen.
func (i *Instance) Fence() uint64 { return i.view.highest.Load() }

// ClockOffset is how far the NATS server's clock is ahead of this machine's.
func (i *Instance) ClockOffset() time.Duration { return i.clock.offset() }

// ClockSpread is by how much the clocks of the servers that led the bucket within the last
// hour and this machine's are apart.
func (i *Instance) ClockSpread() time.Duration {
	d, _, _ := i.clock.spread(time.Now())
	return d
}

// ClockTrouble says what somebody should know of these clocks, "" if there is nothing.
func (i *Instance) ClockTrouble() string { return i.clock.trouble(time.Now()) }
