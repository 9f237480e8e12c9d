//go:build unix

package main

import (
	"errors"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// killer kills a process group when its time has come, again and again until it
// is stopped. It has a thread to itself, a real-time one where the system allows
// it: on a busy machine whatever goes through a scheduler comes late.
type killer struct {
	group   int
	at      atomic.Int64 // boot clock
	stopped atomic.Bool
}

func startKiller(group int, at time.Duration) *killer {
	k := &killer{group: group}
	k.set(at)
	go k.run()
	return k
}

// set says when.
func (k *killer) set(at time.Duration) { k.at.Store(int64(at)) }

func (k *killer) stop() { k.stopped.Store(true) }

func (k *killer) run() {
	runtime.LockOSThread() // and never given back: it is not as others
	hurry()
	for !k.stopped.Load() {
		now, at := bootNow(), time.Duration(k.at.Load())
		if now >= at {
			_ = syscall.Kill(-k.group, syscall.SIGKILL)
			at = now + 5*time.Millisecond
		}
		sleepUntil(min(at, now+50*time.Millisecond)) // at may change
	}
}

// alive tells whether a process group has a member, a zombie too.
func alive(group int) bool { return !errors.Is(syscall.Kill(-group, 0), syscall.ESRCH) }

// killGroup kills a process group until nothing of it lives.
func killGroup(group int) {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if errors.Is(syscall.Kill(-group, syscall.SIGKILL), syscall.ESRCH) || !livesOn(group) {
			return
		}
		time.Sleep(pause)
	}
}
