//go:build unix && !linux

package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

const bootClock = unix.CLOCK_MONOTONIC

func becomeReaper() {}

func childAttr(terminal bool) *syscall.SysProcAttr {
	a := &syscall.SysProcAttr{Setpgid: true}
	if terminal {
		a.Foreground, a.Ctty = true, 0
	}
	return a
}

func guardAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
