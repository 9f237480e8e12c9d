package testnats

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"
)

// output keeps the last lines that a server or process wrote.
type output struct {
	held   sync.Mutex // locked while nothing is taken
	mu     sync.Mutex
	text   []byte
	rest   []byte // begun line, not yet given to onLine
	onLine func(line []byte)
	fatal  string
}

const outputLimit = 1 << 20

func (o *output) Write(p []byte) (int, error) {
	o.held.Lock()
	defer o.held.Unlock()
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, p...)
	if extra := len(o.text) - outputLimit; extra > outputLimit/4 {
		o.text = append([]byte(nil), o.text[extra:]...)
	}
	if o.onLine != nil {
		o.rest = append(o.rest, p...)
		for {
			line, rest, found := bytes.Cut(o.rest, []byte("\n"))
			if !found {
				break
			}
			o.onLine(line)
			o.rest = rest
		}
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.text)
}

// showOnFailure prints the output when the test has failed by the time it ends.
func (o *output) showOnFailure(t testing.TB, name string) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("output of %s:\n%s", name, o)
		}
	})
}

// output is a server.Logger too.

func (o *output) put(level, format string, args []any) {
	fmt.Fprintf(o, "%s %s %s\n", time.Now().Format("15:04:05.000000"), level, fmt.Sprintf(format, args...))
}

func (o *output) Noticef(format string, args ...any) { o.put("INF", format, args) }
func (o *output) Warnf(format string, args ...any)   { o.put("WRN", format, args) }
func (o *output) Errorf(format string, args ...any)  { o.put("ERR", format, args) }
func (o *output) Debugf(format string, args ...any)  { o.put("DBG", format, args) }
func (o *output) Tracef(format string, args ...any)  { o.put("TRC", format, args) }

// Fatalf is all that a server does when it cannot start; it expects the process to end.
func (o *output) Fatalf(format string, args ...any) {
	o.put("FTL", format, args)
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.fatal == "" {
		o.fatal = fmt.Sprintf(format, args...)
	}
}

func (o *output) forgetFatal() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.fatal = ""
}

func (o *output) fatalError() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.fatal
}
