//go:build unix && !linux

package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

const bootClock = unix.CLOCK_MONOTONIC

const ownProgram = ""

func becomeReaper() {}

func childAttr(foreground bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Foreground: foreground}
}

func livesOn(group int) bool { return alive(group) }
