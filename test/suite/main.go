// Command suite runs `go test` and says at the end what `go test` keeps to itself without
// -v: which tests were skipped and why, and which packages failed beside others and passed
// alone.
//
//	go run ./test/suite ./...
//	go run ./test/suite -again -strict -fast github.com/leased/leased,... -- -timeout 20m ./...
//
// Its exit code is 1 when a package failed. With -strict it is also 1 when a test was
// skipped because something is missing here, and when one of the fast packages passed
// only alone: these have no excuse in a busy machine.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

func main() {
	again := flag.Bool("again", false, "run each package that failed once more, alone; passing then counts as flaky")
	strict := flag.Bool("strict", false, "fail on tests skipped for want of something, and on flaky fast packages")
	fast := flag.String("fast", "", "comma separated packages that must pass the first time under -strict")
	flag.Parse()

	first := run(os.Stdout, flag.Args()...)
	if len(first.failed) == 0 && first.err != nil {
		fmt.Println("FAIL:", first.err)
		os.Exit(1)
	}
	failed, flaky := first.failed, []string(nil)
	if *again {
		failed = nil
		for _, pkg := range first.failed {
			fmt.Println("== once more, alone:", pkg)
			if r := run(os.Stdout, "-count=1", "-timeout", "20m", pkg); r.err != nil {
				failed = append(failed, pkg)
				continue
			}
			flaky = append(flaky, pkg)
		}
	}
	code := 0
	for _, pkg := range failed {
		fmt.Println("FAIL", pkg)
		code = 1
	}
	for _, pkg := range flaky {
		fmt.Println("FLAKY: failed beside others, passed alone:", pkg)
		if *strict && slices.Contains(strings.Split(*fast, ","), pkg) {
			fmt.Println("FAIL: a fast package has to pass the first time:", pkg)
			code = 1
		}
	}
	for _, s := range first.skipped {
		fmt.Println("SKIPPED", s)
		if *strict && !s.chosen() {
			code = 1
		}
	}
	fmt.Printf("%d packages passed, %d flaky, %d failed; %d tests passed, %d skipped\n",
		first.packages-len(first.failed), len(flaky), len(failed), first.passed, len(first.skipped))
	os.Exit(code)
}

// result is what one go test did.
type result struct {
	failed           []string // packages
	skipped          []skip
	packages, passed int
	err              error
}

// skip is a test that did not run.
type skip struct{ pkg, test, reason string }

func (s skip) String() string {
	return fmt.Sprintf("%s %s: %s", strings.TrimPrefix(s.pkg, "github.com/leased/leased/"), s.test, s.reason)
}

// chosen says that the test belongs to a suite that has to be asked for by a flag or a
// variable, or was left out by -short: nothing is missing.
func (s skip) chosen() bool {
	return strings.Contains(s.reason, "is not given") || strings.Contains(s.reason, "-short")
}

// event is a line of go test -json (see go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
	FailedBuild, ImportPath       string
}

// run runs go test with args and writes a line a package to w, and all that a failed test
// printed.
func run(w io.Writer, args ...string) (r result) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return result{err: err}
	}
	printed := map[string][]string{} // by package and test, "" for the package itself
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(w, lines.Text())
			continue
		}
		id := e.Package + " " + e.Test
		switch e.Action {
		case "build-output":
			fmt.Fprint(w, e.Output)
		case "output":
			printed[id] = append(printed[id], e.Output)
		case "pass":
			if e.Test != "" {
				r.passed++
				delete(printed, id)
				continue
			}
			r.packages++
			fmt.Fprintf(w, "ok  \t%s\t%.1fs\n", e.Package, e.Elapsed)
			delete(printed, id)
		case "skip":
			if e.Test != "" {
				r.skipped = append(r.skipped, skip{e.Package, e.Test, reason(printed[id])})
			}
			delete(printed, id)
		case "fail":
			fmt.Fprint(w, strings.Join(printed[id], ""))
			if e.Test == "" {
				r.packages++
				r.failed = append(r.failed, e.Package)
				// A package that timed out or crashed leaves tests without an end.
				for name, text := range printed {
					if strings.HasPrefix(name, e.Package+" ") && name != id {
						fmt.Fprint(w, strings.Join(text, ""))
					}
				}
				fmt.Fprintf(w, "FAIL\t%s\t%.1fs\n", e.Package, e.Elapsed)
			}
			delete(printed, id)
		}
	}
	r.err = cmd.Wait()
	if err := lines.Err(); err != nil {
		r.err = err
	}
	return r
}

// reason is what a skipped test said last.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "---") || strings.HasPrefix(line, "===") {
			continue
		}
		if _, text, ok := strings.Cut(line, ".go:"); ok {
			if _, text, ok := strings.Cut(text, ": "); ok {
				return text
			}
		}
		return line
	}
	return "it gives no reason"
}
