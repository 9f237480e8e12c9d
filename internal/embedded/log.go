package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
)

// Levels below debug for what only somebody who debugs the server itself wants.
const (
	levelServerDebug = slog.LevelDebug - 4
	levelServerTrace = slog.LevelDebug - 8
)

// logger passes the server's log lines to slog and keeps the first fatal one: the server does not
// return errors from Start, it logs them and expects the process to end.
type logger struct {
	log *slog.Logger

	mu       sync.Mutex
	fatalErr error
}

func newLogger(l *slog.Logger) *logger {
	if l == nil {
		l = slog.New(slog.DiscardHandler)
	}
	return &logger{log: l.With("component", "nats-server")}
}

// wants tells which of the server's costly lines anybody would see.
func (l *logger) wants() (debug, trace bool) {
	ctx := context.Background()
	return l.log.Enabled(ctx, levelServerDebug), l.log.Enabled(ctx, levelServerTrace)
}

func (l *logger) fatal() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatalErr
}

func (l *logger) put(level slog.Level, format string, args []any) {
	ctx := context.Background()
	if l.log.Enabled(ctx, level) {
		l.log.Log(ctx, level, fmt.Sprintf(format, args...))
	}
}

func (l *logger) Fatalf(format string, args ...any) {
	l.mu.Lock()
	if l.fatalErr == nil {
		message := fmt.Sprintf(format, args...)
		if l.fatalErr = portTaken(message); l.fatalErr == nil {
			l.fatalErr = errors.New(message)
		}
	}
	l.mu.Unlock()
	l.put(slog.LevelError, format, args)
}

func (l *logger) Errorf(format string, args ...any)  { l.put(slog.LevelError, format, args) }
func (l *logger) Warnf(format string, args ...any)   { l.put(slog.LevelWarn, format, args) }
func (l *logger) Noticef(format string, args ...any) { l.put(slog.LevelDebug, format, args) }
func (l *logger) Debugf(format string, args ...any)  { l.put(levelServerDebug, format, args) }
func (l *logger) Tracef(format string, args ...any)  { l.put(levelServerTrace, format, args) }
