package schemas

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/leased/leased/internal/corpus"
)

var calls = []string{"acquire", "evict", "forward", "list", "owner", "release", "renew", "renew_many"}

func loadSet(t testing.TB) *Set {
	t.Helper()
	set, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	return set
}

var readCorpus = sync.OnceValues(func() ([]corpus.Case, error) { return corpus.Load(os.DirFS("../testdata/corpus")) })

func loadCorpus(t testing.TB) []corpus.Case {
	t.Helper()
	cases, err := readCorpus()
	if err != nil {
		t.Fatal(err)
	}
	return cases
}

// checkError checks what every error promises.
func checkError(t *testing.T, err error) *Error {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("error is a %T, want *Error", err)
	}
	for _, text := range []string{e.Error(), e.Member} {
		if i := strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r > '~' }); i >= 0 {
			t.Fatalf("error %q is not printable ASCII at %d", text, i)
		}
	}
	if n := len(e.Error()); n == 0 || n > 400 {
		t.Fatalf("error has %d bytes: %s", n, e)
	}
	if !strings.Contains(e.Error(), e.Member) {
		t.Fatalf("error %q does not name its member %q", e, e.Member)
	}
	return e
}

func TestCorpus(t *testing.T) {
	set := loadSet(t)
	cases := loadCorpus(t)
	valid, seen := 0, map[string]bool{}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			req, err := set.Request(c.Call).Decode(c.Body)
			switch {
			case c.Valid && err != nil:
				t.Errorf("got %v, want valid", err)
			case !c.Valid && err == nil:
				t.Errorf("got %+v, want invalid", req)
			case err != nil:
				if e := checkError(t, err); !strings.Contains(e.Error(), c.Member) {
					t.Errorf("error %q does not name %q", e, c.Member)
				}
			}
		})
		seen[c.Call] = true
		if c.Valid {
			valid++
		}
	}
	if len(cases) < 150 || valid < 50 || len(seen) != len(calls) {
		t.Errorf("%d cases, %d of them valid, for %d calls: too few", len(cases), valid, len(seen))
	}
}

// TestCost holds Decode to its bounds on the large cases: a MiB in 50 ms and 10 MiB.
func TestCost(t *testing.T) {
	const (
		tries   = 10 // others use the machine too
		maxTime = 50 * time.Millisecond
		maxHeap = 10 << 20
	)
	set := loadSet(t)
	for _, c := range loadCorpus(t) {
		if len(c.Body) < 4096 {
			continue
		}
		sch := set.Request(c.Call)
		var took time.Duration
		var heap uint64
		for range tries {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			start := time.Now()
			sch.Decode(c.Body)
			took = time.Since(start)
			runtime.ReadMemStats(&after)
			heap = after.TotalAlloc - before.TotalAlloc
			if (took <= maxTime || raceEnabled) && heap <= maxHeap {
				break
			}
		}
		if took > maxTime && !raceEnabled || heap > maxHeap {
			t.Errorf("%s: %v and %d bytes allocated are too much for %d bytes", c.Name, took, heap, len(c.Body))
		}
		t.Logf("%s: %v, %d bytes allocated", c.Name, took, heap)
	}
}

func TestCalls(t *testing.T) {
	set := loadSet(t)
	var got []string
	for call := range set.requests {
		got = append(got, call)
		if set.Reply(call) == nil {
			t.Errorf("%s has a request but no reply", call)
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, calls) || len(set.replies) != len(calls) {
		t.Errorf("got requests for %v and %d replies, want %v", got, len(set.replies), calls)
	}
	if set.Request("nothing") != nil || set.Reply("nothing") != nil || set.Event() == nil {
		t.Error("schemas of what does not exist, or no event")
	}
}
