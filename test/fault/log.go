package fault

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Names of the wire. The harness speaks it by itself: it shares no code with
// the service but the list of reply kinds.
const (
	bucketStream = "KV_leases"
	bucketPrefix = "$KV.leases."
	eventPrefix  = "dagnats.lease.changed."
	inboxPrefix  = "dagnats.lease.inbox."

	hdrEvent    = "Dagnats-Lease-Event"
	hdrFence    = "Dagnats-Lease-Fence"
	hdrDeadline = "Dagnats-Lease-Deadline-Ms"
	hdrReject   = "Dagnats-Lease-Reject"
	hdrTTL      = "Nats-TTL"
	hdrExpect   = "Nats-Expected-Last-Subject-Sequence"
	hdrStream   = "Nats-Expected-Stream"
	hdrRollup   = "Nats-Rollup"
	hdrMsgID    = "Nats-Msg-Id"
	hdrKVOp     = "KV-Operation"
	hdrReason   = "Nats-Marker-Reason"
	hdrSeq      = "Nats-Sequence"
	hdrLast     = "Nats-Last-Sequence"
	hdrTime     = "Nats-Time-Stamp"
	hdrSubject  = "Nats-Subject"
)

// Entry is one message that the stream stored.
type Entry struct {
	Seq    uint64
	Key    string
	Time   time.Time // the server's message time
	Seen   int64     // when it reached the test, on the run's clock
	Header nats.Header
	Body   []byte
	Record Record // zero when the body is not a record
	Ours   bool   // has the event header and a readable record
}

// Record is the body of a stored message.
type Record struct {
	V          int       `json:"v"`
	Key        string    `json:"key"`
	Holder     string    `json:"holder"`
	TTLMillis  int64     `json:"ttl_ms"`
	AcquiredAt time.Time `json:"acquired_at"`
	WrittenAt  time.Time `json:"written_at"`
	Event      string    `json:"event"`
	Nonce      string    `json:"nonce"`
	Horizon    time.Time `json:"horizon"`
	Previous   *struct {
		Holder   string `json:"holder"`
		Revision uint64 `json:"revision"`
		Ended    string `json:"ended"`
	} `json:"previous"`
	Revision uint64 `json:"revision"`
	Evicted  bool   `json:"evicted"`
}

// The events of a record.
const (
	evAcquired = "acquired"
	evRenewed  = "renewed"
	evReleased = "released"
	evExpired  = "expired"
)

// IsLease says that the entry holds a lease and is no tombstone.
func (e *Entry) IsLease() bool {
	return e.Ours && (e.Record.Event == evAcquired || e.Record.Event == evRenewed)
}

// TTL is the lease's time to live by its record.
func (e *Entry) TTL() time.Duration { return time.Duration(e.Record.TTLMillis) * time.Millisecond }

// Ends is when the lease runs out on the server's clock.
func (e *Entry) Ends() time.Time { return e.Time.Add(e.TTL()) }

// Expected is the sequence the write was conditional on; ok is false when the
// header is missing or is no number, which the server takes for "any".
func (e *Entry) Expected() (seq uint64, ok bool) {
	seq, err := strconv.ParseUint(e.Header.Get(hdrExpect), 10, 64)
	return seq, err == nil
}

func (e *Entry) String() string {
	return fmt.Sprintf("%d %s %s %s ttl %s expect %q", e.Seq, e.Key, e.Record.Event, e.Record.Holder, e.Header.Get(hdrTTL), e.Header.Get(hdrExpect))
}

// Event is one message on the change subject as one subscriber got it.
type Event struct {
	Key        string
	Seq        uint64 // Nats-Sequence; 0: not from the server's republish
	Last       uint64 // Nats-Last-Sequence
	Seen       int64
	Subscriber int // which of the taps, and which of its connections
	Header     nats.Header
	Body       []byte
}

// Clash is a sequence under which the stream showed two messages.
type Clash struct {
	Seen int64 // when the second was
	Text string
}

// Log is the full copy of the stream, gathered while it happens from a consumer
// and from the change events; a message that either of them saw is in it.
type Log struct {
	clock *Clock
	read  Reader

	mu      sync.Mutex
	bySeq   map[uint64]*Entry
	events  []Event
	clashes []Clash
	first   uint64 // lowest sequence that was to be seen
	last    uint64 // highest sequence known to exist

	passed map[uint64]uint64 // sequences that were not kept, with a hash of what was stored
	order  []uint64          // of them, the oldest first
}

// NewLog makes an empty log on the run's clock.
func NewLog(c *Clock) *Log { return &Log{clock: c, bySeq: map[uint64]*Entry{}} }

// Reader judges a stream that is too long to be kept.
type Reader struct {
	// Keep says which keys the log keeps all the same.
	Keep func(key string) bool
	// Entry is told each message of the stream once, Event each change event. They
	// are called one after the other and must not call the log.
	Entry func(*Entry)
	Event func(Event)
}

// NewReadLog makes an empty log that hands over what it takes.
func NewReadLog(c *Clock, r Reader) *Log {
	l := NewLog(c)
	l.read, l.passed = r, map[uint64]uint64{}
	return l
}

// passedKept is for how many sequences that are not kept the log knows that it
// has handed them over: a change event and the consumer are never that far apart.
const passedKept = 100_000

// pass hands e over, once, and says whether it is to be kept too.
func (l *Log) pass(e *Entry) (keep bool) {
	h := fnv.New64a()
	h.Write([]byte(e.Key))
	h.Write(e.Body)
	if old, ok := l.passed[e.Seq]; ok {
		if old != h.Sum64() {
			l.clashes = append(l.clashes, Clash{e.Seen, fmt.Sprintf("sequence %d had another message before %v", e.Seq, e)})
		}
		return false
	}
	l.passed[e.Seq] = h.Sum64()
	if l.order = append(l.order, e.Seq); len(l.order) > passedKept {
		delete(l.passed, l.order[0])
		l.order = l.order[1:]
	}
	l.last = max(l.last, e.Seq)
	l.read.Entry(e)
	return l.read.Keep(e.Key)
}

// add stores one message. A second, different message under a known sequence is
// kept as a clash: the stream told two stories.
func (l *Log) add(e *Entry) {
	e.Seen = l.clock.Now()
	if e.Header.Get(hdrEvent) != "" {
		e.Ours = json.Unmarshal(e.Body, &e.Record) == nil && e.Record.Key == e.Key
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.read.Entry != nil && !l.pass(e) {
		return
	}
	if old := l.bySeq[e.Seq]; old != nil {
		if old.Key != e.Key || string(old.Body) != string(e.Body) {
			l.clashes = append(l.clashes, Clash{e.Seen, fmt.Sprintf("sequence %d is both %v and %v", e.Seq, old, e)})
		}
		return
	}
	l.bySeq[e.Seq] = e
	if l.first == 0 || e.Seq < l.first {
		l.first = e.Seq
	}
	l.last = max(l.last, e.Seq)
}

// Stored takes a message of the stream: seq and time as the server gave them.
func (l *Log) Stored(seq uint64, subject string, t time.Time, h nats.Header, body []byte) {
	l.add(&Entry{Seq: seq, Key: strings.TrimPrefix(subject, bucketPrefix), Time: t, Header: h, Body: body})
}

// republished takes a message from the change subject.
func (l *Log) republished(subscriber int, m *nats.Msg) {
	ev := Event{Key: strings.TrimPrefix(m.Subject, eventPrefix), Subscriber: subscriber, Header: m.Header, Body: m.Data, Seen: l.clock.Now()}
	ev.Seq, _ = strconv.ParseUint(m.Header.Get(hdrSeq), 10, 64)
	ev.Last, _ = strconv.ParseUint(m.Header.Get(hdrLast), 10, 64)
	l.mu.Lock()
	if l.read.Event != nil {
		l.read.Event(ev)
	}
	if l.read.Keep == nil || l.read.Keep(ev.Key) {
		l.events = append(l.events, ev)
	}
	l.mu.Unlock()
	if t, err := time.Parse(time.RFC3339Nano, m.Header.Get(hdrTime)); err == nil && ev.Seq != 0 {
		l.add(&Entry{Seq: ev.Seq, Key: ev.Key, Time: t, Header: m.Header, Body: m.Data})
	}
}

// Snapshot is the log at rest: what the checks read.
type Snapshot struct {
	Entries []*Entry // by sequence
	ByKey   map[string][]*Entry
	Events  []Event
	Clashes []Clash
	bySeq   map[uint64]*Entry
	holes   []hole
}

// hole is a run of sequences nobody saw: overwritten, or removed, before they
// reached the test.
type hole struct{ from, to uint64 }

// Snapshot copies the log.
func (l *Log) Snapshot() *Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := newSnapshot(slices.Collect(maps.Values(l.bySeq)))
	s.Events, s.Clashes = slices.Clone(l.events), slices.Clone(l.clashes)
	return s
}

func newSnapshot(entries []*Entry) *Snapshot {
	s := &Snapshot{Entries: entries, ByKey: map[string][]*Entry{}, bySeq: map[uint64]*Entry{}}
	sort.Slice(s.Entries, func(i, j int) bool { return s.Entries[i].Seq < s.Entries[j].Seq })
	for i, e := range s.Entries {
		s.bySeq[e.Seq] = e
		s.ByKey[e.Key] = append(s.ByKey[e.Key], e)
		if i > 0 && e.Seq != s.Entries[i-1].Seq+1 {
			s.holes = append(s.holes, hole{s.Entries[i-1].Seq + 1, e.Seq - 1})
		}
	}
	return s
}

// Missed is how many sequences between the first and the last nobody saw. A
// jump of a million and more is a bucket made again or lifted, not a loss.
func (s *Snapshot) Missed() (n uint64) {
	for _, h := range s.holes {
		if d := h.to - h.from + 1; d < 1_000_000 {
			n += d
		}
	}
	return n
}

// complete says whether nothing between the sequences from and to went unseen.
func (s *Snapshot) complete(from, to uint64) bool {
	i := sort.Search(len(s.holes), func(i int) bool { return s.holes[i].to >= from })
	return i == len(s.holes) || s.holes[i].from > to
}

// seen says whether seq is within what the log covers at all, holes included.
func (s *Snapshot) covers(seq uint64) bool {
	return len(s.Entries) > 0 && seq >= s.Entries[0].Seq && seq <= s.Entries[len(s.Entries)-1].Seq && s.complete(seq, seq)
}
