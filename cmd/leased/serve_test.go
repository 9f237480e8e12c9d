package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"golang.org/x/crypto/bcrypt"

	"github.com/leased/leased"
	"github.com/leased/leased/internal/embedded"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/metrics"
)

// TestServeFlags: each flag is checked, and all of them together.
func TestServeFlags(t *testing.T) {
	alone := writeFile(t, "alone.conf", "max_payload: 65536")
	stored := writeFile(t, "stored.conf", "jetstream { store_dir: /var/lib/here }")
	cluster := writeFile(t, "cluster.conf", "server_name: n1, cluster { name: c, listen: 127.0.0.1:6222 }")
	broken := writeFile(t, "broken.conf", "max_payload: {")
	unknown := writeFile(t, "unknown.conf", "no_such_thing: 1")
	realm := newRealm(t)
	operator := writeFile(t, "operator.conf", realm.conf)
	creds := writeFile(t, "a.creds", realm.creds(t))
	state := "XDG_STATE_HOME=" + t.TempDir()
	dir := strings.TrimPrefix(state, "XDG_STATE_HOME=") + "/leased"

	for name, c := range map[string]struct {
		env    []string
		args   []string
		inside *embedded.Options // "" in StoreDir: whatever is the default
		err    string
	}{
		"nothing":            {env: []string{state}, inside: &embedded.Options{StoreDir: dir}},
		"home":               {inside: &embedded.Options{StoreDir: "HOME/.local/state/leased"}},
		"relative state":     {env: []string{"XDG_STATE_HOME=here"}, inside: &embedded.Options{StoreDir: "HOME/.local/state/leased"}},
		"all of the inside":  {args: []string{"--nats-listen", "[::1]:0", "--store-dir", "/s", "--sync", "always", "--nats-config", alone, "--nats-account", "A"}, inside: &embedded.Options{Listen: "[::1]:0", StoreDir: "/s", SyncAlways: true, ConfigFile: alone, Account: "A"}},
		"sync by time":       {env: []string{state}, args: []string{"--sync", "2m"}, inside: &embedded.Options{StoreDir: dir, SyncInterval: 2 * time.Minute}},
		"store of the file":  {env: []string{state}, args: []string{"--nats-config", stored}, inside: &embedded.Options{ConfigFile: stored}},
		"flag over file":     {args: []string{"--nats-config", stored, "--store-dir", "/s"}, inside: &embedded.Options{ConfigFile: stored, StoreDir: "/s"}},
		"file without store": {env: []string{state}, args: []string{"--nats-config", alone}, inside: &embedded.Options{ConfigFile: alone, StoreDir: dir}},
		"cluster inside":     {env: []string{state}, args: []string{"--replicas", "3", "--nats-config", cluster}, inside: &embedded.Options{ConfigFile: cluster, StoreDir: dir}},
		"no NATS_URL":        {env: []string{state, "NATS_URL="}, inside: &embedded.Options{StoreDir: dir}},
		"NATS_URL taken back": {env: []string{state, "NATS_URL=a", "NATS_CONTEXT=b"}, args: []string{"--server", ""},
			inside: &embedded.Options{StoreDir: dir}},
		"users of another NATS in env": {env: []string{state, "NATS_USER=u", "NATS_CREDS=/nowhere"}, inside: &embedded.Options{StoreDir: dir}},
		"operator inside":              {env: []string{state}, args: []string{"--nats-config", operator, "--creds", creds}, inside: &embedded.Options{ConfigFile: operator, StoreDir: dir}},
		"operator, creds in env":       {env: []string{state, "NATS_CREDS=" + creds}, args: []string{"--nats-config", operator}, inside: &embedded.Options{ConfigFile: operator, StoreDir: dir}},

		"replicas":                {args: []string{"--replicas", "2"}, err: "--replicas 2: must be 1, 3 or 5"},
		"replicas, number":        {args: []string{"--replicas", "many"}, err: "--replicas"},
		"replicas inside, alone":  {args: []string{"--replicas", "3"}, err: "--replicas 3: the NATS server inside is alone"},
		"replicas, no cluster":    {args: []string{"--replicas", "5", "--nats-config", alone}, err: "--replicas 5"},
		"in flight":               {args: []string{"--max-in-flight", "0"}, err: "--max-in-flight 0: must be 1"},
		"forwards":                {args: []string{"--max-forwards=-1"}, err: "--max-forwards -1: must be 1"},
		"group commit":            {args: []string{"--group-commit", "always"}, err: `--group-commit "always": must be on, off or auto`},
		"api prefix":              {args: []string{"--api-prefix", "a.*"}, err: `--api-prefix "a.*": must be a subject`},
		"api prefix, empty":       {args: []string{"--api-prefix", ""}, err: "--api-prefix"},
		"api prefix, dots":        {args: []string{"--api-prefix", "a..b"}, err: "--api-prefix"},
		"api prefix, end":         {args: []string{"--api-prefix", "a."}, err: "--api-prefix"},
		"api prefix, system":      {args: []string{"--api-prefix", "$SYS.x"}, err: "--api-prefix"},
		"event prefix":            {args: []string{"--event-prefix", "a b"}, err: "--event-prefix"},
		"http listen":             {args: []string{"--http-listen", "9422"}, err: `--http-listen "9422": must be host:port`},
		"http config, no port":    {args: []string{"--http-listen", "", "--http-config", alone}, err: "--http-config: there is no HTTP port"},
		"nats listen":             {args: []string{"--nats-listen", "localhost:99999"}, err: "--nats-listen"},
		"sync":                    {args: []string{"--sync", "never"}, err: `--sync "never": must be always or a duration`},
		"sync, negative":          {args: []string{"--sync=-1s"}, err: "--sync"},
		"config missing":          {args: []string{"--nats-config", "/nowhere/nats.conf"}, err: "--nats-config /nowhere/nats.conf"},
		"config broken":           {args: []string{"--nats-config", broken}, err: "--nats-config " + broken},
		"config unknown":          {args: []string{"--nats-config", unknown}, err: "no_such_thing"},
		"server and store":        {args: []string{"--server", "a", "--store-dir", "/s"}, err: "--store-dir: is for the NATS server inside, but --server names one"},
		"NATS_URL and listen":     {env: []string{"NATS_URL=a"}, args: []string{"--nats-listen", "127.0.0.1:1"}, err: "--nats-listen: is for the NATS server inside, but NATS_URL names one"},
		"context and sync":        {args: []string{"--context", "c", "--sync", "2m"}, err: "--sync: is for the NATS server inside, but --context names one"},
		"NATS_CONTEXT and config": {env: []string{"NATS_CONTEXT=c"}, args: []string{"--nats-config", alone}, err: "--nats-config: is for the NATS server inside, but NATS_CONTEXT names one"},
		"server and account":      {args: []string{"-s", "a", "--nats-account", "A"}, err: "--nats-account"},
		"user inside":             {args: []string{"--user", "u"}, err: "--user: is for a NATS that runs already"},
		"tls inside":              {args: []string{"--tlsfirst"}, err: "--tlsfirst: is for a NATS that runs already"},
		"creds inside":            {args: []string{"--creds", creds}, err: "--creds: is for a NATS that runs already"},
		"operator without creds":  {args: []string{"--nats-config", operator}, err: "--creds: is needed, because --nats-config names an operator"},
		"log level":               {args: []string{"--log-level", "loud"}, err: "--log-level"},
		"log format":              {args: []string{"--log-format", "xml"}, err: "--log-format"},
		"unknown flag":            {args: []string{"--no-such-flag"}, err: "--no-such-flag"},
		"argument":                {args: []string{"now"}, err: "now"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, flags, err := parse(t, c.env, c.args...)
			var p plan
			if err == nil {
				p, err = cmd.plan(flags)
			}
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || exitCode(err) != exitUsage {
					t.Errorf("error %v with exit code %d, want %q with 64", err, exitCode(err), c.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if c.inside != nil {
				c.inside.StoreDir = strings.Replace(c.inside.StoreDir, "HOME", os.Getenv("HOME"), 1)
			}
			if diff := cmp.Diff(c.inside, p.inside); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

// TestGroupCommit: beside a NATS that runs already, writes are stored together if
// the operator says so.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	for when, want := range map[string]bool{"on": true, "off": false, "auto": false} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			n := testnats.Child(t, testnats.ChildOptions{Sync: "always"})
			s := start(t, cleanEnv(t), "serve", "--server", n.URL, "--http-listen", "127.0.0.1:0", "--group-commit", when).serving()
			if !s.Ready {
				t.Fatalf("%+v", s)
			}
			nc := dial(t, n.URL)
			writes, err := nc.SubscribeSync("$KV.leases.>")
			if err != nil {
				t.Fatal(err)
			}
			const calls = 1000
			replies, err := nc.SubscribeSync(nats.NewInbox())
			if err != nil {
				t.Fatal(err)
			}
			for i := range calls {
				if err := nc.PublishRequest("api.leases.acquire", replies.Subject, fmt.Appendf(nil, `{"key":"k-%d","holder":"h","ttl_ms":60000}`, i)); err != nil {
					t.Fatal(err)
				}
			}
			batched := 0
			for range calls {
				if reply, err := replies.NextMsg(10 * time.Second); err != nil || !strings.Contains(string(reply.Data), `"granted":true`) {
					t.Fatal(err, reply)
				}
				w, err := writes.NextMsg(10 * time.Second)
				if err != nil {
					t.Fatal(err)
				}
				if w.Header.Get("Nats-Batch-Id") != "" {
					batched++
				}
			}
			if want != (batched > 0) {
				t.Errorf("%d of %d writes were in batches", batched, calls)
			}
		})
	}
}

// ask sends one call.
func ask(t *testing.T, nc *nats.Conn, call, body string) map[string]any {
	t.Helper()
	msg, err := nc.Request("api.leases."+call, []byte(body), 10*time.Second)
	if err != nil {
		t.Fatalf("%s: %v", call, err)
	}
	var reply map[string]any
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		t.Fatal(err)
	}
	return reply
}

// TestServeInside is the ordinary life of a leased with its own NATS server.
func TestServeInside(t *testing.T) {
	store := t.TempDir()
	args := []string{"serve", "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", store}
	p := start(t, cleanEnv(t), args...)
	s := p.serving()
	if !s.Embedded || !s.Connected || !s.Ready || s.Version == "" || strings.HasSuffix(s.HTTP, ":0") {
		t.Errorf("%+v", s)
	}

	// The series are there at 0, and requests do not add any.
	before := scrape(t, s.HTTP)
	for _, row := range leased.Endpoints() {
		for _, kind := range append(row.Kinds, "no_reply") {
			name := fmt.Sprintf(`leased_replies_total{endpoint=%q,kind=%q}`, row.Name, kind)
			if before[name] != "0" {
				t.Errorf("%s is %q at the start", name, before[name])
			}
		}
	}
	for name, want := range map[string]string{
		`leased_ready`: "1", `leased_bucket_state{state="sound"}`: "1", `leased_bucket_state{state="unseen"}`: "0",
		`leased_nats_connected{connection="front"}`: "1", `leased_nats_connected{connection="store"}`: "1", `leased_nats_connected{connection="hop"}`: "1",
	} {
		if before[name] != want {
			t.Errorf("%s is %q, want %s", name, before[name], want)
		}
	}
	nc := dial(t, s.NATS)
	for i := range 300 {
		if reply := ask(t, nc, "acquire", fmt.Sprintf(`{"key":"key-%d","holder":"holder-%d","ttl_ms":60000}`, i, i)); reply["granted"] != true {
			t.Fatal(reply)
		}
		ask(t, nc, "acquire", fmt.Sprintf(`{"key":"\u00ff%d"}`, i))
	}
	eventually(t, "300 leases are held", func() bool { return scrape(t, s.HTTP)["leased_leases_held"] == "300" })
	after := scrape(t, s.HTTP)
	if diff := cmp.Diff(names(before), names(after)); diff != "" {
		t.Errorf("the series changed with the keys:\n%s", diff)
	}
	for name, want := range map[string]string{
		`leased_replies_total{endpoint="acquire",kind="granted"}`: "300",
		`leased_replies_total{endpoint="acquire",kind="invalid"}`: "300",
	} {
		if after[name] != want {
			t.Errorf("%s is %s, want %s", name, after[name], want)
		}
	}

	for path, want := range map[string]string{"/readyz": "ready\n", "/healthz": "ok\n"} {
		if code, body := get(t, "http://"+s.HTTP+path); code != 200 || body != want {
			t.Errorf("%s: %d %q", path, code, body)
		}
	}
	if code, body := get(t, "http://"+s.HTTP+"/readyz?verbose"); code != 200 || !strings.Contains(body, "ok      bucket: sound\n") {
		t.Errorf("%d %s", code, body)
	}
	if code, body := get(t, "http://"+s.HTTP+"/"); code != 200 || !strings.Contains(body, "/metrics ") || !strings.Contains(body, "/readyz ") {
		t.Errorf("%d %s", code, body)
	}
	if code, _ := get(t, "http://"+s.HTTP+"/other"); code != 404 {
		t.Errorf("/other: %d", code)
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS"} {
		req, _ := http.NewRequest(method, "http://"+s.HTTP+"/metrics", nil)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 405 || resp.Header.Get("Allow") != "GET, HEAD" {
			t.Errorf("%s: %s", method, resp.Status)
		}
	}

	// What others have is refused, with a word that says what it is.
	for name, c := range map[string]struct{ args, say []string }{
		"store": {[]string{"--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--store-dir", store}, []string{"--store-dir", "in use by another process"}},
		"nats":  {[]string{"--nats-listen", strings.TrimPrefix(s.NATS, "nats://"), "--http-listen", "127.0.0.1:0", "--store-dir", t.TempDir()}, []string{"--nats-listen", "taken"}},
		"http":  {[]string{"--nats-listen", "127.0.0.1:0", "--http-listen", s.HTTP, "--store-dir", t.TempDir()}, []string{"--http-listen", "in use"}},
	} {
		_, stderr, code := runs(t, cleanEnv(t), append([]string{"serve"}, c.args...)...)
		last := stderr[strings.LastIndex(strings.TrimSpace(stderr), "\n")+1:]
		if code != exitFailed || !strings.HasPrefix(last, "leased: ") {
			t.Errorf("%s: exit code %d: %s", name, code, stderr)
		}
		for _, say := range c.say {
			if !strings.Contains(last, say) {
				t.Errorf("%s: %q does not say %q", name, last, say)
			}
		}
	}

	// Leases stay over a stop and a start.
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	nc.Close()
	p = start(t, cleanEnv(t), args...)
	nc = dial(t, p.serving().NATS)
	if reply := ask(t, nc, "owner", `{"key":"key-7"}`); reply["holder"] != "holder-7" {
		t.Errorf("after a restart: %v", reply)
	}
	p.signal(syscall.SIGINT)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d after SIGINT", code)
	}
}

// echo is an owner that answers forwards after a while.
func echo(t *testing.T, nc *nats.Conn, holder string, after time.Duration, got chan<- struct{}) {
	t.Helper()
	_, err := nc.Subscribe("dagnats.lease.inbox."+holder+".>", func(m *nats.Msg) {
		got <- struct{}{}
		time.AfterFunc(after, func() { _ = m.Respond(m.Data) })
	})
	if err == nil {
		err = nc.Flush()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestLeavingAnswersEverything: 200 forwards are on their way when SIGTERM
// comes; each gets its reply, and while they do the service is not ready.
func TestLeavingAnswersEverything(t *testing.T) {
	ns := startNATS(t, "")
	p := start(t, cleanEnv(t), beside("-s", ns.ClientURL(), "--max-forwards", "1600")...) // one key has a third
	s := p.serving()
	nc := dial(t, ns.ClientURL())
	const n, after = 200, 2 * time.Second
	got := make(chan struct{}, n)
	echo(t, dial(t, ns.ClientURL()), "h", after, got)
	ask(t, nc, "acquire", `{"key":"k","holder":"h","ttl_ms":60000}`)

	inbox := nc.NewInbox()
	replies, err := nc.SubscribeSync(inbox + ".*")
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := nc.PublishRequest("api.leases.forward", fmt.Sprintf("%s.%d", inbox, i), []byte(`{"key":"k","payload":"aGk="}`)); err != nil {
			t.Fatal(err)
		}
	}
	for range n {
		select {
		case <-got:
		case <-time.After(patience):
			t.Fatal("the forwards do not arrive")
		}
	}
	p.signal(syscall.SIGTERM)
	p.line(`"msg":"leaving"`)
	if code, body := get(t, "http://"+s.HTTP+"/readyz"); code != 503 || !strings.Contains(body, "staying") {
		t.Errorf("while leaving: %d %s", code, body)
	}
	if code, _ := get(t, "http://"+s.HTTP+"/healthz"); code != 200 {
		t.Errorf("healthz while leaving: %d", code)
	}
	seen := map[string]bool{}
	for range n {
		msg, err := replies.NextMsg(patience)
		if err != nil {
			t.Fatalf("after %d replies: %v", len(seen), err)
		}
		if !strings.Contains(string(msg.Data), `"payload":"aGk="`) || seen[msg.Subject] {
			t.Errorf("%s: %s", msg.Subject, msg.Data)
		}
		seen[msg.Subject] = true
	}
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if _, err := nc.Request("api.leases.owner", []byte(`{"key":"k"}`), time.Second); err != nats.ErrNoResponders {
		t.Errorf("after the end: %v", err)
	}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	ns := startNATS(t, "")
	nc := dial(t, ns.ClientURL())
	for _, c := range []struct {
		first, second syscall.Signal
		code          int
	}{{syscall.SIGTERM, syscall.SIGTERM, 143}, {syscall.SIGTERM, syscall.SIGINT, 130}} {
		p := start(t, cleanEnv(t), beside("-s", ns.ClientURL())...)
		p.serving()
		got := make(chan struct{}, 1)
		holder := nc.NewInbox()[7:]
		echo(t, dial(t, ns.ClientURL()), holder, 15*time.Second, got)
		ask(t, nc, "acquire", fmt.Sprintf(`{"key":%q,"holder":%q,"ttl_ms":60000}`, holder, holder))
		if err := nc.PublishRequest("api.leases.forward", nc.NewInbox(), []byte(fmt.Sprintf(`{"key":%q,"timeout_ms":20000}`, holder))); err != nil {
			t.Fatal(err)
		}
		<-got
		p.signal(c.first)
		p.line(`"msg":"leaving"`)
		began := time.Now()
		p.signal(c.second)
		if code := p.exit(); code != c.code || time.Since(began) > 2*time.Second {
			t.Errorf("exit code %d after %v, want %d at once", code, time.Since(began), c.code)
		}
	}
}

// TestLeavingTooLate: what cannot be answered in time is broken off, counted
// and told by the exit code.
func TestLeavingTooLate(t *testing.T) {
	ns := startNATS(t, "")
	var rows []metrics.Endpoint
	for _, row := range leased.Endpoints() {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	m := metrics.New(rows, metrics.Build{})
	var log lockedBuffer
	logger := log.logger()
	l, err := openLinks(to(ns.ClientURL()), logger, m, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	svc, err := leased.Start(leased.Options{Front: l.front, Store: l.store, Hop: l.hop, Replicas: 1,
		APIPrefix: leased.DefaultAPIPrefix, EventPrefix: leased.DefaultEventPrefix, MaxInFlight: 10, MaxForwards: 10,
		Version: "0.0.0", Logger: logger, Metrics: m})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the service is ready", func() bool { return len(failed(svc.Ready())) == 0 })
	nc := dial(t, ns.ClientURL())
	got := make(chan struct{}, 3)
	echo(t, dial(t, ns.ClientURL()), "h", time.Hour, got)
	ask(t, nc, "acquire", `{"key":"k","holder":"h","ttl_ms":60000}`)
	inbox := nc.NewInbox()
	replies, err := nc.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := nc.PublishRequest("api.leases.forward", inbox, []byte(`{"key":"k","timeout_ms":30000}`)); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		<-got
	}
	err = leave(svc, m, logger, 300*time.Millisecond)
	if exitCode(err) != exitFailed || !strings.Contains(err.Error(), "3 calls were broken off") {
		t.Errorf("leave: %v", err)
	}
	if !strings.Contains(log.String(), `"unanswered":3`) {
		t.Errorf("the log does not count them:\n%s", log.String())
	}
	for range 3 {
		msg, err := replies.NextMsg(patience)
		if err != nil || !strings.Contains(string(msg.Data), `"kind":"internal"`) {
			t.Errorf("reply %v %v", msg, err)
		}
	}
}

// to makes every connection to url, without credentials.
func to(url string) connector {
	return func(_ metrics.Connection, options ...nats.Option) (*nats.Conn, error) {
		return endpoint{urls: url}.dial(options...)
	}
}

// TestFrontComesBack: replies to what was taken wait for the front to be connected again, as much
// as the requests in flight may ask for. nats.go keeps 8 MiB if nobody says more.
func TestFrontComesBack(t *testing.T) {
	node := testnats.Server(t)
	relay := testnats.Relay(t, node.URL)
	var log lockedBuffer
	l, err := openLinks(to(relay.URL()), log.logger(), metrics.New(nil, metrics.Build{}), func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	eventually(t, "the front is there", func() bool { return l.front.IsConnected() })
	caller, err := node.Connect().SubscribeSync("reply")
	if err != nil {
		t.Fatal(err)
	}
	relay.Set(testnats.Cut)
	eventually(t, "the front is gone", func() bool { return !l.front.IsConnected() })
	const replies = 40
	for n := range replies {
		if err := l.front.Publish("reply", make([]byte, 1<<20)); err != nil {
			t.Fatalf("reply %d: %v", n, err)
		}
	}
	relay.Set(testnats.Pass)
	for n := range replies {
		if _, err := caller.NextMsg(patience); err != nil {
			t.Fatalf("reply %d: %v", n, err)
		}
	}
}

// TestDroppedMessagesAreCounted: all that nats.go drops, although it tells of the first only.
func TestDroppedMessagesAreCounted(t *testing.T) {
	node := testnats.Server(t)
	var log lockedBuffer
	m := metrics.New(nil, metrics.Build{})
	l, err := openLinks(to(node.URL), log.logger(), m, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	eventually(t, "the front is there", func() bool { return l.front.IsConnected() })
	goOn := make(chan struct{})
	defer close(goOn)
	sub, err := l.front.Subscribe("x", func(*nats.Msg) { <-goOn })
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SetPendingLimits(1, -1); err != nil {
		t.Fatal(err)
	}
	nc := node.Connect()
	for range 10 {
		if err := l.front.Flush(); err != nil {
			t.Fatal(err)
		}
		if err := nc.Publish("x", nil); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	counted := func() float64 {
		families, err := m.Gatherer().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "leased_nats_dropped_total" {
				return f.GetMetric()[0].GetCounter().GetValue() // by connection, front is the first
			}
		}
		return -1
	}
	eventually(t, "eight or nine of ten are counted", func() bool { n := counted(); return n == 8 || n == 9 })
}

// TestNATSComesLater: the process starts without NATS, says so, and serves as
// soon as there is one.
func TestNATSComesLater(t *testing.T) {
	o := natsOptions(t, "")
	o.Port = freePort(t)
	url := fmt.Sprintf("nats://127.0.0.1:%d", o.Port)
	p := start(t, cleanEnv(t), beside("-s", "nats://user:hunter2@"+strings.TrimPrefix(url, "nats://"))...)
	s := p.serving()
	if s.Connected || s.Ready || s.Embedded || s.NATS != url {
		t.Errorf("%+v", s)
	}
	p.line("cannot connect to NATS", "leased-store")
	if code, body := get(t, "http://"+s.HTTP+"/readyz?verbose"); code != 503 || !strings.Contains(body, "FAILED  connected\n") {
		t.Errorf("%d %s", code, body)
	}
	if code, _ := get(t, "http://"+s.HTTP+"/healthz"); code != 200 {
		t.Errorf("healthz %d", code)
	}
	if v := scrape(t, s.HTTP)[`leased_nats_connected{connection="front"}`]; v != "0" {
		t.Errorf("leased_nats_connected is %s", v)
	}
	ns := runNATS(t, o)
	ready := func() bool { code, _ := get(t, "http://"+s.HTTP+"/readyz"); return code == 200 }
	eventually(t, "ready once NATS is there", ready)
	const reconnects = `leased_nats_reconnects_total{connection="front"}`
	if v := scrape(t, s.HTTP)[reconnects]; v != "0" {
		t.Errorf("%s reconnects before the first loss", v)
	}
	p.line("connected to NATS", "leased-front", "2.15")
	nc := dial(t, url)
	if reply := ask(t, nc, "acquire", `{"key":"k","holder":"h","ttl_ms":60000}`); reply["granted"] != true {
		t.Error(reply)
	}
	nc.Close()

	// And again when it goes and comes back.
	ns.Shutdown()
	ns.WaitForShutdown()
	p.line("connection to NATS lost", "leased-front")
	eventually(t, "not ready without NATS", func() bool { return !ready() })
	runNATS(t, o)
	eventually(t, "ready again", ready)
	if v := scrape(t, s.HTTP)[reconnects]; v != "1" {
		t.Errorf("%s reconnects are counted, want 1", v)
	}
	if strings.Contains(p.output(), "hunter2") {
		t.Error("the log shows a password")
	}
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestLeavesWithoutNATS(t *testing.T) {
	p := start(t, cleanEnv(t), beside("-s", fmt.Sprintf("127.0.0.1:%d", freePort(t)))...)
	p.serving()
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

// freePort is a port nobody listens on; another process may take it, which the
// tests that need it notice.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// TestAuthentication: every way to prove who one is works against a server that
// asks for it, a wrong one is named within 5 seconds, and no secret shows.
func TestAuthentication(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("sesame-password"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	users := fmt.Sprintf(`authorization { users: [{user: opener, password: "%s"}] }`, hash)
	realm := newRealm(t)
	creds := realm.creds(t)
	user := testSeed(t)
	ca, other := newAuthority(t), newAuthority(t)
	cert, key := ca.client(t)
	server := func(more string) string {
		c, k := ca.client(t)
		return fmt.Sprintf(`tls { cert_file: %q, key_file: %q, ca_file: %q%s }`, c, k, ca.file, more)
	}
	const refuses = "NATS refuses the credentials"
	for name, c := range map[string]struct {
		conf string
		env  []string
		args []string
		say  string // "": it works
	}{
		"password":             {conf: users, args: []string{"--user", "opener", "--password", "sesame-password"}},
		"password in env":      {conf: users, env: []string{"NATS_USER=opener", "NATS_PASSWORD=sesame-password"}},
		"password in context":  {conf: users, args: []string{"--context", writeFile(t, "c.json", `{"user":"opener","password":"sesame-password"}`)}},
		"wrong password":       {conf: users, args: []string{"--user", "opener", "--password", "sesame-wrong"}, say: refuses},
		"no password":          {conf: users, say: refuses},
		"token":                {conf: `authorization { token: sesame-token }`, env: []string{"NATS_TOKEN=sesame-token"}},
		"token as user":        {conf: `authorization { token: sesame-token }`, args: []string{"--user", "sesame-token"}},
		"wrong token":          {conf: `authorization { token: sesame-token }`, args: []string{"--token", "sesame-wrong"}, say: refuses},
		"creds":                {conf: realm.conf, args: []string{"--creds", writeFile(t, "a.creds", creds)}},
		"creds in context":     {conf: realm.conf, args: []string{"--context", writeFile(t, "c.json", fmt.Sprintf(`{"creds":%q}`, writeFile(t, "a.creds", creds)))}},
		"creds of another":     {conf: realm.conf, env: []string{"NATS_CREDS=" + writeFile(t, "a.creds", testCreds(t))}, say: refuses},
		"nkey":                 {conf: fmt.Sprintf(`authorization { users: [{nkey: %s}] }`, publicKey(t, user)), args: []string{"--nkey", writeFile(t, "a.nk", user)}},
		"wrong nkey":           {conf: fmt.Sprintf(`authorization { users: [{nkey: %s}] }`, publicKey(t, user)), args: []string{"--nkey", writeFile(t, "a.nk", testSeed(t))}, say: refuses},
		"tls":                  {conf: server(""), args: []string{"--tlsca", ca.file}},
		"tls, wrong authority": {conf: server(""), args: []string{"--tlsca", other.file}, say: "certificate"},
		"tls both ways":        {conf: server(", verify: true"), args: []string{"--tlsca", ca.file, "--tlscert", cert, "--tlskey", key}},
		"tls, no certificate":  {conf: server(", verify: true"), args: []string{"--tlsca", ca.file}, say: "certificate required"},
		"tls first":            {conf: server(", handshake_first: true"), args: []string{"--tlsca", ca.file, "--tlsfirst"}},
		"tls first, not asked": {conf: server(", handshake_first: true"), args: []string{"--tlsca", ca.file, "--timeout", "1s"}, say: "timeout"},
		"tls in env":           {conf: server(", verify: true"), env: []string{"NATS_CA=" + ca.file, "NATS_CERT=" + cert, "NATS_KEY=" + key}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ns := startNATS(t, c.conf)
			began := time.Now()
			p := start(t, cleanEnv(t, c.env...), beside(append(c.args, "--server", fmt.Sprintf("nats://127.0.0.1:%d", ns.Addr().(*net.TCPAddr).Port))...)...)
			s := p.serving()
			if c.say == "" {
				if !s.Connected || !s.Ready {
					t.Errorf("%+v", s)
				}
			} else {
				p.line(c.say)
				if took := time.Since(began); s.Connected || took > 5*time.Second {
					t.Errorf("connected %v, told after %v", s.Connected, took)
				}
			}
			_, page := get(t, "http://"+s.HTTP+"/metrics")
			_, checks := get(t, "http://"+s.HTTP+"/readyz?verbose")
			for _, secret := range []string{"sesame", user, strings.Split(creds, "\n")[1]} {
				if strings.Contains(p.output()+page+checks, secret) {
					t.Errorf("%s... shows in log, metrics or checks", secret[:6])
				}
			}
			p.signal(syscall.SIGTERM)
			if code := p.exit(); code != exitOK {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// TestRotation: certificates and credentials are read again on a reconnect.
func TestRotation(t *testing.T) {
	t.Run("certificate", func(t *testing.T) {
		first, second := newAuthority(t), newAuthority(t)
		cert, key := first.client(t)
		ca := writeFile(t, "ca.pem", readFile(t, first.file))
		conf := func(a *authority) string {
			c, k := a.client(t)
			return fmt.Sprintf(`tls { cert_file: %q, key_file: %q, ca_file: %q, verify: true }`, c, k, a.file)
		}
		rotate(t, conf(first), conf(second), []string{"--tlsca", ca, "--tlscert", cert, "--tlskey", key}, func() {
			second.issue(t, cert, key)
			overwrite(t, ca, readFile(t, second.file))
		}, "certificate")
	})
	t.Run("creds", func(t *testing.T) {
		first, second := newRealm(t), newRealm(t)
		creds := writeFile(t, "a.creds", first.creds(t))
		rotate(t, first.conf, second.conf, []string{"--creds", creds}, func() {
			overwrite(t, creds, second.creds(t))
		}, "NATS refuses the credentials")
	})
}

// rotate runs leased against a server with the configuration first, which comes
// back as second; change mends what leased reads, after it has said say.
func rotate(t *testing.T, first, second string, args []string, change func(), say string) {
	t.Helper()
	o := natsOptions(t, first)
	o.Port = server.RANDOM_PORT
	ns := runNATS(t, o)
	port := ns.Addr().(*net.TCPAddr).Port
	p := start(t, cleanEnv(t), beside(append(args, "-s", fmt.Sprintf("127.0.0.1:%d", port))...)...)
	s := p.serving()
	if !s.Ready {
		t.Fatalf("%+v", s)
	}
	ns.Shutdown()
	ns.WaitForShutdown()
	o = natsOptions(t, second)
	o.Port = port
	runNATS(t, o)
	p.line(say)
	change()
	eventually(t, "ready with the new files", func() bool { code, _ := get(t, "http://"+s.HTTP+"/readyz"); return code == 200 })
}

// TestPermissionDenied: the subject that NATS refuses is in the log and the
// refusal is counted.
func TestPermissionDenied(t *testing.T) {
	for _, c := range []struct{ deny, connection, action, subject string }{
		{`publish: { deny: "$JS.API.STREAM.>" }`, "store", "publish", "$JS.API.STREAM."},
		{`subscribe: { deny: "api.leases.*" }`, "front", "subscribe", "api.leases.acquire"},
	} {
		o := natsOptions(t, fmt.Sprintf(`authorization { users: [{user: u, password: p, permissions: { %s } }] }`, c.deny))
		o.Port = freePort(t)
		mended := *o
		ns := runNATS(t, o)
		p := start(t, cleanEnv(t, "NATS_USER=u", "NATS_PASSWORD=p"), beside("-s", ns.ClientURL())...)
		s := p.serving()
		if !s.Connected {
			t.Errorf("%+v", s)
		}
		p.line("not permitted by NATS", fmt.Sprintf(`"action":%q`, c.action), `"subject":"`+c.subject, "leased-"+c.connection)
		if v := scrape(t, s.HTTP)[fmt.Sprintf(`leased_nats_errors_total{connection=%q,error="permission"}`, c.connection)]; v == "" || v == "0" {
			t.Errorf("%s: counted %q", c.connection, v)
		}
		if code, body := get(t, "http://"+s.HTTP+"/readyz?verbose"); code != 503 {
			t.Errorf("%s: ready without the permission: %s", c.connection, body)
		} else if want := c.action + " to " + c.subject; !strings.Contains(body, want) {
			t.Errorf("%s: the checks do not say %q: %s", c.connection, want, body)
		}
		mended.Users = []*server.User{{Username: "u", Password: "p"}}
		if err := ns.ReloadOptions(&mended); err != nil {
			t.Fatal(err)
		}
		eventually(t, "ready once it is permitted", func() bool { code, _ := get(t, "http://"+s.HTTP+"/readyz"); return code == 200 })
	}
}

// TestHTTPConfig: TLS and users of the HTTP port.
func TestHTTPConfig(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.client(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	config := writeFile(t, "web.yml", fmt.Sprintf("tls_server_config: {cert_file: %s, key_file: %s}\nbasic_auth_users: {scraper: %q}\n", cert, key, hash))
	p := start(t, cleanEnv(t), append(anyPorts(t), "--http-config", config)...)
	s := p.serving()
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	defer client.CloseIdleConnections()
	for password, want := range map[string]int{"secret": 200, "wrong": 401} {
		req, _ := http.NewRequest("GET", "https://"+s.HTTP+"/metrics", nil)
		req.SetBasicAuth("scraper", password)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("password %s: %s", password, resp.Status)
		}
	}
	broken := writeFile(t, "broken.yml", "tls_server_config: {cert_file: /nowhere/cert.pem, key_file: /nowhere/key.pem}\n")
	_, stderr, code := runs(t, cleanEnv(t), append(anyPorts(t), "--http-config", broken)...)
	if code != exitUsage || !strings.Contains(stderr, "--http-config "+broken) {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	p = start(t, cleanEnv(t), append(anyPorts(t), "--http-listen", "")...)
	if s := p.serving(); s.HTTP != "" || !s.Ready {
		t.Errorf("without a port: %+v", s)
	}
}

// TestSystemd: a service manager that asks for it is told.
func TestSystemd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	told := func() string {
		buf := make([]byte, 100)
		if err := socket.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		n, err := socket.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		return string(buf[:n])
	}
	p := start(t, cleanEnv(t, "NOTIFY_SOCKET="+path), anyPorts(t)...)
	if s := told(); s != "READY=1" {
		t.Errorf("told %q", s)
	}
	p.signal(syscall.SIGTERM)
	if s := told(); s != "STOPPING=1" {
		t.Errorf("told %q", s)
	}
	if code := p.exit(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestCommandLine(t *testing.T) {
	for name, c := range map[string]struct {
		args           []string
		stdout, stderr string
		code           int
	}{
		"help":          {[]string{"--help"}, "serve ", "", exitOK},
		"serve help":    {[]string{"serve", "--help"}, "--nats-listen=HOST:PORT", "", exitOK},
		"version":       {[]string{"version"}, "nats-server/v2 v2.", "", exitOK},
		"no command":    {nil, "", "leased: expected", exitUsage},
		"other command": {[]string{"bake"}, "", "bake", exitUsage},
		"wrong flag":    {[]string{"serve", "--replicas", "4"}, "", "leased: --replicas 4: must be 1, 3 or 5", exitUsage},
		"open to all":   {append(anyPorts(t), "--nats-listen", "0.0.0.0:0"), "", "must ask for authentication", exitFailed},
	} {
		stdout, stderr, code := runs(t, cleanEnv(t), c.args...)
		if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("%s: exit code %d\n%s%s", name, code, stdout, stderr)
		}
	}
	stdout, _, _ := runs(t, cleanEnv(t), "serve", "--help")
	for _, word := range []string{"$NATS_URL", "$NATS_CONTEXT", "$NATS_CREDS", "$NATS_INBOX_PREFIX", "--http-config", "Exit codes", "SIGTERM"} {
		if !strings.Contains(stdout, word) {
			t.Errorf("serve --help does not name %s", word)
		}
	}
	if i := slices.IndexFunc(strings.Split(stdout, "\n"), func(l string) bool { return len(l) > 100 }); i >= 0 {
		t.Errorf("line %d of serve --help is too long", i+1)
	}
}
