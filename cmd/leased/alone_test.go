package main

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// TestOthersOnItsSubjects: a stream over the calls and a tap on the inboxes of owners are told
// at /readyz?verbose and by a series, and keep nobody from being ready. Where NATS does not
// permit to look for them, that is told, once and without an alarm (P19).
func TestOthersOnItsSubjects(t *testing.T) {
	ns := startNATS(t, `authorization { users: [
		{ user: all, password: pw }
		{ user: store, password: pw, permissions: { publish: { deny: "$JS.API.STREAM.NAMES" } } }
		{ user: hop, password: pw, permissions: { publish: "dagnats.lease.inbox.no.>" } }
	] }`)
	url := strings.Replace(ns.ClientURL(), "://", "://all:pw@", 1)
	nc := dial(t, url)
	streams, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := streams.CreateStream(t.Context(), jetstream.StreamConfig{Name: "AUDIT", Subjects: []string{"api.leases.*"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := nc.Subscribe("dagnats.lease.inbox.>", func(*nats.Msg) {}); err != nil {
		t.Fatal(err)
	}
	s := start(t, cleanEnv(t), beside("--server", url)...).serving()
	var checks string
	eventually(t, "the others are found", func() bool {
		code, text := get(t, "http://"+s.HTTP+"/readyz?verbose")
		checks = text
		return code == 200 && strings.Contains(text, "warning alone: calls: the stream AUDIT stores what is sent to api.leases.> and answers it; inboxes: somebody subscribes to dagnats.lease.inbox.>")
	})
	series := scrape(t, s.HTTP)
	for _, on := range []string{"calls", "inboxes"} {
		if v := series[`leased_foreign_listener{on="`+on+`"}`]; v != "1" {
			t.Errorf("%s: %q\n%s", on, v, checks)
		}
	}

	hop := writeFile(t, "hop.json", `{"user":"hop","password":"pw"}`)
	p := start(t, cleanEnv(t), beside("--server", ns.ClientURL(), "--user", "store", "--password", "pw", "--hop-context", hop)...)
	s = p.serving()
	eventually(t, "it says that it may not look", func() bool {
		code, text := get(t, "http://"+s.HTTP+"/readyz?verbose")
		checks = text
		return code == 200 && strings.Contains(text, "ok      alone: calls: subscriptions were not looked for: NATS does not permit it; streams were not looked for: NATS does not permit it; inboxes: ")
	})
	if strings.Contains(checks, "warning permitted") {
		t.Error(checks)
	}
	for name, v := range scrape(t, s.HTTP) {
		if strings.HasPrefix(name, "leased_nats_errors_total") && v != "0" {
			t.Errorf("%s %s", name, v)
		}
	}
	if strings.Contains(p.output(), "not permitted") {
		t.Error("the log speaks of it")
	}
}
