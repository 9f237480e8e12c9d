// Package coalesce makes a connection that writes less often: what is written
// while the process has other work ready goes out in one piece.
//
// nats.go flushes as soon as its flusher runs, which is right after the first
// message of many; with a hundred calls under way that is a system call, or a
// hand-over through an in-process pipe, for each of them, here and again at the
// server, which answers every read with a write. A connection of this package
// lets every goroutine that is ready run once before it writes. Nothing waits
// when nothing is ready.
package coalesce

import (
	"errors"
	"net"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// most is how many bytes wait at most; Write blocks then.
	most = 1 << 20
	// keep bounds the buffers kept between writes.
	keep = 64 << 10
	// farewell is how long Close tries to send what waits.
	farewell = 250 * time.Millisecond
)

// Conn is a net.Conn whose Write returns before the bytes are sent, and whose
// later calls tell if they could not be. Write deadlines are ignored: who uses
// it notices a peer that reads no more by other means, as nats.go does by pings.
type Conn struct {
	net.Conn

	mu      sync.Mutex
	changed sync.Cond // for all three below
	waiting []byte
	err     error // of a write, or net.ErrClosed
	ended   bool  // the writer

	wake chan struct{}
}

// New makes a Conn on top of c, with a goroutine that ends with Close or with
// the first failed write.
func New(c net.Conn) *Conn {
	n := &Conn{Conn: c, wake: make(chan struct{}, 1)}
	n.changed.L = &n.mu
	go n.run()
	return n
}

// Write queues b. It blocks while a lot is queued already.
func (n *Conn) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for n.err == nil && len(n.waiting) > 0 && len(n.waiting)+len(b) > most {
		n.changed.Wait()
	}
	if n.err != nil {
		return 0, n.err
	}
	n.waiting = append(n.waiting, b...)
	n.nudge()
	return len(b), nil
}

func (n *Conn) nudge() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// run writes until Close, or an error.
func (n *Conn) run() {
	var spare []byte
	for range n.wake {
		runtime.Gosched()
		n.mu.Lock()
		out, closed := n.waiting, n.err != nil
		n.waiting = spare[:0]
		n.changed.Broadcast()
		n.mu.Unlock()
		var err error
		if len(out) > 0 {
			_, err = n.Conn.Write(out)
		}
		if spare = out; cap(spare) > keep {
			spare = nil
		}
		if err == nil && !closed {
			continue
		}
		n.mu.Lock()
		if n.err == nil {
			n.err = err
		}
		n.ended = true
		n.changed.Broadcast()
		n.mu.Unlock()
		return
	}
}

// Close sends what waits, for a moment, and closes the connection.
func (n *Conn) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if errors.Is(n.err, net.ErrClosed) {
		return n.Conn.Close()
	}
	if n.err == nil {
		n.err = net.ErrClosed
	}
	_ = n.Conn.SetWriteDeadline(time.Now().Add(farewell))
	n.nudge()
	for !n.ended {
		n.changed.Wait()
	}
	return n.Conn.Close()
}

// SetWriteDeadline does nothing.
func (n *Conn) SetWriteDeadline(time.Time) error { return nil }

// SetDeadline sets the deadline of reads.
func (n *Conn) SetDeadline(t time.Time) error { return n.Conn.SetReadDeadline(t) }

// Dialer is a nats.CustomDialer whose connections coalesce.
type Dialer struct{ net.Dialer }

// Dial implements nats.CustomDialer.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	c, err := d.Dialer.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return New(c), nil
}

// Dial is the option that makes a connection of nats.go coalesce.
func Dial() nats.Option {
	return func(o *nats.Options) error {
		o.CustomDialer = &Dialer{net.Dialer{Timeout: o.Timeout}}
		return nil
	}
}

// InProcess is a server inside this process whose connections coalesce.
type InProcess struct{ nats.InProcessConnProvider }

// InProcessConn implements nats.InProcessConnProvider.
func (p InProcess) InProcessConn() (net.Conn, error) {
	c, err := p.InProcessConnProvider.InProcessConn()
	if err != nil {
		return nil, err
	}
	return New(c), nil
}
