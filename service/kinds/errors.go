package kinds

import (
	"errors"
	"fmt"
)

// Error is a failed call: its kind and one sentence for a person. On forward it
// also names the owner that was tried last.
type Error struct {
	Kind Kind
	Text string

	// Holder and Revision name the owner a forward tried last; empty and 0
	// when none was tried and on every other call.
	Holder   string
	Revision uint64

	// Cause is for logs only and never leaves the service.
	Cause error
}

func (e *Error) Error() string { return string(e.Kind) + ": " + e.Text }

func (e *Error) Unwrap() error { return e.Cause }

// Is reports equality of kinds, so that errors.Is(err, &Error{Kind: Lost}) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Kind == e.Kind && t.Text == ""
}

// Errorf makes an Error of kind k. A %w operand becomes its Cause.
func Errorf(k Kind, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: k, Text: err.Error(), Cause: errors.Unwrap(err)}
}

// Of tells the kind of err: its own when it is or wraps an Error, Internal for
// any other error. A nil error has no kind.
func Of(err error) Kind {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Internal
}
