package fault

import (
	"context"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Clocks that are wrong. No name space and no preloaded library shifts the wall
// clock of a static Go program, so a program is built from a standard library
// whose time.Now adds a shift; what is monotonic stays right. The program reads
// its shift, in seconds, from a file named after its process.

// shiftDir is the environment variable that names the directory of those files.
const shiftDir = "LEASED_TEST_CLOCK"

const shiftedMain = `package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

func init() {
	dir := os.Getenv("` + shiftDir + `")
	if dir == "" {
		return
	}
	file := filepath.Join(dir, strconv.Itoa(os.Getpid()))
	go func() {
		for {
			if b, err := os.ReadFile(file); err == nil {
				if n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64); err == nil {
					time.Shift.Store(n)
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
	}()
}
`

// buildShifted builds the main package pkg, which lies in dir, with a clock that
// can be shifted, and with what else is laid over its source.
func buildShifted(t testing.TB, out, pkg, dir string, more overlay) {
	t.Helper()
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	std := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	src, err := os.ReadFile(std)
	if err != nil {
		t.Fatal(err)
	}
	text := string(src)
	const now = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if strings.Count(text, now) != 1 || strings.Count(text, "\nimport (\n") != 1 {
		t.Fatalf("%s is not as expected: the clock of %s cannot be shifted", std, runtime.Version())
	}
	text = strings.Replace(text, now, "// Shift is added to the wall clock, in seconds.\nvar Shift atomic.Int64\n\n"+now+"\tsec += Shift.Load()\n", 1)
	text = strings.Replace(text, "\nimport (\n", "\nimport (\n\t\"sync/atomic\"\n", 1)
	o := overlay{std: text, filepath.Join(dir, "zz_shift.go"): shiftedMain}
	maps.Copy(o, more)
	build(t, out, "-overlay", o.write(t), pkg)
}

// build runs go build in this module.
func build(t testing.TB, out string, args ...string) {
	t.Helper()
	next := out + ".new"
	cmd := exec.Command("go", append([]string{"build", "-o", next}, args...)...)
	cmd.Dir = moduleRoot(t)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, text)
	}
	if err := os.Rename(next, out); err != nil {
		t.Fatal(err)
	}
}

func moduleRoot(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Dir(strings.TrimSpace(string(out)))
}

// shiftedServer is a nats-server whose clock can be shifted, built once.
func shiftedServer(t testing.TB) string {
	t.Helper()
	path := filepath.Join(cacheDir(t), fmt.Sprintf("nats-server-%s-%s-shifted", server.VERSION, runtime.Version()))
	if _, err := os.Stat(path); err == nil {
		return path
	}
	buildShifted(t, path, "./test/fault/natsd", filepath.Join(moduleRoot(t), "test", "fault", "natsd"), nil)
	return path
}

// shiftedLeased is leased with a clock that can be shifted. A variant that is
// given runs instead: it must have been built so.
func shiftedLeased(t testing.TB, variant string) string {
	t.Helper()
	if variant != "" {
		return variant
	}
	root := moduleRoot(t)
	h := fnv.New32a()
	h.Write([]byte(root))
	path := filepath.Join(cacheDir(t), fmt.Sprintf("leased-%08x-shifted", h.Sum32()))
	buildShifted(t, path, "./cmd/leased", filepath.Join(root, "cmd", "leased"), nil)
	return path
}

// ownClocks makes the programs of a run look for their shift.
func ownClocks(p Preparation) { p.T.Setenv(shiftDir, p.T.TempDir()) }

// shift sets the clock of a process to be off by some seconds.
func shift(dir string, pid, seconds int) error {
	path := filepath.Join(dir, strconv.Itoa(pid))
	if err := os.WriteFile(path+".new", []byte(strconv.Itoa(seconds)), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// injectServerClock lets the server's clock jump and run fast. Leases end by
// that clock, so what is left to promise is that fences grow and nothing is
// lost or written twice.
func injectServerClock(ctx context.Context, e *Env) (int, error) {
	dir := os.Getenv(shiftDir)
	defer e.Fault("server clock", Window{Clock: true})()
	off := 0
	did, err := every(ctx, e, 4*time.Second, func() error {
		pid := e.Servers[0].PID()
		before, err := e.serverTime()
		if err != nil {
			return err
		}
		switch jump := []int{30, -30, 0}[e.Rng.IntN(3)]; jump {
		case 0: // twice as fast for 3 s
			for range 3 {
				off++
				if err := shift(dir, pid, off); err != nil {
					return err
				}
				time.Sleep(time.Second)
			}
		default:
			off += jump
			if err := shift(dir, pid, off); err != nil {
				return err
			}
		}
		time.Sleep(200 * time.Millisecond)
		after, err := e.serverTime()
		if err != nil {
			return err
		}
		if moved := after.Sub(before); moved > 0 && moved < 2*time.Second {
			return fmt.Errorf("the server's clock did not move: %v", moved)
		}
		return nil
	})
	if e := shift(dir, e.Servers[0].PID(), 0); err == nil {
		err = e
	}
	return did, err
}

// serverTime is the wall clock of the server that leads the bucket.
func (e *Env) serverTime() (time.Time, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	si, err := bucketInfo(ctx, e.admin.Conn)
	if err != nil {
		return time.Time{}, err
	}
	return si.TS, nil
}

// injectServiceClock sets the clocks of instances wrong, each by its own. No
// lease may end sooner or later by that, so all checks stand.
func injectServiceClock(ctx context.Context, e *Env) (int, error) {
	dir := os.Getenv(shiftDir)
	return every(ctx, e, 3*time.Second, func() error {
		i := e.Rng.IntN(len(e.Services))
		off := []int{30, -30, 3600, -3600, 5, -5, 0}[e.Rng.IntN(7)]
		defer e.Fault(fmt.Sprintf("instance %d is %d s off", i, off), Window{})()
		return shift(dir, e.Services[i].PID(), off)
	})
}
