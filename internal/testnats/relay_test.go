package testnats

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, ServersOwn()) }

// echo is a TCP server that sends back what it gets.
func echo(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
			}()
		}
	}()
	t.Cleanup(func() { ln.Close(); <-done })
	return ln.Addr().String()
}

func dial(t *testing.T, l *Link) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// receive reads n bytes, or what comes within the time.
func receive(c net.Conn, n int, within time.Duration) (string, error) {
	c.SetReadDeadline(time.Now().Add(within))
	buf := make([]byte, n)
	got, err := io.ReadFull(c, buf)
	return string(buf[:got]), err
}

func expect(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if got, err := receive(c, len(want), 5*time.Second); err != nil || got != want {
		t.Fatalf("received %q, %v; want %q", got, err, want)
	}
}

func expectSilence(t *testing.T, c net.Conn) {
	t.Helper()
	if got, err := receive(c, 1, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("received %q, %v; want an open and silent connection", got, err)
	}
}

func expectClosed(t *testing.T, c net.Conn) {
	t.Helper()
	if got, err := receive(c, 1, 5*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("received %q, %v; want a closed connection", got, err)
	}
}

func TestRelayModes(t *testing.T) {
	l := Relay(t, echo(t))
	c := dial(t, l)
	send(t, c, "one")
	expect(t, c, "one")

	l.Set(Stall)
	send(t, c, "two")
	expectSilence(t, c)
	l.Set(Pass)
	expect(t, c, "two")

	l.Set(Blackhole)
	send(t, c, "three")
	expectSilence(t, c)
	late := dial(t, l) // made in the dark: it lost nothing yet
	send(t, late, "late")
	expectSilence(t, late)
	l.Set(Pass)
	expectClosed(t, c)
	expect(t, late, "late")

	l.Set(Cut)
	expectClosed(t, late)
	if c, err := net.Dial("tcp", l.Addr()); err == nil { // the reset may come that early
		expectClosed(t, c)
		c.Close()
	}
	l.Set(Pass)
	c = dial(t, l)
	send(t, c, "four")
	expect(t, c, "four")
	Eventually(t, 5*time.Second, func() bool { return l.Conns() == 1 })
	l.CloseConns()
	expectClosed(t, c)
	Eventually(t, 5*time.Second, func() bool { return l.Conns() == 0 })
}

func TestRelayOneWay(t *testing.T) {
	l := Relay(t, echo(t))
	for _, dir := range []Direction{Up, Down} {
		for _, mode := range []Mode{Stall, Blackhole} {
			c := dial(t, l)
			send(t, c, "a")
			expect(t, c, "a")
			l.Set(mode, dir)
			send(t, c, "b")
			expectSilence(t, c)
			l.Set(Pass, 1-dir) // the other way was open all along
			expectSilence(t, c)
			l.Set(Pass, dir)
			if mode == Stall {
				expect(t, c, "b")
			} else {
				expectClosed(t, c)
			}
		}
	}
}

// TestRelayHidesTheEnd: who is cut off does not learn that the other side has gone.
func TestRelayHidesTheEnd(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for _, mode := range []Mode{Stall, Blackhole} {
		l := Relay(t, ln.Addr().String())
		c := dial(t, l)
		server, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		l.Set(mode)
		c.Close()
		expectSilence(t, server)
		send(t, server, "are you there")
		expectSilence(t, server)
		l.Set(Pass)
		expectClosed(t, server)
		server.Close()
	}
}

func TestRelayDelayAndSlice(t *testing.T) {
	l := Relay(t, echo(t))
	c := dial(t, l)
	const delay = 40 * time.Millisecond
	l.Delay(delay, 0)
	start := time.Now()
	send(t, c, "x")
	expect(t, c, "x")
	if took := time.Since(start); took < 2*delay {
		t.Errorf("there and back took %v with %v each way", took, delay)
	}
	l.Delay(delay, 0, Down)
	l.Delay(0, 0, Up)
	start = time.Now()
	send(t, c, "x")
	expect(t, c, "x")
	if took := time.Since(start); took < delay {
		t.Errorf("there and back took %v with %v one way", took, delay)
	}

	// A delay is no limit on the rate: much that is sent at once arrives in order after one delay.
	l.Delay(5*time.Millisecond, 5*time.Millisecond)
	want := bytes.Repeat([]byte("0123456789"), 100_000)
	go c.Write(want)
	got, err := receive(c, len(want), 20*time.Second)
	if err != nil || got != string(want) {
		t.Errorf("a megabyte over a jittery link: %d of %d bytes in order, %v", len(got), len(want), err)
	}

	l.Delay(0, 0)
	l.Slice(1, time.Millisecond, Down)
	send(t, c, "0123456789")
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 10)
	if n, err := c.Read(buf); err != nil || n >= 10 {
		t.Errorf("sliced into bytes, %d came at once (%v)", n, err)
	} else if _, err := io.ReadFull(c, buf[n:]); err != nil || string(buf) != "0123456789" {
		t.Errorf("the slices make %q (%v)", buf, err)
	}
}

// TestDropNext loses exactly the acknowledgement of one stored message.
func TestDropNext(t *testing.T) {
	s := Server(t)
	js, err := jetstream.New(s.Connect())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	l := Relay(t, s.URL)
	for _, then := range []Mode{Pass, Cut} {
		nc := Connect(t, l.URL())
		sub, err := nc.SubscribeSync("news")
		if err != nil {
			t.Fatal(err)
		}
		publish := func(within time.Duration) error {
			_, err := nc.Request("s", bytes.Repeat([]byte("x"), 100_000), within)
			return err
		}
		if err := publish(5 * time.Second); err != nil {
			t.Fatal(err)
		}
		before := stored(t, js)
		dropped := l.DropNext(PubAck("S"), then)
		news := s.Connect()
		if err := news.Publish("news", []byte("before")); err != nil {
			t.Fatal(err)
		}
		if _, err := sub.NextMsg(5 * time.Second); err != nil {
			t.Fatalf("a message that does not match: %v", err)
		}
		if err := publish(300 * time.Millisecond); err == nil {
			t.Fatal("the acknowledgement came all the same")
		}
		if frame := <-dropped; !bytes.HasPrefix(frame, []byte("MSG _INBOX.")) || !bytes.HasSuffix(frame, []byte("}\r\n")) {
			t.Errorf("dropped %q", frame)
		}
		if n := stored(t, js); n != before+1 {
			t.Errorf("%d messages stored by the publish without acknowledgement, want 1", n-before)
		}
		if then == Cut {
			Eventually(t, 5*time.Second, func() bool { return !nc.IsConnected() })
			l.Set(Pass)
			Eventually(t, 5*time.Second, nc.IsConnected)
		}
		if err := publish(5 * time.Second); err != nil {
			t.Errorf("the publish after: %v", err)
		}
		if nc.Statistics.Reconnects != 0 && then == Pass {
			t.Error("the connection did not outlive the drop")
		}
	}
}

func stored(t *testing.T, js jetstream.JetStream) uint64 {
	t.Helper()
	s, err := js.Stream(t.Context(), "S")
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

// TestSplitter feeds a stream of protocol messages in pieces of every size.
func TestSplitter(t *testing.T) {
	frames := []string{
		"INFO {\"a\":1}\r\n", "PONG\r\n", "+OK\r\n", "-ERR 'x'\r\n",
		"MSG a 1 0\r\n\r\n", "MSG a 1 _INBOX.r 14\r\nPING\r\nMSG a 1\n\r\n", "HMSG b 2 12 17\r\nNATS/1.0\r\n\r\nhello\r\n", "PING\r\n",
	}
	all := []byte("")
	for _, f := range frames {
		all = append(all, f...)
	}
	for size := 1; size <= len(all); size++ {
		for omit := -1; omit < len(frames); omit++ {
			seen, out, want := 0, "", ""
			for i, f := range frames {
				if i != omit {
					want += f
				}
			}
			var s splitter
			for rest := all; len(rest) > 0; {
				n := min(size, len(rest))
				for _, c := range s.feed(rest[:n], func(frame []byte) (Mode, bool) {
					if string(frame) != frames[seen] {
						t.Fatalf("size %d: message %d is %q, want %q", size, seen, frame, frames[seen])
					}
					seen++
					return Pass, seen-1 == omit
				}) {
					out += string(c.data)
				}
				rest = rest[n:]
			}
			if out != want {
				t.Fatalf("size %d without message %d: %q, want %q", size, omit, out, want)
			}
		}
	}
	// What is not the text protocol passes as it comes.
	var s splitter
	for _, part := range []string{"\x16\x03\x01\x02", "MSG \xff\x00"} {
		var out []byte
		for _, c := range s.feed([]byte(part), func([]byte) (Mode, bool) { return Pass, true }) {
			out = append(out, c.data...)
		}
		if string(out) != part {
			t.Errorf("%q became %q", part, out)
		}
	}
}

// TestRelayUnderLoad: what NATS sends through a relay arrives whole.
func TestRelayUnderLoad(t *testing.T) {
	s := Server(t)
	nc := Connect(t, Relay(t, s.URL).URL())
	const n = 20_000
	sub, err := nc.SubscribeSync("load")
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := nc.PublishMsg(&nats.Msg{Subject: "load", Data: make([]byte, i%2000), Header: nats.Header{"A": {"b"}}}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		m, err := sub.NextMsg(10 * time.Second)
		if err != nil || len(m.Data) != i%2000 {
			t.Fatalf("message %d: %v", i, err)
		}
	}
}
