package fault

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/leased/leased/service/kinds"
)

// Report is what one run did, saw and is worth.
type Report struct {
	Fault    string
	Topology string
	Seed     uint64
	Length   time.Duration

	Ops      int
	Grants   int
	Forwards int
	Unknown  int
	ByKind   map[kinds.Kind]int
	Injected int
	Promised int

	Stored  int    // messages copied from the stream
	Missed  uint64 // sequences that nobody saw
	Outage  time.Duration
	Keys    int // histories judged
	Illegal []string
	Undone  []string // histories the checker could not decide
	Slowest time.Duration
	Recover time.Duration // until every instance served again after the last fault

	Violations []Violation
	Errors     []string // of the harness: less injected than promised, no recovery
}

// Failed says whether the run proves anything wrong, or proves nothing.
func (r *Report) Failed() bool {
	return len(r.Violations)+len(r.Illegal)+len(r.Undone)+len(r.Errors) > 0
}

// late is how long after its end a lease may show in this run: 1 s, and with
// faults as long as the longest of them, and 5 s.
func (r *Run) late() time.Duration {
	late := time.Second
	var end, start int64
	ws := append([]Window(nil), r.Windows...)
	sort.Slice(ws, func(i, j int) bool { return ws[i].Start < ws[j].Start })
	for i, w := range ws {
		if i == 0 || w.Start > end+int64(lands) {
			start, end = w.Start, w.End
		}
		end = max(end, w.End)
		late = max(late, time.Second+lands+time.Duration(end-start))
	}
	return late
}

// Verify judges a run: each key against the model, the whole by the checks.
func (r *Run) Verify(perKey time.Duration) (*Report, []Judgement) {
	rep := &Report{Ops: len(r.Ops), ByKind: countKinds(r.Ops), Stored: len(r.Log.Entries), Missed: r.Log.Missed()}
	var oks []int64
	for i := range r.Ops {
		op := &r.Ops[i]
		if op.Outcome == Unknown {
			rep.Unknown++
		}
		if op.Call == Forward {
			rep.Forwards++
		}
		if op.Outcome == OK && (op.Call == Acquire || op.Call == Renew) {
			rep.Grants++
			oks = append(oks, op.End)
		}
	}
	sort.Slice(oks, func(i, j int) bool { return oks[i] < oks[j] })
	for i := 1; i < len(oks); i++ {
		rep.Outage = max(rep.Outage, time.Duration(oks[i]-oks[i-1]))
	}

	r = r.withoutRestored()
	lim := Limits{Late: r.late(), Windows: r.Windows, Timeout: perKey}
	echoes, _ := r.writers()
	byKey := ByKey(append(echoes, r.Ops...))
	rep.Keys = len(byKey)
	var bad []Judgement
	var mu sync.Mutex
	var wg sync.WaitGroup
	limit := make(chan struct{}, 2)
	for key, ops := range byKey {
		if r.Foreign[key] || r.clockFault() {
			continue
		}
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			j := CheckRegister(key, ops, lim)
			mu.Lock()
			defer mu.Unlock()
			rep.Slowest = max(rep.Slowest, j.Took)
			switch j.Result {
			case porcupine.Illegal:
				rep.Illegal = append(rep.Illegal, key)
				bad = append(bad, j)
			case porcupine.Unknown:
				rep.Undone = append(rep.Undone, key)
				bad = append(bad, j)
			}
		})
	}
	wg.Wait()
	rep.Violations = r.Judge()
	for _, j := range bad {
		if j.Result == porcupine.Illegal {
			rep.Violations = append(rep.Violations, Violation{"I1", j.Key, j.Stuck()})
		}
	}
	return rep, bad
}

// Save writes everything about a failed run into dir: the history, the copy of
// the stream, what is wrong, and a picture of each key that is.
func (r *Run) Save(dir string, rep *Report, bad []Judgement) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	write := func(name string, f func(io.Writer) error) error {
		file, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		return errors.Join(f(file), file.Close())
	}
	err := errors.Join(
		write("history.ndjson", func(w io.Writer) error { return WriteOps(w, r.Ops) }),
		write("stream.txt", func(w io.Writer) error {
			for _, e := range r.Log.Entries {
				fmt.Fprintf(w, "%.1f %v %s\n", float64(r.Clock.At(e.Time))/1e6, e, e.Body)
			}
			return nil
		}),
		write("windows.json", func(w io.Writer) error { return json.NewEncoder(w).Encode(r.Windows) }),
		write("inbox.txt", func(w io.Writer) error {
			for _, d := range r.Inbox {
				fmt.Fprintf(w, "%+v\n", d)
			}
			return nil
		}),
		write("violations.txt", func(w io.Writer) error {
			for _, e := range rep.Errors {
				fmt.Fprintln(w, e)
			}
			for _, v := range rep.Violations {
				fmt.Fprintln(w, v)
			}
			return nil
		}),
	)
	for i, j := range bad {
		if i == 10 {
			break
		}
		if _, e := j.Picture(dir); e != nil {
			err = errors.Join(err, e)
		}
	}
	return err
}

// Table prints runs as a table for a person and for the documents.
func Table(w io.Writer, reports []*Report) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "fault\ton\tseed\tlength\tinjected\toperations\tgrants\tforwards\tunknown\tstored\tunseen\tlongest outage\trecovered in\tkeys\tverdict")
	for _, r := range reports {
		verdict := "ok"
		if r.Failed() {
			verdict = "FAILED " + strings.Join(r.broken(), " ")
		}
		fmt.Fprintf(t, "%s\t%s\t%d\t%v\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%v\t%v\t%d\t%s\n", r.Fault, r.Topology, r.Seed, r.Length.Round(time.Second), r.Injected, r.Ops, r.Grants, r.Forwards, r.Unknown,
			r.Stored, r.Missed, r.Outage.Round(10*time.Millisecond), r.Recover.Round(10*time.Millisecond), r.Keys, verdict)
	}
	_ = t.Flush()
}

// broken lists the broken invariants, each once.
func (r *Report) broken() []string {
	n := map[string]int{}
	for _, v := range r.Violations {
		n[v.Invariant]++
	}
	if len(r.Undone) > 0 {
		n["undecided"] = len(r.Undone)
	}
	if len(r.Errors) > 0 {
		n["harness"] = len(r.Errors)
	}
	var s []string
	for inv, c := range n {
		s = append(s, fmt.Sprintf("%s(%d)", inv, c))
	}
	sort.Strings(s)
	return s
}
