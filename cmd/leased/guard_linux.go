package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const bootClock = unix.CLOCK_BOOTTIME

// ownProgram is the program of this process, also when its file was replaced.
const ownProgram = "/proc/self/exe"

// becomeReaper makes orphans of the command children of this process.
func becomeReaper() { _ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// hurry asks for real time for the calling thread; processes it starts are not
// to have it.
func hurry() {
	_ = unix.SchedSetAttr(0, &unix.SchedAttr{Policy: unix.SCHED_FIFO, Priority: 1, Flags: unix.SCHED_FLAG_RESET_ON_FORK}, 0)
}

// sleepUntil sleeps until t on the boot clock.
func sleepUntil(t time.Duration) {
	ts := unix.NsecToTimespec(int64(t))
	for unix.ClockNanosleep(bootClock, unix.TIMER_ABSTIME, &ts, nil) == unix.EINTR {
	}
}

// childAttr puts the command into a process group of its own, in the foreground
// of the terminal on request, and ties its life to the guard's.
func childAttr(foreground bool) *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Foreground: foreground, Pdeathsig: syscall.SIGKILL}
}

// livesOn tells whether a process group that was killed has a member that is not
// a zombie: one whose parent left the group may never be reaped.
func livesOn(group int) bool {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, stat := range stats {
		text, err := os.ReadFile(stat)
		if err != nil {
			continue // it has ended
		}
		_, after, _ := strings.Cut(string(text[max(0, strings.LastIndexByte(string(text), ')')):]), " ")
		if f := strings.Fields(after); len(f) > 2 && f[2] == strconv.Itoa(group) && f[0] != "Z" && f[0] != "X" {
			return true
		}
	}
	return len(stats) == 0 && alive(group)
}
