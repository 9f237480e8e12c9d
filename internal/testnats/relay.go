package testnats

import (
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Mode is what a Link does with bytes.
type Mode int

const (
	// Pass hands every byte on.
	Pass Mode = iota
	// Stall keeps bytes back until the mode changes and delivers them then, as TCP does over a
	// short outage. What was sent meanwhile lands late.
	Stall
	// Blackhole reads and drops. Connections stay open and silent, and one that lost bytes is reset
	// when the mode ends, as its stream cannot be continued.
	Blackhole
	// Cut resets all connections, and each new one at once.
	Cut
)

// Direction is the way bytes go through a Link.
type Direction int

const (
	Up   Direction = iota // from who dialed to the target
	Down                  // from the target back
)

// Link is a relay for TCP connections to one target. While it stalls or swallows either direction
// it makes no new connection to the target, and does not tell one side that the other has gone.
type Link struct {
	target string
	frames bool // understand the NATS protocol on the way down
	ln     net.Listener
	wg     sync.WaitGroup
	armed  atomic.Int32

	mu      sync.Mutex
	closed  bool
	changed chan struct{} // closed and replaced when a mode changes
	dirs    [2]shape
	pairs   map[*pair]struct{}
	drops   []*drop
}

type shape struct {
	mode          Mode
	delay, jitter time.Duration
	slice         int
	gap           time.Duration
}

type drop struct {
	match func([]byte) bool
	then  Mode
	got   chan []byte
}

// pair is one relayed connection.
type pair struct {
	client, server *net.TCPConn // server is nil until dialed
	lost           [2]bool      // bytes of that direction were dropped
	done           chan struct{}
	once           sync.Once
}

// chunk is what travels from the reader of a direction to its writer.
type chunk struct {
	data []byte
	due  time.Time
	then Mode // to set after data, when mark is set
	mark bool
	eof  bool
}

// Relay listens on loopback and relays to target, a host:port or a nats:// URL of one.
func Relay(t testing.TB, target string) *Link {
	t.Helper()
	return newLink(t, target, true)
}

func newLink(t testing.TB, target string, frames bool) *Link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{
		target:  strings.TrimPrefix(target, "nats://"),
		frames:  frames,
		ln:      ln,
		changed: make(chan struct{}),
		pairs:   map[*pair]struct{}{},
	}
	l.wg.Go(l.accept)
	t.Cleanup(l.close)
	return l
}

// Addr is the host:port to dial.
func (l *Link) Addr() string { return l.ln.Addr().String() }

// URL is the same as a NATS URL.
func (l *Link) URL() string { return "nats://" + l.Addr() }

// Conns is the number of connections that are open.
func (l *Link) Conns() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.pairs)
}

// Set changes the mode of the directions, of both when none is named. Cut is always for both.
func (l *Link) Set(m Mode, dirs ...Direction) {
	if m == Cut {
		dirs = nil
	}
	l.change(dirs, func(d Direction, s *shape) {
		if s.mode == Blackhole && m != Blackhole {
			for p := range l.pairs {
				if p.lost[d] {
					p.close(true)
				}
			}
		}
		s.mode = m
	})
	if m == Cut {
		l.CloseConns()
	}
}

// Delay holds bytes back for d, plus or minus a random part of up to jitter, without reordering.
func (l *Link) Delay(d, jitter time.Duration, dirs ...Direction) {
	l.change(dirs, func(_ Direction, s *shape) { s.delay, s.jitter = d, jitter })
}

// Slice writes at most n bytes at a time with a pause between; n = 0 ends that.
func (l *Link) Slice(n int, pause time.Duration, dirs ...Direction) {
	l.change(dirs, func(_ Direction, s *shape) { s.slice, s.gap = n, pause })
}

// CloseConns resets the connections that are open now.
func (l *Link) CloseConns() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for p := range l.pairs {
		p.close(true)
	}
}

// DropNext drops the first message from server to client that match is true for, and only that; it
// then sets the mode then (Pass: go on as if nothing had happened). The channel gives the
// message, protocol line and all, once it is dropped. match sees whole protocol messages,
// such as "MSG _INBOX.x 1 2\r\n{}\r\n", in plain text connections to NATS only, and must not use
// the Link.
func (l *Link) DropNext(match func(frame []byte) bool, then Mode) <-chan []byte {
	d := &drop{match, then, make(chan []byte, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drops = append(l.drops, d)
	l.armed.Add(1)
	return d.got
}

func (l *Link) change(dirs []Direction, f func(Direction, *shape)) {
	if len(dirs) == 0 {
		dirs = []Direction{Up, Down}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, d := range dirs {
		f(d, &l.dirs[d])
	}
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Link) mode(d Direction) Mode {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dirs[d].mode
}

func (l *Link) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.ln.Close()
	l.CloseConns()
	l.wg.Wait()
}

func (l *Link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return
		}
		p := &pair{client: c.(*net.TCPConn), done: make(chan struct{})}
		l.mu.Lock()
		if l.closed || l.dirs[Up].mode == Cut {
			p.close(true)
		} else {
			l.pairs[p] = struct{}{}
			l.wg.Go(func() { l.relay(p) })
		}
		l.mu.Unlock()
	}
}

func (l *Link) relay(p *pair) {
	defer func() {
		p.close(true)
		l.mu.Lock()
		delete(l.pairs, p)
		l.mu.Unlock()
	}()
	if !l.open(p, Up, Down) {
		return
	}
	c, err := net.DialTimeout("tcp", l.target, 5*time.Second)
	if err != nil {
		return
	}
	l.mu.Lock()
	p.server = c.(*net.TCPConn)
	l.mu.Unlock()
	select {
	case <-p.done: // closed while dialing, so that close did not see the server side
		p.server.Close()
		return
	default:
	}
	var wg sync.WaitGroup
	wg.Go(func() { l.pump(p, Up, p.client, p.server) })
	wg.Go(func() { l.pump(p, Down, p.server, p.client) })
	wg.Wait()
}

// close ends both sides; with reset what was not delivered yet is thrown away. The mutex of the
// link must be held, or server must not change any more.
func (p *pair) close(reset bool) {
	p.once.Do(func() {
		close(p.done)
		for _, c := range []*net.TCPConn{p.client, p.server} {
			if c == nil {
				continue
			}
			if reset {
				c.SetLinger(0)
			}
			c.Close()
		}
	})
}

// open waits until none of the directions stalls or swallows; false means that p has ended.
func (l *Link) open(p *pair, dirs ...Direction) bool {
	for {
		l.mu.Lock()
		changed, blocked := l.changed, false
		for _, d := range dirs {
			m := l.dirs[d].mode
			blocked = blocked || m == Stall || m == Blackhole
		}
		l.mu.Unlock()
		if !blocked {
			select {
			case <-p.done:
				return false
			default:
				return true
			}
		}
		select {
		case <-changed:
		case <-p.done:
			return false
		}
	}
}

func (l *Link) pump(p *pair, dir Direction, src io.Reader, dst io.Writer) {
	queue := make(chan chunk, 256)
	var wg sync.WaitGroup
	wg.Go(func() { l.read(p, dir, src, queue) })
	wg.Go(func() { l.write(p, dir, dst, queue) })
	wg.Wait()
}

func (l *Link) read(p *pair, dir Direction, src io.Reader, queue chan<- chunk) {
	send := func(c chunk) bool {
		select {
		case queue <- c:
			return true
		case <-p.done:
			return false
		}
	}
	var last time.Time
	due := func() time.Time {
		l.mu.Lock()
		s := l.dirs[dir]
		l.mu.Unlock()
		if s.delay == 0 && s.jitter == 0 {
			return time.Time{}
		}
		d := s.delay
		if s.jitter > 0 {
			d += time.Duration(rand.Int64N(2*int64(s.jitter)+1)) - s.jitter
		}
		if at := time.Now().Add(d); at.After(last) {
			last = at
		}
		return last
	}
	split := splitter{opaque: !l.frames || dir == Up}
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		at := due()
		// The parts are what lies between dropped messages.
		for _, c := range split.feed(buf[:n], l.dropped) {
			c.due = at
			if !send(c) {
				return
			}
		}
		if err != nil {
			send(chunk{eof: true, due: at})
			return
		}
	}
}

// dropped tells whether frame is to be dropped, and what then.
func (l *Link) dropped(frame []byte) (Mode, bool) {
	if l.armed.Load() == 0 {
		return 0, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, d := range l.drops {
		if d.match(frame) {
			l.drops = append(l.drops[:i:i], l.drops[i+1:]...)
			l.armed.Add(-1)
			d.got <- append([]byte(nil), frame...)
			return d.then, true
		}
	}
	return 0, false
}

func (l *Link) write(p *pair, dir Direction, dst io.Writer, queue <-chan chunk) {
	for {
		var c chunk
		select {
		case c = <-queue:
		case <-p.done:
			return
		}
		if !c.due.IsZero() && !p.sleep(time.Until(c.due)) {
			return
		}
		if c.eof {
			if l.open(p, dir) {
				p.close(false)
			}
			return
		}
		if len(c.data) > 0 && !l.deliver(p, dir, dst, c.data) {
			return
		}
		if c.mark && c.then != Pass {
			l.Set(c.then)
		}
	}
}

// deliver writes data as the mode says; false means that p has ended.
func (l *Link) deliver(p *pair, dir Direction, dst io.Writer, data []byte) bool {
	for len(data) > 0 {
		l.mu.Lock()
		s, changed := l.dirs[dir], l.changed
		if s.mode == Blackhole {
			p.lost[dir] = true
		}
		l.mu.Unlock()
		switch s.mode {
		case Blackhole:
			return true
		case Stall:
			select {
			case <-changed:
				continue
			case <-p.done:
				return false
			}
		}
		part := data
		if s.slice > 0 && s.slice < len(data) {
			part = data[:s.slice]
		}
		if _, err := dst.Write(part); err != nil {
			// That the receiver has gone is news that travels the other way.
			if l.open(p, 1-dir) {
				p.close(true)
			}
			return false
		}
		data = data[len(part):]
		if len(data) > 0 && s.gap > 0 && !p.sleep(s.gap) {
			return false
		}
	}
	return true
}

func (p *pair) sleep(d time.Duration) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.done:
		return false
	}
}
