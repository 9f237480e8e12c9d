package service

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Names of the bucket on the wire. They are part of the contract.
const (
	Bucket        = "leases"
	StreamName    = "KV_" + Bucket
	SubjectPrefix = "$KV." + Bucket + "."
)

// Headers of stored messages. JetStream ignores a misspelt or mis-cased header
// silently, so they stand here once and are used by one function, publish.
const (
	headerEvent          = "Dagnats-Lease-Event"
	headerOperation      = "KV-Operation"
	headerTTL            = "Nats-TTL"
	headerExpectedStream = "Nats-Expected-Stream"
	headerExpectedLast   = "Nats-Expected-Last-Subject-Sequence"

	operationPurge = "PURGE"
	operationDel   = "DEL"
)

// js is the bucket on one NATS connection, and for writes on another one where that is
// a shorter way: the only place that publishes to it and reads from it. It implements
// Store.
type js struct {
	nc    *nats.Conn
	out   requests
	near  *near  // a shorter way for writes; nil: there is none
	api   string // "$JS.API." or what a domain or prefix makes of it
	put   string // subject of a key's message without the key
	clock *clock
	// seen is set once JetStream has answered anything at all.
	seen atomic.Bool
	// Writes are held back while a lot are under way: those of StartPut that take a
	// key that holds nothing, its others, and those of PutMany, each kind by itself,
	// so that none of them keeps the others waiting.
	taking, changing, many *window
	// refused is why no write can be stored at the moment; heard is told of each error
	// that JetStream answers.
	refused refusal
	heard   func(a *errorAnswer, subject string)
	// noRoom is the meaning of codeInsufficient, by the last look at the bucket.
	noRoom atomic.Int32
	// group batches writes if it is set and the bucket allows it (atomic).
	group  *committer
	atomic atomic.Bool
}

func newJS(nc *nats.Conn, domain, apiPrefix string, c *clock) (*js, error) {
	j := &js{nc: nc, out: requests{nc: nc}, heard: func(*errorAnswer, string) {}, api: "$JS.API.", put: SubjectPrefix, clock: c, taking: newWindow(), changing: newWindow(), many: newWindow()}
	switch {
	case domain != "" && apiPrefix != "":
		return nil, errors.New("a JetStream domain and an API prefix exclude each other")
	case domain != "":
		apiPrefix = "$JS." + domain + ".API"
		fallthrough
	case apiPrefix != "":
		j.api = strings.TrimSuffix(apiPrefix, ".") + "."
		if j.api != "$JS.API." {
			// The KV subjects of another account or domain hang below its API
			// prefix; the server maps them back.
			j.put = j.api + SubjectPrefix
		}
	}
	return j, nil
}

// apiError is an error reply of the JetStream API.
type apiError = jetstream.APIError

// request asks the JetStream API and decodes the reply into out. A refusal
// comes back as *errorAnswer, silence as ErrNoAnswer.
func (j *js) request(ctx context.Context, subject string, body []byte, out any) error {
	msg, err := j.out.ask(ctx, &nats.Msg{Subject: j.api + subject, Data: body})
	if err != nil {
		return fmt.Errorf("%w (%s): %w", ErrNoAnswer, subject, err)
	}
	return j.noted(subject, readReply(subject, msg.Data, out))
}

// noted tells what JetStream answered, if err is that, and returns err.
func (j *js) noted(subject string, err error) error {
	if a, ok := errors.AsType[*errorAnswer](err); ok {
		j.heard(a, subject)
	}
	return err
}

// readReply decodes a reply of the JetStream API to a request on subject.
func readReply(subject string, data []byte, out any) error {
	var envelope struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(data, &envelope); err != nil {
		return fmt.Errorf("%w (%s): unreadable reply: %w", ErrNoAnswer, subject, err)
	}
	if envelope.Error != nil {
		return answeredWith(envelope.Error)
	}
	return json.Unmarshal(data, out)
}

// errTooLate says that the time for a request was over before it was sent.
var errTooLate = errors.New("there was no time left to send it")

// codeOf is the JetStream error code in err, 0 if there is none.
func codeOf(err error) uint16 {
	var e *apiError
	if errors.As(err, &e) {
		return uint16(e.ErrorCode)
	}
	return 0
}

// StartGet implements Store.
func (j *js) StartGet(key string, wait time.Duration, known Known, done func(Entry, error)) {
	msg := &nats.Msg{Subject: j.api + "STREAM.MSG.GET." + StreamName, Data: getRequest(key)}
	j.out.start(msg, wait, func(reply *nats.Msg, err error) {
		done(caught(func() (Entry, error) {
			e, err := readMessage(key, reply, err, known)
			return e, j.noted("STREAM.MSG.GET", err)
		}))
	})
}

// Get is StartGet for who can wait.
func (j *js) Get(ctx context.Context, key string) (Entry, error) {
	return await(func(done func(Entry, error)) { j.StartGet(key, limit(ctx), nil, done) })
}

// readMessage reads what came back of STREAM.MSG.GET for key's last message.
func readMessage(key string, reply *nats.Msg, err error, known Known) (Entry, error) {
	if err != nil {
		return Entry{}, fmt.Errorf("%w (STREAM.MSG.GET): %w", ErrNoAnswer, err)
	}
	m, e, ok := plainMessage(key, reply.Data, known)
	switch {
	case e.Revision != 0:
		return e, nil
	case !ok:
		var long struct {
			Message struct {
				Seq     uint64    `json:"seq"`
				Headers []byte    `json:"hdrs"`
				Data    []byte    `json:"data"`
				Time    time.Time `json:"time"`
			} `json:"message"`
		}
		err := readReply("STREAM.MSG.GET", reply.Data, &long)
		switch code := codeOf(err); {
		case err == nil:
		case code == codeNoMessage:
			return Entry{Key: key}, nil
		case code == codeStreamNotFound:
			return Entry{}, fmt.Errorf("%w: %w", ErrNoBucket, err)
		case errors.Is(err, ErrNoAnswer):
			return Entry{}, err
		default:
			return Entry{}, fmt.Errorf("%w: %w", ErrNoAnswer, err)
		}
		if long.Message.Seq == 0 {
			return Entry{}, fmt.Errorf("%w (STREAM.MSG.GET): a reply with neither a message nor an error", ErrNoAnswer)
		}
		hdr, err := nats.DecodeHeadersMsg(long.Message.Headers)
		if err != nil && len(long.Message.Headers) > 0 {
			hdr = nil
		}
		m = storedMessage{long.Message.Seq, hdr, long.Message.Data, long.Message.Time}
	}
	if m.seq == 0 {
		return Entry{Key: key}, nil
	}
	e, _ = decodeEntry(key, m.seq, m.at, m.hdr, m.data)
	return e, nil
}

// decodeEntry reads a stored message, ours or not. ttl is its Nats-TTL, 0 when
// it has none.
func decodeEntry(key string, seq uint64, at time.Time, hdr nats.Header, data []byte) (e Entry, ttl time.Duration) {
	e = Entry{Key: key, Revision: seq, At: at}
	switch hdr.Get(headerOperation) {
	case operationPurge, operationDel:
		e.Tombstone = true
	}
	if hdr.Get("Nats-Marker-Reason") != "" {
		e.Tombstone = true
	}
	ttl, _ = time.ParseDuration(hdr.Get(headerTTL))
	if hdr.Get(headerEvent) == "" {
		e.Foreign = "it has no " + headerEvent + " header"
		return e, ttl
	}
	rec, err := decodeRecord(key, data)
	switch {
	case err != nil:
		e.Foreign = err.Error()
	case (rec.Event == Released || rec.Event == Expired) != e.Tombstone:
		e.Foreign = "its event and its KV-Operation disagree"
	default:
		e.Record = rec
	}
	return e, ttl
}

// StartPut implements Store.
func (j *js) StartPut(w *Write, deadline time.Time, done func(uint64, error)) {
	line := j.changing
	switch {
	case j.group != nil && j.atomic.Load():
		j.group.start(w, tryTime(deadline), done)
		return
	case w.Event == Expired: // a few at a time, and soon or not at all
		j.startOne(w, tryTime(deadline), done)
		return
	case w.Expect == 0:
		line = j.taking
	}
	line.enter(1, sendBy(deadline), func(int, int) {
		began := time.Now()
		j.startOne(w, tryTime(deadline), func(rev uint64, err error) {
			defer line.leave(began, err)
			done(rev, err)
		})
	}, func(int, int) { done(0, notStored(errTooLate)) })
}

// PutMany implements Store.
func (j *js) PutMany(ws []*Write, deadline time.Time) []PutResult {
	start := j.startEach
	if j.group != nil && j.atomic.Load() {
		start = j.group.startMany
	}
	return awaitAll(len(ws), func(done func(int, uint64, error)) {
		if len(ws) > 0 && ws[0].Event == Expired { // as many as the expirer sees fit, and soon or not at all
			start(ws, tryTime(deadline), done)
			return
		}
		j.many.enter(len(ws), sendBy(deadline), func(from, to int) {
			began := time.Now()
			start(ws[from:to], tryTime(deadline), func(i int, rev uint64, err error) {
				defer j.many.leave(began, err)
				done(from+i, rev, err)
			})
		}, func(from, to int) {
			for i := from; i < to; i++ {
				done(i, 0, notStored(errTooLate))
			}
		})
	})
}

// queued is how many writes wait for their turn.
func (j *js) queued() int {
	n := j.taking.queued() + j.changing.queued() + j.many.queued()
	if j.group != nil {
		n += j.group.queued()
	}
	return n
}

// startEach stores each write by itself, all at the same time.
func (j *js) startEach(ws []*Write, wait time.Duration, done func(int, uint64, error)) {
	for i, w := range ws {
		j.startOne(w, wait, func(rev uint64, err error) { done(i, rev, err) })
	}
}

// awaitAll waits for the verdicts of the n writes that start begins.
func awaitAll(n int, start func(done func(int, uint64, error))) []PutResult {
	results := make([]PutResult, n)
	var open sync.WaitGroup
	open.Add(n)
	start(func(i int, rev uint64, err error) {
		results[i] = PutResult{rev, err}
		open.Done()
	})
	open.Wait()
	return results
}

// message is w as it is published.
func (j *js) message(w *Write) *nats.Msg {
	msg := nats.NewMsg(j.put + w.Key)
	msg.Data = w.Body
	msg.Header[headerExpectedStream] = []string{StreamName}
	msg.Header[headerExpectedLast] = []string{strconv.FormatUint(w.Expect, 10)}
	msg.Header[headerTTL] = []string{strconv.FormatInt(int64(w.TTL/time.Second), 10) + "s"}
	msg.Header[headerEvent] = []string{string(w.Event)}
	if w.Tombstone {
		msg.Header[headerOperation] = []string{operationPurge}
	}
	return msg
}

// startOne stores w by itself.
func (j *js) startOne(w *Write, wait time.Duration, done func(uint64, error)) {
	j.publish(j.way(), j.message(w), wait, 0, done)
}

// way is how a write goes out. Those of a batch go one way.
func (j *js) way() *requests {
	if j.near != nil {
		if way := j.near.way.Load(); way != nil {
			return way
		}
	}
	return &j.out
}

// publish publishes msg on way and hands its verdict over. batch is how many messages
// it commits, 0 for a message that stands alone.
func (j *js) publish(way *requests, msg *nats.Msg, wait time.Duration, batch int, done func(uint64, error)) {
	if wait <= 0 {
		done(0, notStored(errTooLate))
		return
	}
	way.start(msg, wait, func(reply *nats.Msg, err error) {
		if j.near != nil && (errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrTimeout) && wait >= tryTimeout/2) {
			j.near.lost(way.nc)
		}
		done(caught(func() (uint64, error) {
			seq, err := verdict(reply, err, batch, meaning(j.noRoom.Load()))
			if err == nil {
				j.refused.stored()
				return seq, nil
			}
			if lasts(err) {
				j.refused.note(err)
			}
			return seq, j.noted(aWrite, err)
		}))
	})
}

// send is publish for who can wait.
func (j *js) send(ctx context.Context, way *requests, msg *nats.Msg, batch int) (uint64, error) {
	return await(func(done func(uint64, error)) { j.publish(way, msg, limit(ctx), batch, done) })
}

// verdict reads what came back of a write.
func verdict(reply *nats.Msg, err error, batch int, noRoom meaning) (uint64, error) {
	switch {
	case err == nil:
	case errors.Is(err, nats.ErrNoResponders),
		errors.Is(err, nats.ErrReconnectBufExceeded),
		errors.Is(err, nats.ErrConnectionClosed),
		errors.Is(err, nats.ErrConnectionDraining),
		errors.Is(err, nats.ErrMaxPayload):
		return 0, notStored(err)
	default:
		return 0, fmt.Errorf("%w: %w", ErrNoVerdict, err)
	}
	if seq, ok := plainAck(reply.Data); ok && batch == 0 {
		return seq, nil
	}
	var ack struct {
		Stream string    `json:"stream"`
		Seq    uint64    `json:"seq"`
		Count  int       `json:"count"`
		Error  *apiError `json:"error"`
	}
	switch err := json.Unmarshal(reply.Data, &ack); {
	case err != nil:
		return 0, fmt.Errorf("%w: unreadable ack: %w", ErrNoVerdict, err)
	case ack.Error == nil && (ack.Stream != StreamName || ack.Seq == 0 || ack.Count != batch):
		return 0, fmt.Errorf("%w: an ack of something else", ErrNoVerdict)
	case ack.Error == nil:
		return ack.Seq, nil
	}
	return 0, answeredWith(ack.Error).verdict(batch, noRoom)
}

// lastIn is the sequence that a refusal for the wrong last one names in its text,
// "wrong last sequence: 7"; there is no other place for it.
func lastIn(description string) *uint64 {
	_, text, _ := strings.Cut(description, "wrong last sequence: ")
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return nil
	}
	return &n
}

// tryTime is how long one request of a call may take that has until deadline.
func tryTime(deadline time.Time) time.Duration { return min(tryTimeout, time.Until(deadline)) }

// sendBy is until when a write may wait for its turn, from now on: half of what it has
// is for its verdict, but no more than tryTimeout and no less than a quarter of that.
func sendBy(deadline time.Time) time.Time {
	return deadline.Add(-max(tryTimeout/4, min(tryTimeout, time.Until(deadline)/2)))
}

// deadlineOf is ctx's, that of one request if it has none.
func deadlineOf(ctx context.Context) time.Time {
	if deadline, ok := ctx.Deadline(); ok {
		return deadline
	}
	return time.Now().Add(tryTimeout)
}

// limit is how long one request of a call may take: tryTimeout, and no longer
// than ctx has. That ctx ended early is noticed by the caller afterwards.
func limit(ctx context.Context) time.Duration { return tryTime(deadlineOf(ctx)) }

// streamInfo is STREAM.INFO as far as the service reads it. The configuration
// stays raw: the check compares every field, known to this code or not.
type streamInfo struct {
	Config  map[string]json.RawMessage `json:"config"`
	Created time.Time                  `json:"created"`
	State   struct {
		FirstSeq uint64 `json:"first_seq"`
		LastSeq  uint64 `json:"last_seq"`
		Messages uint64 `json:"messages"`
	} `json:"state"`
	Cluster *struct {
		Name   string `json:"name"`
		Leader string `json:"leader"`
	} `json:"cluster"`
	Now time.Time `json:"ts"`
}

// version is that of the server that leads the stream, "" if it does not say.
func (si *streamInfo) version() string {
	var meta map[string]string
	_ = json.Unmarshal(si.Config["metadata"], &meta)
	return meta["_nats.ver"]
}

// noRoom is what it means that a server has no room for a write. Of several replicas the
// one that leads hands over to another, which may have some; before 2.12 the others could
// store what it refused.
func (si *streamInfo) noRoom() meaning {
	n, ok := release(si.version())
	switch {
	case si.Cluster == nil || string(si.Config["num_replicas"]) == "1":
		return lasting
	case !ok || n[0] < 2 || n[0] == 2 && n[1] < 12:
		return doubtful
	default:
		return passing
	}
}

// errNoLeader says that a follower answered for a leader that is not there.
var errNoLeader = fmt.Errorf("%w: the stream has no leader", ErrNoAnswer)

// info reads the stream's state and takes a sample of its leader's clock.
func (j *js) info(ctx context.Context) (*streamInfo, error) {
	var si streamInfo
	sent := time.Now()
	if err := j.request(ctx, "STREAM.INFO."+StreamName, nil, &si); err != nil {
		if codeOf(err) == codeStreamNotFound {
			return nil, fmt.Errorf("%w: %w", ErrNoBucket, err)
		}
		return nil, err
	}
	if si.Cluster != nil && si.Cluster.Leader == "" || si.Now.IsZero() {
		return nil, errNoLeader
	}
	leader := ""
	if si.Cluster != nil {
		leader = si.Cluster.Leader
	}
	j.clock.sample(leader, sent, time.Now(), si.Now)
	j.noRoom.Store(int32(si.noRoom()))
	if j.near != nil {
		var s seat
		if si.Cluster != nil {
			s = seat{si.Cluster.Name, si.Cluster.Leader}
		}
		j.near.leads(s)
	}
	return &si, nil
}

// Head implements Store.
func (j *js) Head(ctx context.Context) (Head, error) {
	si, err := j.info(ctx)
	if err != nil {
		return Head{}, err
	}
	return Head{si.Now, si.State.LastSeq}, nil
}

// accountInfo is $JS.API.INFO as far as the service reads it.
type accountInfo struct {
	API struct {
		Level int `json:"level"`
	} `json:"api"`
}

func (j *js) account(ctx context.Context) (*accountInfo, error) {
	var ai accountInfo
	if err := j.request(ctx, "INFO", nil, &ai); err != nil {
		return nil, err
	}
	j.seen.Store(true)
	return &ai, nil
}

// create makes the stream. An existing one with another configuration is
// codeStreamExists.
func (j *js) create(ctx context.Context, cfg jetstream.StreamConfig) (*streamInfo, error) {
	body, err := json.Marshal(cfg)
	if err != nil {
		return nil, err
	}
	var si streamInfo
	if err := j.request(ctx, "STREAM.CREATE."+StreamName, body, &si); err != nil {
		return nil, err
	}
	return &si, nil
}

// lift makes seq the next revision of the bucket by purging everything below:
// all leases end, without events. It is the cure of a bucket that went back in
// time, and harmless on an empty one. A seq at or below the last revision ends
// leases and lifts nothing.
func (j *js) lift(ctx context.Context, seq uint64) error {
	var reply struct {
		Success bool `json:"success"`
	}
	body := fmt.Appendf(nil, `{"seq":%d}`, seq)
	if err := j.request(ctx, "STREAM.PURGE."+StreamName, body, &reply); err != nil {
		return err
	}
	if !reply.Success {
		return fmt.Errorf("%w: the purge was refused", ErrNoAnswer)
	}
	return nil
}
