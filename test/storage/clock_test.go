package storage

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// skewFile, put into each package of ours, is a clock whose wall time is off by
// as many seconds as a file says; timers and monotonic readings stay right, as
// when somebody sets the clock of a machine.
const skewFile = `package %s

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"
)

var skew = func() *atomic.Int64 {
	s := new(atomic.Int64)
	read := func() {
		if text, err := os.ReadFile(os.Getenv("LEASED_TEST_SKEW")); err == nil {
			if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
				s.Store(n)
			}
		}
	}
	read()
	go func() {
		for range time.Tick(10 * time.Millisecond) {
			read()
		}
	}()
	return s
}()

func skewedNow() time.Time {
	t := time.Now()
	// Seconds stand in the wall word from bit 30 on while a monotonic reading does.
	*(*uint64)(unsafe.Pointer(&t)) += uint64(skew.Load()) << 30
	return t
}

func skewedSince(t time.Time) time.Duration { return skewedNow().Sub(t) }
func skewedUntil(t time.Time) time.Duration { return t.Sub(skewedNow()) }
`

var skewed struct {
	once sync.Once
	dir  string // goes when all tests are over
	path string
	err  error
}

// skewedLeased builds leased with every look at the clock in our packages
// replaced; nothing else is built anew, so this takes seconds.
func skewedLeased(t *testing.T) string {
	t.Helper()
	skewed.once.Do(func() { skewed.path, skewed.err = buildSkewed() })
	if skewed.err != nil {
		t.Fatal(skewed.err)
	}
	return skewed.path
}

var looksAtClock = regexp.MustCompile(`\btime\.(Now|Since|Until)\(`)

func buildSkewed() (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", err
	}
	root := strings.TrimSpace(string(out))
	dir, err := os.MkdirTemp("", "skewed-")
	if err != nil {
		return "", err
	}
	skewed.dir = dir
	overlay := map[string]string{}
	for _, pkg := range []string{".", "service", "metrics", "cmd/leased"} {
		files, err := filepath.Glob(filepath.Join(root, pkg, "*.go"))
		if err != nil {
			return "", err
		}
		name := ""
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			f, err := parser.ParseFile(token.NewFileSet(), file, text, parser.SkipObjectResolution)
			if err != nil {
				return "", err
			}
			name = f.Name.Name
			changed := looksAtClock.ReplaceAllString(string(text), "skewed$1(")
			if strings.Contains(changed, "time.Now") {
				return "", fmt.Errorf("%s passes time.Now on: this test does not reach it", file)
			}
			if changed == string(text) {
				continue
			}
			if !usesTime(changed) {
				changed += "\nvar _ time.Duration\n"
			}
			copied := filepath.Join(dir, strings.ReplaceAll(filepath.Join(pkg, filepath.Base(file)), "/", "_"))
			if err := os.WriteFile(copied, []byte(changed), 0o600); err != nil {
				return "", err
			}
			overlay[file] = copied
		}
		added := filepath.Join(dir, strings.ReplaceAll(pkg, "/", "_")+"_skew.go")
		if err := os.WriteFile(added, fmt.Appendf(nil, skewFile, name), 0o600); err != nil {
			return "", err
		}
		overlay[filepath.Join(root, pkg, "zz_skew.go")] = added
	}
	list, err := json.Marshal(map[string]any{"Replace": overlay})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, "overlay.json"), list, 0o600); err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "leased")
	build := exec.Command("go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", binary, "./cmd/leased")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return binary, nil
}

// usesTime says whether package time is still named in the source.
func usesTime(source string) bool {
	f, err := parser.ParseFile(token.NewFileSet(), "", source, parser.SkipObjectResolution)
	if err != nil {
		return true
	}
	used := false
	ast.Inspect(f, func(n ast.Node) bool {
		if s, ok := n.(*ast.SelectorExpr); ok {
			if x, ok := s.X.(*ast.Ident); ok && x.Name == "time" {
				used = true
			}
		}
		return !used
	})
	return used
}

// skewedService is the service with a clock of its own.
type skewedService struct {
	*testnats.Service
	file string
	mu   sync.Mutex
}

func serveSkewed(t *testing.T, url string, by time.Duration, prefix string) *skewedService {
	t.Helper()
	s := &skewedService{file: filepath.Join(t.TempDir(), "skew")}
	s.set(t, by)
	s.Service = testnats.LeasedFrom(t, skewedLeased(t), []string{"LEASED_TEST_SKEW=" + s.file}, "serve", "--server", url, "--http-listen", "127.0.0.1:0", "--api-prefix", prefix)
	return s
}

func (s *skewedService) set(t *testing.T, by time.Duration) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	// Renamed, so that no half of it is ever read.
	if err := os.WriteFile(s.file+".new", []byte(strconv.FormatInt(int64(by/time.Second), 10)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(s.file+".new", s.file); err != nil {
		t.Fatal(err)
	}
}

// offset is what the service takes the server's clock to be ahead by.
func (s *skewedService) offset(t *testing.T) time.Duration {
	t.Helper()
	resp, err := http.Get("http://" + s.HTTP() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(body), "\nleased_clock_offset_seconds ")
	line, _, _ := strings.Cut(rest, "\n")
	v, err := strconv.ParseFloat(line, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(v * float64(time.Second))
}

// at makes calls at an API prefix.
type at struct {
	t      *testing.T
	nc     *nats.Conn
	prefix string
}

func (a at) call(name string, body map[string]any) reply {
	a.t.Helper()
	r, err := callAt(a.nc, a.prefix, name, body)
	if err != nil {
		a.t.Error(err)
	}
	return r
}

func (a at) acquire(key, holder string, ttl time.Duration) reply {
	a.t.Helper()
	return a.call("acquire", map[string]any{"key": key, "holder": holder, "ttl_ms": ttl.Milliseconds()})
}

func (a at) grant(key, holder string, ttl time.Duration) reply {
	a.t.Helper()
	var r reply
	testnats.Eventually(a.t, 10*time.Second, func() bool { r = a.acquire(key, holder, ttl); return r.Kind == "granted" }, late(func() string { return r.Kind + " " + r.Error }))
	return r
}

func (a at) renew(l reply, ttl time.Duration) reply {
	a.t.Helper()
	return a.call("renew", map[string]any{"key": l.Key, "holder": l.Holder, "revision": l.Revision, "ttl_ms": ttl.Milliseconds()})
}

func (a at) owner(key string) reply {
	a.t.Helper()
	return a.call("owner", map[string]any{"key": key})
}

// wholeLife proves that a lease lasts as long as it should, to a moment, in the
// eyes of every service in seen.
func wholeLife(t *testing.T, by at, seen []at, key string, before func()) {
	t.Helper()
	const ttl = 3 * time.Second
	l := by.grant(key, "A", ttl)
	if late, early := l.Expires.Sub(l.got.Add(ttl)), l.sent.Add(ttl).Sub(l.Expires); late > 50*time.Millisecond || early > 500*time.Millisecond {
		t.Errorf("%s: expires_at is %v too late or %v too early", key, late, early)
	}
	if left := time.Duration(l.Left) * time.Millisecond; left > ttl || left < ttl-l.got.Sub(l.sent)-50*time.Millisecond {
		t.Errorf("%s: left_ms says %v after %v", key, left, l.got.Sub(l.sent))
	}
	if m := lastOf(t, by.nc, key); m == nil || seconds(t, m) != ttl {
		t.Errorf("%s: stored with another TTL: %+v", key, m)
	}
	if before != nil {
		before()
	}
	l = renewed(t, by, l, ttl)
	for {
		for _, a := range seen {
			o := a.owner(key)
			d := a.acquire(key, "B", time.Second)
			switch {
			case o.got.Before(l.sent.Add(ttl)) && o.Kind != "held":
				t.Errorf("%s at %s: %s %s, %v before its end", key, a.prefix, o.Kind, o.Error, l.sent.Add(ttl).Sub(o.got))
			case d.got.Before(l.sent.Add(ttl)) && d.Kind != "denied":
				t.Errorf("%s at %s: acquire says %s %s, %v before the end", key, a.prefix, d.Kind, d.Error, l.sent.Add(ttl).Sub(d.got))
			case o.sent.After(l.got.Add(ttl)) && o.Kind == "held" && o.Holder == "A":
				t.Errorf("%s at %s: held %v after its end", key, a.prefix, o.sent.Sub(l.got.Add(ttl)))
			case d.sent.After(l.got.Add(ttl)) && d.Kind == "denied" && d.Holder == "A":
				t.Errorf("%s at %s: denied %v after its end", key, a.prefix, d.sent.Sub(l.got.Add(ttl)))
			}
			if o.Kind == "held" && o.Holder == "A" {
				if left, most := time.Duration(o.Left)*time.Millisecond, l.got.Add(ttl).Sub(o.sent); left > most {
					t.Errorf("%s at %s: left_ms says %v, it is %v at most", key, a.prefix, left, most)
				}
			}
			if d.Kind == "granted" {
				if d.Revision <= l.Revision {
					t.Errorf("%s: revision %d after %d", key, d.Revision, l.Revision)
				}
				return
			}
		}
		if time.Since(l.got) > ttl+2*time.Second {
			t.Errorf("%s: never free", key)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func renewed(t *testing.T, a at, l reply, ttl time.Duration) reply {
	t.Helper()
	r := a.renew(l, ttl)
	if r.Kind != "renewed" {
		t.Fatalf("%s at %s: renew says %s: %s", l.Key, a.prefix, r.Kind, r.Error)
	}
	return r
}

// TestSkewedClock is row 16's last part and T09: the clock of the service, off
// by half a minute or set while leases are held, ends none and prolongs none.
func TestSkewedClock(t *testing.T) {
	t.Parallel()
	n := testnats.Child(t, testnats.ChildOptions{})
	c := callerOn(t, n.URL)
	right, stop := serveUntil(t, n.URL)
	defer stop()
	right.waitReady(t)
	var all []at
	var services []*skewedService
	for prefix, by := range map[string]time.Duration{"ahead": 30 * time.Second, "behind": -30 * time.Second, "moving": 0} {
		s := serveSkewed(t, n.URL, by, prefix)
		if prefix == "moving" {
			services = append(services, s)
		}
		// It really runs on another clock.
		if off := s.offset(t); (off + by).Abs() > time.Second {
			t.Fatalf("%s: the service sees the server's clock off by %v, wanted %v", prefix, off, -by)
		}
		all = append(all, at{t, c.nc, prefix})
	}
	all = append(all, at{t, c.nc, "api.leases"})
	moving := services[0]

	var wg sync.WaitGroup
	for i, by := range all {
		wg.Go(func() { wholeLife(t, by, all, fmt.Sprintf("steady-%d", i), nil) })
	}
	wg.Wait()

	// Now somebody sets the clock of one of them, back and forth.
	for i, step := range []time.Duration{30 * time.Second, -30 * time.Second, 0} {
		for j, by := range all {
			wg.Go(func() {
				wholeLife(t, by, all, fmt.Sprintf("step-%d-%d", i, j), func() { moving.set(t, step) })
			})
		}
		wg.Wait()
	}
}

// TestBucketMadeByASkewedClock: a bucket that a service ten minutes behind or
// ahead makes is sound for every instance, and its fences are above those of
// the bucket before it.
func TestBucketMadeByASkewedClock(t *testing.T) {
	t.Parallel()
	for _, by := range []time.Duration{-10 * time.Minute, 10 * time.Minute} {
		t.Run(by.String(), func(t *testing.T) {
			t.Parallel()
			n := testnats.Child(t, testnats.ChildOptions{})
			nc := n.Connect()
			// A first bucket, made on the right clock.
			_, stop := serveUntil(t, n.URL)
			first := at{t, nc, "api.leases"}
			old := first.grant("k", "A", time.Second)
			stop()
			deleteBucket(t, nc)

			s := serveSkewed(t, n.URL, by, "skewed")
			skewed := at{t, nc, "skewed"}
			young := skewed.grant("k", "B", 5*time.Second)
			if young.Revision <= old.Revision {
				t.Errorf("revision %d after %d", young.Revision, old.Revision)
			}
			in, stop := serveUntil(t, n.URL)
			defer stop()
			in.waitReady(t)
			if r := first.owner("k"); r.Kind != "held" || r.Revision != young.Revision {
				t.Errorf("another instance: %s %d", r.Kind, r.Revision)
			}
			// Deleted and made again under both, by whoever comes first.
			deleteBucket(t, nc)
			again := first.grant("k2", "C", time.Second)
			if again.Revision <= young.Revision {
				t.Errorf("revision %d after %d", again.Revision, young.Revision)
			}
			if last := skewed.grant("k3", "C", time.Second); last.Revision <= again.Revision {
				t.Errorf("revision %d after %d", last.Revision, again.Revision)
			}
			wholeLife(t, skewed, []at{first, skewed}, "life", nil)
			_ = s
		})
	}
}

// TestBucketFromTheFutureDeleted: the bucket was made by a clock far ahead, so
// one that replaces it begins where it ended. An instance that has not looked
// since must not take the one for the other.
func TestBucketFromTheFutureDeleted(t *testing.T) {
	t.Parallel()
	n := testnats.Child(t, testnats.ChildOptions{})
	nc := n.Connect()
	s := serveSkewed(t, n.URL, 10*time.Minute, "skewed")
	at{t, nc, "skewed"}.grant("first", "A", time.Second)
	s.Kill()
	var sides []at
	for _, prefix := range []string{"one", "two"} {
		in, stop := serveUntil(t, n.URL, apiPrefix(prefix))
		defer stop()
		in.waitReady(t)
		sides = append(sides, at{t, nc, prefix})
	}
	one, two := sides[0], sides[1]
	const ttl = 6 * time.Second
	held := two.grant("k", "A", ttl)
	end := held.sent.Add(ttl)
	deleteBucket(t, nc)
	// The first finds out by a call and makes it again; the second is asked then.
	testnats.Eventually(t, 5*time.Second, func() bool {
		one.acquire("x", "B", time.Second)
		return api(nc, "STREAM.INFO.KV_leases", nil, nil) == nil
	}, "not made again")
	for time.Now().Before(end) {
		for _, a := range sides {
			if r := a.acquire("k", "B", time.Second); r.Kind == "granted" && r.got.Before(end) {
				t.Fatalf("two holders: %s granted the key with revision %d (A has %d) %v before the end of A's lease", a.prefix, r.Revision, held.Revision, end.Sub(r.got))
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
}
