package service

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// meaning is what an error answer of JetStream says of the message that it answers.
type meaning int

const (
	// doubtful: it may be stored all the same, by another replica for one. So does a code
	// that is not in the table.
	doubtful meaning = iota
	conflicting
	// passing: it is not stored, and the same message may be a moment later.
	passing
	// lasting: it is not stored, and will not be until somebody mends what the answer says.
	lasting
	// ofBatch: nothing of the batch is stored, and its messages may be by themselves.
	ofBatch
	// request: answers requests to the JetStream API, never a message.
	request
)

// answer is one error code of JetStream: what it means for a write, and what it
// tells an operator, before the server's own words.
type answer struct {
	meaning
	text string
}

// JetStream's own error codes, as far as the service goes by them.
const (
	codeNoLeader       = 10008
	codeInsufficient   = 10023
	codeNoMessage      = 10037
	codeNoAccount      = 10039
	codeStreamExists   = 10058
	codeStreamNotFound = 10059
	codeWrongLastSeq   = 10071
	codeNoJetStream    = 10076
	codeStoreFailed    = 10077
	codeInFlight       = 10164
)

// answers are all error codes that JetStream can give to what the service sends. A
// test holds them against the server's source.
var answers = map[uint16]answer{
	// Writes.
	10002:              {lasting, "the JetStream storage of the NATS account is used up: raise its limit, or free some"},
	codeNoLeader:       {passing, "JetStream has no leader at the moment"},
	10009:              {passing, "the server does not lead the bucket any more"},
	codeInsufficient:   {lasting, "the NATS server has no storage left for JetStream: raise its limit, or free some"},
	10028:              {lasting, "the NATS server has no memory left for JetStream"},
	10035:              {lasting, "the NATS account is not there"},
	codeNoAccount:      {lasting, "JetStream is not enabled for this NATS account"},
	10047:              {lasting, "the NATS server has no storage left for JetStream: raise its limit, or free some"},
	10054:              {lasting, "the bucket takes no message of this size: max_msg_size must not be set"},
	codeStreamNotFound: {passing, "the bucket does not exist"},
	10060:              {lasting, "another stream than the bucket takes its subjects"},
	10063:              {doubtful, "a replica is not in step with the others"},
	10070:              {conflicting, "another message came first"},
	codeWrongLastSeq:   {conflicting, "another write of this key came first"},
	codeNoJetStream:    {lasting, "the NATS server has no JetStream"},
	codeStoreFailed:    {doubtful, "the NATS server could not store it"}, // but see full
	10097:              {lasting, "the NATS server takes no headers of this size"},
	10109:              {lasting, "the bucket is sealed: delete it, and it is made again"},
	10111:              {lasting, "the bucket takes no roll-ups"},
	10118:              {passing, "the bucket is offline"},
	10120:              {lasting, "the NATS account has no JetStream limit for this number of replicas"},
	10158:              {doubtful, "the same message is being stored"},
	10163:              {passing, "the server cannot tell the last write of this key at the moment"},
	codeInFlight:       {conflicting, "another write of this key is being decided"},
	10165:              {lasting, "the NATS server does not take the time to live of the message"},
	10166:              {lasting, "the bucket takes no time to live: allow_msg_ttl must be on"},
	10167:              {passing, "the NATS server has more requests than it can take"},
	10168:              {lasting, "the NATS server takes the message for a counter"},
	10169:              {lasting, "the bucket is one of counters: allow_msg_counter must be off"},
	10170:              {lasting, "the bucket is one of counters: allow_msg_counter must be off"},
	10171:              {lasting, "the NATS server takes the message for a counter"},
	10172:              {lasting, "the bucket is one of counters: allow_msg_counter must be off"},
	10185:              {lasting, "the NATS server is too old for what was asked"},
	10188:              {lasting, "the NATS server takes the message for a schedule"},
	10189:              {lasting, "the NATS server takes the message for a schedule"},
	10190:              {lasting, "the NATS server takes the message for a schedule"},
	10191:              {lasting, "the NATS server takes the message for a schedule"},
	10192:              {lasting, "the NATS server takes the message for a schedule"},
	10193:              {lasting, "the NATS server does not take the condition of the write"},
	10194:              {passing, "the bucket is offline"},
	10203:              {lasting, "the NATS server takes the message for a schedule"},
	10212:              {lasting, "the NATS server takes the message for a schedule"},
	10223:              {lasting, "the NATS server takes the message for a schedule"},
	10227:              {lasting, "the NATS server takes the message for one of another stream"},
	// Batches.
	10174: {ofBatch, "the bucket takes no batches"},
	10175: {ofBatch, "a message of the batch has no number"},
	10176: {ofBatch, "the batch did not arrive whole"},
	10177: {ofBatch, "the batch has a header that batches may not have"},
	10179: {ofBatch, "the NATS server does not take the name of the batch"},
	10199: {ofBatch, "the batch is larger than the NATS server takes"},
	10200: {ofBatch, "the NATS server does not take the end of the batch"},
	10201: {ofBatch, "a message stands twice in the batch"},
	10210: {ofBatch, "the NATS server has more batches under way than it takes"},
	10211: {ofBatch, "the NATS server has more batches under way than it takes"},
	// Requests: of information, a message, a consumer; making and purging the bucket.
	10003:            {request, "the NATS server does not take the request"},
	10004:            {request, "not all servers of the cluster answered"},
	10005:            {request, "the cluster has no place for the bucket"},
	10007:            {request, "the bucket is not kept by this server"},
	10010:            {request, "several replicas need a cluster: say --replicas 1"},
	10012:            {request, "the consumer cannot be made"},
	10013:            {request, "a consumer of this name is there"},
	10014:            {request, "the consumer is gone"},
	10025:            {request, "the NATS server cannot read the request"},
	10026:            {request, "the limit of consumers is reached: raise max_consumers of the account"},
	10027:            {request, "the limit of streams is reached: raise max_streams of the account"},
	codeNoMessage:    {request, "there is no such message"},
	10041:            {request, "the servers of the cluster could not agree"},
	10043:            {request, "there is no such message"},
	10048:            {request, "the cluster could not place the bucket"},
	10049:            {request, "the NATS server could not make the bucket"},
	10051:            {request, "the NATS server failed on the bucket"},
	10052:            {request, "the NATS server does not take the bucket's configuration"},
	10053:            {request, "the bucket does not fit the limits of the account"},
	10056:            {request, "the NATS server does not take the request"},
	codeStreamExists: {request, "the bucket is there, with another configuration"},
	10065:            {request, "another stream takes subjects of the bucket, $KV.leases.>: delete it, or take them from it"},
	10069:            {request, "the NATS server could not change the bucket"},
	10074:            {request, "several replicas need a cluster: say --replicas 1"},
	10096:            {request, "the NATS server failed on the bucket"},
	10104:            {request, "the NATS server could not store the consumer"},
	10110:            {request, "the NATS server could not purge the bucket"},
	10113:            {request, "the account wants max_bytes for every stream: allow streams without"},
	10117:            {request, "the NATS server has more subjects than it can tell"},
	10119:            {request, "the consumer is offline"},
	10122:            {request, "the account wants max_bytes for every stream: allow streams without"},
	10133:            {request, "the NATS server does not take this number of replicas"},
	10148:            {request, "a consumer of this name is there"},
	10149:            {request, "the consumer is gone"},
	10157:            {request, "the NATS server does not take the bucket's configuration"},
	10195:            {request, "the consumer is offline"},
}

// full are the reasons for codeStoreFailed that prove that nothing was stored.
var full = []string{"maximum bytes exceeded", "maximum messages exceeded", "maximum messages per subject exceeded", "message too large"}

// errorAnswer is an error that JetStream answered.
type errorAnswer struct {
	*apiError
	answer
	known bool // it is in the table
}

// answeredWith looks e up.
func answeredWith(e *apiError) *errorAnswer {
	a, known := answers[uint16(e.ErrorCode)]
	if uint16(e.ErrorCode) == codeStoreFailed && slices.Contains(full, e.Description) {
		a = answer{lasting, "the bucket is full: it must have no limits"}
	}
	return &errorAnswer{e, a, known}
}

// Error says it in our words and in the server's.
func (a *errorAnswer) Error() string {
	if a.text == "" {
		return fmt.Sprintf("JetStream answered %q (%d)", a.Description, a.ErrorCode)
	}
	return fmt.Sprintf("%s (JetStream: %q, %d)", a.text, a.Description, a.ErrorCode)
}

func (a *errorAnswer) Unwrap() error { return a.apiError }

// verdict is a as the answer to a write. batch is how many messages it would have committed, 0 for one that stands alone; noRoom is what codeInsufficient means.
func (a *errorAnswer) verdict(batch int, noRoom meaning) error {
	if uint16(a.ErrorCode) == codeInsufficient {
		a.meaning = noRoom
	}
	switch {
	case uint16(a.ErrorCode) == codeWrongLastSeq, uint16(a.ErrorCode) == codeInFlight:
		return &conflict{lastIn(a.Description), a}
	case batch > 0 && (a.meaning == ofBatch || a.meaning == lasting):
		// A single server that runs out of room stores what came before in the batch.
		return fmt.Errorf("%w: %w", errBatchRefused, a)
	case a.meaning == passing || a.meaning == lasting:
		return notStored(a)
	default:
		return fmt.Errorf("%w: %w", ErrNoVerdict, a)
	}
}

// lasts says that err is a refusal that is not over by itself.
func lasts(err error) bool {
	a, ok := errors.AsType[*errorAnswer](err)
	return ok && a.meaning == lasting && errors.Is(err, ErrNotStored)
}

// refusal is the last lasting refusal of a write, until one is stored.
type refusal struct{ last atomic.Pointer[refusedAt] }

type refusedAt struct {
	why error
	at  time.Time
}

// refusedFor is how long a refusal is shown that no other write came after.
const refusedFor = time.Minute

func (r *refusal) note(why error) { r.last.Store(&refusedAt{why, time.Now()}) }

// stored says that a write was.
func (r *refusal) stored() {
	if r.last.Load() != nil {
		r.last.Store(nil)
	}
}

// text says why writes are refused, "" while they are not.
func (r *refusal) text() string {
	if p := r.last.Load(); p != nil && time.Since(p.at) < refusedFor {
		return p.why.Error()
	}
	return ""
}

// hearer counts and logs the errors that JetStream answers and that somebody should
// know of, each sort once in a while.
func hearer(obs Observer, log *slog.Logger) func(*errorAnswer, string) {
	var refused, unknown seldom
	return func(a *errorAnswer, to string) {
		switch {
		case !a.known:
			obs.UnknownAnswer()
			if n := unknown.now(time.Now()); n > 0 {
				log.Error("JetStream answers with an error that is not known", "to", to, "code", uint16(a.ErrorCode), "error", a.Description, "times", n)
			}
		case a.meaning == lasting && to == aWrite:
			obs.Refused()
			if n := refused.now(time.Now()); n > 0 {
				log.Error("JetStream refuses writes", "reason", a.Error(), "times", n)
			}
		}
	}
}

// aWrite is what a message to the bucket is called beside requests to the API.
const aWrite = "a write"

// seldom lets one of many events be logged, with how many there were.
type seldom struct {
	mu   sync.Mutex
	last time.Time
	n    int
}

// seldomEvery is the time between two lines.
const seldomEvery = 10 * time.Second

// now counts an event and says how many there were since the last line, 0 if it
// is too early for the next.
func (s *seldom) now(at time.Time) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
	if !s.last.IsZero() && at.Sub(s.last) < seldomEvery {
		return 0
	}
	n, s.n, s.last = s.n, 0, at
	return n
}
