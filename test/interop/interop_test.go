// Package interop holds the service against what others use it with: the
// contract's own example program, the nats CLI, Prometheus, other languages.
package interop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/testnats"
)

// exampleSum is the SHA-256 of the program at the end of the contract.
const exampleSum = "dc9ec1e792cf47288361c6c84e61c52437754ff138eb199b81922f9e82403ebc"

// TestExampleProgram runs the contract's example, byte for byte, to its end. It
// connects to the default URL, so where the machine allows it both run in a
// network namespace of their own.
func TestExampleProgram(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("example/main.go")
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(source); hex.EncodeToString(sum[:]) != exampleSum {
		t.Fatalf("example/main.go is not the contract's text: its SHA-256 is %x", sum)
	}
	program := filepath.Join(t.TempDir(), "example")
	if out, err := exec.Command("go", "build", "-o", program, "./example").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	script := `
"$0" serve --http-listen 127.0.0.1:9422 --store-dir "$2" & leased=$!
until curl -sf http://127.0.0.1:9422/readyz >/dev/null; do
  kill -0 $leased || exit 101
  sleep 0.1
done
"$1"; code=$?
kill -TERM $leased; wait $leased || exit 102
exit $code`
	args := []string{"sh", "-c", script, testnats.LeasedBinary(t), program, t.TempDir()}
	if own := []string{"unshare", "--net", "sh", "-c"}; exec.Command("unshare", "--net", "true").Run() == nil {
		args = append(own, `ip link set lo up && exec "$@"`, "sh")
		args = append(args, "sh", "-c", script, testnats.LeasedBinary(t), program, t.TempDir())
	} else {
		t.Log("no network namespace of its own here: using 127.0.0.1:4222 as it is")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began := time.Now()
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\nstdout: %s\nstderr: %s", err, &stdout, &stderr)
	}
	if stdout.Len() > 0 {
		t.Errorf("the program says: %s", &stdout) // it prints only what went wrong
	}
	if took := time.Since(began); took < 15*time.Second {
		t.Errorf("it ended after %v, before three renewals of a 15 s lease", took)
	}
}

// external starts n instances on one in-process server.
func external(t *testing.T, n int) (*testnats.Node, []*testnats.Service) {
	t.Helper()
	node := testnats.Server(t)
	var services []*testnats.Service
	for range n {
		services = append(services, testnats.Leased(t, "serve", "--server", node.NS().ClientURL(), "--http-listen", "127.0.0.1:0"))
	}
	for _, s := range services {
		testnats.Eventually(t, 20*time.Second, func() bool {
			r, err := http.Get("http://" + s.HTTP() + "/readyz")
			if err != nil {
				return false
			}
			r.Body.Close()
			return r.StatusCode == 200
		}, "ready")
	}
	return node, services
}

// cli runs the nats CLI and returns what it prints.
func cli(t *testing.T, server string, args ...string) string {
	t.Helper()
	cmd := exec.Command(testnats.Tool(t, "nats"), append([]string{"--server", server}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir(), "XDG_CONFIG_HOME=")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nats %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// instances matches the ids in a table of the nats CLI.
var instances = regexp.MustCompile(`\b[A-Za-z0-9]{22}\b`)

var base = []string{"acquire", "renew", "release", "owner", "forward"}

// TestNatsCLI looks at two instances as a stranger would.
func TestNatsCLI(t *testing.T) {
	t.Parallel()
	node, _ := external(t, 2)
	url := node.NS().ClientURL()

	ls := cli(t, url, "micro", "ls")
	var info []struct {
		Info struct {
			ID        string
			Endpoints []struct {
				Name, Subject string
				QueueGroup    string            `json:"queue_group"`
				Metadata      map[string]string `json:"metadata"`
			} `json:"endpoints"`
		} `json:"info"`
	}
	decodeAll(t, cli(t, url, "micro", "info", "dagnats-api", "--json"), &info)
	if len(info) == 0 {
		t.Error("nats micro info shows no instance")
	}
	if ids := instances.FindAllString(ls, -1); !strings.Contains(ls, "dagnats-api") || len(ids) != 2 {
		t.Errorf("nats micro ls does not show two instances of dagnats-api: %q\n%s", ids, ls)
	}
	for _, service := range info {
		if !strings.Contains(ls, service.Info.ID) {
			t.Errorf("nats micro ls does not show %s:\n%s", service.Info.ID, ls)
		}
		seen := map[string]bool{}
		for _, e := range service.Info.Endpoints {
			seen[e.Name] = true
			if e.Subject != "api.leases."+e.Name || e.QueueGroup != "dagnats-leases" {
				t.Errorf("%s: subject %q, queue group %q", e.Name, e.Subject, e.QueueGroup)
			}
			for _, name := range []string{"request_schema", "reply_schema"} {
				if !json.Valid([]byte(e.Metadata[name])) {
					t.Errorf("%s: metadata %s is not JSON: %.80q", e.Name, name, e.Metadata[name])
				}
			}
			if e.Metadata["description"] == "" || !strings.Contains(e.Metadata["kinds"], "invalid") {
				t.Errorf("%s: metadata %q", e.Name, e.Metadata)
			}
		}
		for _, name := range base {
			if !seen[name] {
				t.Errorf("nats micro info shows no endpoint %s", name)
			}
		}
	}
	const calls = 400
	nc := node.Connect()
	for i := range calls {
		request(t, nc, "acquire", fmt.Sprintf(`{"key":"k%d","holder":"A","ttl_ms":5000}`, i))
	}
	stats := cli(t, url, "micro", "stats", "dagnats-api")
	for _, name := range base {
		if !strings.Contains(stats, name) {
			t.Errorf("nats micro stats does not show %s:\n%s", name, stats)
		}
	}
	for _, n := range granted(t, nc, 2) {
		if n < calls/10 {
			t.Errorf("an instance answered %d of %d calls", n, calls)
		}
	}
	if kv := cli(t, url, "kv", "get", "leases", "k1", "--raw"); !strings.Contains(kv, `"holder":"A"`) {
		t.Errorf("nats kv get shows %q", kv)
	}
}

// granted asks $SRV.STATS for how many acquires each instance granted.
func granted(t *testing.T, nc *nats.Conn, instances int) (counts []int) {
	t.Helper()
	sub, err := nc.SubscribeSync(nc.NewInbox())
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Unsubscribe()
	if err := nc.PublishRequest("$SRV.STATS.dagnats-api", sub.Subject, nil); err != nil {
		t.Fatal(err)
	}
	for range instances {
		msg, err := sub.NextMsg(5 * time.Second)
		if err != nil {
			t.Fatal(err)
		}
		var stats struct {
			Endpoints []struct {
				Name string
				Data struct{ Replies map[string]int }
			}
		}
		if err := json.Unmarshal(msg.Data, &stats); err != nil {
			t.Fatal(err)
		}
		for _, e := range stats.Endpoints {
			if e.Name == "acquire" {
				counts = append(counts, e.Data.Replies["granted"])
			}
		}
	}
	return counts
}

// decodeAll reads JSON values, one after the other or in an array.
func decodeAll[T any](t *testing.T, text string, into *[]T) {
	t.Helper()
	if json.Unmarshal([]byte(text), into) == nil {
		return
	}
	for dec := json.NewDecoder(strings.NewReader(text)); ; {
		var v T
		if err := dec.Decode(&v); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		*into = append(*into, v)
	}
}

func request(t *testing.T, nc *nats.Conn, call, body string) []byte {
	t.Helper()
	msg, err := nc.Request("api.leases."+call, []byte(body), 5*time.Second)
	if err != nil {
		t.Fatalf("%s %s: %v", call, body, err)
	}
	return msg.Data
}

// TestKillOneOfTwo kills an instance under load: what is sent after the server
// has dropped its connections is answered, all of it.
func TestKillOneOfTwo(t *testing.T) {
	t.Parallel()
	node, services := external(t, 2)
	before := node.NS().NumClients()

	var after atomic.Bool
	var answered, lostAfter, lostBefore atomic.Int64
	stop := make(chan struct{})
	done := make(chan struct{}, 4)
	for c := range cap(done) {
		nc := node.Connect()
		go func() {
			defer func() { done <- struct{}{} }()
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				sentAfter := after.Load()
				_, err := nc.Request("api.leases.acquire", fmt.Appendf(nil, `{"key":"k-%d-%d","holder":"A","ttl_ms":2000}`, c, i), 6*time.Second)
				switch {
				case err == nil:
					answered.Add(1)
				case sentAfter:
					lostAfter.Add(1)
				default:
					lostBefore.Add(1)
				}
			}
		}()
	}
	testnats.Eventually(t, 10*time.Second, func() bool { return answered.Load() > 200 }, "load")
	services[0].Kill()
	// An instance has three connections; ours are four.
	testnats.Eventually(t, 10*time.Second, func() bool { return node.NS().NumClients() <= before+cap(done)-3 }, "its connections dropped")
	after.Store(true)
	mark := answered.Load()
	testnats.Eventually(t, 20*time.Second, func() bool { return answered.Load() > mark+1000 }, "a thousand more answers")
	close(stop)
	for range cap(done) {
		<-done
	}
	t.Logf("%d answered, %d in flight lost with the instance, %d lost after", answered.Load(), lostBefore.Load(), lostAfter.Load())
	if lostAfter.Load() > 0 {
		t.Errorf("%d requests sent after the server dropped the dead instance were lost", lostAfter.Load())
	}
}

// debian finds a program of a Debian package; on CI it must be there.
func debian(t *testing.T, program, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is missing: install the Debian package %s", program, pkg)
		}
		t.Skipf("%s is not installed (Debian package %s)", program, pkg)
	}
	return path
}

// TestPrometheus has a real Prometheus scrape the service.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	prometheus := debian(t, "prometheus", "prometheus")
	promtool := debian(t, "promtool", "prometheus")
	s := testnats.Leased(t, "serve", "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", t.TempDir())
	nc := testnats.Connect(t, s.NATS())
	request(t, nc, "acquire", `{"key":"k","holder":"A","ttl_ms":60000}`)
	request(t, nc, "acquire", `{"key":"k","holder":"B","ttl_ms":60000}`)
	request(t, nc, "acquire", `{"key":"k","holder":"B"}`)

	body := get(t, "http://"+s.HTTP()+"/metrics")
	check := exec.Command(promtool, "check", "metrics")
	check.Stdin = bytes.NewReader(body)
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics is not silent: %v\n%s", err, out)
	}

	dir := t.TempDir()
	config := filepath.Join(dir, "prometheus.yml")
	if err := os.WriteFile(config, fmt.Appendf(nil, "global: {scrape_interval: 1s}\nscrape_configs:\n- job_name: leased\n  static_configs: [{targets: ['%s']}]\n", s.HTTP()), 0o600); err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", testnats.FreePort(t))
	cmd := exec.Command(prometheus, "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "tsdb"), "--web.listen-address="+addr)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("prometheus: %s", &log)
		}
	})
	query := func(expr string) string {
		r, err := http.Get("http://" + addr + "/api/v1/query?query=" + url.QueryEscape(expr))
		if err != nil {
			return ""
		}
		defer r.Body.Close()
		var reply struct {
			Data struct {
				Result []struct{ Value [2]any }
			}
		}
		if json.NewDecoder(r.Body).Decode(&reply) != nil || len(reply.Data.Result) != 1 {
			return ""
		}
		return fmt.Sprint(reply.Data.Result[0].Value[1])
	}
	for expr, want := range map[string]string{
		`up{job="leased"}`: "1",
		`leased_replies_total{endpoint="acquire",kind="granted"}`:       "1",
		`leased_replies_total{endpoint="acquire",kind="denied"}`:        "1",
		`leased_replies_total{endpoint="acquire",kind="invalid"}`:       "1",
		`leased_replies_total{endpoint="forward",kind="owner_timeout"}`: "0",
		`leased_leases_held`: "1",
		`sum(leased_request_duration_seconds_count{endpoint="acquire"})`: "3",
	} {
		testnats.Eventually(t, 30*time.Second, func() bool { return query(expr) == want }, expr, testnats.Lazy(func() string { return query(expr) }))
	}
}

func get(t *testing.T, url string) []byte {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != 200 {
		t.Fatalf("%s: %s, %v", url, r.Status, err)
	}
	return body
}

// TestJavaScript has a holder in JavaScript use the wire.
func TestJavaScript(t *testing.T) {
	t.Parallel()
	node := debian(t, "node", "nodejs")
	dir := t.TempDir()
	data, err := os.ReadFile(filepath.Join("js", "holder.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "holder.mjs"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	modules := filepath.Join(testnats.Modules(t, filepath.Join("js", "package.json")), "node_modules")
	if err := os.Symlink(modules, filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	s := testnats.Leased(t, "serve", "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", t.TempDir())
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	holder := exec.CommandContext(ctx, node, "holder.mjs", s.NATS())
	holder.Dir = dir
	var stdout, stderr bytes.Buffer
	holder.Stdout, holder.Stderr = &stdout, &stderr
	if err := holder.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, &stdout, &stderr)
	}
	var steps []struct{ Step string }
	decodeAll(t, stdout.String(), &steps)
	var got []string
	for _, s := range steps {
		got = append(got, s.Step)
	}
	if want := []string{"acquired", "renewed", "forwarded", "released"}; !slices.Equal(got, want) {
		t.Errorf("steps %v, want %v", got, want)
	}
}
