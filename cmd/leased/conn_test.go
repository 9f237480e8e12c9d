package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
)

// parse runs the parser alone, in the environment env (NAME=value).
func parse(t *testing.T, env []string, args ...string) (*serveCmd, map[string]bool, error) {
	t.Helper()
	for _, v := range os.Environ() {
		if name, value, _ := strings.Cut(v, "="); strings.HasPrefix(name, "NATS_") {
			t.Setenv(name, value) // to have it back when the test ends
			os.Unsetenv(name)
		}
	}
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_STATE_HOME", "")
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
	var c commands
	parser, err := newParser(&c)
	if err != nil {
		t.Fatal(err)
	}
	command, err := parser.Parse(append([]string{"serve"}, args...))
	if err != nil {
		return nil, nil, &exitError{exitUsage, err}
	}
	return &c.Serve, given(command), nil
}

// shown is the part of an endpoint that decides how to connect.
type shown struct {
	URLs, User, Password, Token string
	Creds, NKey                 bool
	Cert, CA, TLSFirst          bool
	Domain, API, Inbox          string
	Timeout                     time.Duration
}

func show(t *testing.T, e endpoint) shown {
	t.Helper()
	o := nats.GetDefaultOptions()
	for _, option := range e.options {
		if err := option(&o); err != nil {
			t.Fatal(err)
		}
	}
	return shown{
		URLs: e.urls, User: o.User, Password: o.Password, Token: o.Token,
		Creds: o.UserJWT != nil, NKey: o.Nkey != "",
		Cert: o.TLSCertCB != nil, CA: o.RootCAsCB != nil, TLSFirst: o.TLSHandshakeFirst,
		Domain: e.jsDomain, API: e.jsAPIPrefix, Inbox: o.InboxPrefix, Timeout: o.Timeout,
	}
}

// TestConnectionFlags: what stands on the command line wins over the
// environment, and that over the context.
func TestConnectionFlags(t *testing.T) {
	ca := newAuthority(t)
	cert, key := ca.client(t)
	creds, seed := writeFile(t, "a.creds", testCreds(t)), writeFile(t, "a.nk", testSeed(t))
	context := writeFile(t, "context.json", `{"url":"nats://context:4222","user":"cu","password":"cp","cert":"`+cert+`","key":"`+key+`","ca":"`+ca.file+`",
		"jetstream_domain":"cd","inbox_prefix":"ci","tls_first":true}`)
	tokens := writeFile(t, "tokens.json", `{"url":"nats://context:4222","token":"ct","jetstream_api_prefix":"capi"}`)
	t.Setenv("LEASED_TEST_TOKEN", "from-env")
	indirect := writeFile(t, "indirect.json", `{"url":"nats://context:4222","token":"env://LEASED_TEST_TOKEN"}`)
	jwts := writeFile(t, "creds.json", `{"url":"nats://context:4222","creds":"`+creds+`"}`)

	config := t.TempDir()
	if err := os.MkdirAll(filepath.Join(config, "nats", "context"), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{"context/one.json": `{"url":"nats://one:4222","user":"u1","password":"p1"}`,
		"context/two.json": `{"url":"nats://two:4222"}`, "context.txt": "two"} {
		if err := os.WriteFile(filepath.Join(config, "nats", file), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	home := "XDG_CONFIG_HOME=" + config

	fromContext := shown{URLs: "nats://context:4222", User: "cu", Password: "cp", Cert: true, CA: true, TLSFirst: true, Domain: "cd", Inbox: "ci"}
	with := func(s shown, change func(*shown)) shown { change(&s); return s }
	for name, c := range map[string]struct {
		env  []string
		args []string
		want shown
		err  string
	}{
		"server":            {args: []string{"--server", "a,nats://b:1"}, want: shown{URLs: "a,nats://b:1"}},
		"short":             {args: []string{"-s", "a"}, want: shown{URLs: "a"}},
		"NATS_URL":          {env: []string{"NATS_URL=a"}, want: shown{URLs: "a"}},
		"flag over env":     {env: []string{"NATS_URL=a"}, args: []string{"-s", "b"}, want: shown{URLs: "b"}},
		"every variable":    {env: []string{"NATS_URL=a", "NATS_USER=u", "NATS_PASSWORD=p", "NATS_CERT=" + cert, "NATS_KEY=" + key, "NATS_CA=" + ca.file, "NATS_JS_DOMAIN=d", "NATS_INBOX_PREFIX=i", "NATS_TIMEOUT=7s"}, want: shown{URLs: "a", User: "u", Password: "p", Cert: true, CA: true, Domain: "d", Inbox: "i", Timeout: 7 * time.Second}},
		"every flag":        {args: []string{"--server=a", "--user=u", "--password=p", "--tlscert=" + cert, "--tlskey=" + key, "--tlsca=" + ca.file, "--tlsfirst", "--js-domain=d", "--inbox-prefix=i", "--timeout=7s"}, want: shown{URLs: "a", User: "u", Password: "p", Cert: true, CA: true, TLSFirst: true, Domain: "d", Inbox: "i", Timeout: 7 * time.Second}},
		"user alone":        {args: []string{"--server=a", "--user=t"}, want: shown{URLs: "a", Token: "t"}},
		"token":             {args: []string{"--server=a", "--token=t"}, want: shown{URLs: "a", Token: "t"}},
		"NATS_TOKEN":        {env: []string{"NATS_TOKEN=t"}, args: []string{"--server=a"}, want: shown{URLs: "a", Token: "t"}},
		"creds":             {args: []string{"--server=a", "--creds=" + creds}, want: shown{URLs: "a", Creds: true}},
		"NATS_CREDS":        {env: []string{"NATS_CREDS=" + creds}, args: []string{"--server=a"}, want: shown{URLs: "a", Creds: true}},
		"nkey":              {args: []string{"--server=a", "--nkey=" + seed}, want: shown{URLs: "a", NKey: true}},
		"NATS_NKEY":         {env: []string{"NATS_NKEY=" + seed}, args: []string{"--server=a"}, want: shown{URLs: "a", NKey: true}},
		"creds over user":   {env: []string{"NATS_USER=u", "NATS_PASSWORD=p"}, args: []string{"--server=a", "--creds=" + creds}, want: shown{URLs: "a", Creds: true}},
		"password from env": {env: []string{"NATS_PASSWORD=p"}, args: []string{"--server=a", "--user=u"}, want: shown{URLs: "a", User: "u", Password: "p"}},
		"other user's env":  {env: []string{"NATS_USER=x", "NATS_PASSWORD=p"}, args: []string{"--server=a", "--user=u"}, want: shown{URLs: "a", Token: "u"}},
		"user from env":     {env: []string{"NATS_USER=u"}, args: []string{"--server=a", "--password=p"}, want: shown{URLs: "a", User: "u", Password: "p"}},
		"api prefix":        {env: []string{"NATS_JS_DOMAIN=d"}, args: []string{"--server=a", "--js-api-prefix=x"}, want: shown{URLs: "a", API: "x"}},
		"api prefix by env": {env: []string{"NATS_JS_API_PREFIX=x"}, args: []string{"--server=a"}, want: shown{URLs: "a", API: "x"}},

		"context file":           {args: []string{"--context=" + context}, want: fromContext},
		"NATS_CONTEXT":           {env: []string{"NATS_CONTEXT=" + context}, want: fromContext},
		"server over context":    {args: []string{"--context=" + context, "--server=a"}, want: with(fromContext, func(s *shown) { s.URLs = "a" })},
		"creds over context":     {args: []string{"--context=" + context, "--creds=" + creds}, want: with(fromContext, func(s *shown) { s.User, s.Password, s.Creds = "", "", true })},
		"token over context":     {env: []string{"NATS_TOKEN=t"}, args: []string{"--context=" + context}, want: with(fromContext, func(s *shown) { s.User, s.Password, s.Token = "", "", "t" })},
		"password over context":  {args: []string{"--context=" + context, "--password=p"}, want: with(fromContext, func(s *shown) { s.Password = "p" })},
		"password env, context":  {env: []string{"NATS_PASSWORD=p"}, args: []string{"--context=" + context}, want: with(fromContext, func(s *shown) { s.Password = "p" })},
		"prefix over domain":     {args: []string{"--context=" + context, "--js-api-prefix=x"}, want: with(fromContext, func(s *shown) { s.Domain, s.API = "", "x" })},
		"inbox over context":     {args: []string{"--context=" + context, "--inbox-prefix=i"}, want: with(fromContext, func(s *shown) { s.Inbox = "i" })},
		"context token":          {args: []string{"--context=" + tokens}, want: shown{URLs: "nats://context:4222", Token: "ct", API: "capi"}},
		"user over token":        {args: []string{"--context=" + tokens, "--user=u", "--password=p"}, want: shown{URLs: "nats://context:4222", User: "u", Password: "p", API: "capi"}},
		"secret by reference":    {args: []string{"--context=" + indirect}, want: shown{URLs: "nats://context:4222", Token: "from-env"}},
		"context creds":          {args: []string{"--context=" + jwts}, want: shown{URLs: "nats://context:4222", Creds: true}},
		"named context":          {env: []string{home}, args: []string{"--context=one"}, want: shown{URLs: "nats://one:4222", User: "u1", Password: "p1"}},
		"named over selected":    {env: []string{home, "NATS_CONTEXT=one"}, args: []string{"--context=two"}, want: shown{URLs: "nats://two:4222"}},
		"selected, with servers": {env: []string{home}, args: []string{"--server=a"}, want: shown{URLs: "a"}},

		"no such context":     {env: []string{home}, args: []string{"--context=three"}, err: "--context three"},
		"no such file":        {args: []string{"--context=/nowhere/x.json"}, err: "--context /nowhere/x.json"},
		"two ways":            {args: []string{"--server=a", "--token=t", "--creds=" + creds}, err: "--creds and --token: give one way"},
		"two ways in env":     {env: []string{"NATS_URL=a", "NATS_USER=u", "NATS_NKEY=" + seed}, err: "NATS_NKEY and NATS_USER: give one way"},
		"password alone":      {args: []string{"--server=a", "--password=p"}, err: "--password (NATS_PASSWORD): needs --user"},
		"no creds file":       {args: []string{"--server=a", "--creds=/nowhere/a.creds"}, err: "--creds: open /nowhere/a.creds"},
		"creds are none":      {args: []string{"--server=a", "--creds=" + cert}, err: "no user NKEY seed in it"},
		"nkey is none":        {args: []string{"--server=a", "--nkey=" + cert}, err: "no user NKEY seed in it"},
		"cert without key":    {args: []string{"--server=a", "--tlscert=" + cert}, err: "--tlscert and --tlskey"},
		"cert is none":        {args: []string{"--server=a", "--tlscert=" + creds, "--tlskey=" + creds}, err: "certificate"},
		"ca is none":          {args: []string{"--server=a", "--tlsca=" + creds}, err: "root certificate"},
		"no ca":               {args: []string{"--server=a", "--tlsca=/nowhere/ca.pem"}, err: "--tlsca"},
		"domain and prefix":   {args: []string{"--server=a", "--js-domain=d", "--js-api-prefix=x"}, err: "--js-domain and --js-api-prefix"},
		"timeout":             {args: []string{"--server=a", "--timeout=0s"}, err: "--timeout"},
		"timeout unreadable":  {args: []string{"--server=a", "--timeout=soon"}, err: "--timeout"},
		"env unreadable":      {env: []string{"NATS_TIMEOUT=soon"}, args: []string{"--server=a"}, err: "NATS_TIMEOUT"},
		"scheme":              {args: []string{"--server=http://a"}, err: "--server http://a: the scheme"},
		"url with password":   {args: []string{"--server=nats://u:hunter2@a:port"}, err: "--server nats://a:port"},
		"url without host":    {args: []string{"--server=nats://u:hunter2@"}, err: "--server nats://"},
		"second url":          {args: []string{"--server=a,http://u:hunter2@b"}, err: "--server http://b"},
		"flag of another cli": {args: []string{"--server=a", "--trace"}, err: "--trace"},
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
				if err != nil && strings.Contains(err.Error(), "hunter2") {
					t.Errorf("the error shows a password: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if p.inside != nil {
				t.Fatal("a NATS server inside")
			}
			if c.want.Timeout == 0 {
				c.want.Timeout = 5 * time.Second
			}
			if diff := cmp.Diff(c.want, show(t, p.nats)); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}

	t.Run("selected context when asked", func(t *testing.T) {
		cmd, flags, err := parse(t, []string{home})
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := cmd.external(flags); ok {
			t.Error("a selected context makes serve use it unasked")
		}
		e, err := cmd.resolve(flags, true)
		if err != nil || e.urls != "nats://two:4222" {
			t.Errorf("%q, %v", e.urls, err)
		}
	})
}

func TestRedact(t *testing.T) {
	for in, want := range map[string]string{
		"nats://a:4222":              "nats://a:4222",
		"nats://u:p@a:4222":          "nats://a:4222",
		"nats://token@a, tls://x@b":  "nats://a,tls://b",
		"u:p@a":                      "a",
		"nats://u:p@ss@a":            "nats://a",
		"localhost,nats://u:p@[::1]": "localhost,nats://[::1]",
	} {
		if got := redact(in); got != want {
			t.Errorf("redact(%q) = %q, want %q", in, got, want)
		}
	}
}
