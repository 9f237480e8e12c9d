package main

import (
	"errors"
	"fmt"
)

// Exit codes, the same for every command. They follow sysexits.h where it has a
// name for the case.
const (
	exitOK           = 0
	exitFailed       = 1   // the answer is no, or the command could not do its work
	exitUsage        = 64  // a flag, an argument or their combination is wrong
	exitNoService    = 69  // no NATS, or no lease service on it
	exitService      = 70  // the service answered with an error
	exitWaited       = 75  // the time to wait ran out
	exitNotPermitted = 77  // NATS refused the credentials or a subject
	exitSignal       = 128 // plus the number of the signal that ended the command
)

// exitError is an error that knows its exit code.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string { return e.err.Error() }
func (e *exitError) Unwrap() error { return e.err }

// silentExit is the exit code of a command that was run: it has said itself
// what there is to say.
type silentExit int

func (s silentExit) Error() string { return fmt.Sprintf("the command ended with code %d", int(s)) }

// usagef makes the error of a wrong flag or combination of flags. Its text
// names the flag and the rule.
func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// exitCode is the code of err: 0 without one, its own where it has one.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	var e *exitError
	if errors.As(err, &e) {
		return e.code
	}
	return exitFailed
}
