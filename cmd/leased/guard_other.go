//go:build unix && !linux

package main

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const bootClock = unix.CLOCK_MONOTONIC

const ownProgram = ""

func becomeReaper() {}

func hurry() {}

func sleepUntil(t time.Duration) { time.Sleep(t - bootNow()) }

func childAttr(foreground bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Foreground: foreground}
}

func livesOn(group int) bool { return alive(group) }
