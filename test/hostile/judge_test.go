package hostile

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/service/kinds"
	"github.com/leased/leased/test/fault"
)

// judge gathers what is wrong.
type judge struct {
	clock *fault.Clock
	log   *fault.Log
	tap   *fault.Tap

	mu     sync.Mutex
	wrong  map[string][]string // by what it is; the first few in words
	counts map[string]int
	stored int
	leases map[string]time.Time // of mass expiry: when each ends whose end was not told
	office office
}

func newJudge(c *fault.Clock) *judge {
	j := &judge{clock: c, wrong: map[string][]string{}, counts: map[string]int{}, leases: map[string]time.Time{}}
	j.log = fault.NewReadLog(c, fault.Reader{Keep: isHonest, Entry: j.entry, Event: j.event})
	return j
}

// isHonest says whether only the recorded honest write key.
func isHonest(key string) bool { return strings.HasPrefix(key, honestPrefix) }

const inWords = 5

// found notes something wrong of the kind what.
func (j *judge) found(what, format string, args ...any) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.foundLocked(what, format, args...)
}

func (j *judge) foundLocked(what, format string, args ...any) {
	if j.counts[what]++; len(j.wrong[what]) < inWords {
		words := fmt.Sprintf("%.1f s: ", float64(j.clock.Now())/1e9) + fmt.Sprintf(format, args...)
		j.wrong[what] = append(j.wrong[what], words[:min(len(words), 1000)])
	}
}

// report fails t with all that is wrong.
func (j *judge) report(t testing.TB) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	var whats []string
	for what := range j.counts {
		whats = append(whats, what)
	}
	slices.Sort(whats)
	for _, what := range whats {
		t.Errorf("%s: %d times\n\t%s", what, j.counts[what], strings.Join(j.wrong[what], "\n\t"))
	}
}

// entry judges one message of the stream.
func (j *judge) entry(e *fault.Entry) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.stored++
	for _, why := range wrongWith(e) {
		j.foundLocked("forged effect", "the stream has %v: %s: %q", e, why, clip(e.Body))
	}
	if strings.HasPrefix(e.Key, stormPrefix) {
		if e.IsLease() {
			j.leases[e.Key] = e.Ends()
		} else {
			delete(j.leases, e.Key)
		}
	}
}

// wrongWith tells what in e the service cannot have written.
func wrongWith(e *fault.Entry) []string {
	why := e.Wrong()
	if !e.Ours {
		return why
	}
	r := e.Record
	switch {
	case r.V != 1:
		why = append(why, "a version that is not 1")
	case r.Nonce == "" && r.Event != "expired":
		why = append(why, "no nonce")
	case e.IsLease() && (r.TTLMillis < 1000 || r.TTLMillis > 600_000):
		why = append(why, "a ttl that cannot be asked for")
	case !slices.Contains([]string{"acquired", "renewed", "released", "expired"}, r.Event):
		why = append(why, "no event of the contract")
	case r.Evicted:
		why = append(why, "an eviction: nobody here may evict")
	case e.Time.Sub(r.WrittenAt).Abs() > 10*time.Second:
		why = append(why, "made at another time than it was stored")
	}
	return why
}

// event judges one change event: nobody but the server may publish there.
func (j *judge) event(ev fault.Event) {
	if ev.Seq == 0 || ev.Header.Get("Nats-Subject") != "$KV.leases."+ev.Key {
		j.found("forged effect", "a change of %s that the server did not publish: %q", ev.Key, clip(ev.Body))
	}
}

// untold is how many leases of mass expiry ended 5 s ago and were told by nobody.
func (j *judge) untold() (n int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, ends := range j.leases {
		if time.Since(ends) > 5*time.Second {
			n++
		}
	}
	return n
}

// office is what the judge asks of who was elected.
type office interface {
	Check() error // nil: it may act now
	Holder() string
	Tenure() uint64
}

// elected and resigns hold the office to one at a time.
func (j *judge) elected(h office) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if o := j.office; o != nil && o.Check() == nil {
		j.foundLocked("two holders", "the office: %s under %d while %s has it under %d", h.Holder(), h.Tenure(), o.Holder(), o.Tenure())
	}
	j.office = h
}

func (j *judge) resigns(h office) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.office == h {
		j.office = nil
	}
}

// start copies the stream from now on.
func (j *judge) start(s *stage) (err error) {
	j.tap, err = fault.StartTap(j.log, s.urls, nats.UserInfo(judgeRole.name, judgeRole.password), nats.CustomInboxPrefix(judgeRole.inbox))
	return err
}

// watch asks every instance for its verdict, each second until ctx ends.
func (j *judge) watch(ctx context.Context, s *stage) {
	every(ctx, time.Second, func() {
		for i, svc := range s.services {
			m, err := scrape(svc.HTTP())
			if err != nil {
				continue // it is away, or just joins
			}
			for _, state := range []string{"distrusted", "misconfigured", "missing", "unsupported", "waiting", "unavailable"} {
				if m[`leased_bucket_state{state="`+state+`"}`] == 1 {
					j.found("verdict "+state, "of instance %d", i)
				}
			}
			for series, n := range m {
				if n > 0 && (strings.HasPrefix(series, "leased_panics_total") || strings.HasPrefix(series, "leased_unlisted_replies_total")) {
					j.found("bug", "%s of instance %d is %v", series, i, n)
				}
			}
		}
	})
}

// histories judges what the honest saw.
func (j *judge) histories(h *honest) {
	run := &fault.Run{Clock: h.rec.Clock, Ops: h.rec.Ops(), Log: j.log.Snapshot(), Inbox: h.box.Deliveries(), End: h.rec.Clock.Now()}
	rep, _ := run.Verify(time.Minute)
	for _, v := range rep.Violations {
		j.found("history "+v.Invariant, "%s %s", v.Key, v.Text)
	}
	for _, key := range append(rep.Illegal, rep.Undone...) {
		j.found("history I1", "%s makes no sense, or could not be decided", key)
	}
	calls, busy, silent := map[fault.Call]int{}, map[fault.Call]int{}, map[fault.Call]int{}
	for _, op := range run.Ops {
		calls[op.Call]++
		switch op.Kind {
		case kinds.Busy:
			busy[op.Call]++
		case kinds.Unknown, "":
			silent[op.Call]++
		}
	}
	for call, n := range calls {
		// Both are true answers in the second of a burst, and no lease is lost by them.
		if most := mayFail * float64(n); float64(busy[call]) > most || float64(silent[call]) > most {
			j.found("honest", "of %d calls of %s %d were answered busy and %d not at all, or unknown", n, call, busy[call], silent[call])
		}
	}
}

// mayFail is which share of the calls of the honest may be answered busy, and which not
// at all.
const mayFail = 0.02

// level is what a process uses.
type level struct {
	goroutines, heap, rss float64
}

func (l level) String() string {
	return fmt.Sprintf("%.0f goroutines, %.1f MB live heap, %.1f MB RSS", l.goroutines, l.heap/1e6, l.rss/1e6)
}

// over tells what of l is more than it was before, by more than a fifth and by some.
func (l level) over(before level) (what []string) {
	more := func(name string, b, a, slack float64) {
		if a > b*1.2+slack {
			what = append(what, fmt.Sprintf("%s: %.0f before, %.0f after", name, b, a))
		}
	}
	more("goroutines", before.goroutines, l.goroutines, 20)
	more("bytes of live heap", before.heap, l.heap, 30e6)
	more("bytes of RSS", before.rss, l.rss, 30e6)
	return what
}

// measure reads what the instance uses, garbage aside: it waits for two collections, of
// which the second began after it did; the scrapes themselves bring them about.
func measure(ctx context.Context, address string) (l level, err error) {
	var last float64
	for collections := 0; collections < 3; {
		m, err := scrape(address)
		if err != nil {
			return l, err
		}
		if ctx.Err() != nil {
			return l, fmt.Errorf("no garbage collection: %w", context.Cause(ctx))
		}
		if gc := m["go_memstats_last_gc_time_seconds"]; gc != last {
			last = gc
			collections++
		}
		l = level{
			goroutines: m["go_goroutines"],
			// The next collection comes when the live heap has grown by GOGC percent.
			heap: m["go_memstats_next_gc_bytes"] / (1 + m["go_gc_gogc_percent"]/100),
			rss:  m["process_resident_memory_bytes"],
		}
	}
	return l, nil
}

var httpClient = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

var sample = regexp.MustCompile(`^([a-z_]+(?:\{[^}]*\})?) ([0-9.e+-]+)$`)

// scrape reads the series of an instance.
func scrape(address string) (map[string]float64, error) {
	resp, err := httpClient.Get("http://" + address + "/metrics")
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	m := map[string]float64{}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if found := sample.FindStringSubmatch(lines.Text()); found != nil {
			m[found[1]], _ = strconv.ParseFloat(found[2], 64)
		}
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return m, lines.Err()
}
