//go:build unix

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// guardCmd is the process between "leased run" and the command it runs. It gets
// each deadline of the lease through a pipe and kills the command's process
// group before the last one it got, or at once when the pipe ends: so the
// command is dead in time also when its wrapper is stopped, killed or cut off.
//
// Lines it reads from file 3:
//
//	deadline N   the group must be dead at N (ns of the boot clock)
//	signal N     send signal N to the group
//	end          TERM now, KILL after grace or in time for the deadline
//
// Lines it writes to file 4:
//
//	started PID       the command runs in the process group PID
//	failed CODE TEXT  it could not be started
//	exit CODE         it ended (128+N after signal N)
//	gone              nothing of its group is left
type guardCmd struct {
	Grace   time.Duration `required:""`
	Margin  time.Duration `required:""`
	Signal  int           `required:""`
	Command []string      `arg:"" passthrough:""`
}

const (
	controlFile = 3
	reportFile  = 4
)

// bootNow reads the clock that also runs while the machine sleeps: a lease does
// not wait for it. The same clock is read by wrapper and guard.
func bootNow() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(bootClock, &ts); err != nil {
		panic(err) // the clock exists on every system this file is built for
	}
	return time.Duration(ts.Nano())
}

// guard is a running guard.
type guard struct {
	guardCmd
	report *os.File
	group  int

	mu       sync.Mutex
	deadline time.Duration // boot clock
	endAt    time.Duration // KILL no later than this, 0: no end was asked for
	termed   bool
	wake     chan struct{}
}

func (g *guardCmd) Run(_ *kong.Context) error {
	// The wrapper decides what signals mean; only the pipe ends a guard. They are
	// caught and not ignored, because the command would inherit that.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGTTOU, syscall.SIGTTIN, syscall.SIGTSTP, syscall.SIGPIPE)
	if len(g.Command) > 0 && g.Command[0] == "--" {
		g.Command = g.Command[1:]
	}
	control, report := os.NewFile(controlFile, "control"), os.NewFile(reportFile, "report")
	if _, err := control.Stat(); err != nil {
		return usagef("guard: for use by leased run only")
	}
	syscall.CloseOnExec(controlFile)
	syscall.CloseOnExec(reportFile)
	r := &guard{guardCmd: *g, report: report, wake: make(chan struct{}, 1)}
	return r.run(control)
}

func (g *guard) say(format string, args ...any) {
	fmt.Fprintf(g.report, format+"\n", args...) // a wrapper that is gone needs no report
}

func (g *guard) run(control io.Reader) error {
	lines := bufio.NewScanner(control)
	if !lines.Scan() || !g.obey(lines.Text()) || g.deadline <= bootNow() {
		g.say("failed %d the lease was over before the command was started", exitLost)
		return nil
	}
	becomeReaper()
	// The kernel kills the child when the thread that started it ends.
	runtime.LockOSThread()
	cmd := exec.Command(g.Command[0], g.Command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = childAttr(term.IsTerminal(int(os.Stdin.Fd())))
	if err := cmd.Start(); err != nil {
		code := 126
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			code = 127
		}
		g.say("failed %d %s", code, strings.ReplaceAll(err.Error(), "\n", " "))
		return nil
	}
	g.group = cmd.Process.Pid
	g.say("started %d", g.group)

	ended := make(chan int, 1)
	go func() {
		_ = cmd.Wait()
		code := cmd.ProcessState.ExitCode()
		if s, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() {
			code = exitSignal + int(s.Signal())
		}
		ended <- code
	}()
	go func() {
		for lines.Scan() {
			g.obey(lines.Text())
		}
		g.kill(syscall.SIGKILL) // the wrapper is gone
		g.mu.Lock()
		g.endAt = 1
		g.mu.Unlock()
		g.stir()
	}()

	for {
		select {
		case code := <-ended:
			// What the command left behind in its group must not outlive it.
			g.say("exit %d", code)
			g.finish()
			g.say("gone")
			return nil
		case <-g.wake:
		case <-time.After(g.next()):
		}
		g.tick()
	}
}

// obey carries out one line of the wrapper.
func (g *guard) obey(line string) bool {
	word, rest, _ := strings.Cut(line, " ")
	n, err := strconv.ParseInt(rest, 10, 64)
	switch {
	case word == "deadline" && err == nil:
		g.mu.Lock()
		g.deadline = time.Duration(n)
		g.mu.Unlock()
		g.stir()
	case word == "signal" && err == nil:
		g.kill(syscall.Signal(n))
	case word == "end":
		g.mu.Lock()
		if g.endAt == 0 {
			g.endAt = bootNow() + g.Grace
		}
		g.mu.Unlock()
		g.stir()
	default:
		return false
	}
	return true
}

func (g *guard) stir() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// times says when to send the first signal and when to kill.
func (g *guard) times() (soft, hard time.Duration) {
	hard = g.deadline - g.Margin
	soft = hard - g.Grace
	if g.endAt != 0 {
		soft, hard = 0, min(hard, g.endAt)
	}
	return soft, hard
}

// next is how long to sleep: never long, for the machine may.
func (g *guard) next() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	soft, hard := g.times()
	until := hard
	if !g.termed {
		until = soft
	}
	return min(max(until-bootNow(), time.Millisecond), 100*time.Millisecond)
}

// tick does what is due.
func (g *guard) tick() {
	g.mu.Lock()
	soft, hard := g.times()
	now := bootNow()
	first := now >= soft && !g.termed
	if first {
		g.termed = true
	}
	g.mu.Unlock()
	switch {
	case now >= hard:
		g.kill(syscall.SIGKILL)
	case first:
		g.kill(syscall.Signal(g.Signal))
	}
}

func (g *guard) kill(s syscall.Signal) {
	if g.group > 0 {
		_ = syscall.Kill(-g.group, s)
	}
}

// finish ends what is left of the group: TERM, then KILL, until nothing is.
func (g *guard) finish() {
	g.mu.Lock()
	if g.endAt == 0 {
		g.endAt = bootNow() + g.Grace
	}
	g.mu.Unlock()
	for first := true; ; first = false {
		reap(g.group)
		if errors.Is(syscall.Kill(-g.group, 0), syscall.ESRCH) {
			return
		}
		if first {
			g.mu.Lock()
			g.termed = true
			g.mu.Unlock()
			g.kill(syscall.Signal(g.Signal))
			g.kill(syscall.SIGCONT)
		}
		g.tick()
		time.Sleep(2 * time.Millisecond)
	}
}

// reap takes the exit codes of orphans of the group, so that it can be empty.
func reap(group int) {
	for {
		pid, err := syscall.Wait4(-group, nil, syscall.WNOHANG, nil)
		if pid <= 0 || err != nil {
			return
		}
	}
}
