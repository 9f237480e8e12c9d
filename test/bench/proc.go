//go:build linux

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// A child is a server process of a contestant.
type child struct {
	name string // what kind of process: "nats", "leased", "etcd", ...
	cmd  *exec.Cmd
	log  string // file with what it printed
	done chan struct{}
}

// A nursery starts children that die with this process: the kernel sends
// SIGKILL when the thread that forked them ends, so they are all forked by one
// thread that lives as long as the program.
type nursery struct {
	starts chan func()
}

func newNursery() *nursery {
	n := &nursery{starts: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range n.starts {
			f()
		}
	}()
	return n
}

// end lets the thread go, and with it whatever child is left.
func (n *nursery) end() { close(n.starts) }

// start runs bin and keeps what it prints in dir.
func (n *nursery) start(dir, name, bin string, args ...string) (*child, error) {
	log, err := os.CreateTemp(dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(bin, args...)
	cmd.Dir = dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	n.starts <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	c := &child{name: name, cmd: cmd, log: log.Name(), done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(c.done)
	}()
	return c, nil
}

// stop asks the child to leave and, after five seconds, makes it.
func (c *child) stop() {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.done:
	case <-time.After(5 * time.Second):
		_ = c.cmd.Process.Kill()
		<-c.done
	}
}

// wait polls ready until it returns nil, the child dies or the time is over.
func (c *child) wait(ctx context.Context, limit time.Duration, ready func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-c.done:
			return fmt.Errorf("%s ended at its start: %s", c.name, c.tail())
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w: %s", c.name, err, c.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// tail is the end of what the child printed.
func (c *child) tail() string {
	b, err := os.ReadFile(c.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-600):])
}

// stopAll ends all children, the last started first.
func stopAll(cs []*child) {
	for i := len(cs) - 1; i >= 0; i-- {
		cs[i].stop()
	}
}

type use struct {
	cpu time.Duration
	rss int64
}

// usage reads what each child has used so far; a dead child has used nothing.
func usage(cs []*child) []use {
	out := make([]use, len(cs))
	for i, c := range cs {
		if u, err := usageOf(c.cmd.Process.Pid); err == nil {
			out[i] = u
		}
	}
	return out
}

// clockTick is the unit of the times in /proc/PID/stat: USER_HZ, 100 a second
// on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

func usageOf(pid int) (use, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return use{}, err
	}
	return parseStat(b)
}

// parseStat reads user and system time and the resident pages of a
// /proc/PID/stat line. The command name may hold spaces and parentheses, so
// fields are counted after the last one.
func parseStat(b []byte) (use, error) {
	end := bytes.LastIndexByte(b, ')')
	fields := bytes.Fields(b[end+1:])
	if end < 0 || len(fields) < 22 {
		return use{}, errors.New("not a /proc/PID/stat line")
	}
	number := func(i int) int64 {
		n, _ := strconv.ParseInt(string(fields[i]), 10, 64)
		return n
	}
	return use{
		cpu: time.Duration(number(11)+number(12)) * clockTick,
		rss: number(21) * int64(os.Getpagesize()),
	}, nil
}

// selfCPU is what this process has used so far.
func selfCPU() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// machineCPU is what all processes of the machine have used so far.
func machineCPU() time.Duration {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	return parseMachine(b)
}

// parseMachine adds up the first line of /proc/stat but for the idle times
// (fields 4 and 5) and the guests', which user time has in it.
func parseMachine(b []byte) time.Duration {
	line, _, _ := bytes.Cut(b, []byte{'\n'})
	var busy time.Duration
	for i, f := range bytes.Fields(line) {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err == nil && i != 4 && i != 5 && i < 9 {
			busy += time.Duration(n) * clockTick
		}
	}
	return busy
}

// goBuild compiles pkg of this module into dir and returns the binary's path.
func goBuild(ctx context.Context, dir, name, pkg string) (string, error) {
	bin := filepath.Join(dir, name)
	out, err := exec.CommandContext(ctx, "go", "build", "-o", bin, pkg).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build %s: %w: %s", pkg, err, out)
	}
	return bin, nil
}
