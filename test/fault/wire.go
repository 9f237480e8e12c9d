package fault

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
)

// request is one body for all calls, as the contract allows.
type request struct {
	Key      string        `json:"key"`
	Holder   string        `json:"holder,omitempty"`
	TTL      int64         `json:"ttl_ms,omitempty"`
	Revision uint64        `json:"revision,omitempty"`
	Timeout  int64         `json:"timeout_ms,omitempty"`
	Wait     int64         `json:"wait_ms,omitempty"`
	Payload  string        `json:"payload,omitempty"`
	Leases   []keyRevision `json:"leases,omitempty"`
}

type keyRevision struct {
	Key      string `json:"key"`
	Revision uint64 `json:"revision"`
}

// reply is one body for all replies.
type reply struct {
	Granted  *bool     `json:"granted"`
	Held     bool      `json:"held"`
	Released bool      `json:"released"`
	Key      string    `json:"key"`
	Holder   string    `json:"holder"`
	Revision uint64    `json:"revision"`
	Acquired time.Time `json:"acquired_at"`
	TTL      int64     `json:"ttl_ms"`
	Left     int64     `json:"left_ms"`
	Payload  *string   `json:"payload"`
	Attempts int       `json:"attempts"`
	Error    string    `json:"error"`
	Kind     string    `json:"kind"`
}

// kind tells what kind of reply r is to call c.
func (r *reply) kind(c Call) kinds.Kind {
	switch {
	case r.Kind != "":
		return kinds.Kind(r.Kind)
	case c == Acquire && r.Granted != nil && *r.Granted:
		return kinds.Granted
	case c == Acquire && r.Granted != nil:
		return kinds.Denied
	case c == Renew && r.Granted != nil && *r.Granted:
		return kinds.Renewed
	case c == Release && r.Released:
		return kinds.Released
	case c == Evict && r.Released:
		return kinds.Evicted
	case c == Owner && r.Held:
		return kinds.Held
	case c == Owner:
		return kinds.Free
	case c == Forward && r.Payload != nil:
		return kinds.Forwarded
	}
	return "malformed"
}

// ask is what a forward carries to the holder: who asks, and how to behave.
type ask struct {
	ID   string `json:"id"`
	Mode string `json:"mode"`
}

// The behaviours of a holder that a forward can ask for.
const (
	modeAnswer = "answer"
	modeTwice  = "twice" // answer, and answer again
	modeHang   = "hang"  // process, and say nothing
)

// Client is one connection that calls the service and records what it did.
type Client struct {
	ID      int
	Conn    *nats.Conn
	Record  *Recorder
	Timeout time.Duration // for one call, on top of a forward's own
}

// clientTimeout is longer than the service needs for any answer (4 s).
const clientTimeout = 5 * time.Second

// Do makes the call that op describes, records it and returns it with its
// times, outcome and answer. A forward's payload is given by mode.
func (c *Client) Do(op Op) Op { return c.do(op, modeAnswer) }

func (c *Client) do(op Op, mode string) Op {
	req := request{Key: op.Key, Holder: op.Holder, TTL: op.TTL.Milliseconds(), Revision: op.Revision, Timeout: op.Timeout.Milliseconds(), Wait: op.Wait.Milliseconds()}
	if op.Call == Owner {
		req.Holder = "" // the asker's name is for the record only
	}
	msg := nats.NewMsg("api.leases." + string(op.Call))
	if op.Call == Forward {
		b, _ := json.Marshal(ask{op.ForwardID, mode})
		req.Payload = base64.StdEncoding.EncodeToString(b)
		msg.Header.Set("X-Of-The-Caller", "must not pass")
		msg.Header.Set("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	}
	if op.Call == Renew && op.Revision%3 == 0 { // one of many, which must make no difference
		msg.Subject = "api.leases.renew_many"
		req.Leases = []keyRevision{{op.Key, op.Revision}}
		req.Key, req.Revision = "unused", 1
	}
	msg.Data, _ = json.Marshal(req)
	wait := c.Timeout
	if wait == 0 {
		wait = clientTimeout
	}
	op.Client = c.ID
	op.Start = c.Record.Clock.Now()
	got, err := c.Conn.RequestMsg(msg, wait+op.Timeout+op.Wait)
	op.End = c.Record.Clock.Now()
	op.read(got, err)
	c.Record.Add(op)
	return op
}

// read fills in what came back.
func (op *Op) read(msg *nats.Msg, err error) {
	if err != nil {
		op.Text, op.Outcome = err.Error(), Unknown
		// Nobody there, or nothing was sent: both prove that it was not applied.
		if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, nats.ErrReconnectBufExceeded) {
			op.Outcome = Busy
		}
		return
	}
	var r struct {
		reply
		Leases []reply `json:"leases"` // of renew_many
	}
	if err := json.Unmarshal(msg.Data, &r); err != nil {
		op.Kind, op.Text = "malformed", fmt.Sprintf("%v: %q", err, msg.Data)
		op.Outcome = Unknown
		return
	}
	if len(r.Leases) == 1 {
		r.reply = r.Leases[0]
	}
	op.Kind, op.Text = r.kind(op.Call), r.Error
	op.Outcome = OutcomeOf(op.Call, op.Kind)
	if op.Kind == kinds.Released || op.Kind == kinds.Evicted {
		return
	}
	op.Got = Lease{Held: r.Held, Holder: r.Holder, Rev: r.Revision, TTL: time.Duration(r.TTL) * time.Millisecond, Left: time.Duration(r.Left) * time.Millisecond, Acquired: r.Acquired}
	if op.Call == Forward {
		op.Got.Held = r.Revision != 0
		op.Attempts = r.Attempts
		if r.Payload != nil {
			if b, err := base64.StdEncoding.DecodeString(*r.Payload); err == nil {
				op.AnswerOf = string(b)
			}
		}
	}
}
