package service

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

type lockedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lockedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// TestHandoversAreCounted: up to a hundred in a second have a line each, the rest one line
// for all, and a second later it begins anew. None is lost or told twice.
func TestHandoversAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &lockedLog{}
		h := &handovers{log: slog.New(slog.NewJSONHandler(out, nil))}
		note := func(n int, event Event) {
			for range n {
				h.note(event, "k", "a", 1, OpAcquire)
			}
		}
		note(100, Acquired) // just what has lines of its own
		time.Sleep(2 * time.Second)
		note(60, Acquired)
		note(60, Released)
		time.Sleep(500 * time.Millisecond)
		note(1000, Expired)
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		note(10, Released)
		time.Sleep(5 * time.Second)

		single, sums := map[string]int{}, []map[string]any{}
		for line := range strings.Lines(out.text.String()) {
			var fields map[string]any
			if err := json.Unmarshal([]byte(line), &fields); err != nil {
				t.Fatal(err)
			}
			if _, summary := fields["acquired"]; summary {
				sums = append(sums, fields)
			} else {
				single[fields["msg"].(string)]++
			}
		}
		if single["lease acquired"] != 160 || single["lease released"] != 50 || single["lease expired"] != 0 {
			t.Errorf("lines of their own: %v", single)
		}
		if len(sums) != 1 || sums[0]["acquired"] != 0. || sums[0]["released"] != 20. || sums[0]["expired"] != 1000. {
			t.Errorf("sums: %v", sums)
		}
	})
}

// TestHandoversAtWarn: where nobody reads them they are not counted either.
func TestHandoversAtWarn(t *testing.T) {
	out := &lockedLog{}
	h := &handovers{log: slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	for range 500 {
		h.note(Acquired, "k", "a", 1, OpAcquire)
	}
	if h.rest != nil || out.text.Len() > 0 {
		t.Errorf("%v %s", h.rest, out.text.String())
	}
}
