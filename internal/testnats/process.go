package testnats

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Process is a child process. It is killed when the test ends, and by the kernel when this process
// does.
type Process struct {
	Name string

	t    testing.TB
	path string
	args []string
	env  []string
	out  *output

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{} // closed when cmd has ended
}

func newProcess(t testing.TB, name, path string, args []string) *Process {
	p := &Process{Name: name, t: t, path: path, args: args, out: &output{}}
	p.out.showOnFailure(t, name)
	t.Cleanup(func() { p.Kill() })
	return p
}

// start runs the program; it must not be running.
func (p *Process) start() {
	p.t.Helper()
	cmd := exec.Command(p.path, p.args...)
	cmd.Stdout, cmd.Stderr = p.out, p.out
	cmd.Env = append(os.Environ(), p.env...)
	cmd.WaitDelay = 5 * time.Second
	setDeathSignal(cmd)
	done, started := make(chan struct{}), make(chan error)
	go func() {
		// The kernel sends the death signal when the thread that made the child ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			cmd.Wait()
			close(done)
		}
	}()
	if err := <-started; err != nil {
		p.t.Fatalf("%s: %v", p.Name, err)
	}
	p.mu.Lock()
	p.cmd, p.done = cmd, done
	p.mu.Unlock()
}

func (p *Process) current() (*exec.Cmd, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.done
}

// PID is the process id, of the last one if it has ended.
func (p *Process) PID() int {
	if cmd, _ := p.current(); cmd != nil {
		return cmd.Process.Pid
	}
	return 0
}

// Output is what the process has written so far, standard output and error together.
func (p *Process) Output() string { return p.out.String() }

// HoldOutput reads nothing more of what the process writes, until release: its pipe
// fills, and who writes to it waits.
func (p *Process) HoldOutput() (release func()) {
	p.out.held.Lock()
	return p.out.held.Unlock
}

// Running tells whether the process has been started and has not ended; a paused one is running.
func (p *Process) Running() bool {
	_, done := p.current()
	if done == nil {
		return false
	}
	select {
	case <-done:
		return false
	default:
		return true
	}
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} {
	_, done := p.current()
	return done
}

// Signal sends a signal to the process.
func (p *Process) Signal(sig os.Signal) {
	p.t.Helper()
	cmd, _ := p.current()
	if err := cmd.Process.Signal(sig); err != nil {
		p.t.Errorf("%s: signal %v: %v", p.Name, sig, err)
	}
}

// Kill ends the process as a crash does, paused or not, and waits until it is gone.
func (p *Process) Kill() {
	cmd, done := p.current()
	if cmd == nil {
		return
	}
	cmd.Process.Kill() // an error says that it has ended
	<-done
}

// Term asks the process to end; see Wait.
func (p *Process) Term() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
}

// Pause stops the process until Resume and returns when it stands still. Windows cannot.
func (p *Process) Pause() {
	p.t.Helper()
	p.Signal(stopSignal)
	Eventually(p.t, 5*time.Second, func() bool { return p.stopped() || !p.Running() }, p.Name, " does not stop")
}

// Resume lets a paused process go on.
func (p *Process) Resume() {
	p.t.Helper()
	p.Signal(continueSignal)
}

// Wait waits for the process to end and returns its exit code, -1 when a signal ended it. It fails
// the test when that takes longer.
func (p *Process) Wait(within time.Duration) int {
	p.t.Helper()
	cmd, done := p.current()
	if done == nil {
		p.t.Fatalf("%s has not been started", p.Name)
	}
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		p.t.Fatalf("%s still runs after %v", p.Name, within)
	}
	return cmd.ProcessState.ExitCode()
}

// await polls ready until it returns nil, and fails the test when the process ends before.
func (p *Process) await(within time.Duration, ready func() error) {
	p.t.Helper()
	var err error
	Eventually(p.t, within, func() bool {
		if !p.Running() {
			cmd, _ := p.current()
			p.t.Fatalf("%s ended with code %d before it was ready:\n%s", p.Name, cmd.ProcessState.ExitCode(), p.out)
		}
		err = ready()
		return err == nil
	}, Lazy(func() string { return fmt.Sprintf("%s is not ready: %v\n%s", p.Name, err, p.out) }))
}

// stopped reads the state of the process from the kernel; where that cannot be read, the signal
// that was sent is all there is to know.
func (p *Process) stopped() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		return true
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(rest, "T")
}
