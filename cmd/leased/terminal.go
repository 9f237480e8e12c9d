//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The command is a process group of its own, so what a shell does for its jobs
// has to be done for it: the terminal is handed to it, and ^Z stops both.

// foreground is the process group that the terminal on stdin listens to, 0 if
// stdin is not this session's terminal.
func foreground() int {
	group, err := unix.IoctlGetInt(0, unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return group
}

// wantsTerminal tells whether the command should have the terminal from the
// start. In a pipeline others may need it; the command then gets it when it
// asks (see stopped).
func wantsTerminal() bool {
	_, err := unix.IoctlGetInt(1, unix.TIOCGPGRP)
	return err == nil && foreground() == unix.Getpgrp()
}

// handTerminal makes to the terminal's foreground, if from is.
func handTerminal(from, to int) {
	if from == 0 || foreground() != from {
		return
	}
	signal.Ignore(syscall.SIGTTOU) // we may be in the background
	defer signal.Reset(syscall.SIGTTOU)
	_ = unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, to)
}

// stopped is called when the terminal stopped the command: because it used the
// terminal without having it, which can be helped if it is ours to give, or
// because the user wants it stopped, and then this process stops with it, until
// the shell lets both go on. The lease goes on only if that is soon.
func stopped(group int, s syscall.Signal) {
	own := unix.Getpgrp()
	if s == syscall.SIGTSTP || foreground() != own {
		handTerminal(group, own)
		resumed := make(chan os.Signal, 1)
		signal.Notify(resumed, syscall.SIGCONT)
		_ = syscall.Kill(0, s)
		select {
		case <-resumed:
		case <-time.After(100 * time.Millisecond): // nobody could let us go on, so the kernel did not stop us
		}
		signal.Stop(resumed)
	}
	handTerminal(own, group)
}
