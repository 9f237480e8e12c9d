// Package coalesce makes a connection that writes less often: what is written
// while the process has other work ready goes out in one piece.
//
// nats.go flushes as soon as its flusher runs, which is right after the first
// message of many; with a hundred calls under way that is a system call, or a
// hand-over through an in-process pipe, for each of them, here and again at the
// server, which answers every read with a write. A connection of this package
// lets every goroutine that is ready run once before it writes. Nothing waits
// when nothing is ready, and what comes after a silence is written at once, without
// another goroutine.
package coalesce

import (
	"errors"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// most is how many bytes wait at most; Write blocks then.
	most = 1 << 20
	// keep bounds the buffers kept between writes.
	keep = 64 << 10
	// silence is how long nothing was written before a write that is alone, and
	// alone how long that may hold its caller up.
	silence = 100 * time.Microsecond
	alone   = time.Millisecond
	// farewell is how long Close tries to send what waits.
	farewell = 250 * time.Millisecond
)

// Conn is a net.Conn whose Write returns before the bytes are sent, and whose
// later calls tell if they could not be. Write deadlines are ignored: who uses
// it notices a peer that reads no more by other means, as nats.go does by pings.
type Conn struct {
	net.Conn

	mu      sync.Mutex
	changed sync.Cond // for waiting, err and ended
	waiting []byte
	writing bool      // a write below is under way
	last    time.Time // its end, of the last one
	err     error     // of a write, or net.ErrClosed
	ended   bool      // the writer

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

// Write queues b, or writes it if nothing was written for a while. It blocks while
// a lot is queued already.
func (n *Conn) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for n.err == nil && len(n.waiting) > 0 && len(n.waiting)+len(b) > most {
		n.changed.Wait()
	}
	if n.err != nil {
		return 0, n.err
	}
	if n.writing || len(n.waiting) > 0 || time.Since(n.last) < silence {
		n.waiting = append(n.waiting, b...)
		n.nudge()
		return len(b), nil
	}
	if err := n.writeAlone(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// writeAlone writes b, or as much of it as the peer takes at once, and queues the
// rest. n.mu is held, but not while it writes.
func (n *Conn) writeAlone(b []byte) error {
	n.writing = true
	_ = n.Conn.SetWriteDeadline(time.Now().Add(alone))
	n.mu.Unlock()
	sent, err := n.Conn.Write(b)
	n.mu.Lock()
	n.writing, n.last = false, time.Now()
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = nil
		n.waiting = append(slices.Clone(b[sent:]), n.waiting...)
	}
	if n.err == nil {
		_ = n.Conn.SetWriteDeadline(time.Time{}) // Close has one of its own
		n.err = err
	}
	if len(n.waiting) > 0 || n.err != nil {
		n.nudge()
	}
	return err
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
		if n.writing { // and nudges when it is done
			n.mu.Unlock()
			continue
		}
		out, closed := n.waiting, n.err != nil
		n.waiting, n.writing = spare[:0], true
		n.changed.Broadcast()
		n.mu.Unlock()
		var err error
		if len(out) > 0 {
			_, err = n.Conn.Write(out)
		}
		if spare = out; cap(spare) > keep {
			spare = nil
		}
		n.mu.Lock()
		n.writing, n.last = false, time.Now()
		if n.err == nil {
			n.err = err
		}
		n.ended = err != nil || closed
		n.changed.Broadcast()
		ended := n.ended
		n.mu.Unlock()
		if ended {
			return
		}
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
type Dialer struct{ nats.CustomDialer }

// Dial implements nats.CustomDialer.
func (d *Dialer) Dial(network, address string) (net.Conn, error) {
	c, err := d.CustomDialer.Dial(network, address)
	if err != nil {
		return nil, err
	}
	return New(c), nil
}

// Dial is the option that makes a connection of nats.go coalesce. It comes after one that
// sets a dialer of its own, which it goes on to use.
func Dial() nats.Option {
	return func(o *nats.Options) error {
		if o.CustomDialer == nil {
			o.CustomDialer = &net.Dialer{Timeout: o.Timeout}
		}
		o.CustomDialer = &Dialer{o.CustomDialer}
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
