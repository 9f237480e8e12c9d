// Package testnats gives tests real parts: NATS servers and clusters inside the test process,
// nats-server and leased as child processes that can be killed and paused, TCP relays that cut,
// stall, delay and drop, and the command line tools.
//
// Everything takes a testing.TB, ends with the test, listens on loopback only and leaves no
// goroutine and no process. What a server wrote to its log is shown when the test fails.
package testnats

import (
	"fmt"
	"testing"
	"time"
)

// Eventually polls cond until it is true and fails the test when it is not so within that time.
// What else is given is printed then, as fmt.Sprint does; see Lazy.
func Eventually(t testing.TB, within time.Duration, cond func() bool, what ...any) {
	t.Helper()
	deadline := time.Now().Add(within)
	for wait := time.Millisecond; !cond(); wait = min(2*wait, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so within %v: %s", within, fmt.Sprint(what...))
		}
		time.Sleep(wait)
	}
}

// Lazy is text that is made when it is printed.
type Lazy func() string

func (l Lazy) String() string { return l() }
