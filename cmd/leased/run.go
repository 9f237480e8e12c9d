//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/leased/leased/client"
	"github.com/leased/leased/service/kinds"
)

// Exit codes of run that are not the command's own.
const (
	exitLost   = 124 // the lease was lost while the command ran
	exitBefore = 125 // something failed before the command was started
)

type runCmd struct {
	callFlags
	logFlags
	Key     string        `arg:"" help:"What to lease."`
	Command []string      `arg:"" passthrough:"partial" placeholder:"-- CMD ..." help:"The command and its arguments."`
	TTL     time.Duration `name:"ttl" default:"15s" placeholder:"DURATION" help:"How long the lease lasts without a renewal; it is renewed every third of it: whole seconds, 1s to 10m (default 15s)."`
	NoWait  bool          `short:"n" help:"Do not wait while another holds the key: exit 75."`
	Wait    time.Duration `short:"w" placeholder:"DURATION" help:"How long to wait for the key, then exit 75 (default for ever)."`
	Holder  string        `placeholder:"ID" help:"Holder id, unique per process (default a new one)."`
	Meta    string        `placeholder:"TEXT" help:"Shown with the lease, at most 512 bytes."`
	Grace   time.Duration `placeholder:"DURATION" help:"How long the command has between the first signal and KILL when the lease is lost (default a fifth of the TTL, at most 10s)."`
	Signal  string        `default:"TERM" placeholder:"NAME" help:"The first signal (default TERM)."`
	Restart bool          `help:"After a loss, or when the command fails, stand by and take over again."`
}

// Help is shown by --help.
func (runCmd) Help() string {
	return `Waits until it holds KEY, runs the command while it does, and releases the key
when the command and everything in its process group have ended.

If the lease is lost, or cannot be renewed, the command gets --signal, and KILL
before the lease can belong to another: also when this process is stopped,
killed or cut off from NATS. Processes that leave the command's process group
are not found.

The command has standard input, output and error to itself; INT, TERM, HUP,
QUIT, USR1 and USR2 are passed on. Its environment has LEASE_KEY, LEASE_HOLDER,
LEASE_REVISION (at the start), LEASE_TTL_MS, NATS_URL, and LEASE_FILE: a file
that always holds the current lease as JSON. Send the revision with every write.

Exit codes: the command's own; 128+N if signal N ended it; 124 the lease was
lost; 125 something failed before the command was started; 126 the command
could not be started; 127 it was not found; 75 the key was not acquired in time.

    leased run nightly -- ./backup.sh
    leased run --restart --ttl 5s leader -- ./server --port 8080`
}

// killMargin is how long before the lease can belong to another the command is
// killed.
func (r *runCmd) killMargin() time.Duration {
	return min(max(r.TTL/20, 50*time.Millisecond), time.Second)
}

var runSignals = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

func (r *runCmd) Run(command *kong.Context) error {
	if err := r.check(); err != nil {
		return err
	}
	first := unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(r.Signal), "SIG"))
	if first == 0 {
		return usagef("--signal %s: not a signal's name, such as TERM or INT", r.Signal)
	}
	// Better to know before the key is taken.
	if _, err := exec.LookPath(r.Command[0]); err != nil {
		code := 126
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			code = 127
		}
		return &exitError{code, err}
	}
	e, err := r.resolve(given(command), true)
	if err != nil {
		return err
	}
	nc, err := e.connect(context.Background(), "leased-run")
	if err != nil {
		return &exitError{exitBefore, err}
	}
	defer nc.Close()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, runSignals...)
	w := &wrapper{
		runCmd: r, first: int(first), urls: nc.ConnectedUrl(), signals: signals, log: r.logger(slog.LevelInfo),
		client: client.New(nc, client.Options{Prefix: r.APIPrefix, EventPrefix: r.EventPrefix, Timeout: r.Timeout}),
	}
	for {
		code, again, err := w.once()
		if r.Restart && again {
			continue
		}
		if err == nil && code == 0 {
			return nil
		}
		if err == nil {
			err = silentExit(code)
		}
		return &exitError{code, err}
	}
}

func (r *runCmd) check() error {
	if len(r.Command) > 0 && r.Command[0] == "--" {
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
	}
	if r.Grace == 0 {
		r.Grace = min(r.TTL/5, 10*time.Second)
	}
	return nil
}

// wrapper is a running "leased run".
type wrapper struct {
	*runCmd
	client  *client.Client
	first   int // the first signal
	urls    string
	signals chan os.Signal
	log     *slog.Logger
}

// once waits for the lease, runs the command and releases. again says that with
// --restart there is reason to begin anew.
func (w *wrapper) once() (code int, again bool, err error) {
	waiting, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	held := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		var timeout <-chan time.Time
		if w.Wait > 0 {
			t := time.NewTimer(w.Wait)
			defer t.Stop()
			timeout = t.C
		}
		for {
			select {
			case s := <-w.signals:
				if s != syscall.SIGUSR1 && s != syscall.SIGUSR2 { // there is nobody yet to pass them to
					cancel(&exitError{exitSignal + int(s.(syscall.Signal)), fmt.Errorf("%v while waiting for %s", s, w.Key)})
					return
				}
			case <-timeout:
				cancel(&exitError{exitWaited, fmt.Errorf("%s was not free within %v", w.Key, w.Wait)})
				return
			case <-held:
				return
			}
		}
	})

	l := &leash{w: w}
	h, err := w.client.Hold(waiting, w.Key, client.HoldOptions{
		Holder: w.Holder, TTL: w.TTL, Meta: w.Meta, NoWait: w.NoWait, Margin: w.Grace + w.killMargin(),
		OnRenew: l.renewed,
		OnError: func(err error) { w.log.Warn("the lease service", "key", w.Key, "error", err) },
	})
	close(held)
	watching.Wait()
	if err != nil {
		var known *exitError
		var denied *client.DeniedError
		switch {
		case errors.As(context.Cause(waiting), &known):
			return known.code, false, known
		case errors.As(err, &denied):
			return exitWaited, false, err
		case kinds.Of(err) == kinds.Invalid:
			return exitUsage, false, err
		}
		return exitBefore, false, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), w.Timeout)
		defer cancel()
		if e := h.Resign(ctx); e != nil {
			w.log.Warn("the lease was not released; it runs out by itself", "key", w.Key, "error", e)
		}
	}()
	return l.run(h)
}

// leash ties one run of the command to one lease.
type leash struct {
	w    *wrapper
	file string // LEASE_FILE

	mu       sync.Mutex
	hold     *client.Hold
	revision uint64
	deadline time.Duration // boot clock
	control  *os.File      // to the guard, nil before it runs
}

// renewed is told of each revision and until when the holder may act.
func (l *leash) renewed(revision uint64, until time.Time) {
	at := bootNow() + time.Until(until)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.revision, l.deadline = revision, at
	if l.control != nil {
		fmt.Fprintf(l.control, "deadline %d\n", at) // a guard that is gone is noticed elsewhere
		l.write()
	}
}

// write puts the current lease into LEASE_FILE, all of it or nothing.
func (l *leash) write() {
	body, err := json.Marshal(map[string]any{"key": l.w.Key, "holder": l.hold.Holder(), "revision": l.revision, "tenure": l.hold.Tenure(), "ttl_ms": l.w.TTL.Milliseconds()})
	if err == nil {
		tmp := l.file + ".new"
		if err = os.WriteFile(tmp, append(body, '\n'), 0o600); err == nil {
			err = os.Rename(tmp, l.file)
		}
	}
	if err != nil {
		l.w.log.Warn("the file that follows the lease could not be written", "error", err)
	}
}

func (l *leash) run(h *client.Hold) (code int, again bool, err error) {
	dir, err := os.MkdirTemp("", "leased-run-")
	if err != nil {
		return exitBefore, false, err
	}
	defer os.RemoveAll(dir)
	report, err := l.start(h, filepath.Join(dir, "lease.json"))
	if err != nil {
		return exitBefore, false, err
	}
	defer l.control.Close()
	defer takeTerminalBack()

	var lost error
	over := h.Context().Done()
	code = -1
	group := 0
	for {
		select {
		case line, ok := <-report:
			word, rest, _ := strings.Cut(line, " ")
			switch {
			case !ok && code < 0:
				// The guard died: what it guarded must not live on.
				if group > 0 {
					_ = syscall.Kill(-group, syscall.SIGKILL)
				}
				return exitLost, true, errors.New("the guard of the command died")
			case !ok && lost != nil:
				return exitLost, true, fmt.Errorf("lease %s: %w", l.w.Key, lost)
			case !ok:
				return code, code != 0, nil
			case word == "started":
				group, _ = strconv.Atoi(rest)
			case word == "failed":
				number, text, _ := strings.Cut(rest, " ")
				code, _ = strconv.Atoi(number)
				return code, code == exitLost, errors.New(text)
			case word == "exit":
				code, _ = strconv.Atoi(rest)
			}
		case <-over:
			over = nil
			lost = context.Cause(h.Context())
			l.w.log.Warn("the lease is lost: ending the command", "key", l.w.Key, "reason", lost)
			l.tell("end\n")
		case s := <-l.w.signals:
			l.tell("signal %d\n", int(s.(syscall.Signal)))
		}
	}
}

func (l *leash) tell(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(l.control, format, args...)
}

// start runs the guard, which runs the command, and returns the lines it
// reports; the channel is closed when the guard has ended.
func (l *leash) start(h *client.Hold, file string) (<-chan string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	controlRead, controlWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer controlRead.Close()
	reportRead, reportWrite, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer reportWrite.Close()

	args := append([]string{"guard", "--grace", l.w.Grace.String(), "--margin", l.w.killMargin().String(), "--signal", strconv.Itoa(l.w.first), "--"}, l.w.Command...)
	cmd := exec.Command(self, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{controlRead, reportWrite}
	cmd.SysProcAttr = guardAttr()

	l.mu.Lock()
	l.hold, l.file, l.control = h, file, controlWrite
	l.write()
	cmd.Env = append(os.Environ(),
		"LEASE_KEY="+l.w.Key,
		"LEASE_HOLDER="+h.Holder(),
		"LEASE_REVISION="+strconv.FormatUint(l.revision, 10),
		"LEASE_TTL_MS="+strconv.FormatInt(l.w.TTL.Milliseconds(), 10),
		"LEASE_FILE="+file,
	)
	if os.Getenv("NATS_URL") == "" {
		cmd.Env = append(cmd.Env, "NATS_URL="+l.w.urls)
	}
	fmt.Fprintf(controlWrite, "deadline %d\n", l.deadline)
	l.mu.Unlock()
	if err := cmd.Start(); err != nil {
		controlWrite.Close()
		reportRead.Close()
		return nil, err
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		defer reportRead.Close()
		for s := bufio.NewScanner(reportRead); s.Scan(); {
			lines <- s.Text()
		}
		_ = cmd.Wait()
	}()
	return lines, nil
}

// takeTerminalBack makes this process group the terminal's foreground again
// after the command had it.
func takeTerminalBack() {
	fd := int(os.Stdin.Fd())
	if !term.IsTerminal(fd) {
		return
	}
	signal.Ignore(syscall.SIGTTOU)
	defer signal.Reset(syscall.SIGTTOU)
	_ = unix.IoctlSetPointerInt(fd, unix.TIOCSPGRP, unix.Getpgrp())
}
