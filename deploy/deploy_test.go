// Package deploy has files to run leased with; its tests run them.
package deploy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/leased/leased/client"
	"github.com/leased/leased/internal/testnats"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testnats.ServersOwn()) }

// roles are the users of permissions.conf, in the order of that file.
var roles = []string{"leased", "leased-front", "leased-hop", "holder", "worker-1", "caller", "watcher", "operator"}

// password is the variable of a role's password.
func password(role string) string {
	return strings.ToUpper(strings.ReplaceAll(role, "-", "_")) + "_PASSWORD"
}

// passwords puts all of them into the environment.
func passwords(t *testing.T) {
	for _, role := range roles {
		t.Setenv(password(role), "the-password-of-"+role)
	}
}

func as(role string) nats.Option { return nats.UserInfo(role, "the-password-of-"+role) }

// TestWhoMayWhat holds every subject that leased and its callers use, and some that nobody
// may, against every role of permissions.conf.
func TestWhoMayWhat(t *testing.T) {
	passwords(t)
	node := testnats.Server(t, func(o *server.Options) {
		if err := o.ProcessConfigFile("permissions.conf"); err != nil {
			t.Fatal(err)
		}
	})
	if n := len(roles); len(usersOf(t)) != n {
		t.Fatalf("permissions.conf has the users %v", usersOf(t))
	}
	const holders = "holder worker-1"
	publish := map[string]string{
		"api.leases.acquire":    holders,
		"api.leases.renew":      holders,
		"api.leases.renew_many": holders,
		"api.leases.release":    holders,
		"api.leases.owner":      holders + " caller watcher operator",
		"api.leases.forward":    holders + " caller",
		"api.leases.list":       holders + " watcher operator",
		"api.leases.evict":      "operator",
		"api.leases.other":      "",

		"$SRV.PING":              "watcher operator",
		"$SRV.PING.dagnats-api":  "watcher operator",
		"$SRV.INFO":              "watcher operator",
		"$SRV.STATS.dagnats-api": "leased watcher operator",

		"$JS.API.INFO":                                     "leased operator",
		"$JS.API.STREAM.INFO.KV_leases":                    "leased operator",
		"$JS.API.STREAM.INFO.OTHER":                        "",
		"$JS.API.STREAM.CREATE.KV_leases":                  "leased",
		"$JS.API.STREAM.UPDATE.KV_leases":                  "operator",
		"$JS.API.STREAM.PURGE.KV_leases":                   "leased operator",
		"$JS.API.STREAM.DELETE.KV_leases":                  "",
		"$JS.API.STREAM.MSG.GET.KV_leases":                 "leased operator",
		"$JS.API.STREAM.MSG.DELETE.KV_leases":              "",
		"$JS.API.STREAM.RESTORE.KV_leases":                 "",
		"$JS.API.DIRECT.GET.KV_leases.$KV.leases.k":        "",
		"$JS.API.CONSUMER.CREATE.KV_leases.c":              "leased operator",
		"$JS.API.CONSUMER.CREATE.KV_leases.c.$KV.leases.k": "leased operator",
		"$JS.API.CONSUMER.CREATE.OTHER.c":                  "",
		"$JS.API.CONSUMER.DELETE.KV_leases.c":              "leased operator",
		"$JS.API.CONSUMER.MSG.NEXT.KV_leases.c":            "operator",
		"$JS.FC.KV_leases.c.x":                             "leased operator",
		"$JS.ACK.KV_leases.c.1.1.1.1.1":                    "operator",
		"$KV.leases.k":                                     "leased",
		"$KV.other.k":                                      "",
		"dagnats.lease.changed.k":                          "",
		"dagnats.lease.inbox.h.k":                          "leased-hop",
		"dagnats.lease.inbox.worker-1.k":                   "leased-hop",
		"_INBOX.a.b":                                       "leased-front",
		"_INBOX.holder.a.b":                                "leased-front",
		"_INBOX.operator.a":                                "leased-front",
		"_INBOX_leased.a.b":                                "",
		"_INBOX_leased.peers.a":                            "leased-front",
		"_INBOX_leased_hop.a.b":                            "",
		"_INBOX_leased_front.a.b":                          "",
		"orders.new":                                       "",
		"$SYS.REQ.SERVER.PING":                             "",
	}
	const lookers = "holder worker-1 watcher operator"
	subscribe := map[string]string{
		"api.leases.*":                   "leased-front",
		"api.leases.owner":               "leased-front",
		"api.leases.>":                   "leased-front", // NATS takes the > for one token that the * allows
		"$SRV.>":                         "leased-front",
		"$SRV.STATS.dagnats-api":         "leased-front",
		"_INBOX.>":                       "",
		"_INBOX.*":                       "",
		"_INBOX.a.*":                     "",
		"_INBOX.*.a":                     "",
		"_INBOX_leased.>":                "leased",
		"_INBOX_leased.peers.>":          "leased",
		"_INBOX_leased_hop.>":            "leased-hop",
		"_INBOX_leased_front.>":          "leased-front",
		"dagnats.lease.changed.>":        lookers,
		"dagnats.lease.changed.k":        lookers,
		"dagnats.lease.inbox.>":          "",
		"dagnats.lease.inbox.*.>":        "",
		"dagnats.lease.inbox.worker-1.>": "worker-1",
		"dagnats.lease.inbox.worker-2.>": "",
		"$KV.leases.>":                   "",
		"$KV.leases.k":                   "",
		"$JS.API.>":                      "",
		"$JS.ACK.>":                      "",
		"$JS.EVENT.ADVISORY.STREAM.DELETED.KV_leases": "leased",
		"_R_.>": "",
		"_R_.a": "",
		">":     "",
	}
	for _, role := range []string{"holder", "worker-1", "caller", "watcher", "operator"} {
		subscribe["_INBOX."+role+".>"] = role
		subscribe["_INBOX."+role+".a.*"] = role
	}
	for _, role := range roles {
		denied := make(chan string, 1000)
		nc := node.Connect(as(role), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { denied <- err.Error() }))
		// refused tells whether NATS refused what was done: its errors come in order.
		refused := func(subject string, do func() error) (yes bool) {
			t.Helper()
			if err := errors.Join(do(), nc.Publish("nobody.may.this", nil), nc.Flush()); err != nil {
				t.Fatal(err)
			}
			for {
				select {
				case err := <-denied:
					switch {
					case strings.Contains(err, `"nobody.may.this"`):
						return yes
					case strings.Contains(err, `"`+subject+`"`):
						yes = true
					default:
						t.Fatalf("%s, %s: %s", role, subject, err)
					}
				case <-time.After(10 * time.Second):
					t.Fatalf("%s, %s: NATS does not answer", role, subject)
				}
			}
		}
		for subject, who := range publish {
			if got, want := !refused(subject, func() error { return nc.Publish(subject, nil) }), slices.Contains(strings.Fields(who), role); got != want {
				t.Errorf("%s may publish to %s: %v, want %v", role, subject, got, want)
			}
		}
		for subject, who := range subscribe {
			var sub *nats.Subscription
			got := !refused(subject, func() (err error) { sub, err = nc.SubscribeSync(subject); return err })
			if want := slices.Contains(strings.Fields(who), role); got != want {
				t.Errorf("%s may subscribe to %s: %v, want %v", role, subject, got, want)
			}
			_ = sub.Unsubscribe()
		}
	}
}

// usersOf are the names of users in permissions.conf.
func usersOf(t *testing.T) (users []string) {
	for _, m := range regexp.MustCompile(`\{ user: (\S+),`).FindAllStringSubmatch(read(t, "permissions.conf"), -1) {
		users = append(users, m[1])
	}
	return users
}

func read(t testing.TB, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// site is what the files of this directory make: three servers, and leased beside them.
type site struct {
	t     *testing.T
	dir   string
	ca    string
	nodes []*testnats.Node
	url   string
	http  string
	log   func() string
}

// replace replaces each old text, which must be there, by the new one after it.
func replace(t testing.TB, text string, oldNew ...string) string {
	t.Helper()
	for i := 0; i < len(oldNew); i += 2 {
		if !strings.Contains(text, oldNew[i]) {
			t.Fatalf("%q is not in\n%s", oldNew[i], text)
		}
		text = strings.ReplaceAll(text, oldNew[i], oldNew[i+1])
	}
	return text
}

func newSite(t *testing.T) *site {
	passwords(t)
	s := &site{t: t, dir: t.TempDir()}
	certificates(t, s.dir)
	s.ca = filepath.Join(s.dir, "ca.pem")
	if err := os.WriteFile(filepath.Join(s.dir, "permissions.conf"), []byte(read(t, "permissions.conf")), 0o600); err != nil {
		t.Fatal(err)
	}
	ports := map[string]int{}
	for _, name := range []string{"n1", "n2", "n3"} {
		ports[name] = testnats.FreePort(t)
	}
	conf := read(t, "cluster.conf")
	var urls []string
	for _, name := range []string{"n1", "n2", "n3"} {
		port := testnats.FreePort(t)
		text := replace(t, conf,
			"server_name: n1", "server_name: "+name,
			"0.0.0.0:4222", fmt.Sprintf("127.0.0.1:%d", port),
			"/var/lib/nats", t.TempDir(),
			"sync_interval: always", `sync_interval: "2m"`, // nothing loses power here
			"10.0.0.1:6222", fmt.Sprintf("127.0.0.1:%d", ports[name]),
			"@n1:6222", fmt.Sprintf("@127.0.0.1:%d", ports["n1"]),
			"@n2:6222", fmt.Sprintf("@127.0.0.1:%d", ports["n2"]),
			"@n3:6222", fmt.Sprintf("@127.0.0.1:%d", ports["n3"]),
			"/etc/nats/", s.dir+"/")
		file := filepath.Join(s.dir, name+".conf")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s.nodes = append(s.nodes, testnats.Server(t, func(o *server.Options) {
			*o = server.Options{NoSigs: true} // all else is in the file
			if err := o.ProcessConfigFile(file); err != nil {
				t.Fatal(err)
			}
		}))
		urls = append(urls, fmt.Sprintf("tls://127.0.0.1:%d", port))
	}
	s.url = strings.Join(urls, ",")
	testnats.Eventually(t, 20*time.Second, func() bool {
		for _, n := range s.nodes {
			if n.NS().NumRoutes() < 2 || !n.NS().JetStreamIsCurrent() {
				return false
			}
		}
		return true
	}, "the servers are no cluster")

	contexts := map[string]string{}
	for _, name := range []string{"leased", "leased-front", "leased-hop"} {
		text := read(t, name+".json")
		if name == "leased" {
			text = replace(t, text, "nats://n1:4222,nats://n2:4222,nats://n3:4222", s.url, "/etc/leased/ca.pem", s.ca)
		}
		contexts[name] = filepath.Join(s.dir, name+".json")
		if err := os.WriteFile(contexts[name], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the instances ask each other
		leased := testnats.Leased(t, "serve", "--context", contexts["leased"], "--front-context", contexts["leased-front"],
			"--hop-context", contexts["leased-hop"], "--replicas", "3", "--http-listen", "127.0.0.1:0")
		s.http, s.log = leased.HTTP(), leased.Output
		testnats.Eventually(t, 30*time.Second, func() bool { return strings.HasPrefix(s.get("/readyz"), "200") }, testnats.Lazy(func() string { return s.get("/readyz?verbose") }))
	}
	return s
}

// get is the status and body of a page of leased.
func (s *site) get(path string) string {
	resp, err := http.Get("http://" + s.http + path)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	http.DefaultClient.CloseIdleConnections()
	return fmt.Sprintf("%d %s", resp.StatusCode, body)
}

// replies counts the replies that NATS did not let leased send.
func (s *site) refusedReplies() int {
	m := regexp.MustCompile(`leased_nats_errors_total\{connection="front",error="reply"\} (\d+)`).FindStringSubmatch(s.get("/metrics"))
	if m == nil {
		return -1
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

func (s *site) connect(role string, options ...nats.Option) *nats.Conn {
	s.t.Helper()
	return testnats.Connect(s.t, s.url, append([]nats.Option{as(role), nats.CustomInboxPrefix("_INBOX." + role), nats.RootCAs(s.ca)}, options...)...)
}

// command runs leased as a role.
func (s *site) command(role string, args ...string) (out string, code int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, testnats.LeasedBinary(s.t), args...)
	cmd.Env = append(os.Environ(), "NATS_URL="+s.url, "NATS_CA="+s.ca, "NATS_USER="+role, "NATS_PASSWORD=the-password-of-"+role, "NATS_INBOX_PREFIX=_INBOX."+role)
	text, err := cmd.CombinedOutput()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		s.t.Fatalf("%v: %v\n%s", args, err, text)
	}
	return string(text), cmd.ProcessState.ExitCode()
}

// TestSite runs leased on the cluster of cluster.conf with the contexts and permissions of
// this directory, and lets every role try every command, every function of the client, and
// what it should not be able to do.
func TestSite(t *testing.T) {
	s := newSite(t)
	t.Run("commands", s.commands)
	t.Run("client", s.client)
	t.Run("reply subjects", s.replySubjects)
	t.Run("inboxes", s.inboxes)
	t.Run("responses", s.responses)
	t.Run("routes", s.routes)
	t.Run("lift", s.lift)
	if body := s.get("/readyz?verbose"); strings.Contains(body, "did not let this user publish") {
		t.Errorf("leased lacks a permission: %s", body)
	}
	if page := s.get("/metrics"); regexp.MustCompile(`error="permission"\} [1-9]`).MatchString(page) {
		t.Error("leased was refused a subject")
	}
}

// commands: each command does its work for the roles that it is for, and says at once
// that NATS does not permit it to the others.
func (s *site) commands(t *testing.T) {
	const denied, deniedRun, permitted = 77, 125, -1
	revision := func(key string) string {
		out, _ := s.command("holder", "owner", key, "--json")
		var l struct{ Revision uint64 }
		if err := json.Unmarshal([]byte(out), &l); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strconv.FormatUint(l.Revision, 10)
	}
	s.want(t, 0, "holder", "acquire", "stays", "--holder", "h", "--ttl", "10m")
	for _, role := range []string{"holder", "worker-1", "caller", "watcher", "operator"} {
		code := func(ok int, who ...string) int {
			if slices.Contains(who, role) {
				return ok
			}
			return denied
		}
		holds := slices.Contains([]string{"holder", "worker-1"}, role)
		s.want(t, code(0, "holder", "worker-1"), role, "acquire", "k", "--holder", role, "--ttl", "1m")
		if holds {
			s.want(t, 0, role, "renew", "k", "--holder", role, "--revision", revision("k"), "--ttl", "1m")
			s.want(t, 0, role, "release", "k", "--holder", role, "--revision", revision("k"))
			s.want(t, 0, role, "run", "k", "--", "true")
			s.want(t, 0, role, "run", "--shards", "0-1", "group", "--", "true")
		} else {
			s.want(t, denied, role, "renew", "k", "--holder", role, "--revision", "1", "--ttl", "1m")
			s.want(t, denied, role, "release", "k", "--holder", role, "--revision", "1")
			s.want(t, deniedRun, role, "run", "-n", "k", "--", "true")
			s.want(t, deniedRun, role, "run", "--shards", "0-1", "group", "--", "true")
		}
		s.want(t, 0, role, "owner", "stays")
		s.want(t, code(permitted, "holder", "worker-1", "caller"), role, "forward", "stays", "hello") // nobody listens
		s.want(t, code(0, "holder", "worker-1", "watcher", "operator"), role, "ls")
		s.want(t, code(0, "operator"), role, "evict", "stays")
		if role == "operator" {
			s.want(t, 0, "holder", "acquire", "stays", "--holder", "h", "--ttl", "10m")
		}
		if role == "caller" {
			s.want(t, denied, role, "watch", "--count", "1")
			continue
		}
		stop := s.changes(t)
		s.want(t, 0, role, "watch", "--count", "1")
		stop()
	}
}

func (s *site) want(t *testing.T, code int, role string, args ...string) {
	t.Helper()
	out, got := s.command(role, args...)
	if code == -1 && got != 77 && got != 64 {
		return
	}
	if got != code || code == 77 && !strings.Contains(out, "Permissions Violation") {
		t.Errorf("%s: leased %s: exit code %d, want %d: %s", role, strings.Join(args, " "), got, code, out)
	}
}

// changes makes events until stop is called.
func (s *site) changes(t *testing.T) (stop func()) {
	c := client.New(s.connect("holder"), client.Options{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			r, err := c.Acquire(ctx, client.AcquireRequest{Key: "busy", Holder: "busy", TTL: time.Second})
			if err == nil {
				_, _ = c.Release(ctx, r.Lease)
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return func() { cancel(); <-done }
}

// client: every function of package client works for a holder, and with them those of an
// owner for a worker.
func (s *site) client(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, role := range []string{"holder", "worker-1"} {
		c := client.New(s.connect(role), client.Options{})
		r, err := c.Acquire(ctx, client.AcquireRequest{Key: "c", Holder: role, TTL: time.Minute})
		must(err)
		r, err = c.Renew(ctx, r.Lease)
		must(err)
		many, err := c.RenewMany(ctx, role, time.Minute, []client.Lease{r.Lease})
		must(err)
		must(many[0].Err)
		_, err = c.Owner(ctx, "c")
		must(err)
		_, _, err = c.List(ctx, client.ListRequest{})
		must(err)
		_, err = c.Release(ctx, many[0].Lease)
		must(err)
		must(c.Run(ctx, "c", client.HoldOptions{Holder: role, TTL: 10 * time.Second}, func(context.Context, *client.Hold) error { return nil }))

		elected, leave := context.WithCancel(ctx)
		_ = c.Elect(elected, "e", client.ElectOptions{HoldOptions: client.HoldOptions{Holder: role, TTL: 10 * time.Second},
			OnElected: func(context.Context, *client.Hold) { leave() }})
		sharing, leave := context.WithCancel(ctx)
		_ = c.Shards(sharing, "s", []string{"s0"}, client.ShardsOptions{HoldOptions: client.HoldOptions{Holder: role, TTL: 10 * time.Second},
			Work: func(context.Context, *client.Hold) { leave() }})
		must(ctx.Err())
	}
	worker, caller := client.New(s.connect("worker-1"), client.Options{}), client.New(s.connect("caller"), client.Options{})
	in, err := worker.Inbox("worker-1", client.InboxOptions{})
	must(err)
	defer in.Close()
	h, err := worker.Hold(ctx, "served", client.HoldOptions{Holder: "worker-1", TTL: 10 * time.Second})
	must(err)
	defer h.Resign(ctx)
	must(in.Serve(h, func(_ context.Context, r client.Request) []byte { return append([]byte("heard "), r.Payload...) }))
	for range 3 {
		f, err := caller.Forward(ctx, client.ForwardRequest{Key: "served", Payload: []byte("you")})
		must(err)
		if string(f.Payload) != "heard you" {
			t.Errorf("%q", f.Payload)
		}
	}
	operator := client.New(s.connect("operator"), client.Options{})
	owner, err := operator.Owner(ctx, "served")
	must(err)
	_, err = operator.Evict(ctx, "served", owner.Lease.Revision)
	must(err)
}

// replySubjects: no role gets anything written, sent or done by the rights of leased.
func (s *site) replySubjects(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c := client.New(s.connect("holder"), client.Options{})
	r, err := c.Acquire(ctx, client.AcquireRequest{Key: "victim", Holder: "worker-1", TTL: 10 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan *nats.Msg, 1000)
	for _, tap := range []struct{ role, subject string }{
		{"worker-1", "dagnats.lease.inbox.worker-1.>"}, {"holder", "dagnats.lease.changed.victim"}, {"leased", "_INBOX_leased.x.>"}, {"leased-hop", "_INBOX_leased_hop.x.>"},
	} {
		if _, err := s.connect(tap.role).Subscribe(tap.subject, func(m *nats.Msg) { heard <- m }); err != nil {
			t.Fatal(err)
		}
	}
	before, seq := s.refusedReplies(), s.lastSeq(t)
	for role, subjects := range map[string][]string{
		"watcher": {"api.leases.owner", "api.leases.list", "$SRV.PING", "$SRV.PING.dagnats-api", "$SRV.INFO", "$SRV.STATS.dagnats-api"},
		"holder":  {"api.leases.owner", "api.leases.forward", "api.leases.acquire"},
		"caller":  {"api.leases.owner"},
	} {
		nc := s.connect(role)
		for _, subject := range subjects {
			for _, to := range []string{
				"$KV.leases.victim", "$KV.leases.new", "dagnats.lease.inbox.worker-1.victim", "dagnats.lease.changed.victim",
				"$JS.API.STREAM.PURGE.KV_leases", "_INBOX_leased.x.y", "_INBOX_leased_hop.x.y", "_INBOX.>", "orders.new", "api.leases.evict", "_R_.x",
			} {
				if err := nc.PublishRequest(subject, to, []byte(`{"key":"nobody-holds-this"}`)); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	// Those to micro's own verbs are refused by the permissions alone: both instances
	// answer, and this one alone is asked here.
	testnats.Eventually(t, 10*time.Second, func() bool { return s.refusedReplies() >= before+20 }, testnats.Lazy(func() string {
		return fmt.Sprintf("%d replies were refused before, now %d", before, s.refusedReplies())
	}))
	got, err := c.Owner(ctx, "victim")
	if err != nil || got.Lease.Revision != r.Lease.Revision {
		t.Errorf("the lease is now %+v, %v", got, err)
	}
	if now := s.lastSeq(t); now != seq {
		t.Errorf("the bucket went from %d to %d", seq, now)
	}
	if len(heard) > 0 {
		m := <-heard
		t.Errorf("%d messages came where they should not; the first: %s %q", len(heard)+1, m.Subject, m.Data)
	}
	if body := s.get("/readyz?verbose"); !strings.HasPrefix(body, "200") || !strings.Contains(body, "did not let this user reply") {
		t.Errorf("the checks say %s", body)
	}
	if !strings.Contains(s.log(), "NATS does not let this user reply where a caller said") {
		t.Error("the log does not tell of it")
	}
}

func (s *site) lastSeq(t *testing.T) uint64 {
	t.Helper()
	m, err := s.connect("operator").Request("$JS.API.STREAM.INFO.KV_leases", nil, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		State struct {
			Last uint64 `json:"last_seq"`
		}
	}
	if err := json.Unmarshal(m.Data, &info); err != nil || info.State.Last == 0 {
		t.Fatalf("%v: %s", err, m.Data)
	}
	return info.State.Last
}

// inboxes: nobody reads the replies and acks of leased, or answers in the place of NATS,
// and the connection that replies hears that nobody takes a reply.
func (s *site) inboxes(t *testing.T) {
	front := s.connect("leased-front", nats.CustomInboxPrefix("_INBOX_leased_front"))
	if m, err := front.Request("_INBOX.caller.gone", nil, 10*time.Second); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("a reply that nobody takes: %+v, %v", m, err)
	}
	for _, role := range []string{"holder", "worker-1", "caller", "watcher", "operator", "leased-front", "leased-hop"} {
		refused := make(chan string, 10)
		nc := s.connect(role, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
		sub, err := nc.SubscribeSync("_INBOX_leased.>")
		if err != nil {
			t.Fatal(err)
		}
		// An ack, as it would be for a write of leased.
		if err := nc.Publish("_INBOX_leased.AAAA.1", []byte(`{"stream":"KV_leases","seq":99999999999999999}`)); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"Subscription to", "Publish to"} {
			select {
			case got := <-refused:
				if !strings.Contains(got, want) || !strings.Contains(got, "_INBOX_leased") {
					t.Errorf("%s: %s", role, got)
				}
			case <-time.After(10 * time.Second):
				t.Errorf("%s: not refused: %s", role, want)
			}
		}
		if n, _, _ := sub.Pending(); n != 0 {
			t.Errorf("%s read %d messages", role, n)
		}
	}
}

// responses: an owner answers the forward that it got, once, and nothing else.
func (s *site) responses(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	refused := make(chan string, 10)
	nc := s.connect("worker-1", nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { refused <- err.Error() }))
	forged := make(chan string, 10)
	if _, err := nc.Subscribe("dagnats.lease.inbox.worker-1.>", func(m *nats.Msg) {
		other := m.Reply[:strings.LastIndexByte(m.Reply, '.')] + ".1"
		for _, to := range []string{other, m.Reply, m.Reply, "$KV.leases.victim"} {
			nc.Publish(to, []byte("true"))
		}
		nc.Flush()
		forged <- m.Reply
	}); err != nil {
		t.Fatal(err)
	}
	c := client.New(s.connect("holder"), client.Options{})
	r, err := c.Acquire(ctx, client.AcquireRequest{Key: "answers", Holder: "worker-1", TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	f, err := c.Forward(ctx, client.ForwardRequest{Key: "answers"})
	if err != nil || string(f.Payload) != "true" || f.Revision != r.Lease.Revision {
		t.Errorf("%+v, %v", f, err)
	}
	reply := <-forged
	if !strings.HasPrefix(reply, "_INBOX_leased_hop.") {
		t.Errorf("forwarded with the reply subject %s", reply)
	}
	for _, want := range []string{reply[:strings.LastIndexByte(reply, '.')] + ".1", reply, "$KV.leases.victim"} {
		select {
		case got := <-refused:
			if !strings.Contains(got, `Publish to "`+want+`"`) {
				t.Errorf("refused: %s, want %s", got, want)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("not refused: %s", want)
		}
	}
}

// routes: who has no certificate is told nothing.
func (s *site) routes(t *testing.T) {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(read(t, s.ca)))
	own, err := tls.LoadX509KeyPair(filepath.Join(s.dir, "server.pem"), filepath.Join(s.dir, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range s.nodes {
		for _, c := range []struct {
			certificates []tls.Certificate
			want         string
		}{{nil, ""}, {[]tls.Certificate{own}, "INFO "}} {
			got := ""
			conn, err := tls.Dial("tcp", n.NS().ClusterAddr().String(), &tls.Config{RootCAs: pool, Certificates: c.certificates})
			if err == nil {
				_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
				text := make([]byte, 5)
				k, _ := io.ReadFull(conn, text)
				got = string(text[:k])
				conn.Close()
			}
			if got != c.want {
				t.Errorf("with %d certificates a route is told %q, want %q", len(c.certificates), got, c.want)
			}
		}
	}
}

// lift ends all leases, so it comes last.
func (s *site) lift(t *testing.T) {
	for _, role := range []string{"holder", "watcher"} {
		if out, code := s.command(role, "fence", "lift", "--yes", "--timeout", "500ms"); code == 0 {
			t.Errorf("%s: %s", role, out)
		}
	}
	before := s.lastSeq(t)
	s.want(t, 0, "operator", "fence", "lift", "--yes")
	if now := s.lastSeq(t); now <= before {
		t.Errorf("the bucket went from %d to %d", before, now)
	}
	js := s.connect("operator")
	info, err := js.Request("$JS.API.STREAM.INFO.KV_leases", nil, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var stream struct {
		Config json.RawMessage `json:"config"`
	}
	if err := json.Unmarshal(info.Data, &stream); err != nil {
		t.Fatal(err)
	}
	for _, step := range [][2]string{
		{"STREAM.UPDATE.KV_leases", string(stream.Config)},
		{"CONSUMER.CREATE.KV_leases.durable", `{"stream_name":"KV_leases","config":{"durable_name":"durable","name":"durable","ack_policy":"explicit"}}`},
		{"CONSUMER.INFO.KV_leases.durable", ""},
		{"CONSUMER.DELETE.KV_leases.durable", ""},
	} {
		m, err := js.Request("$JS.API."+step[0], []byte(step[1]), 10*time.Second)
		if err != nil || strings.Contains(string(m.Data), `"error"`) {
			t.Errorf("%s: %v %+v", step[0], err, m)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c := client.New(s.connect("holder"), client.Options{})
	testnats.Eventually(t, 30*time.Second, func() bool {
		_, err := c.Acquire(ctx, client.AcquireRequest{Key: "after", Holder: "h", TTL: time.Minute})
		return err == nil
	}, "nothing is granted after the lift")
}

// TestUnit: systemd understands the unit, as it is and with the lines for a cluster.
func TestUnit(t *testing.T) {
	verify, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("systemd-analyze is not on PATH (Debian: apt-get install systemd)")
	}
	unit := replace(t, read(t, "leased.service"), "/usr/local/bin/leased", testnats.LeasedBinary(t))
	inside := regexp.MustCompile(`(?m)^ExecStart=.*--store-dir.*\n`)
	cluster := regexp.MustCompile(`(?m)^#   `).ReplaceAllString(inside.ReplaceAllString(unit, ""), "")
	if cluster == unit || strings.Count(cluster, "ExecStart=") != 1 || strings.Count(unit, "\nExecStart=") != 1 {
		t.Fatalf("the unit has other lines than this test expects:\n%s", cluster)
	}
	for name, text := range map[string]string{"inside": unit, "cluster": cluster} {
		file := filepath.Join(t.TempDir(), "leased.service")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(verify, "verify", file).CombinedOutput()
		if err != nil || strings.Contains(string(out), "leased.service:") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

// certificates makes an authority and a certificate for 127.0.0.1 in dir.
func certificates(t *testing.T, dir string) {
	t.Helper()
	serial := int64(0)
	issue := func(parent *x509.Certificate, parentKey *ecdsa.PrivateKey, ca bool, certFile, keyFile string) (*x509.Certificate, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		serial++
		cert := &x509.Certificate{
			SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: certFile}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		if ca {
			cert.IsCA, cert.BasicConstraintsValid, cert.KeyUsage = true, true, x509.KeyUsageCertSign
			parent, parentKey = cert, key
		}
		der, err := x509.CreateCertificate(rand.Reader, cert, parent, &key.PublicKey, parentKey)
		if err != nil {
			t.Fatal(err)
		}
		private, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: private}} {
			if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return cert, key
	}
	ca, key := issue(nil, nil, true, "ca.pem", "ca.key")
	issue(ca, key, false, "server.pem", "server.key")
}
