package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/term"

	"github.com/leased/leased"
)

// logFlags are the flags of the log, which goes to stderr.
type logFlags struct {
	LogLevel  string `group:"logs" enum:"debug,info,warn,error" default:"info" placeholder:"LEVEL" help:"Least level that is logged: debug, info, warn or error (default info)."`
	LogFormat string `group:"logs" enum:"auto,text,json" default:"auto" placeholder:"FORMAT" help:"text, json, or auto: text on a terminal, else json (default auto)."`
}

// openLog opens the log of the flags.
func (f logFlags) openLog() *logs {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.LogLevel)); err != nil {
		level = slog.LevelInfo
	}
	terminal := isTerminal(os.Stderr)
	text := f.LogFormat == "text" || f.LogFormat == "auto" && terminal
	return newLogs(os.Stderr, level, text, terminal)
}

// logs takes log records from every goroutine and writes them from one of its own,
// because stderr may be a pipe that somebody reads slowly, or not at all: no call waits
// for it, and neither does leaving. What finds the queue full is dropped, counted, and
// told when lines flow again.
//
// A record waits in the queue as it is, so that its encoding costs the one who writes
// and not the goroutine that delivers the store's replies, say.
type logs struct {
	out     io.Writer
	escapes bool // out is a terminal that gets JSON
	root    slog.Handler
	encoded bytes.Buffer // what the handlers encode to; the writer's alone
	records chan logRecord
	dropped atomic.Uint64
	failed  atomic.Uint64 // part of dropped: lines in writes that failed
	late    atomic.Int64  // when the last line was dropped
	writing atomic.Int64  // since when a write is under way, 0: none is
	leave   sync.Once
	leaving chan struct{}
	done    chan struct{} // closed when nothing is written any more
}

type logRecord struct {
	handler slog.Handler // what encodes it, with the attributes of its logger
	slog.Record
}

const (
	// logRoom is how many records wait at most.
	logRoom = 1024
	// logBytes is how much is written at once.
	logBytes = 16 << 10
	// logStuck is how long one write takes before the checks say so.
	logStuck = time.Second
	// logShown is how long dropped lines show in the checks.
	logShown = time.Minute
	// logFarewell is how long leaving waits for what is in the queue.
	logFarewell = 500 * time.Millisecond
)

func newLogs(out io.Writer, level slog.Level, text, terminal bool) *logs {
	l := &logs{out: out, escapes: terminal && !text, records: make(chan logRecord, logRoom), leaving: make(chan struct{}), done: make(chan struct{})}
	options := &slog.HandlerOptions{Level: level}
	if text {
		l.root = slog.NewTextHandler(&l.encoded, options)
	} else {
		l.root = slog.NewJSONHandler(&l.encoded, options)
	}
	go l.run()
	return l
}

// at is a logger of what is at least at level and of the level of the flags.
func (l *logs) at(level slog.Level) *slog.Logger {
	return slog.New(&logHandler{logs: l, encoder: l.root, level: level})
}

// close writes what waits, for a moment.
func (l *logs) close() {
	l.leave.Do(func() { close(l.leaving) })
	t := time.NewTimer(logFarewell)
	defer t.Stop()
	select {
	case <-l.done:
	case <-t.C:
	}
}

func (l *logs) put(r logRecord) {
	select {
	case l.records <- r:
	default:
		l.drop(1)
	}
}

func (l *logs) drop(n uint64) {
	l.late.Store(time.Now().UnixNano())
	l.dropped.Add(n)
}

// run writes until close, and then what is there.
func (l *logs) run() {
	defer close(l.done)
	var told uint64
	var toldAt time.Time
	for {
		var r logRecord
		select {
		case r = <-l.records:
		case <-l.leaving:
			select {
			case r = <-l.records:
			default:
				return
			}
		}
		lines := l.encode(r)
	more:
		for l.encoded.Len() < logBytes {
			select {
			case r := <-l.records:
				lines += l.encode(r)
			default:
				break more
			}
		}
		if n := l.dropped.Load() - l.failed.Load(); n > told && time.Since(toldAt) > time.Second {
			r := slog.NewRecord(time.Now(), slog.LevelWarn, "log lines were dropped: stderr is not read as fast as they come", 0)
			r.Add("lines", n-told)
			lines += l.encode(logRecord{l.root, r})
			told, toldAt = n, time.Now()
		}
		l.write(lines)
	}
}

func (l *logs) encode(r logRecord) uint64 {
	if err := r.handler.Handle(context.Background(), r.Record); err != nil {
		l.drop(1) // a value that cannot be encoded
		return 0
	}
	return 1
}

func (l *logs) write(lines uint64) {
	text := l.encoded.Bytes()
	if l.escapes {
		text = visibleLines(text)
	}
	l.writing.Store(time.Now().UnixNano())
	if _, err := l.out.Write(text); err != nil { // nobody can be told
		l.failed.Add(lines)
		l.drop(lines)
	}
	l.writing.Store(0)
	l.encoded.Reset()
}

// visibleLines is visibleJSON of each line.
func visibleLines(text []byte) (out []byte) {
	for line := range bytes.Lines(text) {
		out = append(append(out, visibleJSON(line)...), '\n')
	}
	return out
}

// check is the line about the log in /readyz?verbose: it never keeps anybody from
// answering calls.
func (l *logs) check() leased.Check {
	c := leased.Check{Name: "log", OK: true}
	since := func(at int64) time.Duration { return time.Since(time.Unix(0, at)).Round(time.Second) }
	if at := l.writing.Load(); at != 0 && since(at) >= logStuck {
		c.Warn, c.Detail = true, fmt.Sprintf("nobody reads stderr, for %v; %d lines are dropped", since(at), l.dropped.Load())
	} else if at := l.late.Load(); at != 0 && since(at) < logShown {
		c.Warn, c.Detail = true, fmt.Sprintf("lines are dropped because stderr is read too slowly or not at all: %d, the last %v ago", l.dropped.Load(), since(at))
	}
	return c
}

// logHandler is a slog.Handler that puts records into the queue.
type logHandler struct {
	*logs
	encoder slog.Handler
	level   slog.Level
}

func (h *logHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= h.level && h.encoder.Enabled(ctx, level)
}

// Handle takes r as it is now: what it refers to may change until it is encoded.
func (h *logHandler) Handle(_ context.Context, r slog.Record) error {
	settled := true
	r.Attrs(func(a slog.Attr) bool {
		settled = a.Value.Kind() != slog.KindAny && a.Value.Kind() != slog.KindLogValuer && a.Value.Kind() != slog.KindGroup
		return settled
	})
	if !settled {
		now := slog.NewRecord(r.Time, r.Level, r.Message, r.PC)
		r.Attrs(func(a slog.Attr) bool {
			now.AddAttrs(settle(a))
			return true
		})
		r = now
	}
	h.put(logRecord{h.encoder, r})
	return nil
}

// settle is a with a value that does not change any more.
func settle(a slog.Attr) slog.Attr {
	a.Value = a.Value.Resolve()
	switch v := a.Value.Any().(type) {
	case []slog.Attr:
		group := make([]slog.Attr, len(v))
		for i := range v {
			group[i] = settle(v[i])
		}
		a.Value = slog.GroupValue(group...)
	case error:
		a.Value = slog.StringValue(v.Error())
	case []string:
		a.Value = slog.AnyValue(slices.Clone(v))
	default:
		if a.Value.Kind() == slog.KindAny && v != nil {
			a.Value = slog.StringValue(fmt.Sprintf("%+v", v))
		}
	}
	return a
}

func (h *logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &logHandler{h.logs, h.encoder.WithAttrs(attrs), h.level} // encoded now
}

func (h *logHandler) WithGroup(name string) slog.Handler {
	return &logHandler{h.logs, h.encoder.WithGroup(name), h.level}
}

// lastWords writes to stderr what a command ends with, if somebody reads it.
func lastWords(format string, args ...any) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		fmt.Fprintf(os.Stderr, format, args...)
	}()
	select {
	case <-done:
	case <-time.After(logFarewell):
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
