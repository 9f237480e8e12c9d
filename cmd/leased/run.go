//go:build unix

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/leased/leased/client"
	"github.com/leased/leased/service/kinds"
)

// Exit codes of run that are not the command's own.
const (
	exitLost   = 124 // the lease was lost while the command ran
	exitBefore = 125 // something failed before the command was started
)

type runCmd struct {
	serviceFlags
	logFlags
	Key     string   `arg:"" help:"What to lease; with --shards the group."`
	Command []string `arg:"" optional:"" passthrough:"partial" placeholder:"-- CMD ..." help:"The command and its arguments."`
	// H7: it has to outlast the change of a leader.
	TTL     time.Duration `name:"ttl" default:"15s" placeholder:"DURATION" help:"How long the lease lasts without a renewal; it is renewed every third of it: whole seconds, 1s to 10m, on a cluster at least 10s (default 15s)."`
	NoWait  bool          `short:"n" help:"Do not wait while another holds the key: exit 75."`
	Wait    time.Duration `short:"w" placeholder:"DURATION" help:"How long to wait for the key, then exit 75 (default for ever)."`
	Holder  string        `placeholder:"ID" help:"Holder id, unique per process (default a new one)."`
	Meta    string        `placeholder:"TEXT" help:"Shown with the lease, at most 512 bytes."`
	Grace   time.Duration `placeholder:"DURATION" help:"How long the command has between the first signal and KILL when the lease is lost (default a fifth of the TTL, at most 10s)."`
	Signal  string        `default:"TERM" placeholder:"NAME" help:"The first signal (default TERM)."`
	Restart bool          `help:"After a loss, or when the command fails, stand by and take over again."`

	Shards      string `placeholder:"RANGE" help:"Take a fair share of the keys KEY-0 to KEY-63 (with 0-63) among all that run with the same group and range, one command a key."`
	Share       bool   `help:"With --shards: one command for all keys; LEASE_FILE lists them."`
	ShareSignal string `default:"HUP" placeholder:"NAME" help:"With --share: what tells the command that LEASE_FILE lists other keys (default HUP)."`

	rest []string // of the command line, from -- on
}

// Help is shown by --help.
func (runCmd) Help() string {
	return `Waits until it holds KEY, runs the command while it does, and releases the key
when the command and everything in its process group have ended.

If the lease is lost, or cannot be renewed, the command gets --signal, and KILL
before the lease can belong to another: also when this process is stopped,
killed or cut off from NATS. Processes that leave the command's process group,
or become another user's, are out of reach. On a machine that lets processes
wait for long, allow a real-time priority (CAP_SYS_NICE, or LimitRTPRIO=1). As the
first process of a container it reaps what its commands leave behind.

An operator's evict is the exception: the key is free at once. The command gets
--signal as soon as the event of it arrives (else with the next renewal, up to a
third of the TTL later) and KILL after --grace, and may act beside the next
holder until then.

The command has standard input, output, error and the terminal to itself; INT,
TERM, HUP, QUIT, USR1 and USR2 are passed on. Its environment has LEASE_KEY,
LEASE_HOLDER, LEASE_REVISION (of the acquire), LEASE_TTL_MS, NATS_URL, and
LEASE_FILE: a file that always holds the current lease as JSON. Send
LEASE_REVISION, which is tenure in LEASE_FILE, with every write.

Exit codes: the command's own; 128+N if signal N ended it; 124 the lease was
lost; 125 something failed before the command was started; 126 the command
could not be started; 127 it was not found; 75 the key was not acquired in time.

With --restart only a command that succeeds, or ends by HUP, INT or TERM, ends
it, and an INT, TERM or QUIT to this process.

With --shards each key has a command of its own. A key that goes to another
process costs its command --signal and --grace; one that is lost is dealt with
as above. A command that ends by itself ends it all, with its code, unless
--restart starts it again; INT, TERM and QUIT end all commands by --signal, and
the exit code is 128+N.

With --share there is one command. It finds its keys in LEASE_FILE, a JSON list,
and in LEASE_KEYS (at the start, comma separated), and gets HUP after each
change, not in its first second. A key that is to go to another process is taken
off the list --grace before. A key that is lost costs the command's life; it is
started again with the keys that are left.

    leased run nightly -- ./backup.sh
    leased run --restart --ttl 10s leader -- ./server --port 8080
    leased run --shards 0-63 jobs -- ./worker`
}

// killMargin is how long before the lease can belong to another the command is
// killed: it covers the time that a busy machine lets a process wait.
func (r *runCmd) killMargin() time.Duration {
	return min(max(r.TTL/10, 200*time.Millisecond), time.Second)
}

// runSignals are passed on to the command.
var runSignals = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// endsWaiting tells whether s ends a process that runs no command yet.
func endsWaiting(s os.Signal) bool { return s != syscall.SIGUSR1 && s != syscall.SIGUSR2 }

func (r *runCmd) Run(command *kong.Context) error {
	w, err := r.prepare(command)
	if err != nil {
		return err
	}
	defer w.logs.close()
	defer w.nc.Close()
	dir, err := os.MkdirTemp("", "leased-run-")
	if err != nil {
		return &exitError{exitBefore, err}
	}
	defer os.RemoveAll(dir)
	w.dir = dir
	catch(w.signals, runSignals...)

	var code int
	if r.Shards != "" {
		code, err = w.shards()
	} else {
		code, err = w.single()
	}
	if err == nil && code == 0 {
		return nil
	}
	if err == nil {
		err = silentExit(code)
	}
	return &exitError{code, err}
}

// prepare does what can fail before a key is taken.
func (r *runCmd) prepare(command *kong.Context) (*wrapper, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	w := &wrapper{runCmd: r, signals: make(chan os.Signal, 16), refused: make(chan error, 1), logs: r.openLog(), complaints: rate.Sometimes{Interval: complainEvery}}
	w.log = w.logs.at(slog.LevelInfo).With("key", r.Key)
	var err error
	if w.first, err = signalNamed("--signal", r.Signal); err != nil {
		return nil, err
	}
	if w.shareSignal, err = signalNamed("--share-signal", r.ShareSignal); err != nil {
		return nil, err
	}
	if w.keys, err = r.shardKeys(); err != nil {
		return nil, err
	}
	if _, err := exec.LookPath(r.Command[0]); err != nil {
		return nil, &exitError{cannotStart(err), err}
	}
	w.program = ownProgram
	if _, err := os.Stat(w.program); err != nil {
		if w.program, err = os.Executable(); err != nil {
			return nil, &exitError{exitBefore, err}
		}
	}
	e, err := r.resolve(given(command), true)
	if err != nil {
		return nil, err
	}
	w.urls = e.urls
	if w.nc, err = e.connect(context.Background(), "leased-run", w.natsOptions()...); err != nil {
		return nil, &exitError{exitBefore, err}
	}
	w.client = client.New(w.nc, client.Options{Prefix: r.APIPrefix, EventPrefix: r.EventPrefix, Timeout: r.Timeout})
	return w, nil
}

// natsOptions are for a connection that is to last, and to be given up soon when
// it has gone silent: there may be another server.
func (w *wrapper) natsOptions() []nats.Option {
	return []nats.Option{
		nats.MaxReconnects(-1), nats.ReconnectWait(200 * time.Millisecond), nats.ReconnectJitter(300*time.Millisecond, 300*time.Millisecond),
		nats.ReconnectBufSize(-1), nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(min(max(w.TTL/5, time.Second), 5*time.Second)), nats.MaxPingsOutstanding(2),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			if action, _ := violation(err); errors.Is(err, nats.ErrPermissionViolation) && action == "publish" {
				select {
				case w.refused <- err:
				default:
				}
			}
		}),
	}
}

func (r *runCmd) check() error {
	if r.Command = append(r.Command, r.rest...); len(r.Command) > 0 && r.Command[0] == "--" {
		r.Command = r.Command[1:]
	}
	switch {
	case len(r.Command) == 0:
		return usagef("CMD: give the command to run after --")
	case r.NoWait && r.Wait != 0:
		return usagef("--no-wait and --wait: give one of them")
	case r.Wait < 0:
		return usagef("--wait %v: must not be negative", r.Wait)
	case r.TTL < time.Second || r.TTL > 10*time.Minute || r.TTL%time.Second != 0:
		return usagef("--ttl %v: must be whole seconds from 1s to 10m", r.TTL)
	case r.Grace < 0 || r.Grace+r.killMargin() > r.TTL/2:
		return usagef("--grace %v: must be from 0 to %v, so that renewals come in time", r.Grace, r.TTL/2-r.killMargin())
	case r.Share && r.Shards == "":
		return usagef("--share: needs --shards")
	case r.Shards != "" && (r.NoWait || r.Wait != 0):
		return usagef("--shards: waits for its share for ever, so not with --no-wait or --wait")
	}
	if r.Grace == 0 {
		r.Grace = min(r.TTL/5, 10*time.Second)
	}
	return nil
}

func signalNamed(flag, name string) (syscall.Signal, error) {
	s := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(name), "SIG"))
	if s == 0 {
		return 0, usagef("%s %s: not a signal's name, such as TERM or INT", flag, name)
	}
	return s, nil
}

// wrapper is a running "leased run".
type wrapper struct {
	*runCmd
	nc          *nats.Conn
	client      *client.Client
	first       syscall.Signal
	shareSignal syscall.Signal
	keys        []string // of --shards
	urls        string
	program     string // of the guard
	dir         string // of LEASE_FILE
	signals     chan os.Signal
	refused     chan error // NATS does not let us ask
	logs        *logs
	log         *slog.Logger
	complaints  rate.Sometimes
	adopting    sync.Once
}

// restartPause is how long a command that failed is not started again.
const restartPause = time.Second

// single is run without --shards.
func (w *wrapper) single() (code int, err error) {
	for pause := time.Duration(0); ; {
		code, again, err := w.once(pause)
		if !again || !w.Restart {
			return code, err
		}
		if err != nil {
			w.log.Warn("standing by again", "error", err)
		}
		pause = 0
		if code != exitLost {
			pause = restartPause
		}
	}
}

// once waits for the lease, runs the command and releases. again says that with
// --restart there is reason to begin anew.
func (w *wrapper) once(pause time.Duration) (code int, again bool, err error) {
	waiting, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	watched := w.watch(cancel, pause)
	if pause > 0 {
		select {
		case <-time.After(pause):
		case <-waiting.Done():
		}
	}
	changed := make(chan struct{}, 1)
	h, err := w.client.Hold(waiting, w.Key, client.HoldOptions{
		Holder: w.Holder, TTL: w.TTL, Meta: w.Meta, NoWait: w.NoWait, Margin: w.Grace + w.killMargin(),
		OnRenew: func(uint64, time.Time) {
			select {
			case changed <- struct{}{}:
			default:
			}
		},
		OnError: w.complain, OnDenied: w.waitsFor(),
	})
	watched()
	if err == nil {
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), w.Timeout)
			defer cancel()
			if e := h.Resign(ctx); e != nil {
				w.log.Warn("the lease was not released; it runs out by itself", "error", e)
			}
		}()
	}
	var known *exitError
	var denied *client.DeniedError
	switch {
	case errors.As(context.Cause(waiting), &known): // perhaps in the moment when the lease came
		return known.code, false, known
	case err == nil:
	case errors.As(err, &denied):
		return exitWaited, false, err
	case kinds.Of(err) == kinds.Invalid:
		return exitUsage, false, err
	default:
		return exitBefore, false, err
	}

	l := w.leash(h)
	l.changed, l.signals = changed, w.signals
	r := l.run(h.Context())
	switch {
	case r.cut:
		return exitLost, !l.asked, cmp.Or(r.err, context.Cause(h.Context()), fmt.Errorf("the time of lease %s was over", w.Key))
	case !r.started:
		return r.code, r.code == exitLost && !l.asked, r.err
	}
	return r.code, worthAnother(r.code) && !l.asked, nil
}

// complain logs an error that is being retried. An outage has many: one every few
// seconds is told. What the client says once is always told.
func (w *wrapper) complain(err error) {
	log := func() { w.log.Warn("the lease service", "error", err) }
	if _, keys := errors.AsType[*client.KeySetError](err); keys || errors.Is(err, nats.ErrPermissionViolation) {
		log()
		return
	}
	w.complaints.Do(log)
}

// complainEvery is the time between two complaints.
const complainEvery = 5 * time.Second

// waitsFor says who has the key, once for each.
func (w *wrapper) waitsFor() func(client.Lease) {
	known := ""
	return func(l client.Lease) {
		if l.Holder != known {
			known = l.Holder
			w.log.Info("waiting: another holds the key", "holder", l.Holder, "left", l.Left.String())
		}
	}
}

// leash makes one for one lease.
func (w *wrapper) leash(h *client.Hold) *leash {
	return &leash{
		wrapper: w, term: true, file: filepath.Join(w.dir, h.Key()),
		env: []string{"LEASE_KEY=" + h.Key(), "LEASE_HOLDER=" + h.Holder(), "LEASE_REVISION=" + strconv.FormatUint(h.Tenure(), 10)},
		tie: func() tie { return tie{lease: w.held(h), until: h.Deadline()} },
	}
}

// worthAnother tells whether a command that ended with code is to be started again:
// not when it was sent away.
func worthAnother(code int) bool {
	switch code {
	case 0, exitSignal + int(syscall.SIGHUP), exitSignal + int(syscall.SIGINT), exitSignal + int(syscall.SIGTERM):
		return false
	}
	return true
}

// watch calls cancel with an *exitError when there is no sense in waiting any
// longer, until the function that it returns is called.
func (w *wrapper) watch(cancel context.CancelCauseFunc, pause time.Duration) (done func()) {
	end := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		var timeout <-chan time.Time
		if w.Wait > 0 {
			t := time.NewTimer(pause + w.Wait)
			defer t.Stop()
			timeout = t.C
		}
		for {
			select {
			case s := <-w.signals:
				if endsWaiting(s) {
					cancel(&exitError{exitSignal + int(s.(syscall.Signal)), fmt.Errorf("%v while waiting for %s", s, w.Key)})
					return
				}
			case err := <-w.refused:
				cancel(&exitError{exitBefore, err})
				return
			case <-timeout:
				cancel(&exitError{exitWaited, fmt.Errorf("%s was not free within %v", w.Key, w.Wait)})
				return
			case <-end:
				return
			}
		}
	})
	return func() {
		close(end)
		watching.Wait()
	}
}
