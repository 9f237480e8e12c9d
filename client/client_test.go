package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m, testnats.ServersOwn()) }

// TestImports: users of this package get nats.go and the kinds, and nothing else
// of ours.
func TestImports(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		ours := strings.HasPrefix(path, "github.com/leased/leased/")
		if ours && path != "github.com/leased/leased/client" && path != "github.com/leased/leased/service/kinds" ||
			strings.Contains(path, "nats-server") {
			t.Errorf("client depends on %s", path)
		}
	}
}

// canned answers every request with one reply, or one error.
type canned struct {
	subject string
	body    string
	reply   string
	err     error
}

func (c *canned) request(_ context.Context, subject string, body []byte) ([]byte, error) {
	c.subject, c.body = subject, string(body)
	return []byte(c.reply), c.err
}
func (c *canned) subscribe(string, func(*nats.Msg), func(error)) (func(), error) {
	return func() {}, nil
}
func (c *canned) flush() error            { return nil }
func (c *canned) publish(*nats.Msg) error { return nil }
func (c *canned) place() any              { return c }

const lease = `"key":"k","holder":"me","revision":18446744073709551615,"acquired_at":"2026-10-18T12:00:00.123Z","expires_at":"2026-10-18T12:00:15.123Z","ttl_ms":15000,"left_ms":14999,"meta":"m"`

func TestCalls(t *testing.T) {
	l := Lease{Key: "k", Holder: "me", Revision: 7, TTL: 15 * time.Second}
	calls := map[string]func(*Client) (Result, error){
		"acquire": func(c *Client) (Result, error) {
			return c.Acquire(t.Context(), AcquireRequest{Key: "k", Holder: "me", TTL: 15 * time.Second, Wait: time.Second, Meta: "m"})
		},
		"renew":   func(c *Client) (Result, error) { return c.Renew(t.Context(), l) },
		"release": func(c *Client) (Result, error) { return c.Release(t.Context(), l) },
		"owner":   func(c *Client) (Result, error) { return c.Owner(t.Context(), "k") },
		"evict":   func(c *Client) (Result, error) { return c.Evict(t.Context(), "k", 7) },
	}
	requests := map[string]string{
		"acquire": `{"key":"k","holder":"me","ttl_ms":15000,"wait_ms":1000,"meta":"m"}`,
		"renew":   `{"key":"k","holder":"me","ttl_ms":15000,"revision":7}`,
		"release": `{"key":"k","holder":"me","revision":7}`,
		"owner":   `{"key":"k"}`,
		"evict":   `{"key":"k","revision":7}`,
	}
	for _, test := range []struct {
		call, reply string
		kind        kinds.Kind // of the result, or of the error
	}{
		{"acquire", `{"granted":true,"held":true,` + lease + `}`, kinds.Granted},
		{"acquire", `{"granted":false,"held":true,` + strings.ReplaceAll(lease, `"me"`, `"other"`) + `}`, kinds.Denied},
		{"acquire", `{"granted":true,"held":true,` + strings.ReplaceAll(lease, `"me"`, `"other"`) + `}`, kinds.Unknown},
		{"acquire", `{"granted":true,"held":true,` + strings.ReplaceAll(lease, `"k"`, `"other"`) + `}`, kinds.Unknown},
		{"acquire", `{"granted":true,"held":true,"key":"k","holder":"me"}`, kinds.Unknown},
		{"acquire", `{"granted":false,"held":false,"key":"k"}`, kinds.Unknown},
		{"acquire", ``, kinds.Unknown},
		{"acquire", `null`, kinds.Unknown},
		{"acquire", `<html>`, kinds.Unknown},
		{"acquire", `{"error":"e","kind":"busy"}`, kinds.Busy},
		{"acquire", `{"error":"e","kind":"unknown"}`, kinds.Unknown},
		{"acquire", `{"error":"e","kind":"of_the_future"}`, kinds.Unknown},
		{"acquire", `{"error":"e","kind":"granted"}`, kinds.Unknown},
		{"acquire", `{"error":"e"}`, kinds.Unknown},
		{"renew", `{"granted":true,"held":true,` + lease + `,"of_the_future":1}`, kinds.Renewed},
		{"renew", `{"granted":true,"held":true,` + strings.ReplaceAll(lease, "18446744073709551615", "7") + `}`, kinds.Unknown},
		{"renew", `{"error":"e","kind":"lost"}`, kinds.Lost},
		{"release", `{"released":true,"held":false,"key":"k","holder":"me","revision":7}`, kinds.Released},
		{"release", `{"released":true,"held":false,"key":"k","holder":"me","revision":8}`, kinds.Unknown},
		{"release", `{"error":"e","kind":"lost"}`, kinds.Lost},
		{"owner", `{"held":true,` + lease + `}`, kinds.Held},
		{"owner", `{"held":false,"key":"k"}`, kinds.Free},
		{"owner", `{"held":true,"key":"k"}`, kinds.Unknown},
		{"owner", `{}`, kinds.Unknown},
		{"evict", `{"released":true,"held":false,"key":"k","holder":"other","revision":7}`, kinds.Evicted},
		{"evict", `{"error":"e","kind":"lost"}`, kinds.Lost},
	} {
		w := &canned{reply: test.reply}
		before := time.Now()
		r, err := calls[test.call](newClient(w, Options{}))
		if r.SentAt.Before(before) || time.Since(r.SentAt) < 0 {
			t.Errorf("%s: SentAt %v", test.call, r.SentAt)
		}
		if w.subject != "api.leases."+test.call || w.body != requests[test.call] {
			t.Errorf("%s asks %s", w.subject, w.body)
		}
		if test.kind.IsError() {
			var e *kinds.Error
			if !errors.As(err, &e) || e.Kind != test.kind || r.Kind != "" {
				t.Errorf("%s answered %s: %v, %v", test.call, test.reply, r.Kind, err)
			}
			continue
		}
		if err != nil || r.Kind != test.kind {
			t.Errorf("%s answered %s: %v, %v", test.call, test.reply, r.Kind, err)
		}
		if strings.Contains(test.reply, "acquired_at") {
			if r.Revision != 1<<64-1 || r.TTL != 15*time.Second || r.Left != 14999*time.Millisecond || r.Meta != "m" ||
				!r.AcquiredAt.Equal(time.Date(2026, 10, 18, 12, 0, 0, 123e6, time.UTC)) || r.ExpiresAt.Sub(r.AcquiredAt) != r.TTL {
				t.Errorf("%+v", r.Lease)
			}
		}
	}
}

func TestForwardListRenewMany(t *testing.T) {
	w := &canned{reply: `{"holder":"me","revision":9,"payload":"AAH/","attempts":2}`}
	c := newClient(w, Options{Prefix: "other.prefix"})
	f, err := c.Forward(t.Context(), ForwardRequest{Key: "k", Payload: []byte{0, 1, 255}, Timeout: 300 * time.Millisecond})
	if err != nil || f.Holder != "me" || f.Revision != 9 || string(f.Payload) != "\x00\x01\xff" || f.Attempts != 2 || f.SentAt.IsZero() {
		t.Errorf("%+v, %v", f, err)
	}
	if w.subject != "other.prefix.forward" || w.body != `{"key":"k","timeout_ms":300,"payload":"AAH/"}` {
		t.Error(w.subject, w.body)
	}
	w.reply = `{"error":"e","kind":"owner_timeout","holder":"me","revision":9}`
	_, err = c.Forward(t.Context(), ForwardRequest{Key: "k"})
	var e *kinds.Error
	if !errors.As(err, &e) || e.Kind != kinds.OwnerTimeout || e.Holder != "me" || e.Revision != 9 || !mayBeApplied(err) {
		t.Error(err)
	}
	if w.body != `{"key":"k"}` {
		t.Error(w.body)
	}
	w.reply = `{}`
	if _, err = c.Forward(t.Context(), ForwardRequest{Key: "k"}); kinds.Of(err) != kinds.Unknown {
		t.Error(err)
	}

	w.reply = `{"leases":[{` + lease + `}],"next":"k"}`
	leases, next, err := c.List(t.Context(), ListRequest{Prefix: "p", Holder: "me", After: "a", Limit: 3})
	if err != nil || len(leases) != 1 || leases[0].Holder != "me" || next != "k" {
		t.Error(leases, next, err)
	}
	if w.body != `{"holder":"me","prefix":"p","after":"a","limit":3}` {
		t.Error(w.body)
	}

	two := []Lease{{Key: "k", Revision: 7}, {Key: "l", Revision: 8}}
	w.reply = `{"leases":[{"granted":true,"held":true,` + lease + `},{"key":"l","error":"e","kind":"lost"}]}`
	out, err := c.RenewMany(t.Context(), "me", 15*time.Second, two)
	if err != nil || out[0].Err != nil || out[0].Kind != kinds.Renewed || out[0].Revision != 1<<64-1 || kinds.Of(out[1].Err) != kinds.Lost || out[1].SentAt.IsZero() {
		t.Error(out, err)
	}
	if w.body != `{"holder":"me","ttl_ms":15000,"leases":[{"key":"k","revision":7},{"key":"l","revision":8}]}` {
		t.Error(w.body)
	}
	w.reply = `{"leases":[{"granted":true,"held":true,` + lease + `}]}`
	out, err = c.RenewMany(t.Context(), "me", 15*time.Second, two)
	if kinds.Of(err) != kinds.Unknown || kinds.Of(out[0].Err) != kinds.Unknown || len(out) != 2 {
		t.Error(out, err)
	}

	w.reply = `{"error":"e","kind":"lost","more":1}`
	if got, _, err := c.Call(t.Context(), "renew", []byte(`{ }`)); err != nil || string(got) != w.reply || w.body != `{ }` {
		t.Errorf("%s, %v", got, err)
	}
}

// limited is a service that takes and gives no more leases at once than it can.
type limited struct {
	canned
	requests, answers int // how many leases a request and a reply can have
	broken            string
	sent              []int
}

func (l *limited) request(_ context.Context, _ string, body []byte) ([]byte, error) {
	var q request
	if err := json.Unmarshal(body, &q); err != nil {
		return nil, err
	}
	l.sent = append(l.sent, len(q.Leases))
	var a reply
	switch {
	case len(q.Leases) > l.requests:
		return nil, kinds.Errorf(kinds.Unavailable, "not sent: %w", nats.ErrMaxPayload)
	case len(q.Leases) > l.answers:
		a = reply{Error: "e", Kind: string(kinds.ReplyTooLarge)}
	case q.Leases[0].Key == l.broken:
		a = reply{Error: "e", Kind: string(kinds.Busy)}
	default:
		for _, k := range q.Leases {
			a.Leases = append(a.Leases, reply{Granted: true, Held: true, Key: k.Key, Holder: q.Holder, Revision: k.Revision + 1})
		}
	}
	return json.Marshal(a)
}

// TestRenewManyInParts: what is too large for the server goes in parts.
func TestRenewManyInParts(t *testing.T) {
	var many []Lease
	for i := range 500 {
		many = append(many, Lease{Key: fmt.Sprint("k", i), Revision: uint64(1000 + i)})
	}
	for _, w := range []*limited{{requests: 1000, answers: 499}, {requests: 1000, answers: 318}, {requests: 200, answers: 1000}, {requests: 300, answers: 1}, {requests: 7, answers: 3}} {
		out, err := newClient(w, Options{}).RenewMany(t.Context(), "me", ttl, many)
		if err != nil || len(out) != len(many) {
			t.Fatal(len(out), err)
		}
		for i, o := range out {
			if o.Err != nil || o.Key != many[i].Key || o.Revision != many[i].Revision+1 || o.SentAt.IsZero() {
				t.Fatalf("%d: %+v", i, o)
			}
		}
		if len(w.sent) > 2*len(many)-1 {
			t.Errorf("%d requests", len(w.sent))
		}
	}
	// A service that says so of everything is not asked for ever.
	w := &limited{requests: 1000}
	out, err := newClient(w, Options{}).RenewMany(t.Context(), "me", ttl, many)
	if kinds.Of(err) != kinds.ReplyTooLarge || kinds.Of(out[499].Err) != kinds.ReplyTooLarge || len(w.sent) != 2*len(many)-1 {
		t.Errorf("%v after %d requests", err, len(w.sent))
	}
	// Part of it fails: the error is told, and the rest is renewed.
	w = &limited{requests: 1000, answers: 250, broken: "k250"}
	out, err = newClient(w, Options{}).RenewMany(t.Context(), "me", ttl, many)
	if kinds.Of(err) != kinds.Busy || out[249].Err != nil || kinds.Of(out[250].Err) != kinds.Busy {
		t.Error(out[249].Err, out[250].Err, err)
	}
}

// TestRenewManyOverASmallConnection: a request that a NATS server would not take.
func TestRenewManyOverASmallConnection(t *testing.T) {
	n := testnats.Server(t, func(o *server.Options) { o.MaxPayload, o.MaxControlLine = 4096, 4096 })
	nc := n.Connect()
	w := &limited{requests: 1000, answers: 1000}
	if _, err := nc.Subscribe("api.leases.renew_many", func(m *nats.Msg) {
		a, _ := w.request(t.Context(), m.Subject, m.Data)
		if len(a) > 4096 {
			a = []byte(`{"error":"e","kind":"reply_too_large"}`)
		}
		_ = m.Respond(a)
	}); err != nil {
		t.Fatal(err)
	}
	var many []Lease
	for i := range 300 {
		many = append(many, Lease{Key: fmt.Sprint(strings.Repeat("k", 100), i), Revision: 7})
	}
	out, err := New(n.Connect(), Options{}).RenewMany(t.Context(), "me", ttl, many)
	if err != nil || out[299].Err != nil || out[299].Revision != 8 {
		t.Errorf("%v, %v", err, out[299])
	}
}

func TestNewHolder(t *testing.T) {
	valid := regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
	seen := map[string]bool{}
	for _, name := range []string{"", "host.example.org", "é\x00 *>", strings.Repeat("a", 300), "ok"} {
		id := NewHolder(name)
		if !valid.MatchString(id) || seen[id] || NewHolder(name) == id {
			t.Errorf("%q makes %q", name, id)
		}
		seen[id] = true
	}
}

func TestDurationsOnTheWire(t *testing.T) {
	text, err := json.Marshal(request{Key: "k", TTL: ms(1500 * time.Millisecond)})
	if err != nil || string(text) != `{"key":"k","ttl_ms":1500}` {
		t.Errorf("%s, %v", text, err)
	}
}
