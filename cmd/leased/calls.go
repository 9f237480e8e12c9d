package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	jsonv2 "github.com/go-json-experiment/json"
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/nats-io/nats.go"
	"golang.org/x/term"

	"github.com/leased/leased/client"
	"github.com/leased/leased/schemas"
	"github.com/leased/leased/service"
	"github.com/leased/leased/service/kinds"
)

// serviceFlags say how to reach the lease service.
type serviceFlags struct {
	connFlags
	APIPrefix   string `name:"api-prefix" group:"service" default:"${apiPrefix}" placeholder:"SUBJECT" help:"Subject of the calls (default ${apiPrefix})."`
	EventPrefix string `name:"event-prefix" group:"service" default:"${eventPrefix}" placeholder:"SUBJECT" help:"Subject of events and inboxes (default ${eventPrefix})."`
}

// callFlags are the flags of every command that asks the service something.
type callFlags struct {
	serviceFlags
	JSON bool `name:"json" group:"service" help:"Print the service's reply as it came on the wire."`
}

// caller is a connection to ask with.
type caller struct {
	*client.Client
	nc    *nats.Conn
	flags callFlags
	at    endpoint
	kong  *kong.Context
	term  bool            // stdout is a terminal
	ctx   context.Context // ends, with an *exitError, by INT, TERM, or when NATS refuses a subject
}

// with connects and runs do.
func (f callFlags) with(command *kong.Context, do func(*caller) error) error {
	e, err := f.resolve(given(command), true)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	nc, err := e.connect(ctx, "leased-cli", nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		if errors.Is(err, nats.ErrPermissionViolation) {
			cancel(&exitError{exitNotPermitted, err}) // a request would only time out
		}
	}))
	if err != nil {
		return err
	}
	defer nc.Close()
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(signals)
	go func() {
		select {
		case s := <-signals:
			cancel(&exitError{exitSignal + int(s.(syscall.Signal)), fmt.Errorf("%v", s)})
		case <-ctx.Done():
		}
	}()
	return do(&caller{
		// ask has a limit for each call.
		Client: client.New(nc, client.Options{Prefix: f.APIPrefix, EventPrefix: f.EventPrefix, Timeout: time.Hour}),
		nc:     nc, flags: f, at: e, kong: command, term: isTerminal(command.Stdout), ctx: ctx,
	})
}

// stopped is why the command is to end now, nil if it is not.
func (c *caller) stopped() *exitError {
	known, _ := errors.AsType[*exitError](context.Cause(c.ctx))
	return known
}

// ask makes one call and returns the reply. extra is how long the service may
// take on top of --timeout.
func (c *caller) ask(call string, body question, extra time.Duration) (reply, error) {
	return c.askUntil(c.ctx, call, body, extra)
}

// askUntil is ask that ends with ctx.
func (c *caller) askUntil(ctx context.Context, call string, body question, extra time.Duration) (reply, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return reply{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.flags.Timeout+extra)
	defer cancel()
	raw, _, err := c.Call(ctx, call, b)
	if err != nil {
		stopped := c.stopped()
		switch {
		case stopped != nil:
			return reply{}, stopped
		case errors.Is(err, nats.ErrNoResponders):
			return reply{}, &exitError{exitNoService, fmt.Errorf("no lease service listens on %s.%s", c.flags.APIPrefix, call)}
		case errors.Is(err, nats.ErrMaxPayload):
			return reply{}, usagef("%s: larger than NATS takes, %d bytes", call, c.nc.MaxPayload())
		}
		return reply{}, &exitError{exitNoService, fmt.Errorf("%s: %w", call, err)}
	}
	r, ok := readReply(call, body, raw)
	if !ok {
		perhaps := ", and the call may have been applied"
		if call == "owner" || call == "list" {
			perhaps = ""
		}
		return reply{}, &exitError{exitService, fmt.Errorf("%s: the reply is not one of the lease contract%s: %.200s", call, perhaps, raw)}
	}
	return r, nil
}

// question is the body of a request.
type question map[string]any

// readReply reads a reply to body. It is none if it breaks the schema of the call's
// replies or is about something else: whoever has a subscription on the subject, a
// stream too, answers as the service does, and the first reply counts.
func readReply(call string, body question, raw []byte) (r reply, ok bool) {
	set, err := schemas.Load()
	if err != nil {
		panic(err) // the schemas are part of this program
	}
	if jsonv2.Unmarshal(raw, &r) != nil {
		return reply{}, false
	}
	r.raw = raw
	if r.Kind != "" && r.Error != "" {
		return r, true // a kind of a newer service is a failure too
	}
	return r, set.Reply(call).Admits(raw) == nil && r.answers(call, body)
}

// answers tells whether r, which keeps the schema, is about what was asked.
func (r reply) answers(call string, body question) bool {
	text := func(name string) string { s, _ := body[name].(string); return s }
	revision, _ := body["revision"].(uint64)
	ours := r.Key == text("key")
	switch call {
	case "acquire":
		return ours && *r.Granted == (r.Holder == text("holder"))
	case "renew":
		return ours && r.Holder == text("holder") && r.Revision > revision
	case "release":
		return ours && r.Holder == text("holder") && r.Revision == revision
	case "evict":
		return ours && r.Revision == revision
	case "owner":
		return ours
	case "list":
		last := text("after")
		for _, l := range r.Leases {
			if l.Key <= last || !strings.HasPrefix(l.Key, text("prefix")) || text("holder") != "" && l.Holder != text("holder") {
				return false
			}
			last = l.Key
		}
		return r.Next == "" || r.Next >= last && r.Next > text("after")
	}
	return true // forward: no member says which key it is about
}

// reply is any reply of the service.
type reply struct {
	raw []byte

	Granted  *bool  `json:"granted"`
	Released bool   `json:"released"`
	Held     bool   `json:"held"`
	Error    string `json:"error"`
	Kind     string `json:"kind"`
	lease
	Payload  []byte  `json:"payload"`
	Attempts int     `json:"attempts"`
	Leases   []lease `json:"leases"`
	Next     string  `json:"next"`
}

type lease struct {
	Key        string `json:"key"`
	Holder     string `json:"holder"`
	Revision   uint64 `json:"revision"`
	AcquiredAt string `json:"acquired_at"`
	ExpiresAt  string `json:"expires_at"`
	TTL        int64  `json:"ttl_ms"`
	Left       int64  `json:"left_ms"`
	Meta       string `json:"meta"`
}

// noKinds are the errors that mean "no" and not "it failed".
var noKinds = map[kinds.Kind]bool{kinds.Lost: true, kinds.NotHeld: true, kinds.OwnerUnavailable: true, kinds.OwnerRejected: true}

// print shows the reply: as it came with --json, else text; errors go to stderr
// and decide the exit code.
func (c *caller) print(r reply, text func(io.Writer)) error {
	out := c.kong.Stdout
	if c.flags.JSON {
		c.printJSON(r.raw)
	}
	if r.Kind != "" {
		code := exitService
		switch k := kinds.Kind(r.Kind); {
		case noKinds[k]:
			code = exitFailed
		case k == kinds.Invalid:
			code = exitUsage
		}
		return &exitError{code, fmt.Errorf("%s: %s", r.Kind, r.Error)}
	}
	if !c.flags.JSON {
		text(out)
	}
	return nil
}

// printJSON prints a line of JSON; a terminal gets it with the same meaning.
func (c *caller) printJSON(text []byte) {
	if c.term {
		text = []byte(visibleJSON(text))
	}
	fmt.Fprintf(c.kong.Stdout, "%s\n", text)
}

func (l lease) print(w io.Writer, what string) {
	fmt.Fprintf(w, "%s %s by %s, revision %d, %s left\n", visible(l.Key), what, visible(l.Holder), l.Revision, time.Duration(l.Left)*time.Millisecond)
}

// errNo ends a command whose answer is no and has been printed.
func errNo(code int, format string, args ...any) error {
	return &exitError{code, fmt.Errorf(format, args...)}
}

type acquireCmd struct {
	callFlags
	Key    string        `arg:"" help:"What to lease."`
	Holder string        `placeholder:"ID" help:"Who holds it; unique per process. Without it a new one, which is printed."`
	TTL    time.Duration `name:"ttl" default:"15s" placeholder:"DURATION" help:"How long without a renewal: whole seconds, 1s to 10m (default 15s)."`
	Wait   time.Duration `short:"w" placeholder:"DURATION" help:"How long to wait while another holds it (default not at all)."`
	Meta   string        `placeholder:"TEXT" help:"Shown with the lease, at most 512 bytes."`
}

func (a *acquireCmd) Run(command *kong.Context) error {
	if a.Wait < 0 {
		return usagef("--wait %v: must not be negative", a.Wait)
	}
	if a.Holder == "" {
		a.Holder = client.NewHolder("cli")
	}
	return a.with(command, func(c *caller) error {
		until := time.Now().Add(a.Wait)
		for {
			r, err := a.once(c, until)
			if err != nil {
				return err
			}
			denied := r.Kind == "" && !*r.Granted
			if denied && time.Until(until) > time.Millisecond {
				continue
			}
			if err := c.print(r, func(w io.Writer) {
				what := "leased"
				if denied {
					what = "is held"
				}
				r.lease.print(w, what)
			}); err != nil {
				return err
			}
			switch {
			case denied && a.Wait > 0:
				return errNo(exitWaited, "%s is still held by %s after %v", a.Key, r.Holder, a.Wait)
			case denied:
				return errNo(exitFailed, "%s is held by %s", a.Key, r.Holder)
			}
			return nil
		}
	})
}

// once asks once. It waits in slices, and for the answer also when it was told to
// stop, so that a lease that was granted nevertheless can be given back.
func (a *acquireCmd) once(c *caller, until time.Time) (reply, error) {
	slice := min(time.Second, max(0, time.Until(until))).Truncate(time.Millisecond)
	body := question{"key": a.Key, "holder": a.Holder, "ttl_ms": a.TTL.Milliseconds()}
	if slice > 0 {
		body["wait_ms"] = slice.Milliseconds()
	}
	if a.Meta != "" {
		body["meta"] = a.Meta
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer context.AfterFunc(c.ctx, func() {
		if last := slice + lastWord; c.stopped().code == exitNotPermitted {
			cancel()
		} else {
			time.AfterFunc(last, cancel)
		}
	})()
	r, err := c.askUntil(ctx, "acquire", body, slice)
	stopped := c.stopped()
	if err != nil || stopped == nil || slice == 0 {
		return r, err
	}
	if r.Granted != nil && *r.Granted {
		ctx, cancel := context.WithTimeout(context.Background(), lastWord)
		defer cancel()
		_, _ = c.askUntil(ctx, "release", question{"key": a.Key, "holder": a.Holder, "revision": r.Revision}, 0)
	}
	return reply{}, stopped
}

// lastWord is how long answers are awaited after we were told to stop.
const lastWord = 250 * time.Millisecond

// pairFlags name a lease as its holder knows it.
type pairFlags struct {
	Key      string `arg:"" help:"What is leased."`
	Holder   string `required:"" placeholder:"ID" help:"Who holds it."`
	Revision uint64 `required:"" placeholder:"N" help:"The revision of the last reply."`
}

type renewCmd struct {
	callFlags
	pairFlags
	TTL time.Duration `name:"ttl" default:"15s" placeholder:"DURATION" help:"How long from now: whole seconds, 1s to 10m (default 15s)."`
}

func (a *renewCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		r, err := c.ask("renew", question{"key": a.Key, "holder": a.Holder, "revision": a.Revision, "ttl_ms": a.TTL.Milliseconds()}, 0)
		if err != nil {
			return err
		}
		return c.print(r, func(w io.Writer) { r.lease.print(w, "renewed") })
	})
}

type releaseCmd struct {
	callFlags
	pairFlags
}

func (a *releaseCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		r, err := c.ask("release", question{"key": a.Key, "holder": a.Holder, "revision": a.Revision}, 0)
		if err != nil {
			return err
		}
		return c.print(r, func(w io.Writer) { fmt.Fprintf(w, "%s released\n", visible(r.Key)) })
	})
}

type ownerCmd struct {
	callFlags
	Key string `arg:"" help:"What is leased."`
}

func (a *ownerCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		r, err := c.ask("owner", question{"key": a.Key}, 0)
		if err != nil {
			return err
		}
		if err := c.print(r, func(w io.Writer) {
			if r.Held {
				r.lease.print(w, "is held")
			}
		}); err != nil {
			return err
		}
		if !r.Held {
			return errNo(exitFailed, "nobody holds %s", a.Key)
		}
		return nil
	})
}

type forwardCmd struct {
	callFlags
	Key     string        `arg:"" help:"Whose owner is asked."`
	Payload *string       `arg:"" optional:"" help:"What to send, which may be ''; - or nothing: standard input, but nothing on a terminal is no payload."`
	Within  time.Duration `default:"5s" placeholder:"DURATION" help:"How long the whole call may take, and before it the reading of standard input, 100ms to 30s (default 5s)."`
}

func (a *forwardCmd) Run(command *kong.Context) error {
	payload := []byte{}
	switch {
	case a.Payload == nil && term.IsTerminal(int(os.Stdin.Fd())):
	case a.Payload == nil || *a.Payload == "-":
		var err error
		if payload, err = readWithin(os.Stdin, a.Within); err != nil {
			return err
		}
	default:
		payload = []byte(*a.Payload)
	}
	return a.with(command, func(c *caller) error {
		r, err := c.ask("forward", question{"key": a.Key, "payload": payload, "timeout_ms": a.Within.Milliseconds()}, a.Within)
		if err != nil {
			return err
		}
		return c.print(r, func(w io.Writer) {
			if c.term {
				r.Payload = []byte(visiblePage(string(r.Payload)))
			}
			_, _ = w.Write(r.Payload)
		})
	})
}

// mostPayload is the largest message that any NATS takes.
const mostPayload = 64 << 20

// readWithin reads all of standard input, whose writer may never come to an end.
func readWithin(in io.Reader, limit time.Duration) ([]byte, error) {
	type result struct {
		text []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		text, err := io.ReadAll(io.LimitReader(in, mostPayload+1))
		done <- result{text, err}
	}()
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case r := <-done:
		if len(r.text) > mostPayload {
			return nil, usagef("PAYLOAD: larger than any NATS takes, %d bytes", mostPayload)
		}
		return r.text, r.err
	case <-t.C:
		return nil, &exitError{exitWaited, fmt.Errorf("PAYLOAD: standard input did not end within %v (--within)", limit)}
	}
}

type evictCmd struct {
	callFlags
	Key      string `arg:"" help:"What is leased."`
	Revision uint64 `placeholder:"N" help:"Only if this is its revision. Without it: whatever it is now."`
}

// evictTries is how often a lease that was renewed between the look and the evict
// is looked up again.
const evictTries = 5

// Help is shown by --help.
func (evictCmd) Help() string {
	return `The key is free at once, and its holder acts on until it learns of that: at its next
renewal, unless it follows the events of its key. A record that a stranger wrote is
evicted too. Its revision is read from the bucket, for which NATS has to permit
$JS.API.STREAM.MSG.GET.KV_leases; else give the --revision that the error names.`
}

func (a *evictCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		var r reply
		for again := range evictTries {
			revision := a.Revision
			if revision == 0 {
				o, err := c.ask("owner", question{"key": a.Key}, 0)
				switch revision = o.Revision; {
				case err != nil:
					return err
				case o.Kind == string(kinds.Internal): // a record of a stranger, perhaps
					if revision, err = c.stored(a.Key); err != nil {
						return c.print(o, nil)
					}
				case o.Kind != "":
					return c.print(o, nil)
				case !o.Held:
					return errNo(exitFailed, "nobody holds %s", a.Key)
				}
			}
			var err error
			if r, err = c.ask("evict", question{"key": a.Key, "revision": revision}, 0); err != nil {
				return err
			}
			if a.Revision != 0 || r.Kind != string(kinds.Lost) || again == evictTries-1 {
				break
			}
		}
		return c.print(r, func(w io.Writer) {
			by := "not a lease"
			if r.Holder != "" {
				by = "held by " + visible(r.Holder)
			}
			fmt.Fprintf(w, "%s evicted, it was %s\n", visible(r.Key), by)
		})
	})
}

// stored reads the revision of what is stored for key, if NATS lets us.
func (c *caller) stored(key string) (uint64, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.flags.Timeout)
	defer cancel()
	return service.Stored(ctx, c.nc, c.at.jsDomain, c.at.jsAPIPrefix, key)
}

type lsCmd struct {
	callFlags
	Prefix string `arg:"" optional:"" help:"Only keys that begin with this."`
	Holder string `placeholder:"ID" help:"Only this holder's."`
}

// Help is shown by --help.
func (lsCmd) Help() string {
	return `On a terminal it is a table. Elsewhere each lease is a line of four columns between
tabs: key, holder, revision, milliseconds left. With --json each page of 1000 is one
line. What is no lease, a record that a stranger wrote, is not in the list.`
}

func (a *lsCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		var all []lease
		body := question{"limit": 1000}
		if a.Prefix != "" {
			body["prefix"] = a.Prefix
		}
		if a.Holder != "" {
			body["holder"] = a.Holder
		}
		for {
			r, err := c.ask("list", body, 0)
			if err != nil {
				return err
			}
			if err := c.print(r, func(io.Writer) {}); err != nil {
				return err
			}
			all = append(all, r.Leases...)
			if r.Next == "" {
				break
			}
			body["after"] = r.Next
		}
		if a.JSON {
			return nil
		}
		out := command.Stdout
		if !c.term {
			for _, l := range all {
				fmt.Fprintf(out, "%s\t%s\t%d\t%d\n", visible(l.Key), visible(l.Holder), l.Revision, l.Left)
			}
			return nil
		}
		t := table.NewWriter()
		t.SetOutputMirror(out)
		t.SetStyle(table.StyleRounded)
		t.AppendHeader(table.Row{"Key", "Holder", "Revision", "Held for", "Left", "Meta"})
		for _, l := range all {
			since := ""
			if at, err := time.Parse(time.RFC3339, l.AcquiredAt); err == nil {
				since = time.Since(at).Round(time.Second).String()
			}
			t.AppendRow(table.Row{visible(l.Key), visible(l.Holder), l.Revision, since, time.Duration(l.Left) * time.Millisecond, visible(l.Meta)})
		}
		t.Render()
		return nil
	})
}

type watchCmd struct {
	callFlags
	Key   string `arg:"" optional:"" help:"Only this key."`
	Count int    `placeholder:"N" help:"End after so many changes."`
}

// change is one line of watch.
type change struct {
	Key      string          `json:"key"`
	Event    string          `json:"event"` // empty: not written by the service
	Revision uint64          `json:"revision"`
	Record   json.RawMessage `json:"record,omitempty"`
}

func (a *watchCmd) Run(command *kong.Context) error {
	return a.with(command, func(c *caller) error {
		prefix := c.flags.EventPrefix + ".changed."
		subject := prefix + ">"
		if a.Key != "" {
			subject = prefix + a.Key
		}
		sub, err := c.nc.SubscribeSync(subject)
		if err != nil {
			return usagef("KEY: %w", err)
		}
		text := c.term && !c.flags.JSON
		for n := 0; a.Count == 0 || n < a.Count; n++ {
			msg, err := sub.NextMsgWithContext(c.ctx)
			stopped := c.stopped()
			switch {
			case err == nil:
			case stopped == nil:
				return &exitError{exitNoService, err}
			case stopped.code == exitNotPermitted:
				return stopped
			default:
				return nil // that is how it ends
			}
			ch := change{Key: strings.TrimPrefix(msg.Subject, prefix), Event: msg.Header.Get("Dagnats-Lease-Event")}
			_, _ = fmt.Sscan(msg.Header.Get(nats.JSSequence), &ch.Revision)
			if json.Valid(msg.Data) {
				ch.Record = msg.Data
			}
			if text {
				var l lease
				_ = json.Unmarshal(msg.Data, &l)
				fmt.Fprintf(command.Stdout, "%s  %-8s  %s  %s  revision %d\n", time.Now().Format("15:04:05.000"), visible(first(ch.Event, "foreign")), visible(ch.Key), visible(l.Holder), ch.Revision)
				continue
			}
			line, err := json.Marshal(ch)
			if err != nil {
				return err
			}
			c.printJSON(line)
		}
		return nil
	})
}
