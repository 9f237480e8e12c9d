package service

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// The consumer that fills the view: ephemeral, in memory, one per instance,
// delivering every key's last message and then everything that follows.
const (
	watchHeartbeat = time.Second
	// watchSilence is how long a consumer may say nothing before it is taken for
	// dead: three heartbeats and a half.
	watchSilence = 3500 * time.Millisecond
	// watchLinger is how long the server keeps the consumer of an instance that
	// vanished.
	watchLinger = 10 * time.Second
)

// watcher keeps the view fed. Each consumer is one epoch of the view; when one
// fails, or may have missed something, the next one starts from the beginning.
type watcher struct {
	js   *js
	view *view
	obs  Observer
	log  *slog.Logger
	sup  *supervisor
	name string // consumer name without the epoch
	// lost is told until when a lease is believed in that is not in the bucket any more.
	lost func(until time.Time)
}

// run follows the bucket until ctx is done. ready is asked before each attempt:
// there is no point in watching a bucket that is not there.
func (w *watcher) run(ctx context.Context, ready func() bool, reset <-chan struct{}) {
	backoff := 100 * time.Millisecond
	for ctx.Err() == nil {
		if ready() {
			began := time.Now()
			err := w.follow(ctx, reset)
			if ctx.Err() != nil {
				return
			}
			if time.Since(began) > 10*time.Second {
				backoff = 100 * time.Millisecond
			}
			w.log.Debug("the watch on the bucket starts again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff/2 + rand.N(backoff)):
		}
		backoff = min(2*backoff, 3*time.Second)
	}
}

// follow runs one consumer until it fails.
func (w *watcher) follow(ctx context.Context, reset <-chan struct{}) error {
	epoch := w.view.restart()
	for len(reset) > 0 {
		<-reset
	}
	inbox := newInbox(w.js.nc, "")
	msgs := make(chan *nats.Msg, 64*1024)
	sub, err := w.js.nc.ChanSubscribe(inbox, msgs)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	name := w.name + "-" + strconv.FormatUint(uint64(epoch), 10)
	pending, err := w.create(ctx, name, inbox)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tryTimeout)
		defer cancel()
		var out struct{}
		_ = w.js.request(ctx, "CONSUMER.DELETE."+StreamName+"."+name, nil, &out) // it dies of itself too
	}()
	w.view.alive.Store(w.view.local(time.Now()))
	if pending == 0 {
		if err := w.complete(ctx, epoch); err != nil {
			return err
		}
	}
	silence := time.NewTicker(watchHeartbeat / 2)
	defer silence.Stop()
	var last uint64 // consumer sequence
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-reset:
			return fmt.Errorf("reset")
		case <-silence.C:
			if w.view.local(time.Now())-w.view.alive.Load() > int64(watchSilence) {
				return fmt.Errorf("the consumer is silent")
			}
		case msg := <-msgs:
			now := time.Now()
			w.view.alive.Store(w.view.local(now))
			if msg.Header.Get("Status") != "" && len(msg.Data) == 0 {
				if err := w.status(msg, last); err != nil {
					return err
				}
				lo, _ := w.view.clock.bounds(now)
				w.view.heard.Store(lo.UnixNano())
				continue
			}
			meta, err := msg.Metadata()
			if err != nil {
				return err
			}
			if meta.Sequence.Consumer != last+1 {
				return fmt.Errorf("message %d of the consumer follows %d", meta.Sequence.Consumer, last)
			}
			last = meta.Sequence.Consumer
			key := strings.TrimPrefix(msg.Subject, SubjectPrefix)
			if w.view.complete.Load() {
				w.observe(key, meta.Sequence.Stream, msg)
			}
			// What should be gone says nothing of what is the last of its key: a server
			// that was killed finds again what had been replaced, and shows it until
			// its first sweep.
			ghost := !w.view.complete.Load() && overdue(msg, meta.Timestamp, w.view.clock, now)
			if isToken(key) && !ghost && !w.view.confirm(key, meta.Sequence.Stream, meta.Timestamp, epoch) {
				e, ttl := decodeEntry(key, meta.Sequence.Stream, meta.Timestamp, msg.Header, msg.Data)
				w.view.delivered(e, ttl, epoch, now)
			}
			w.view.heard.Store(meta.Timestamp.UnixNano())
			w.view.position.Store(meta.Sequence.Stream)
			if meta.NumPending == 0 && !w.view.complete.Load() {
				if err := w.complete(ctx, epoch); err != nil {
					return err
				}
			}
		}
	}
}

// How many leases that a consumer did not show are read at a time, and in all.
const (
	readAtOnce = 32
	readAtMost = 1024
)

// complete makes the view whole. Leases that it knows and that the consumer of epoch
// did not show are read through the leader, the last to end first: what is there was
// behind the consumer's replica; the first that is not was ended by somebody, and so
// may be all that end before it.
func (w *watcher) complete(ctx context.Context, epoch uint32) error {
	left := w.view.unconfirmed(epoch, time.Now(), readAtMost)
	if len(left) == 0 {
		w.view.completed(epoch)
		return nil
	}
	var newest uint64
	for _, g := range left {
		newest = max(newest, g.rev)
	}
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if si, err := w.js.info(ctx); err != nil {
		return err
	} else if si.State.LastSeq < newest {
		return errStale // it leads no more, or the bucket went back: the keeper looks
	}
	for len(left) > 0 {
		chunk := left[:min(len(left), readAtOnce)]
		left = left[len(chunk):]
		entries, errs := make([]Entry, len(chunk)), make([]error, len(chunk))
		var reads sync.WaitGroup
		for i, g := range chunk {
			reads.Go(func() {
				errs[i] = errPanicked
				defer w.sup.rescue("watcher", nil)
				entries[i], errs[i] = w.js.Get(ctx, g.key)
			})
		}
		reads.Wait()
		for i, g := range chunk {
			switch {
			case errs[i] != nil:
				return errs[i]
			case entries[i].Revision != 0:
				w.view.delivered(entries[i], 0, epoch, time.Now())
			case time.Now().Before(g.over):
				w.lost(g.over)
				w.view.completed(epoch)
				return nil
			}
		}
	}
	if len(w.view.unconfirmed(epoch, time.Now(), 1)) > 0 {
		return fmt.Errorf("the consumer is far behind")
	}
	w.view.completed(epoch)
	return nil
}

// overdue says that the time to live of a stored message is over.
func overdue(msg *nats.Msg, at time.Time, c *clock, now time.Time) bool {
	ttl, err := time.ParseDuration(msg.Header.Get(headerTTL))
	lo, _ := c.bounds(now)
	return err == nil && ttl > 0 && !lo.Before(at.Add(ttl))
}

// observe counts a change (E5).
func (w *watcher) observe(key string, rev uint64, msg *nats.Msg) {
	event := msg.Header.Get(headerEvent)
	if event == "" {
		event = "foreign"
		w.log.Warn("a message in the bucket was not written by this service", "key", key, "revision", rev)
	}
	w.obs.Change(event)
}

// status handles heartbeats and flow control.
func (w *watcher) status(msg *nats.Msg, last uint64) error {
	if msg.Reply != "" { // flow control: everything before it has been handled
		return msg.Respond(nil)
	}
	if stalled := msg.Header.Get("Nats-Consumer-Stalled"); stalled != "" {
		return w.js.nc.Publish(stalled, nil)
	}
	if sent := msg.Header.Get("Nats-Last-Consumer"); sent != "" {
		if n, err := strconv.ParseUint(sent, 10, 64); err == nil && n != last {
			return fmt.Errorf("the consumer is at %d, %d arrived", n, last)
		}
		// What was removed before it was delivered counts as delivered.
		if n, err := strconv.ParseUint(msg.Header.Get("Nats-Last-Stream"), 10, 64); err == nil {
			w.view.position.Store(max(n, w.view.position.Load()))
		}
	}
	return nil
}

// create makes the consumer and tells how many messages wait for it.
func (w *watcher) create(ctx context.Context, name, inbox string) (pending uint64, err error) {
	req := map[string]any{
		"stream_name": StreamName,
		"config": map[string]any{
			"name":               name,
			"deliver_subject":    inbox,
			"deliver_policy":     "all",
			"ack_policy":         "none",
			"replay_policy":      "instant",
			"mem_storage":        true,
			"num_replicas":       1,
			"flow_control":       true,
			"idle_heartbeat":     watchHeartbeat / 2, // one may be late
			"inactive_threshold": watchLinger,
			"metadata":           map[string]string{"leased": "view"},
		},
	}
	body, err := json.Marshal(req)
	if err != nil {
		return 0, err
	}
	var reply struct {
		Name       string `json:"name"`
		NumPending uint64 `json:"num_pending"`
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := w.js.request(ctx, "CONSUMER.CREATE."+StreamName+"."+name, body, &reply); err != nil {
		return 0, err
	}
	if reply.Name != name {
		return 0, fmt.Errorf("%w (CONSUMER.CREATE): a reply about something else", ErrNoAnswer)
	}
	return reply.NumPending, nil
}
