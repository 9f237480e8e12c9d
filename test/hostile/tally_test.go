package hostile

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// tally is what one attack did and what came of it.
type tally struct {
	mu    sync.Mutex
	tried int
	got   map[string]int // how a try ended: a kind, "silence", "not permitted" and the like
	slow  time.Duration  // the longest that an answer took
}

// try counts n tries.
func (t *tally) try(n int) {
	t.mu.Lock()
	t.tried += n
	t.mu.Unlock()
}

// end counts how a try ended.
func (t *tally) end(how string) {
	t.mu.Lock()
	if t.got == nil {
		t.got = map[string]int{}
	}
	t.got[how]++
	t.mu.Unlock()
}

// took notes how long an answer took.
func (t *tally) took(d time.Duration) {
	t.mu.Lock()
	t.slow = max(t.slow, d)
	t.mu.Unlock()
}

// ends are the ways tries ended, the most frequent first.
func (t *tally) ends() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := slices.SortedFunc(maps.Keys(t.got), func(a, b string) int {
		return cmp.Or(t.got[b]-t.got[a], strings.Compare(a, b))
	})
	var b strings.Builder
	for i, name := range names {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s %d", name, t.got[name])
	}
	return b.String()
}

// table is what all attacks did.
func table(attacks []*attack) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "attack\ttried\tleast\tslowest\tanswers")
	for _, a := range attacks {
		fmt.Fprintf(w, "%s\t%d\t%d\t%v\t%s\n", a.name, a.tally.tried, a.mustTry, a.tally.slow.Round(time.Millisecond), a.tally.ends())
	}
	w.Flush()
	return b.String()
}
