package coalesce

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counting counts the writes below.
type counting struct {
	net.Conn
	writes atomic.Int64
}

func (c *counting) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

// TestOrder: whatever is written arrives whole and in order, in fewer writes.
func TestOrder(t *testing.T) {
	near, far := net.Pipe()
	below := &counting{Conn: near}
	c := New(below)
	var got bytes.Buffer
	var read sync.WaitGroup
	read.Go(func() { _, _ = io.Copy(&got, far) })
	var want bytes.Buffer
	for i := range 20_000 {
		line := bytes.Repeat([]byte{byte('a' + i%26)}, 1+i%97)
		want.Write(line)
		if n, err := c.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	read.Wait()
	if !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Fatalf("%d bytes arrived, %d were written, or in another order", got.Len(), want.Len())
	}
	t.Logf("20000 writes went out as %d", below.writes.Load())
	if below.writes.Load() > 19_000 {
		t.Error("nothing was coalesced")
	}
	if _, err := c.Write([]byte("late")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write after Close: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestPeerGone: a peer that closed makes later writes fail, and Close returns.
func TestPeerGone(t *testing.T) {
	near, far := net.Pipe()
	c := New(near)
	far.Close()
	var err error
	for deadline := time.Now().Add(5 * time.Second); err == nil && time.Now().Before(deadline); {
		_, err = c.Write([]byte("x"))
	}
	if !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// TestPeerSilent: a peer that reads nothing blocks writes once a lot waits, and
// neither them nor Close for ever.
func TestPeerSilent(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	c := New(near)
	blocked := make(chan error, 1)
	go func() {
		for {
			if _, err := c.Write(make([]byte, 64<<10)); err != nil {
				blocked <- err
				return
			}
		}
	}()
	select {
	case err := <-blocked:
		t.Fatal(err)
	case <-time.After(100 * time.Millisecond):
	}
	began := time.Now()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
	if err := <-blocked; !errors.Is(err, net.ErrClosed) {
		t.Errorf("the blocked write got %v", err)
	}
}

// TestLarge: one write may be larger than the limit.
func TestLarge(t *testing.T) {
	near, far := net.Pipe()
	c := New(near)
	var read sync.WaitGroup
	var n int64
	read.Go(func() { n, _ = io.Copy(io.Discard, far) })
	for range 3 {
		if _, err := c.Write(make([]byte, 2*most)); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	read.Wait()
	if n != 6*most {
		t.Errorf("%d bytes arrived", n)
	}
}

// TestAlone: after a silence a write is done when Write returns; a peer that takes
// it piecemeal gets it whole and in order all the same, and holds nobody up.
func TestAlone(t *testing.T) {
	near, far := net.Pipe()
	below := &counting{Conn: near}
	c := New(below)
	slow := make(chan bool)
	var got bytes.Buffer
	var read sync.WaitGroup
	read.Go(func() {
		piece := make([]byte, 700)
		for {
			select {
			case <-slow:
				time.Sleep(500 * time.Microsecond) // so slow is the peer
			default:
			}
			n, err := far.Read(piece)
			got.Write(piece[:n])
			if err != nil {
				return
			}
		}
	})
	var want bytes.Buffer
	for i := range int64(5) {
		line := bytes.Repeat([]byte{byte('a' + i)}, 100)
		want.Write(line)
		time.Sleep(2 * silence)
		if n, err := c.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
		if n := below.writes.Load(); n != i+1 {
			t.Fatalf("%d writes below after %d", n, i+1)
		}
	}
	close(slow)
	for i := range 10 {
		line := bytes.Repeat([]byte{byte('k' + i)}, 10_000)
		want.Write(line)
		time.Sleep(2 * silence)
		began := time.Now()
		if n, err := c.Write(line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
		if took := time.Since(began); took > time.Second {
			t.Errorf("a write took %v", took)
		}
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	read.Wait()
	if !bytes.Equal(got.Bytes(), want.Bytes()) {
		t.Fatalf("%d bytes arrived of %d, or in another order", got.Len(), want.Len())
	}
}
