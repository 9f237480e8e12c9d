//go:build unix

package main

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/leased/leased/client"
)

// TestOutageIsNotAFlood: errors that are retried ten times a second are told every
// few seconds.
func TestOutageIsNotAFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out lockedBuffer
		w := &wrapper{log: out.logger(), complaints: rate.Sometimes{Interval: complainEvery}}
		for range 600 {
			w.complain(errors.New("away"))
			time.Sleep(100 * time.Millisecond)
		}
		if n := strings.Count(out.String(), "away"); n != 12 {
			t.Errorf("%d lines in a minute, want 12", n)
		}
	})
}

// TestWaitingNamesTheHolderOnce: a waiter looks every second; who has the key is said
// when it is news.
func TestWaitingNamesTheHolderOnce(t *testing.T) {
	var out lockedBuffer
	w := &wrapper{log: out.logger()}
	say := w.waitsFor()
	for _, holder := range []string{"a", "a", "a", "b", "b", "a"} {
		say(client.Lease{Holder: holder, Left: time.Second})
	}
	var told []string
	for line := range strings.Lines(out.String()) {
		_, rest, _ := strings.Cut(line, `"holder":"`)
		told = append(told, rest[:1])
	}
	if got := strings.Join(told, ""); got != "aba" {
		t.Errorf("told of %s, want aba:\n%s", got, out.String())
	}
}
