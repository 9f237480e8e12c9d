package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

const bootClock = unix.CLOCK_BOOTTIME

// becomeReaper makes orphans of the command children of this process.
func becomeReaper() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// childAttr puts the command into a process group of its own, in the foreground
// if there is a terminal, and ties its life to the guard's.
func childAttr(terminal bool) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if terminal {
		a.Foreground, a.Ctty = true, 0
	}
	return a
}

// guardAttr keeps the guard out of reach of what is sent to the wrapper's group.
func guardAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
