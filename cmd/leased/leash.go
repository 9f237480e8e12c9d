//go:build unix

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/leased/leased/client"
)

// leash is one run of the command, by its guard, tied to leases. One goroutine
// has it.
type leash struct {
	*wrapper
	tie     func() tie
	told    func(keys int)   // the command was told of this version of the keys
	changed <-chan struct{}  // tie may have changed; it is looked at now and then too
	signals <-chan os.Signal // passed on to the command
	env     []string
	file    string // LEASE_FILE
	term    bool   // the command may have the terminal

	control *os.File // to the guard
	guard   *os.Process
	group   int           // the command's process group, 0 when nothing of it is left
	killer  *killer       // in case the guard is stopped
	until   time.Time     // as last told to the guard
	over    time.Duration // the same on the boot clock: when the command must be dead
	text    []byte        // what is in file
	keys    int           // version of the keys that the command was told of
	hush    time.Time     // no signal about keys before
	asked   bool          // a signal that asks to end was passed on
}

// tie is what the command depends on.
type tie struct {
	lease any       // becomes LEASE_FILE
	until time.Time // when the first lease can belong to another; zero without any
	keys  int       // version of the set of keys
}

// held is a lease in LEASE_FILE.
type held struct {
	Key      string `json:"key"`
	Holder   string `json:"holder"`
	Revision uint64 `json:"revision"`
	Tenure   uint64 `json:"tenure"`
	TTL      int64  `json:"ttl_ms"`
}

func (w *wrapper) held(h *client.Hold) held {
	return held{h.Key(), h.Holder(), h.Revision(), h.Tenure(), w.TTL.Milliseconds()}
}

// result is how a run of the command ended.
type result struct {
	started bool
	cut     bool  // it was ended from here, not by itself
	code    int   // of the command, or why it was not started
	err     error // what there is to say about it
}

const (
	shareSettle = time.Second            // from the start of the command to the first signal about keys
	shareEvery  = 100 * time.Millisecond // between signals about keys
)

// run runs the command until it has ended by itself, ctx is done or the guard
// ends it; nothing of it lives when run returns.
func (l *leash) run(ctx context.Context) result {
	report, err := l.start()
	if err != nil {
		return result{code: exitBefore, err: err}
	}
	defer os.Remove(l.file)
	defer l.control.Close()

	r := result{code: -1}
	tick := time.NewTicker(min(l.TTL/50, 100*time.Millisecond))
	defer tick.Stop()
	done := ctx.Done()
	for {
		select {
		case line, ok := <-report:
			word, rest, _ := strings.Cut(line, " ")
			number, text, _ := strings.Cut(rest, " ")
			n, _ := strconv.Atoi(number)
			switch {
			case !ok && l.group != 0: // the guard died: what it guarded must not live on
				killGroup(l.group)
				return result{started: true, cut: true, code: exitLost, err: errors.New("the guard of the command died")}
			case !ok && r.code < 0:
				return result{code: exitBefore, err: errors.New("the guard of the command died")}
			case !ok:
				return r
			case word == "started":
				r.started, l.group, l.killer = true, n, startKiller(n, l.over-l.killMargin())
				defer l.killer.stop()
				defer handTerminal(l.group, syscall.Getpgrp())
			case word == "failed":
				r.code, r.err = n, errors.New(text)
			case word == "stopped":
				stopped(l.group, syscall.Signal(n))
				l.tell("signal %d\n", syscall.SIGCONT)
			case word == "ending":
				r.cut = true
			case word == "exit":
				r.code = n
			case word == "gone":
				l.group = 0
				l.killer.stop()
			}
		case <-done:
			done = nil
			l.log.Warn("ending the command", "reason", context.Cause(ctx))
			l.tell("end\n")
		case s := <-l.signals:
			l.asked = l.asked || asksToEnd(s)
			l.tell("signal %d\n", s)
		case <-l.changed:
			l.follow()
		case <-tick.C:
			l.follow()
			if l.group != 0 && bootNow() >= l.over-l.killMargin() {
				r.cut = true
				_ = l.guard.Signal(syscall.SIGCONT) // it may have been stopped, and have news
			}
		}
	}
}

// asksToEnd tells whether the sender of s wants the command ended for good.
func asksToEnd(s os.Signal) bool {
	return s == syscall.SIGINT || s == syscall.SIGTERM || s == syscall.SIGQUIT
}

// tell sends a line to the guard. One that is stopped must not stop us.
func (l *leash) tell(format string, args ...any) {
	_ = l.control.SetWriteDeadline(time.Now().Add(10 * time.Millisecond))
	fmt.Fprintf(l.control, format, args...) // a guard that is gone is noticed elsewhere
}

// follow passes on what has become of the leases.
func (l *leash) follow() {
	t := l.tie()
	if l.over == 0 || !t.until.Equal(l.until) {
		l.until, l.over = t.until, bootAt(t.until)
		l.tell("deadline %d\n", l.over)
		if l.killer != nil {
			l.killer.set(l.over - l.killMargin())
		}
	}
	l.write(t.lease)
	if t.keys != l.keys && l.group != 0 && time.Now().After(l.hush) {
		l.tell("signal %d\n", l.shareSignal)
		l.keys, l.hush = t.keys, time.Now().Add(shareEvery)
		l.told(l.keys)
	}
}

// bootAt is t on the boot clock. The monotonic reading of t stands still while
// the machine sleeps, the wall clock may be set: the earlier one counts.
func bootAt(t time.Time) time.Duration {
	if t.IsZero() {
		return 1<<63 - 1
	}
	now := bootNow()
	return now + min(time.Until(t), time.Until(t.Round(0)))
}

// write puts the current lease into LEASE_FILE, all of it or nothing.
func (l *leash) write(lease any) {
	text, err := json.Marshal(lease)
	if err == nil && bytes.Equal(text, l.text) {
		return
	}
	next := l.file + ".new"
	if err == nil {
		err = os.WriteFile(next, append(text, '\n'), 0o600)
	}
	if err == nil {
		err = os.Rename(next, l.file)
	}
	if err != nil {
		l.log.Warn("the file that follows the lease could not be written", "error", err)
	}
	l.text = text
}

// start runs the guard, which runs the command, and returns the lines it
// reports; the channel is closed when the guard has ended.
func (l *leash) start() (<-chan string, error) {
	controlRead, control, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer controlRead.Close()
	report, reportWrite, err := os.Pipe()
	if err != nil {
		control.Close()
		return nil, err
	}
	defer reportWrite.Close()

	t := l.tie()
	l.control, l.keys, l.hush = control, t.keys, time.Now().Add(shareSettle)
	l.follow()
	cmd := l.guardCommand()
	cmd.ExtraFiles = []*os.File{controlRead, reportWrite}
	if err := cmd.Start(); err != nil {
		control.Close()
		report.Close()
		return nil, err
	}
	l.guard = cmd.Process
	l.adopting.Do(adoptOrphans)
	if l.told != nil {
		l.told(l.keys)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		defer report.Close()
		for s := bufio.NewScanner(report); s.Scan(); {
			lines <- s.Text()
		}
		_ = cmd.Wait()
	}()
	return lines, nil
}

// guardCommand is the guard, not yet with its pipes.
func (l *leash) guardCommand() *exec.Cmd {
	cmd := exec.Command(l.program)
	cmd.Args = append(os.Args[:1:1], guardArgs(l.Grace, l.killMargin(), l.first, l.term && wantsTerminal(), l.Command)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), append(l.env, "LEASE_FILE="+l.file, "LEASE_TTL_MS="+strconv.FormatInt(l.TTL.Milliseconds(), 10), "NATS_URL="+l.urls)...)
	// Out of reach of what is sent to this process' group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// adoptOrphans has this process, if it is the first of a container, take the ends of what
// the guards' commands leave behind: nobody else does. It may take a guard's end too, whose
// code nobody reads.
func adoptOrphans() {
	if os.Getpid() != 1 {
		return
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	go func() {
		for range ended {
			for {
				pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
				if pid <= 0 && !errors.Is(err, syscall.EINTR) {
					break
				}
			}
		}
	}()
}
