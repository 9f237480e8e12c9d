//go:build unix

package client

import (
	"os"
	"syscall"
	"testing"
)

func pause(t *testing.T, p *os.Process)  { send(t, p, syscall.SIGSTOP) }
func resume(t *testing.T, p *os.Process) { send(t, p, syscall.SIGCONT) }

func send(t *testing.T, p *os.Process, s syscall.Signal) {
	t.Helper()
	if err := p.Signal(s); err != nil {
		t.Fatal(err)
	}
}
