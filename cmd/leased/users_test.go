package main

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/metrics"
)

// TestUsersInside: where the configuration of the server inside has users, the connection
// that replies reaches inboxes and nothing else, whatever a caller says.
func TestUsersInside(t *testing.T) {
	conf := writeFile(t, "nats.conf", `
		accounts {
			A { jetstream: enabled
				exports: [{service: "api.leases.*"}]
				users: [
					{user: admin, password: p}
					{user: watcher, password: p, permissions: { publish: ["api.leases.owner", "api.leases.list", "$SRV.>"], subscribe: ["_INBOX.watcher.>"] }}
					{user: team, password: p, permissions: { publish: ["api.leases.owner"], subscribe: ["team.replies.>"] }}
					{user: h, password: p, permissions: { publish: ["api.leases.*"], subscribe: ["_INBOX.h.>", "dagnats.lease.inbox.h.>"], allow_responses: {max: 1, expires: "35s"} }}
				] }
			B { users: [{user: other, password: p}], imports: [{service: {account: A, subject: "api.leases.*"}}] }
		}`)
	p := start(t, cleanEnv(t), append(anyPorts(t), "--nats-config", conf, "--nats-account", "A", "--reply-to", "_INBOX.>,_R_.>,team.replies.>")...)
	s := p.serving()
	if !s.Ready {
		t.Fatalf("%+v", s)
	}
	as := func(user string, options ...nats.Option) *nats.Conn {
		return dial(t, s.NATS, append([]nats.Option{nats.UserInfo(user, "p")}, options...)...)
	}
	h := as("h", nats.CustomInboxPrefix("_INBOX.h"))
	granted := ask(t, h, "acquire", `{"key":"victim","holder":"h","ttl_ms":600000}`)
	if granted["granted"] != true {
		t.Fatal(granted)
	}

	// Callers with other inboxes, and in another account, are answered; the owner is reached.
	for name, nc := range map[string]*nats.Conn{"prefix": as("team", nats.CustomInboxPrefix("team.replies")), "account": as("other"), "account, prefix": as("other", nats.CustomInboxPrefix("mine"))} {
		if reply := ask(t, nc, "owner", `{"key":"victim"}`); reply["holder"] != "h" {
			t.Errorf("%s: %v", name, reply)
		}
	}
	asked := make(chan struct{}, 100)
	echo(t, h, "h", 0, asked)
	if reply := ask(t, h, "forward", `{"key":"victim","payload":"aGV5"}`); reply["payload"] != "aGV5" {
		t.Errorf("forward: %v", reply)
	}
	<-asked

	// micro answers $SRV by itself: permissions alone hold these.
	admin := as("admin")
	taps := make(chan string, 100)
	for _, subject := range []string{"$KV.leases.>", "orders.>", "_INBOX_leased.x", "_INBOX_leased_front.>", "dagnats.lease.changed.>"} {
		if _, err := admin.Subscribe(subject, func(m *nats.Msg) { taps <- m.Subject + " " + string(m.Data) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := admin.Flush(); err != nil {
		t.Fatal(err)
	}
	watcher := as("watcher", nats.CustomInboxPrefix("_INBOX.watcher"))
	for _, subject := range []string{"$SRV.PING.dagnats-api", "$SRV.INFO", "$SRV.STATS", "api.leases.owner", "api.leases.list"} {
		for _, to := range []string{"$KV.leases.victim", "orders.new", "_INBOX_leased.x", "dagnats.lease.inbox.h.victim", "dagnats.lease.changed.victim"} {
			if err := watcher.PublishRequest(subject, to, []byte(`{"key":"victim"}`)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := watcher.Flush(); err != nil {
		t.Fatal(err)
	}
	// 15 to $SRV, and 2 to orders.new and 2 to the inbox of leased that pass the rule for requests.
	eventually(t, "the replies are refused", func() bool {
		return scrape(t, s.HTTP)[`leased_nats_errors_total{connection="front",error="reply"}`] == "19"
	})
	p.line("NATS does not let this user reply where a caller said", "$KV.leases.victim")
	if got := ask(t, h, "owner", `{"key":"victim"}`); got["revision"] != granted["revision"] {
		t.Errorf("the lease is now %v", got)
	}
	if err := admin.Flush(); err != nil {
		t.Fatal(err)
	}
	if len(taps) > 0 || len(asked) > 0 {
		t.Errorf("%d messages came where they should not, %d to the owner", len(taps), len(asked))
	}
	if code, body := get(t, "http://"+s.HTTP+"/readyz?verbose"); code != 200 || !strings.Contains(body, "warning permitted: within the last minute NATS did not let this user reply") {
		t.Errorf("%d %s", code, body)
	}
}

// TestConnectionsOfTheirOwn: each connection has the credentials of its context, and else
// those of the others.
func TestConnectionsOfTheirOwn(t *testing.T) {
	ns := startNATS(t, `authorization { users: [
		{user: store, password: p, permissions: {
			publish: ["$JS.API.>", "$KV.leases.>", "$SRV.STATS.dagnats-api"], subscribe: ["_INBOX_s.>", "$JS.EVENT.ADVISORY.>"] }}
		{user: front, password: p, permissions: { publish: ["_INBOX.>", "_INBOX_s.peers.>"], subscribe: ["api.leases.*", "$SRV.>", "_INBOX_f.>"] }}
		{user: hop, password: p, permissions: { publish: ["dagnats.lease.inbox.>"], subscribe: ["_INBOX_h.>"] }}
		{user: all, password: p}
	] }`)
	url := fmt.Sprintf("nats://127.0.0.1:%d", ns.Addr().(*net.TCPAddr).Port)
	front := writeFile(t, "front.json", `{"url":"nats://nowhere:1","user":"front","password":"env://LEASED_TEST_PASSWORD","inbox_prefix":"_INBOX_f"}`)
	hop := writeFile(t, "hop.json", `{"user":"hop","password":"p","inbox_prefix":"_INBOX_h"}`)
	for name, env := range map[string][]string{
		"flags":       nil,
		"environment": {"NATS_FRONT_CONTEXT=" + front, "NATS_HOP_CONTEXT=" + hop},
	} {
		args := []string{"-s", url, "--user", "store", "--password", "p", "--inbox-prefix", "_INBOX_s"}
		if env == nil {
			args = append(args, "--front-context", front, "--hop-context", hop)
		}
		p := start(t, cleanEnv(t, append(env, "LEASED_TEST_PASSWORD=p")...), beside(args...)...)
		s := p.serving()
		if !s.Ready {
			t.Fatalf("%s: %+v", name, s)
		}
		nc := dial(t, url, nats.UserInfo("all", "p"))
		asked := make(chan struct{}, 1)
		echo(t, nc, "h", 0, asked)
		if reply := ask(t, nc, "acquire", `{"key":"k","holder":"h","ttl_ms":60000}`); reply["granted"] != true {
			t.Errorf("%s: %v", name, reply)
		}
		if reply := ask(t, nc, "forward", `{"key":"k","payload":"aGV5"}`); reply["payload"] != "aGV5" {
			t.Errorf("%s: %v", name, reply)
		}
		if text := p.output(); strings.Contains(text, "not permitted") {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// TestOwnContexts: what of a context counts for a connection of its own.
func TestOwnContexts(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.client(t)
	creds := writeFile(t, "a.creds", testCreds(t))
	user := writeFile(t, "user.json", `{"url":"nats://nowhere:1","user":"fu","password":"fp","inbox_prefix":"fi","jetstream_domain":"fd"}`)
	certs := writeFile(t, "certs.json", fmt.Sprintf(`{"cert":%q,"key":%q}`, cert, key))
	nothing := writeFile(t, "nothing.json", `{"url":"nats://nowhere:1","inbox_prefix":"x"}`)
	base := []string{"-s", "a", "--user", "u", "--password", "p", "--inbox-prefix", "i", "--js-domain", "d"}
	plain := shown{URLs: "a", User: "u", Password: "p", Inbox: "i", Domain: "d"}
	with := func(change func(*shown)) shown { s := plain; change(&s); return s }
	for name, c := range map[string]struct {
		env        []string
		args       []string
		front, hop shown
		err        string
	}{
		"none":        {args: base, front: plain, hop: plain},
		"front":       {args: append(base, "--front-context", user), hop: plain, front: with(func(s *shown) { s.User, s.Password, s.Inbox = "fu", "fp", "fi" })},
		"hop":         {args: append(base, "--hop-context", user), front: plain, hop: with(func(s *shown) { s.User, s.Password, s.Inbox = "fu", "fp", "fi" })},
		"over env":    {env: []string{"NATS_USER=eu", "NATS_PASSWORD=ep", "NATS_HOP_CONTEXT=" + user}, args: []string{"-s", "a", "--js-domain", "d"}, front: with(func(s *shown) { s.User, s.Password, s.Inbox = "eu", "ep", "" }), hop: with(func(s *shown) { s.User, s.Password, s.Inbox = "fu", "fp", "fi" })},
		"certificate": {args: append(base, "--front-context", certs), hop: plain, front: with(func(s *shown) { s.Cert = true })},
		"creds, user": {args: []string{"-s", "a", "--creds", creds, "--js-domain", "d", "--front-context", user}, hop: with(func(s *shown) { s.User, s.Password, s.Inbox, s.Creds = "", "", "", true }), front: with(func(s *shown) { s.User, s.Password, s.Inbox = "fu", "fp", "fi" })},

		"missing":          {args: append(base, "--front-context", "/nowhere/front.json"), err: "--front-context /nowhere/front.json"},
		"no credentials":   {args: append(base, "--hop-context", nothing), err: "--hop-context " + nothing + ": it has no credentials"},
		"inside":           {args: []string{"--front-context", user}, err: "--front-context: is for a NATS that runs already"},
		"reply-to beside":  {args: append(base, "--reply-to", "mine.>"), err: "--reply-to: is for the NATS server inside"},
		"reply-to, all":    {args: []string{"--reply-to", ">"}, err: `--reply-to ">": must be a subject`},
		"reply-to, any":    {args: []string{"--reply-to", "_INBOX.>,*.x"}, err: `--reply-to "*.x"`},
		"reply-to, system": {args: []string{"--reply-to", "$KV.>"}, err: `--reply-to "$KV.>"`},
		"reply-to, none":   {args: []string{"--reply-to", "a..b"}, err: `--reply-to "a..b"`},
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
			for connection, want := range map[metrics.Connection]shown{metrics.Front: c.front, metrics.Hop: c.hop} {
				got := show(t, p.endpoint(connection))
				got.Timeout = 0
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s (-want +got)\n%s", connection, diff)
				}
			}
		})
	}
}
