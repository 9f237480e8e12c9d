package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/service/kinds"
)

// Verdict is what the bucket is good for at the moment.
type Verdict string

// The verdicts, from "nobody looked yet" to "all calls are served".
const (
	Unseen        Verdict = "unseen"        // nobody looked yet
	Sound         Verdict = "sound"         // as it should be
	Unsupported   Verdict = "unsupported"   // positive proof that the server cannot keep leases
	Unavailable   Verdict = "unavailable"   // no answer, no leader
	Missing       Verdict = "missing"       // deleted under the service
	Misconfigured Verdict = "misconfigured" // a field of its configuration would end leases
	Distrusted    Verdict = "distrusted"    // it went back in time: acquire and renew are refused
	Waiting       Verdict = "waiting"       // made again: nothing is granted until the old leases are over
)

// Verdicts lists all of them.
func Verdicts() []Verdict {
	return []Verdict{Unseen, Sound, Unsupported, Unavailable, Missing, Misconfigured, Distrusted, Waiting}
}

// Health is the last judgement of the bucket.
type Health struct {
	Verdict  Verdict
	Reason   string   // why it is not sound, one phrase
	Warnings []string // names of what differs and does no harm to leases; WarningText explains
	Leader   bool     // the stream had a leader at the last look
	Version  string   // of the stream leader, "" when unknown
	LastSeq  uint64
	Checked  time.Time // last look that got an answer
	// Until, on an unavailable bucket that was sound before: calls are still
	// tried until then, because a leader is usually back within a moment.
	Until time.Time
	// Renewals, on a bucket that waits, says that leases in it may be renewed.
	Renewals bool
}

// grace is how long calls go on being tried against a sound bucket that stopped
// answering. It is less than a call's own budget.
const grace = 3 * time.Second

// keeper makes, checks and distrusts the bucket. It implements Guard.
type keeper struct {
	js       *js
	view     *view
	log      *slog.Logger
	replicas int
	events   string // republish destination without the key
	peers    func(ctx context.Context, wait time.Duration, most uint64) peerNews

	health atomic.Pointer[Health]
	kick   chan struct{}
	reset  chan struct{} // tells the watcher that the bucket is another one
	first  chan struct{} // closed after the first verdict
	once   sync.Once

	// The rest belongs to the goroutine of run.
	asked     bool      // peers have been asked
	claimed   claim     // the highest revision that they say was issued
	claimedAt time.Time // when that was said last
	proved    uint64    // the connection that was proved able to write, from 1
	backSince time.Time // the bucket has been behind since
	less      bool      // the bucket held fewer messages than the view knows leases
	holdUntil time.Time
	held      atomic.Pointer[time.Time]  // holdUntil, for others to read
	forgotten atomic.Pointer[time.Time]  // end of the last lease that the view has forgotten
	early     atomic.Pointer[suspension] // why nothing is granted although the bucket is the same
	recounted atomic.Int64               // when the view was last filled anew for a doubt, local; 0: never

	created atomic.Int64 // of the bucket last seen, Unix ns; 0: none
	same    shared[*streamInfo]

	// alarm is when there was reason to think that the bucket is another one or
	// went back, in the view's local time; 0: none. Nothing is granted until a
	// look that began after it. proof says that it went back for certain.
	alarm  atomic.Int64
	hinted atomic.Int64 // when an advisory last raised it
	proof  atomic.Bool
}

const (
	checkEvery   = 2 * time.Second
	checkTimeout = 5 * time.Second
	// How long the other instances are waited for: at every start, and where two
	// holders are at stake.
	askShort = 300 * time.Millisecond
	askLong  = 1500 * time.Millisecond
	// createdSlack allows for the time between a server's stamping a stream as
	// created and the clock its first sequence was taken from.
	createdSlack = time.Minute
)

func newKeeper(j *js, v *view, replicas int, events string, peers func(context.Context, time.Duration, uint64) peerNews, log *slog.Logger) *keeper {
	k := &keeper{js: j, view: v, replicas: replicas, events: events, peers: peers, log: log,
		kick: make(chan struct{}, 1), reset: make(chan struct{}, 1), first: make(chan struct{})}
	k.health.Store(&Health{Verdict: Unseen, Reason: "the bucket has not been looked at yet"})
	return k
}

// Allow implements Guard.
func (k *keeper) Allow(op Op) error {
	h := k.health.Load()
	if k.alarm.Load() != 0 && (op == OpAcquire || op == OpRenew) && h.Verdict != Unsupported {
		return kinds.Errorf(kinds.Unavailable, "the bucket is being looked at: it may be another one")
	}
	paused := k.paused()
	if paused != "" && op == OpAcquire && h.Verdict != Unsupported {
		return kinds.Errorf(kinds.Unavailable, "%s", paused)
	}
	switch h.Verdict {
	case Sound:
		return nil
	case Unsupported:
		return kinds.Errorf(kinds.Unsupported, "%s", h.Reason)
	case Unavailable:
		if time.Now().Before(h.Until) {
			return nil
		}
	case Distrusted, Waiting:
		if op != OpAcquire && op != OpRenew || h.Renewals && op == OpRenew {
			return nil
		}
	}
	return kinds.Errorf(kinds.Unavailable, "%s", h.Reason)
}

// Bucket implements Guard: the time of its making.
func (k *keeper) Bucket() int64 { return k.created.Load() }

// Acked implements Guard.
func (k *keeper) Acked(op Op, bucket int64, before, revision uint64) error {
	switch {
	case revision <= before:
		k.proof.Store(true)
		k.raise()
		return fmt.Errorf("the bucket went back in time: it issued revision %d after %d", revision, before)
	case bucket != k.Bucket(), (revision-before >= leap || k.view.silent(time.Now())) && !k.sameBucket():
		k.raise()
		return errors.New("the bucket was deleted and made again")
	case k.alarm.Load() != 0:
		return k.Allow(op)
	}
	// What was decided before a suspension took no lease that this instance knew: it stands.
	if h := k.health.Load(); h.Verdict == Distrusted || h.Verdict == Waiting && !h.Renewals {
		return k.Allow(op)
	}
	return nil // an ack is better proof of life than the last look
}

// Sure implements Guard.
func (k *keeper) Sure(bucket int64, before, revision uint64) bool {
	return revision > before && revision-before < leap && bucket == k.Bucket() && !k.view.silent(time.Now()) &&
		k.alarm.Load() == 0 && k.health.Load().Verdict == Sound
}

// hint is told of an advisory that the bucket was deleted. Anybody can publish
// one, so it stops grants at most once in a while.
func (k *keeper) hint() {
	now := k.view.local(time.Now())
	if last := k.hinted.Load(); last != 0 && now-last < int64(hintEvery) || !k.hinted.CompareAndSwap(k.hinted.Load(), now) {
		k.look()
		return
	}
	k.raise()
}

// hintEvery is how often an advisory may stop grants until the look after it.
const hintEvery = 5 * time.Second

// raise stops all grants until the bucket has been looked at.
func (k *keeper) raise() {
	k.alarm.Store(max(1, k.view.local(time.Now())))
	k.look()
}

// leap is a rise of the revision over the highest one seen when a write began that
// deserves a look: a bucket made anew starts at the present microsecond, so its first
// revision is above what its predecessor issued last by nearly the microseconds that
// one was there. It must be more than what all holders together write while one write
// is under way.
const leap = 100_000

// sameBucket asks whether the bucket is the one that was inspected last, once for all
// who want to know at the same time. It asks again while nobody answers, as when its
// leader has just changed.
func (k *keeper) sameBucket() bool {
	ctx, cancel := context.WithTimeout(context.Background(), 2*lookTimeout+tryTimeout/4) // one that others asked for, and the next
	defer cancel()
	for try := 0; ; try++ {
		si, err := k.same.ask(ctx, func() (*streamInfo, error) { return k.info(context.Background()) })
		if err == nil {
			return si.Created.UnixNano() == k.created.Load()
		}
		if errors.Is(err, ErrNoBucket) || pause(ctx, try) != nil {
			return false
		}
	}
}

// Suspect implements Guard.
func (k *keeper) Suspect(err error) {
	if errors.Is(err, errDeposed) && k.js.near != nil {
		k.js.near.drop()
	}
	if errors.Is(err, ErrNoBucket) || errors.Is(err, nats.ErrNoResponders) || errors.Is(err, errDeposed) {
		k.look()
	}
	if errors.Is(err, errEarly) || errors.Is(err, errDeposed) {
		k.recount()
	}
}

// recount has the view filled anew, which finds out whether leases are gone, once in
// a while.
func (k *keeper) recount() {
	now, last := max(1, k.view.local(time.Now())), k.recounted.Load()
	if (last == 0 || now-last >= int64(hintEvery)) && k.recounted.CompareAndSwap(last, now) {
		k.restart()
	}
}

// suspension is a time in which nothing is granted in a bucket that is the same as ever.
type suspension struct {
	until time.Time
	why   string
}

// suspend puts off all grants until then, as after a bucket was deleted: leases may
// be believed in that are not there any more. Those that are go on.
func (k *keeper) suspend(until time.Time, why string) {
	now := time.Now()
	if most := now.Add(MaxTTL); until.After(most) {
		until = most
	}
	if !until.After(now) {
		return
	}
	for {
		old := k.early.Load()
		if old != nil && !until.After(old.until) {
			return
		}
		if k.early.CompareAndSwap(old, &suspension{until, why}) {
			break
		}
	}
	k.log.Error("nothing is granted for a while", "reason", why, "for", until.Sub(now).Round(time.Millisecond))
	k.look()
}

// paused says why nothing is granted although the bucket is the same, "" if it is.
func (k *keeper) paused() string {
	if p := k.early.Load(); p != nil && time.Now().Before(p.until) {
		return p.why
	}
	return ""
}

// stepped is told that the clock of the server that leads the bucket was set. Forward, it
// ends leases before their holders think so; back, it prolongs them, and nobody is
// harmed.
func (k *keeper) stepped(server string, by time.Duration) {
	why := stepText(server, by)
	k.log.Error(why)
	if by > 0 {
		k.suspend(k.lastEnd(), why+"; nothing is granted until the leases from before are over")
	}
}

// gone is told that leases that last until then were ended by somebody without a word.
func (k *keeper) gone(until time.Time) {
	k.suspend(until, "leases are gone from the bucket before their end (a purge, or a limit that was edited); nothing is granted until they would have been over")
}

// failed is called when a look panicked: nothing is known of the bucket until the next.
func (k *keeper) failed() {
	k.raise()
	old := k.health.Load()
	k.health.Store(&Health{Verdict: Unavailable, Reason: "the look at the bucket failed; the log says how", Warnings: old.Warnings, Version: old.Version, LastSeq: old.LastSeq, Checked: old.Checked})
}

// look asks for a check now.
func (k *keeper) look() {
	select {
	case k.kick <- struct{}{}:
	default:
	}
}

// run checks the bucket on a timer and when asked, until ctx is done.
func (k *keeper) run(ctx context.Context) {
	for {
		k.check(ctx)
		wait := checkEvery
		if v := k.health.Load().Verdict; v == Unseen || v == Unavailable || v == Missing {
			wait /= 4
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		case <-k.kick:
			t.Stop()
		}
	}
}

// check looks once and publishes its verdict.
func (k *keeper) check(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	began := k.view.local(time.Now())
	h := k.judge(ctx)
	if h == nil {
		return // no answer, and the last verdict is a proof that stands
	}
	old := k.health.Swap(h)
	if a := k.alarm.Load(); a != 0 && a < began && !h.Checked.IsZero() && h.Verdict != Unavailable {
		k.alarm.CompareAndSwap(a, 0)
	}
	k.once.Do(func() { close(k.first) })
	if old.Verdict != h.Verdict || old.Reason != h.Reason || !slices.Equal(old.Warnings, h.Warnings) {
		level := slog.LevelInfo
		if h.Verdict != Sound || len(h.Warnings) > 0 {
			level = slog.LevelWarn
		}
		k.log.Log(ctx, level, "bucket "+string(h.Verdict), "reason", h.Reason, "warnings", h.Warnings, "nats_server", h.Version, "last_seq", h.LastSeq)
	}
}

// judge makes a verdict, nil for "as before".
func (k *keeper) judge(ctx context.Context) *Health {
	if !k.js.nc.IsConnected() {
		return k.noAnswer("not connected to NATS")
	}
	ai, err := k.account(ctx)
	known := k.created.Load() != 0
	switch code := codeOf(err); {
	case code == codeNoJetStream:
		return &Health{Verdict: Unsupported, Reason: "the NATS server has no JetStream"}
	case code == codeNoAccount:
		return &Health{Verdict: Unsupported, Reason: "JetStream is not enabled for this NATS account"}
	case errors.Is(err, nats.ErrNoResponders) && !k.js.seen.Load():
		return &Health{Verdict: Unsupported, Reason: "nobody answers the JetStream API: the NATS server has no JetStream"}
	case err != nil && !known:
		return k.noAnswer(err.Error())
	case err != nil:
		// Only the meta leader answers that. The bucket may do without it.
		ai = &accountInfo{}
	case ai.API.Level < 1:
		return &Health{Verdict: Unsupported, Reason: "the NATS server is older than 2.11 and cannot expire keys"}
	}
	issued := k.view.highest.Load() // before the look: what was acked by then must show
	si, err := k.info(ctx)
	if err == nil && (!k.asked || si.State.LastSeq < k.claim().fence) {
		k.ask(ctx, askShort, si.State.LastSeq, si.Now)
		issued = k.view.highest.Load()
		si, err = k.info(ctx)
	}
	if errors.Is(err, ErrNoBucket) {
		k.missing(ctx)
		if reason := tooOld(k.js.nc.ConnectedServerVersion()); reason != "" {
			return &Health{Verdict: Unsupported, Reason: reason, Version: k.js.nc.ConnectedServerVersion()}
		}
		if err := k.make(ctx, ai.API.Level); err != nil && codeOf(err) != codeStreamExists {
			return k.noAnswer("the bucket cannot be made: " + err.Error())
		}
		issued = k.view.highest.Load()
		si, err = k.info(ctx)
	}
	if err != nil {
		return k.noAnswer(err.Error())
	}
	h := k.inspect(si, issued)
	if h.Verdict == Sound && !k.mayWrite(ctx) {
		return k.noAnswer("writes to the bucket get no answer; is this user allowed to publish on " + k.js.put + ">?")
	}
	return h
}

// ask asks the other instances what they know; last and now are the bucket's last
// revision and the server's clock, as far as they are known.
func (k *keeper) ask(ctx context.Context, wait time.Duration, last uint64, now time.Time) peerNews {
	most := credible(max(last, k.view.highest.Load()), now)
	news := k.peers(ctx, wait, most)
	news.report(k.log, most)
	k.asked = true
	if news.waiting != "" {
		k.suspend(news.wait, "leases are gone from the bucket before their end, says the instance "+news.waiting+"; nothing is granted until they would have been over")
	}
	if c := news.highest; c.fence >= k.claim().fence {
		k.claimed, k.claimedAt = c, time.Now()
	}
	return news
}

// claim is the highest revision that was claimed, for as long as that stands.
func (k *keeper) claim() claim {
	if time.Since(k.claimedAt) >= claimFor {
		return claim{}
	}
	return k.claimed
}

// lookTimeout bounds one request of a look: one that was sent while nobody led is
// never answered, and a leader is usually back before the next.
const lookTimeout = 700 * time.Millisecond

func (k *keeper) account(ctx context.Context) (*accountInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return k.js.account(ctx)
}

func (k *keeper) info(ctx context.Context) (*streamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	return k.js.info(ctx)
}

// mayWrite proves, once a connection, that this user may write to the bucket:
// without the permission a write is met with silence. The probe's condition is
// never true.
func (k *keeper) mayWrite(ctx context.Context) bool {
	connection := k.js.nc.Stats().Reconnects + 1
	if k.proved == connection {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	_, err := k.js.send(ctx, &k.js.out, k.js.message(&Write{Key: "leased-probe", Expect: 1<<63 - 1, Event: Expired, TTL: MinTTL, Tombstone: true}), 0)
	if errors.Is(err, ErrConflict) {
		k.proved = connection
	}
	return k.proved == connection
}

// noAnswer is the verdict when nothing new is known. A proof that the server
// cannot do it stands until a new one.
func (k *keeper) noAnswer(reason string) *Health {
	old := k.health.Load()
	if old.Verdict == Unsupported {
		return nil
	}
	h := &Health{Verdict: Unavailable, Reason: reason, Warnings: old.Warnings, Version: old.Version, LastSeq: old.LastSeq, Checked: old.Checked, Until: old.Until}
	if old.Verdict == Sound {
		h.Until = time.Now().Add(grace)
	}
	return h
}

// inspect judges a bucket that is there. highest is a revision that was issued
// before si was asked for.
func (k *keeper) inspect(si *streamInfo, highest uint64) *Health {
	h := &Health{Leader: true, LastSeq: si.State.LastSeq, Checked: time.Now()}
	var meta map[string]string
	_ = json.Unmarshal(si.Config["metadata"], &meta)
	h.Version = si.version()
	if reason := tooOld(h.Version); reason != "" {
		h.Verdict, h.Reason = Unsupported, reason
		return h
	}
	forbidden, warnings := compare(si.Config, k.config(0, 0))
	h.Warnings = warnings
	if len(forbidden) > 0 {
		h.Verdict, h.Reason = Misconfigured, "the bucket's configuration is not ours: "+strings.Join(forbidden, "; ")
		return h
	}
	k.js.atomic.Store(string(si.Config["allow_atomic"]) == "true")
	if was := k.created.Load(); was != 0 && was != si.Created.UnixNano() {
		k.replaced(si.Created.UnixNano())
	}
	k.created.Store(si.Created.UnixNano())

	if si.State.LastSeq >= highest {
		k.proof.Store(false)
		if si.State.LastSeq >= k.claim().fence {
			k.backSince = time.Time{}
		}
	}
	born := uint64(si.Created.Add(-createdSlack).UnixMicro())
	if si.State.LastSeq < born && si.State.Messages == 0 {
		// Nothing is in it, so nothing is lost by lifting it: it was made by an
		// instance whose clock is far behind the server's, for one.
		ctx, cancel := context.WithTimeout(context.Background(), tryTimeout)
		err := k.js.lift(ctx, max(uint64(si.Created.UnixMicro()), highest+1))
		cancel()
		if err == nil {
			k.look()
		}
	}
	until := holdOf(meta, si.Created)
	if left := until.Sub(si.Now); left > 0 {
		k.holdFor(time.Now().Add(left))
	}
	claimed := k.claim()
	switch {
	case si.State.LastSeq < born:
		h.Verdict, h.Reason = Distrusted, fmt.Sprintf("the bucket went back in time: its last revision %d is older than its creation (a restored backup?); lift it with `leased fence lift`", si.State.LastSeq)
	case time.Now().Before(k.holdUntil), si.Now.Before(until):
		h.Verdict, h.Reason = Waiting, "the bucket was deleted and made again; nothing is granted until the leases of the old one are over"
	case k.paused() != "" && si.State.LastSeq >= max(highest, claimed.fence):
		h.Verdict, h.Reason, h.Renewals = Waiting, k.paused(), true
		k.view.noteFence(si.State.LastSeq)
	case si.State.LastSeq < highest && !k.proof.Load() && !k.stayedBack():
		// A new leader may answer before it has applied its log. Acked guards
		// every grant meanwhile.
		if h.Verdict = Sound; k.health.Load().Verdict != Sound || k.alarm.Load() != 0 {
			h.Verdict, h.Reason = Unavailable, "the bucket shows an older revision than was issued; looking again"
		}
		time.AfterFunc(checkEvery/4, k.look)
	case si.State.LastSeq < highest:
		h.Verdict, h.Reason = Distrusted, fmt.Sprintf("the bucket went back in time: its last revision is %d, but %d was issued; lift it with `leased fence lift`", si.State.LastSeq, highest)
	case si.State.LastSeq < claimed.fence && k.stayedBack():
		h.Verdict, h.Reason = Distrusted, fmt.Sprintf("the bucket went back in time, says the instance %s: the last revision is %d, but %d was issued; lift it with `leased fence lift`, or wait until nobody has said so for %v", claimed.who, si.State.LastSeq, claimed.fence, claimFor)
	case si.State.LastSeq < claimed.fence:
		h.Verdict, h.Reason = Unavailable, "another instance has seen a higher revision than the bucket shows; looking again"
		time.AfterFunc(checkEvery/4, k.look)
	default:
		h.Verdict = Sound
		k.view.noteFence(si.State.LastSeq)
	}
	// The bucket holds less than the view has in force, twice: somebody purged it.
	if less := int64(si.State.Messages) < k.view.held.Load(); less && k.less {
		k.less = false
		k.restart()
	} else if k.less = less; less {
		time.AfterFunc(checkEvery/4, k.look)
	}
	if h.Verdict != Misconfigured && k.health.Load().Verdict == Misconfigured {
		k.restart() // what it was may have ended leases
	}
	if h.Verdict == Distrusted && k.health.Load().Verdict != Distrusted {
		// It knows revisions that are no longer there. Their holders still believe
		// in them, should the bucket be deleted next.
		end := k.lastEnd()
		k.forgotten.Store(&end)
		k.view.forget()
		k.restart()
	}
	return h
}

// backFor is how long the bucket must be behind before it is distrusted.
const backFor = 3 * time.Second

// stayedBack notes that the bucket's last revision is behind what was issued and
// says whether it has been for long enough.
func (k *keeper) stayedBack() bool {
	if k.backSince.IsZero() {
		k.backSince = time.Now()
	}
	return time.Since(k.backSince) >= backFor
}

// missing is called when there is no bucket: whoever makes it must know until
// when the leases of the one before are believed in.
func (k *keeper) missing(ctx context.Context) {
	known, waited := k.created.Load() != 0, k.health.Load().Verdict == Waiting
	if known {
		k.health.Store(&Health{Verdict: Missing, Reason: "the bucket was deleted"})
	}
	complete := k.view.complete.Load()
	if known {
		k.replaced(0)
	}
	news := k.ask(ctx, askLong, 0, time.Now())
	end := news.end
	if known && !complete && !waited && !news.heard {
		// Leases may have been granted that this instance never saw, and the
		// instances that granted them are gone.
		end = time.Now().Add(MaxTTL)
	}
	k.holdFor(end)
}

// holdFor puts off all grants until end at least; no lease that there is now lasts
// longer than MaxTTL, whatever clocks say.
func (k *keeper) holdFor(end time.Time) {
	if most := time.Now().Add(MaxTTL); end.After(most) {
		end = most
	}
	if end.After(k.holdUntil) {
		k.holdUntil = end
		k.held.Store(&end)
	}
}

// lastEnd is when the last lease that this instance ever knew is over.
func (k *keeper) lastEnd() time.Time {
	end := k.view.lastEnd()
	if p := k.forgotten.Load(); p != nil && p.After(end) {
		return *p
	}
	return end
}

// hold is until when nothing is granted, the zero time if that never was so.
func (k *keeper) hold() time.Time {
	var until time.Time
	if p := k.held.Load(); p != nil {
		until = *p
	}
	if p := k.early.Load(); p != nil && p.until.After(until) {
		until = p.until
	}
	return until
}

// replaced is called when the bucket is gone or another one: what it held may
// still be believed in by its holders until it is over.
func (k *keeper) replaced(created int64) {
	k.holdFor(k.lastEnd())
	k.created.Store(created)
	k.view.forget()
	k.restart()
}

func (k *keeper) restart() {
	select {
	case k.reset <- struct{}{}:
	default:
	}
}

// config is the bucket as the service makes it.
func (k *keeper) config(firstSeq uint64, level int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:               StreamName,
		Description:        "leases: one key, one holder, for a bounded time (leased)",
		Subjects:           []string{SubjectPrefix + ">"},
		Storage:            jetstream.FileStorage,
		Retention:          jetstream.LimitsPolicy,
		Discard:            jetstream.DiscardNew,
		MaxMsgsPerSubject:  1,
		MaxMsgs:            -1,
		MaxBytes:           -1,
		MaxMsgSize:         -1,
		MaxConsumers:       -1,
		Duplicates:         2 * time.Minute,
		Replicas:           k.replicas,
		DenyDelete:         true,
		AllowRollup:        true,
		AllowMsgTTL:        true,
		AllowDirect:        false,
		AllowAtomicPublish: level >= 2,
		FirstSeq:           firstSeq,
		RePublish:          &jetstream.RePublish{Source: SubjectPrefix + ">", Destination: k.events + ".>"}, // E1
	}
}

// make creates the bucket with a first revision above every fence known.
func (k *keeper) make(ctx context.Context, level int) error {
	// A leap above, so that no write to the old bucket's end looks like its next.
	highest := max(k.view.highest.Load(), k.claim().fence)
	if highest >= maxLift {
		return fmt.Errorf("revision %d was seen: too close to the end of all revisions to begin above it; start the instances again", highest)
	}
	first := max(uint64(time.Now().UnixMicro()), highest+1+leap)
	cfg := k.config(first, level)
	if left := time.Until(k.holdUntil); left > 0 {
		_, hi := k.view.clock.bounds(time.Now())
		cfg.Metadata = map[string]string{holdKey: hi.Add(left).UTC().Format(time.RFC3339Nano)}
	}
	if _, err := k.js.create(ctx, cfg); err != nil {
		return err
	}
	k.log.Info("bucket made", "replicas", k.replicas, "first_revision", first)
	return nil
}

// holdKey is the metadata of a bucket that replaces a deleted one: until when,
// on the server's clock, no instance may grant anything in it.
const holdKey = "leased_hold_until"

// holdOf reads it. What a bucket that was made at created replaces was over MaxTTL
// later: who may edit the stream cannot stop grants for longer.
func holdOf(meta map[string]string, created time.Time) time.Time {
	t, _ := time.Parse(time.RFC3339Nano, meta[holdKey])
	if most := created.Add(MaxTTL); t.After(most) {
		return most
	}
	return t
}

// tooOld tells why a server of version v cannot keep leases, "" if it can or if
// v is unknown. Before 2.11 there is no per-key TTL; 2.11.0-2.11.9 and 2.12.0
// never expire a key while others are renewed.
func tooOld(v string) string {
	n, ok := release(v)
	old := ok && (n[0] < 2 || n[0] == 2 && (n[1] < 11 || n[1] == 11 && n[2] < 10 || n[1] == 12 && n[2] == 0))
	if !old {
		return ""
	}
	return "nats-server " + v + " does not expire keys reliably; 2.11.10 or newer (not 2.12.0) is needed"
}

// release is a version's three numbers.
func release(v string) (n [3]int, ok bool) {
	core, _, _ := strings.Cut(v, "-")
	parts := strings.Split(core, ".")
	if len(parts) != 3 {
		return n, false
	}
	for i, p := range parts {
		var err error
		if n[i], err = strconv.Atoi(p); err != nil {
			return n, false
		}
	}
	return n, true
}

// Fields of the configuration that may differ from ours.
var (
	// free fields say nothing about leases.
	freeFields = map[string]bool{"description": true, "metadata": true, "placement": true, "compression": true, "allow_atomic": true, "first_seq": true}
	// warnedFields cost something, but every promise about leases stands.
	warnedFields = map[string]string{"allow_direct": "allow_direct", "republish": "republish", "num_replicas": "replicas"}
	warningTexts = map[string]string{
		"allow_direct": "allow_direct is on: programs that read the bucket with direct gets may see old leases (this service does not)",
		"republish":    "republish differs: change events are missing or go elsewhere",
		"replicas":     "the number of replicas is not the one of --replicas",
	}
	// absent values a server may leave out or write.
	zeroValues = map[string][]string{"max_consumers": {"-1", "0"}, "max_msgs": {"-1", "0"}, "max_bytes": {"-1", "0"}, "max_msg_size": {"-1", "0"}}
)

// WarningText explains a name in Health.Warnings.
func WarningText(name string) string { return warningTexts[name] }

// compare holds the bucket's configuration against ours, field by field, by
// their names on the wire.
func compare(got map[string]json.RawMessage, want jetstream.StreamConfig) (forbidden, warnings []string) {
	body, err := json.Marshal(want)
	if err != nil {
		panic(err) // a struct of plain fields
	}
	var ours map[string]json.RawMessage
	if err := json.Unmarshal(body, &ours); err != nil {
		panic(err)
	}
	names := maps.Clone(got)
	maps.Copy(names, ours)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if freeFields[name] || same(name, got[name], ours[name]) {
			continue
		}
		if w := warnedFields[name]; w != "" {
			warnings = append(warnings, w)
			continue
		}
		forbidden = append(forbidden, fmt.Sprintf("%s is %s, must be %s", name, shown(got[name]), shown(ours[name])))
	}
	return forbidden, warnings
}

// same compares two values of a field; an absent one equals its zero value.
func same(name string, a, b json.RawMessage) bool {
	if unlimited := zeroValues[name]; unlimited != nil {
		return (a == nil || slices.Contains(unlimited, string(a))) && (b == nil || slices.Contains(unlimited, string(b)))
	}
	var x, y any
	if a != nil && json.Unmarshal(a, &x) != nil || b != nil && json.Unmarshal(b, &y) != nil {
		return false
	}
	return isZero(x) && isZero(y) || reflect.DeepEqual(x, y)
}

// isZero says that a decoded JSON value is nothing, or a structure of nothings.
func isZero(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case bool:
		return !v
	case float64:
		return v == 0
	case string:
		return v == "" || v == "default"
	case []any:
		return len(v) == 0
	case map[string]any:
		for _, x := range v {
			if !isZero(x) {
				return false
			}
		}
		return true
	}
	return false
}

func shown(v json.RawMessage) string {
	if v == nil {
		return "not set"
	}
	return string(v)
}
