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
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A guard is the process between "leased run" and the command it runs. It gets
// each deadline of the lease through a pipe and kills the command's process
// group before the last one it got, or at once when the pipe ends: so the
// command is dead in time also when its wrapper is stopped, killed or cut off.
//
// Lines it reads from file 3:
//
//	deadline N   the group must be dead at N (ns of the boot clock)
//	signal N     send signal N to the group
//	end          the first signal now, KILL after grace or in time for the deadline
//
// Lines it writes to file 4:
//
//	started PID       the command runs in the process group PID
//	failed CODE TEXT  it could not be started
//	stopped N         the terminal stopped it with signal N
//	ending            it gets the first signal, because of "end" or the deadline
//	exit CODE         it ended (128+N after signal N)
//	gone              nothing of its group is left
type guard struct {
	grace, margin time.Duration
	first         syscall.Signal // instead of KILL, as long as there is time
	report        *os.File
	group         int
	killer        *killer

	mu       sync.Mutex
	deadline time.Duration // boot clock
	endAt    time.Duration // KILL no later than this, 0: no end was asked for
	ending   bool          // the first signal was sent
	orphan   bool          // the wrapper is gone
	wake     chan struct{}
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

// guardArgs are the arguments of a process that runs g's guard.
func guardArgs(grace, margin time.Duration, first syscall.Signal, foreground bool, command []string) []string {
	return append([]string{"guard", grace.String(), margin.String(), strconv.Itoa(int(first)), strconv.FormatBool(foreground)}, command...)
}

// runGuard is the guard's process; args are those of guardArgs.
func runGuard(args []string) int {
	control, report := os.NewFile(controlFile, "control"), os.NewFile(reportFile, "report")
	if _, err := control.Stat(); err != nil || len(args) < 5 {
		fmt.Fprintln(os.Stderr, "leased: guard: for use by leased run only")
		return exitUsage
	}
	syscall.CloseOnExec(controlFile)
	syscall.CloseOnExec(reportFile)
	// The wrapper decides what signals mean; only the pipe ends a guard. They are
	// caught and not ignored, because the command would inherit that.
	catch(make(chan os.Signal, 1), append(runSignals, syscall.SIGTTOU, syscall.SIGTTIN, syscall.SIGTSTP, syscall.SIGPIPE)...)

	g := &guard{report: report, wake: make(chan struct{}, 1)}
	var errs [4]error
	var first int
	var foreground bool
	g.grace, errs[0] = time.ParseDuration(args[0])
	g.margin, errs[1] = time.ParseDuration(args[1])
	first, errs[2] = strconv.Atoi(args[2])
	foreground, errs[3] = strconv.ParseBool(args[3])
	if err := errors.Join(errs[:]...); err != nil {
		g.say("failed %d guard: %v", exitBefore, err)
		return exitUsage
	}
	g.first = syscall.Signal(first)
	g.run(control, args[4:], foreground)
	return exitOK
}

// catch is signal.Notify for those that are not ignored, as under nohup.
func catch(c chan<- os.Signal, signals ...os.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
}

func (g *guard) say(format string, args ...any) {
	fmt.Fprintf(g.report, format+"\n", args...) // a wrapper that is gone needs no report
}

func (g *guard) run(control io.Reader, command []string, foreground bool) {
	lines := bufio.NewScanner(control)
	// A guard that was slow to start may have missed renewals: they are in the pipe, or
	// the end of the lease is.
	for late := true; late; late = g.late() {
		if !lines.Scan() || !g.obey(lines.Text()) || g.endAt != 0 {
			g.say("failed %d the lease was over before the command was started", exitLost)
			return
		}
	}
	becomeReaper()
	// The kernel kills the child when the thread that started it ends.
	runtime.LockOSThread()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = childAttr(foreground)
	if err := cmd.Start(); err != nil {
		g.say("failed %d %s", cannotStart(err), strings.ReplaceAll(err.Error(), "\n", " "))
		return
	}
	g.group = cmd.Process.Pid
	g.mu.Lock()
	_, hard := g.times()
	g.killer = startKiller(g.group, hard)
	g.mu.Unlock()
	g.say("started %d", g.group)

	ended := make(chan int, 1)
	go g.reap(ended)
	go func() {
		for lines.Scan() {
			g.obey(lines.Text())
		}
		// The wrapper is gone. That is known before the command ends of it, for who
		// sees it end asks then.
		g.mu.Lock()
		g.endAt, g.orphan = 1, true
		g.mu.Unlock()
		g.kill(syscall.SIGKILL)
		g.stir()
	}()

	for len(ended) == 0 {
		g.tick()
		select {
		case code := <-ended:
			ended <- code
		case <-g.wake:
		case <-time.After(g.next()):
		}
	}
	g.say("exit %d", <-ended)
	g.finish()
	g.say("gone")
	g.mu.Lock()
	orphan := g.orphan
	g.mu.Unlock()
	if orphan { // nobody else is left to tidy up
		file := os.Getenv("LEASE_FILE")
		_ = os.Remove(file)
		_ = os.Remove(filepath.Dir(file))
	}
}

// cannotStart is the exit code for a command that could not be started.
func cannotStart(err error) int {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return 127
	}
	return 126
}

// reap takes the end of the command, and of every orphan that became a child of
// this process.
func (g *guard) reap(ended chan<- int) {
	for {
		var s syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &s, syscall.WUNTRACED, nil)
		switch {
		case errors.Is(err, syscall.EINTR) || err == nil && pid != g.group:
		case err != nil:
			return // the command was the last
		case s.Stopped():
			if n := s.StopSignal(); n == syscall.SIGTSTP || n == syscall.SIGTTIN || n == syscall.SIGTTOU {
				g.say("stopped %d", n)
			}
		case s.Signaled():
			ended <- exitSignal + int(s.Signal())
		default:
			ended <- s.ExitStatus()
		}
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
		g.end()
		g.stir()
	default:
		return false
	}
	return true
}

func (g *guard) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.endAt == 0 {
		g.endAt = bootNow() + g.grace
	}
}

// stir is called when the times may have changed.
func (g *guard) stir() {
	g.mu.Lock()
	if g.killer != nil {
		_, hard := g.times()
		g.killer.set(hard)
	}
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// times says when to send the first signal and when to kill.
func (g *guard) times() (soft, hard time.Duration) {
	hard = g.deadline - g.margin
	soft = hard - g.grace
	if g.endAt != 0 {
		soft, hard = 0, min(hard, g.endAt)
	}
	return soft, hard
}

// late says that it is too late to start.
func (g *guard) late() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	soft, _ := g.times()
	return bootNow() >= soft
}

// next is how long to sleep: never long, for the machine may.
func (g *guard) next() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	soft, hard := g.times()
	until := hard
	if !g.ending {
		until = soft
	}
	return min(max(until-bootNow(), time.Millisecond), 100*time.Millisecond)
}

// tick does what is due, and says whether that was to kill.
func (g *guard) tick() bool {
	g.mu.Lock()
	soft, hard := g.times()
	now := bootNow()
	first := now >= soft && !g.ending
	g.ending = g.ending || first
	g.mu.Unlock()
	if first {
		g.say("ending")
		g.ask()
	}
	if now < hard {
		return false
	}
	g.kill(syscall.SIGKILL)
	return true
}

// ask sends the first signal, and lets those that are stopped take it.
func (g *guard) ask() {
	g.kill(g.first)
	g.kill(syscall.SIGCONT)
}

func (g *guard) kill(s syscall.Signal) {
	if g.group > 0 {
		_ = syscall.Kill(-g.group, s)
	}
}

// finish ends what the command left behind in its group: the first signal, then
// KILL, until nothing lives.
func (g *guard) finish() {
	if !alive(g.group) {
		return
	}
	g.end()
	g.stir()
	g.mu.Lock()
	g.ending = true
	g.mu.Unlock()
	g.ask()
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		killed := g.tick()
		if !alive(g.group) || killed && !livesOn(g.group) {
			return
		}
		time.Sleep(pause)
	}
}
