package service

import (
	"context"
	crand "crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// A lookout looks for others on the subjects that are the service's or a holder's alone:
// those of the calls and of the inboxes. A stream over them answers each request with an
// ack, before the service or in place of an owner that is gone; any other subscription
// keeps NATS from saying that nobody is there.
//
// A stream names its subjects. A subscription shows by what does not come: to a request on a
// subject that nobody can have a reason to listen on NATS answers "no responders" at once.
// Whoever subscribes to one call or to one holder's inbox only is not found (P19, F6).
type lookout struct {
	nc    *nats.Conn // sends what is sent to owners
	js    *js
	parts []part
	log   *slog.Logger
	found atomic.Pointer[[]Listener]
}

// part is some of the service's subjects.
type part struct {
	name     string        // Calls or Inboxes
	subjects string        // all of them
	probe    func() string // one that nobody uses
}

// What others can be found on.
const (
	Calls   = "calls"
	Inboxes = "inboxes"
)

// Listener is what a look found on one part of the subjects.
type Listener struct {
	On      string // Calls or Inboxes
	Others  bool   // somebody is there
	Detail  string // who it is, or what could not be looked for
	Checked bool   // as far as NATS permits
}

const (
	// lookoutEvery is the time between two looks.
	lookoutEvery = time.Minute
	// lookoutAgain is the time to a look after one that had no answer.
	lookoutAgain = 10 * time.Second
	// lookoutWait is how long NATS has to answer.
	lookoutWait = 2 * time.Second
	// lookoutName is a call that there is not, and begins the made-up name of a holder; no
	// key or holder can be called so. The call has a fixed name, so that NATS can be told to
	// permit it.
	lookoutName = "~lookout"
)

// Lookout tells whether subject is one that only a lookout publishes to, which may have to do
// without: a NATS that does not permit it keeps nothing from working.
func Lookout(subject string) bool {
	return strings.Contains(subject, "."+lookoutName) || strings.HasSuffix(subject, ".STREAM.NAMES")
}

func newLookout(nc *nats.Conn, j *js, apiPrefix, inboxPrefix string, log *slog.Logger) *lookout {
	l := &lookout{nc: nc, js: j, log: log, parts: []part{
		{Calls, apiPrefix + ".>", func() string { return apiPrefix + "." + lookoutName }},
		{Inboxes, inboxPrefix + ".>", func() string { return inboxPrefix + "." + lookoutName + "-" + crand.Text() + ".key" }},
	}}
	l.found.Store(&[]Listener{})
	return l
}

// Listeners is what the last look found, nothing before the first one.
func (i *Instance) Listeners() []Listener { return *i.lookout.found.Load() }

// run looks until ctx is done.
func (l *lookout) run(ctx context.Context) {
	for {
		wait := time.Second
		if l.nc.IsConnected() {
			wait = l.look(ctx)
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

// look looks everywhere and says when to look again.
func (l *lookout) look(ctx context.Context) (again time.Duration) {
	again = lookoutEvery
	last := *l.found.Load()
	var found []Listener
	for i, p := range l.parts {
		now := l.at(ctx, p)
		if ctx.Err() != nil {
			return again
		}
		found = append(found, now)
		if !now.Checked {
			again = lookoutAgain
		}
		known := i < len(last) && last[i].Others
		switch {
		case now.Others && !(known && last[i].Detail == now.Detail):
			l.log.Warn("somebody else is on subjects that are not theirs", "on", p.name, "who", now.Detail)
		case known && !now.Others && now.Checked:
			l.log.Info("nobody else is on these subjects any more", "on", p.name)
		}
	}
	l.found.Store(&found)
	return again
}

// at looks for others in one part.
func (l *lookout) at(ctx context.Context, p part) Listener {
	found := Listener{On: p.name, Checked: true}
	var details []string
	add := func(format string, args ...any) { details = append(details, fmt.Sprintf(format, args...)) }

	heard, err := l.heard(ctx, p)
	if err != nil {
		found.Checked = errors.Is(err, errNotPermitted)
		add("subscriptions were not looked for: %v", err)
	}
	streams, err := l.streams(ctx, p.subjects)
	switch {
	case err != nil:
		found.Checked = found.Checked && errors.Is(err, errNotPermitted)
		add("streams were not looked for: %v", err)
	case len(streams) > 0:
		add("the stream %s stores what is sent to %s and answers it", strings.Join(streams, ", the stream "), p.subjects)
	}
	if found.Others = heard || len(streams) > 0; heard && len(streams) == 0 {
		add("somebody subscribes to %s or to more", p.subjects)
	}
	found.Detail = strings.Join(details, "; ")
	return found
}

// streams names the streams whose subjects have some in common with subjects.
func (l *lookout) streams(ctx context.Context, subjects string) ([]string, error) {
	body, err := json.Marshal(map[string]string{"subject": subjects})
	if err != nil {
		return nil, err
	}
	msg, err := ask(ctx, l.js.nc, l.js.api+"STREAM.NAMES", body, lookoutWait)
	if err != nil {
		return nil, err
	}
	var reply struct {
		Streams []string `json:"streams"`
	}
	if err := readReply("STREAM.NAMES", msg.Data, &reply); err != nil {
		return nil, err
	}
	return reply.Streams, nil
}

// heard tells whether anybody hears what is sent to p. Once could be an accident of a
// subscription that comes or goes: twice says so.
func (l *lookout) heard(ctx context.Context, p part) (bool, error) {
	for range 2 {
		heard, err := l.probe(ctx, p.probe())
		if !heard || err != nil {
			return false, err
		}
	}
	return true, nil
}

// probe tells whether anybody hears what is sent to subject.
func (l *lookout) probe(ctx context.Context, subject string) (heard bool, err error) {
	_, err = ask(ctx, l.nc, subject, nil, time.Millisecond)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return false, nil
	case err == nil, errors.Is(err, nats.ErrTimeout):
		return true, nil
	}
	return false, err
}

// errNotPermitted says that NATS does not let this service look.
var errNotPermitted = errors.New("NATS does not permit it")

// ask sends a request and returns its answer. What NATS itself has to say to the request comes
// at once, and before the wait for others begins: nats.ErrNoResponders, errNotPermitted.
func ask(ctx context.Context, nc *nats.Conn, subject string, body []byte, wait time.Duration) (*nats.Msg, error) {
	inbox := newInbox(nc, "")
	sub, err := nc.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer sub.Unsubscribe()
	before := nc.LastError()
	if err := nc.PublishRequest(subject, inbox, body); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lookoutWait)
	defer cancel()
	if err := nc.FlushWithContext(ctx); err != nil {
		return nil, err
	}
	if err := nc.LastError(); err != before && errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), `"`+subject+`"`) {
		return nil, errNotPermitted
	}
	return sub.NextMsg(wait)
}
