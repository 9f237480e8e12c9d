package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// socksServer is a SOCKS5 proxy that leads every connection to one server.
type socksServer struct {
	net.Listener
	to string

	mu    sync.Mutex
	asked []string // for which addresses
}

func startSocks(t *testing.T, to string) *socksServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &socksServer{Listener: l, to: to}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go s.serve(c)
		}
	}()
	return s
}

func (s *socksServer) serve(c net.Conn) {
	defer c.Close()
	head := make([]byte, 2)
	if _, err := io.ReadFull(c, head); err != nil { // version, count of methods
		return
	}
	_, _ = io.CopyN(io.Discard, c, int64(head[1]))
	_, _ = c.Write([]byte{5, 0}) // nobody has to say who he is
	request := make([]byte, 4+4+2)
	if _, err := io.ReadFull(c, request); err != nil || request[3] != 1 { // IPv4
		return
	}
	s.mu.Lock()
	s.asked = append(s.asked, fmt.Sprintf("%v:%d", net.IP(request[4:8]), binary.BigEndian.Uint16(request[8:])))
	s.mu.Unlock()
	to, err := net.Dial("tcp", s.to)
	if err != nil {
		return
	}
	defer to.Close()
	_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	go func() { _, _ = io.Copy(to, c); to.Close() }()
	_, _ = io.Copy(c, to)
}

// TestSocksProxy: what a context says of a proxy counts for serve and for the commands that
// ask: the address in it is one that only the proxy knows.
func TestSocksProxy(t *testing.T) {
	const nowhere = "192.0.2.1:4222"
	s := startSocks(t, startNATS(t, "").Addr().String())
	file := writeFile(t, "proxied.json", fmt.Sprintf(`{"url":"nats://%s","socks_proxy":"socks5://%s"}`, nowhere, s.Addr()))
	p := start(t, cleanEnv(t), beside("--context", file)...)
	if got := p.serving(); !got.Ready {
		t.Errorf("%+v", got)
	}
	if stdout, stderr, code := runs(t, cleanEnv(t), "acquire", "k", "--context", file); code != 0 {
		t.Error(stdout, stderr)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.asked); n < 4 || slices.ContainsFunc(s.asked, func(a string) bool { return a != nowhere }) {
		t.Errorf("the proxy was asked for %v", s.asked)
	}
}

// TestSilentSocksProxy: a proxy that takes connections and never says a word keeps nobody
// waiting for ever, and one that is none is a mistake of the command line.
func TestSilentSocksProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	file := writeFile(t, "silent.json", fmt.Sprintf(`{"url":"nats://192.0.2.1:4222","socks_proxy":"socks5://%s"}`, l.Addr()))
	p := start(t, cleanEnv(t), beside("--context", file, "--timeout", "300ms")...)
	if got := p.serving(); got.Connected {
		t.Errorf("%+v", got)
	}
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if _, stderr, code := runs(t, cleanEnv(t), "owner", "k", "--context", file, "--timeout", "300ms"); code != exitNoService {
		t.Error(code, stderr)
	}
	for _, by := range []string{"127.0.0.1:1080", "http://127.0.0.1:1080", "socks5://", "socks5://u:secret@[:1"} {
		file := writeFile(t, "wrong.json", fmt.Sprintf(`{"url":"nats://192.0.2.1:4222","socks_proxy":%q}`, by))
		_, stderr, code := runs(t, cleanEnv(t), "serve", "--context", file)
		if code != exitUsage || !strings.Contains(stderr, "socks_proxy of the context: must be socks5://HOST:PORT") || strings.Contains(stderr, "secret") {
			t.Errorf("%s: %d %s", by, code, stderr)
		}
	}
}
