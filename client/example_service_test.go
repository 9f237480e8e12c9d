package client_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/nats-io/nats.go"
)

// stage lets examples, which have no testing.TB, use testnats.
type stage struct {
	testing.TB // nil: what is not below is not for examples
	cleanups   []func()
	ctx        context.Context
}

func (s *stage) Helper()                           {}
func (s *stage) Name() string                      { return "example" }
func (s *stage) Failed() bool                      { return false }
func (s *stage) Skipped() bool                     { return false }
func (s *stage) Log(...any)                        {}
func (s *stage) Logf(string, ...any)               {}
func (s *stage) Cleanup(f func())                  { s.cleanups = append(s.cleanups, f) }
func (s *stage) Context() context.Context          { return s.ctx }
func (s *stage) Fatal(args ...any)                 { panic(fmt.Sprintln(args...)) }
func (s *stage) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (s *stage) Error(args ...any)                 { s.Fatal(args...) }
func (s *stage) Errorf(format string, args ...any) { s.Fatalf(format, args...) }

func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		panic(err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// serviceForExample starts the lease service and connects to its NATS server.
func serviceForExample() (nc *nats.Conn, done func()) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &stage{ctx: ctx}
	service := testnats.Leased(s, "serve", "--nats-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--store-dir="+s.TempDir())
	nc = testnats.Connect(s, service.NATS())
	return nc, func() {
		cancel()
		for i := len(s.cleanups) - 1; i >= 0; i-- {
			s.cleanups[i]()
		}
	}
}

// eventually waits until f holds, and says so if it never does.
func eventually(f func() bool) {
	for range 1000 {
		if f() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	fmt.Println("it never came to that")
}
