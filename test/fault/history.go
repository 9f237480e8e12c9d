package fault

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// Never is the time of return of an operation that nobody saw return.
const Never = math.MaxInt64

// Clock is the one clock of a run: nanoseconds since its start, monotonic.
type Clock struct{ start time.Time }

// NewClock starts a clock at 0.
func NewClock() *Clock { return &Clock{start: time.Now()} }

// Now is the time since the start in nanoseconds.
func (c *Clock) Now() int64 { return int64(time.Since(c.start)) }

// At tells when the wall clock's t was. It is as good as the wall clock is:
// use it only for bounds of a second and more.
func (c *Clock) At(t time.Time) int64 { return int64(t.Round(0).Sub(c.start.Round(0))) }

// Call is one of the service's calls, or what the harness itself did to a key.
type Call string

const (
	Acquire Call = "acquire"
	Renew   Call = "renew"
	Release Call = "release"
	Owner   Call = "owner"
	Forward Call = "forward"
	Evict   Call = "evict"

	// Wipe is done by a fault, not by a client: the bucket lost its content
	// (deleted, purged, restored), so a lease may have ended before its time.
	Wipe Call = "wipe"
)

// Outcome is what a caller may conclude from the answer it got, or did not get.
type Outcome int

const (
	// OK: the operation took effect, or a read was answered.
	OK Outcome = iota + 1
	// Refused: it did not take effect, and the reply tells why: the state.
	Refused
	// Busy: it did not take effect, and the reply says nothing of the state.
	Busy
	// Unknown: it may have taken effect, or may yet.
	Unknown
)

func (o Outcome) String() string {
	return [...]string{"", "ok", "refused", "busy", "unknown"}[o]
}

// Op is one operation of one client and what came of it.
type Op struct {
	ID     int    `json:"id"`
	Client int    `json:"client"`
	Call   Call   `json:"call"`
	Key    string `json:"key"`
	Holder string `json:"holder,omitempty"`

	// TTL is asked for by acquire and renew, Revision named by renew, release
	// and evict, Timeout by forward. Wait is how long an acquire may wait.
	TTL      time.Duration `json:"ttl,omitempty"`
	Revision uint64        `json:"revision,omitempty"`
	Timeout  time.Duration `json:"timeout,omitempty"`
	Wait     time.Duration `json:"wait,omitempty"`

	// Bogus marks a renew or release that names a pair which was never right.
	Bogus bool `json:"bogus,omitempty"`

	Start   int64      `json:"start"`          // just before the request was sent
	End     int64      `json:"end"`            // when the answer came, or the caller gave up
	Outcome Outcome    `json:"outcome"`        //
	Kind    kinds.Kind `json:"kind,omitempty"` // of the reply, "" when none came
	Text    string     `json:"text,omitempty"` // the error's sentence
	Got     Lease      `json:"got,omitzero"`   // what the reply says of the lease

	// Forward only: the request's id, the number of attempts the reply tells,
	// and the attempt whose answer came back ("" when none did).
	ForwardID string `json:"forward_id,omitempty"`
	Attempts  int    `json:"attempts,omitempty"`
	AnswerOf  string `json:"answer_of,omitempty"`
}

// Lease is what a reply says about a key. Rev 0 says nothing.
type Lease struct {
	Held     bool          `json:"held,omitempty"`
	Holder   string        `json:"holder,omitempty"`
	Rev      uint64        `json:"rev,omitempty"`
	TTL      time.Duration `json:"ttl,omitempty"`
	Left     time.Duration `json:"left,omitempty"`
	Acquired time.Time     `json:"acquired,omitzero"`
}

func (o *Op) String() string {
	ms := func(t int64) string { return fmt.Sprintf("%.1f", float64(t)/1e6) }
	s := fmt.Sprintf("#%d c%d %s..%s %s %s", o.ID, o.Client, ms(o.Start), ms(o.End), o.Call, o.Key)
	if o.Holder != "" {
		s += " " + o.Holder
	}
	if o.Revision != 0 {
		s += fmt.Sprintf(" @%d", o.Revision)
	}
	if o.TTL != 0 {
		s += " " + o.TTL.String()
	}
	s += " -> " + o.Outcome.String()
	if o.Kind != "" {
		s += " " + string(o.Kind)
	}
	if o.Got.Rev != 0 {
		s += fmt.Sprintf(" %s@%d", o.Got.Holder, o.Got.Rev)
	}
	return s
}

// slow says that op took long enough to have written, waited in vain for the
// verdict, and found that what it wrote is superseded: a refusal may then hide a
// write of its own. An acquire that waits may have done so at any time.
func (o *Op) slow() bool { return o.End-o.Start > int64(foundOut) }

// OutcomeOf tells what a reply of kind k says about call c. The empty kind is
// no reply at all.
func OutcomeOf(c Call, k kinds.Kind) Outcome {
	switch k {
	case kinds.Granted, kinds.Renewed, kinds.Released, kinds.Held, kinds.Free, kinds.Forwarded, kinds.Evicted, kinds.ReplyTooLarge:
		return OK
	case kinds.Denied, kinds.Lost, kinds.NotHeld, kinds.OwnerUnavailable, kinds.OwnerRejected:
		return Refused
	case kinds.Unknown, kinds.OwnerTimeout, "":
		return Unknown
	case kinds.Internal:
		if c == Forward {
			return Unknown
		}
		return Busy
	default:
		return Busy
	}
}

// writes says whether the call can change a key.
func (c Call) writes() bool { return c != Owner && c != Forward }

// Window is one injected fault: from the first moment it can matter until the
// moment everything it touched was seen to work again.
type Window struct {
	Fault string `json:"fault"`
	Start int64  `json:"start"`
	End   int64  `json:"end"`

	// Stale: the fault can leave a deposed leader that answers reads, so a read
	// that overlaps it (or the 20 s after it) may tell an older truth.
	Stale bool `json:"stale,omitempty"`
	// Clock: a server's clock was moved; time-outs of leases are void.
	Clock bool `json:"clock,omitempty"`
	// Wiped: the bucket lost content.
	Wiped bool `json:"wiped,omitempty"`
	// Restored: it went back to what it was before.
	Restored bool `json:"restored,omitempty"`
}

// staleAfter is how long a deposed leader can go on answering reads after the
// partition healed; nats-server notices within one 10 s tick of 10 s silence.
const staleAfter = 20 * time.Second

// Recorder collects the operations of a run. It is safe for concurrent use.
type Recorder struct {
	Clock *Clock

	mu      sync.Mutex
	ops     []Op
	windows []Window
	nextID  int
}

// NewRecorder makes an empty record on its own clock.
func NewRecorder() *Recorder { return &Recorder{Clock: NewClock()} }

// Add stores a finished operation and numbers it.
func (r *Recorder) Add(op Op) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nextID++
	op.ID = r.nextID
	r.ops = append(r.ops, op)
}

// Fault opens a window and returns the function that closes it. Whoever is
// still open at the end of a run is closed by Windows.
func (r *Recorder) Fault(w Window) (end func()) {
	w.Start, w.End = r.Clock.Now(), Never
	r.mu.Lock()
	defer r.mu.Unlock()
	i := len(r.windows)
	r.windows = append(r.windows, w)
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.windows[i].End == Never {
			r.windows[i].End = r.Clock.Now()
		}
	}
}

// Ops is a copy of what was recorded so far.
func (r *Recorder) Ops() []Op {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Op(nil), r.ops...)
}

// Windows is a copy of the faults so far, open ones ending now.
func (r *Recorder) Windows() []Window {
	r.mu.Lock()
	defer r.mu.Unlock()
	ws := append([]Window(nil), r.windows...)
	for i := range ws {
		if ws[i].End == Never {
			ws[i].End = r.Clock.Now()
		}
	}
	return ws
}

// WriteOps writes operations, one JSON object a line.
func WriteOps(w io.Writer, ops []Op) error {
	b := bufio.NewWriter(w)
	enc := json.NewEncoder(b)
	for i := range ops {
		if err := enc.Encode(&ops[i]); err != nil {
			return err
		}
	}
	return b.Flush()
}

// ReadOps reads what WriteOps wrote.
func ReadOps(r io.Reader) ([]Op, error) {
	var ops []Op
	dec := json.NewDecoder(r)
	for {
		var op Op
		switch err := dec.Decode(&op); err {
		case nil:
			ops = append(ops, op)
		case io.EOF:
			return ops, nil
		default:
			return ops, fmt.Errorf("operation %d: %w", len(ops)+1, err)
		}
	}
}
