package hostile

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// listers are 4 readers of the whole list, page by page, 4 pages a second each.
func listers(ctx context.Context, s *stage, t *tally) {
	together(4, func(int) {
		nc := s.connect(s.roles["watcher"], name("lister"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		after := ""
		every(ctx, 250*time.Millisecond, func() {
			body := object{"limit": 1000}
			if after != "" {
				body["after"] = after
			}
			a := t.ask(nc, "list", body, 5*time.Second)
			after = a.Next
			if a.how == "silence" {
				s.judge.found("list", "a page is not answered")
			}
		})
	})
}

// The storms of mass expiry.
const (
	stormPrefix = "storm-"
	stormRate   = 200 // leases a second
	stormFor    = 40 * time.Second
)

// massExpiry takes 200 leases a second for 40 s, by one holder, all of which end in
// the same second, and again. No storm begins that would not end before the run.
func massExpiry(ctx context.Context, s *stage, t *tally) {
	var conns []*nats.Conn
	for range 4 {
		nc := s.connect(s.roles["holder"], name("storm"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		conns = append(conns, nc)
	}
	over := time.Now().Add(s.length)
	for storm := 0; ctx.Err() == nil; storm++ {
		lasts := min(stormFor, time.Until(over)-5*time.Second)
		if lasts < 10*time.Second {
			return
		}
		end := time.Now().Add(lasts)
		var wg sync.WaitGroup
		n := 0
		one, cancel := context.WithDeadline(ctx, end.Add(-2*time.Second))
		every(one, 50*time.Millisecond, func() {
			for range stormRate / 20 {
				n++
				left := int64(time.Until(end)/time.Second) * 1000
				key := fmt.Sprintf("%s%d-%d", stormPrefix, storm, n)
				nc := conns[n%len(conns)]
				wg.Go(func() {
					t.ask(nc, "acquire", object{"key": key, "holder": "storm", "ttl_ms": max(left, 1000)}, 6*time.Second)
				})
			}
		})
		cancel()
		wg.Wait()
		pause(ctx, time.Until(end)+time.Second)
		t.end("storms")
	}
}

// huge sends 96 requests of 1 MB, less what NATS adds, at once over 8 connections, 30 s
// after the start and every 5 minutes then: more than nats-server lets wait for a
// connection. Each must be answered: with invalid, busy or what is true. In a run of
// more than 10 minutes every third burst is of 480: of these nats-server may lose what
// it cut a connection for, but the honest not a lease. A burst takes all processors for
// as long as it takes, so that there are no more of them.
func huge(ctx context.Context, s *stage, t *tally) {
	const connections = 8
	var conns []*nats.Conn
	for range connections {
		nc := s.connect(s.roles["holder"], name("huge"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		conns = append(conns, nc)
	}
	body := append([]byte(`{"key":"huge","payload":"`), bytes.Repeat([]byte("A"), 1<<20-200)...)
	body = append(body, `"}`...)
	burst := 0
	for pause(ctx, 30*time.Second); ctx.Err() == nil; pause(ctx, 5*time.Minute) {
		size := 96
		if burst++; burst%3 == 0 {
			size = 480
		}
		together(size, func(i int) {
			a := t.ask(conns[i%connections], "owner", body, 10*time.Second)
			if size == 96 && (a.how == "silence" || a.how == "nobody there" || a.how == "no connection") {
				s.judge.found("huge", "a request of 1 MB is answered with %s", a.how)
			}
		})
	}
}

// bigReplies renews 500 leases at a time whose reply is larger than max_payload, as
// each has 512 times a character that JSON escapes; every 2 s. There must be a reply.
func bigReplies(ctx context.Context, s *stage, t *tally) {
	nc := s.connect(s.roles["holder"], name("big"), t)
	if nc == nil {
		return
	}
	defer nc.Close()
	const many = 500
	var held []object
	meta := strings.Repeat("<", 512)
	for ctx.Err() == nil && len(held) < many {
		key := fmt.Sprintf("big-%d", len(held))
		a := t.ask(nc, "acquire", object{"key": key, "holder": "big", "ttl_ms": 20_000, "meta": meta}, 5*time.Second)
		if a.how != "granted" {
			pause(ctx, 100*time.Millisecond)
			continue
		}
		held = append(held, object{"key": key, "revision": a.Revision})
	}
	every(ctx, 2*time.Second, func() {
		a := t.ask(nc, "renew_many", object{"holder": "big", "ttl_ms": 20_000, "leases": held}, 6*time.Second)
		if a.how == "silence" {
			s.judge.found("renew_many", "%d renewals are not answered", len(held))
		}
		// Who is told nothing, or too little, asks.
		for i := range held {
			if i < len(a.Leases) {
				var one answer
				_ = json.Unmarshal(a.Leases[i], &one)
				if one.Revision != 0 {
					held[i]["revision"] = one.Revision
				}
			}
		}
		if a.how != "leases" {
			for i := range held {
				if own := t.ask(nc, "owner", object{"key": held[i]["key"]}, 5*time.Second); own.Holder == "big" {
					held[i]["revision"] = own.Revision
				} else {
					held[i]["revision"] = max(t.ask(nc, "acquire", object{"key": held[i]["key"], "holder": "big", "ttl_ms": 20_000, "meta": meta}, 5*time.Second).Revision, 1)
				}
			}
		}
	})
}

// kindOf tells how the call ended that body answers.
func kindOf(body []byte) string {
	var a answer
	if json.Unmarshal(body, &a) != nil {
		return "no JSON"
	}
	return a.outcome()
}
