package hostile

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go"
)

// pollers are 64 holders over 8 connections that, every 750 ms, ask at the same
// instant for 8 keys that nobody had before; who gets one gives it back at once. It
// is healthy traffic, so unknown is false doubt, and one of those that ask must get
// the key.
func pollers(ctx context.Context, s *stage, t *tally) {
	const holders, keys, connections = 64, 8, 8
	var conns []*nats.Conn
	for range connections {
		nc := s.connect(s.roles["holder"], name("poller"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		conns = append(conns, nc)
	}
	every(ctx, 750*time.Millisecond, func() {
		fresh := name("poll")
		granted, refused := make([]bool, holders), make([]bool, holders)
		together(holders, func(i int) {
			key, holder := fmt.Sprintf("%s-%d", fresh, i%keys), fmt.Sprintf("poller-%d", i)
			sent := time.Now()
			a := t.ask(conns[i%connections], "acquire", object{"key": key, "holder": holder, "ttl_ms": 10_000}, 6*time.Second)
			switch a.how {
			case "granted":
				granted[i] = true
				t.ask(conns[i%connections], "release", object{"key": key, "holder": holder, "revision": a.Revision}, 6*time.Second)
			case "busy": // in the second of a burst
				refused[i] = true
			case "denied":
			default:
				s.judge.found("pollers", "after %v an acquire is answered %s: %s", time.Since(sent).Round(time.Millisecond), a.how, a.Error)
			}
		})
		for k := range keys {
			any := false
			for i := k; i < holders; i += keys {
				any = any || granted[i] || refused[i]
			}
			if !any {
				s.judge.found("pollers", "nobody of %d was granted %s-%d", holders/keys, fresh, k)
			}
		}
	})
}

// snatch wants what the honest hold, 10 calls a second: holder and revision are no
// secrets, but the pair that it names is never the present one.
func snatch(ctx context.Context, s *stage, t *tally) {
	nc := s.connect(s.roles["holder"], name("snatch"), t)
	if nc == nil {
		return
	}
	defer nc.Close()
	every(ctx, 100*time.Millisecond, func() {
		i := rand.IntN(keepers)
		own := t.ask(nc, "owner", object{"key": keeperKey(i)}, 5*time.Second)
		var a answer
		switch rand.IntN(4) {
		case 0:
			a = t.ask(nc, "acquire", object{"key": keeperKey(i), "holder": "thief", "ttl_ms": 600_000}, 5*time.Second)
		case 1:
			a = t.ask(nc, "renew", object{"key": keeperKey(i), "holder": "thief", "revision": max(own.Revision, 1), "ttl_ms": 600_000}, 5*time.Second)
		case 2:
			a = t.ask(nc, "release", object{"key": keeperKey(i), "holder": keeperHolder(i), "revision": max(own.Revision, 2) - 1}, 5*time.Second)
		default:
			a = t.ask(nc, "renew_many", object{"holder": "thief", "ttl_ms": 1000, "leases": []object{{"key": keeperKey(i), "revision": max(own.Revision, 1)}}}, 5*time.Second)
			if len(a.Leases) == 1 {
				a.how = kindOf(a.Leases[0])
			}
		}
		if a.how == "granted" || a.how == "released" || a.how == "renewed" {
			s.judge.found("two holders", "%s, which is held, was %s to a thief: %s", keeperKey(i), a.how, clip(a.raw))
		}
	})
}

// ghosts are waiters of clients that are gone: every 7.5 s a connection asks 5,000 times,
// within 2.5 s, for one of 8 keys that another holds, waiting 30 s and with a new holder
// each time, and is closed: 20,000 wait at a time, if the service lets them. Meanwhile an
// honest one waits for a free key, which must be granted at once, and every 10 s for a
// key that ghosts waited for first: the dead must not get it for their TTL of 20 s.
func ghosts(ctx context.Context, s *stage, t *tally) {
	holder := s.roles["holder"]
	wall := s.connect(holder, name("wall"), t)
	if wall == nil {
		return
	}
	defer wall.Close()
	const keys = 8
	wallKey := func(i int) string { return fmt.Sprintf("wall-%d", i) }
	together(3, func(part int) {
		switch part {
		case 0: // the holder of what the ghosts wait for
			revs := make([]uint64, keys)
			every(ctx, 250*time.Millisecond, func() {
				for i := range keys {
					if revs[i] != 0 {
						if a := t.ask(wall, "renew", object{"key": wallKey(i), "holder": "wall", "revision": revs[i], "ttl_ms": 5000}, 5*time.Second); a.how == "granted" {
							revs[i] = a.Revision
							continue
						}
					}
					revs[i] = t.ask(wall, "acquire", object{"key": wallKey(i), "holder": "wall", "ttl_ms": 5000}, 5*time.Second).Revision
				}
				pause(ctx, time.Second)
			})
		case 1: // the ghosts
			every(ctx, 7500*time.Millisecond, func() {
				nc := s.connect(holder, name("ghost"), t)
				if nc == nil {
					return
				}
				defer nc.Close()
				one, cancel := context.WithTimeout(ctx, 2500*time.Millisecond)
				defer cancel()
				every(one, 50*time.Millisecond, func() {
					for i := range 100 {
						body := fmt.Sprintf(`{"key":%q,"holder":%q,"ttl_ms":20000,"wait_ms":30000}`, wallKey(i%keys), name("ghost"))
						t.try(1)
						_ = nc.PublishRequest("api.leases.acquire", nc.NewInbox(), []byte(body))
					}
				})
				t.end("left")
				_ = nc.FlushTimeout(2 * time.Second)
			})
		case 2:
			s.waitAmongGhosts(ctx, t)
		}
	})
}

// waitAmongGhosts is the honest side of ghosts.
func (s *stage) waitAmongGhosts(ctx context.Context, t *tally) {
	nc := s.connect(s.roles["holder"], name("prober"), t)
	if nc == nil {
		return
	}
	defer nc.Close()
	turn := 0
	every(ctx, time.Second, func() {
		turn++
		free := name("free")
		if a := t.ask(nc, "acquire", object{"key": free, "holder": "prober", "ttl_ms": 5000, "wait_ms": 1000}, 7*time.Second); a.how != "granted" {
			s.judge.found("ghosts", "a free key is answered %s: %s", a.how, a.Error)
		} else {
			t.ask(nc, "release", object{"key": free, "holder": "prober", "revision": a.Revision}, 5*time.Second)
		}
		if turn%10 != 0 {
			return
		}
		key := name("haunted")
		had := t.ask(nc, "acquire", object{"key": key, "holder": "before", "ttl_ms": 20_000}, 7*time.Second)
		if had.how != "granted" {
			s.judge.found("ghosts", "a fresh key is answered %s: %s", had.how, had.Error)
			return
		}
		ghost := s.connect(s.roles["holder"], name("ghost"), t)
		if ghost == nil {
			return
		}
		for range 20 {
			t.try(1)
			_ = ghost.PublishRequest("api.leases.acquire", ghost.NewInbox(), fmt.Appendf(nil, `{"key":%q,"holder":%q,"ttl_ms":20000,"wait_ms":30000}`, key, name("ghost")))
		}
		_ = ghost.FlushTimeout(2 * time.Second)
		ghost.Close()
		// All of them wait by then: a free key is given to who asks for it.
		if pause(ctx, 2*time.Second); ctx.Err() != nil {
			return
		}
		freed := time.Now()
		t.ask(nc, "release", object{"key": key, "holder": "before", "revision": had.Revision}, 5*time.Second)
		a := t.ask(nc, "acquire", object{"key": key, "holder": "after", "ttl_ms": 1000, "wait_ms": 10_000}, 16*time.Second)
		t.end("haunted key " + a.how)
		if a.how != "granted" {
			s.judge.found("ghosts", "%v after its release a key that 20 dead waited for is answered %s, held by %q", time.Since(freed).Round(time.Millisecond), a.how, a.Holder)
		}
	})
}

// hungOwner holds a key and never answers what is forwarded to it: 40 forwards of
// 30 s a second, which is more than the 512 at a time that each instance takes. The
// forwards among the honest go on meanwhile, as the histories show.
func hungOwner(ctx context.Context, s *stage, t *tally) {
	r := s.roles[ownerRole]
	nc := s.connect(r, name("hung"), t)
	if nc == nil {
		return
	}
	defer nc.Close()
	if _, err := nc.Subscribe("dagnats.lease.inbox."+r.name+".>", func(*nats.Msg) { t.end("swallowed") }); err != nil {
		s.judge.found("harness", "the hung owner has no inbox: %v", err)
		return
	}
	together(2, func(part int) {
		if part == 0 {
			for ctx.Err() == nil {
				a := t.ask(nc, "acquire", object{"key": "hung", "holder": r.name, "ttl_ms": 10_000}, 5*time.Second)
				for a.how == "granted" && ctx.Err() == nil {
					pause(ctx, 3*time.Second)
					a = t.ask(nc, "renew", object{"key": "hung", "holder": r.name, "revision": a.Revision, "ttl_ms": 10_000}, 5*time.Second)
				}
				pause(ctx, 100*time.Millisecond)
			}
			return
		}
		inbox := nc.NewInbox()
		_, _ = nc.Subscribe(inbox, func(m *nats.Msg) { t.end(kindOf(m.Data)) })
		every(ctx, 25*time.Millisecond, func() {
			t.try(1)
			_ = nc.PublishRequest("api.leases.forward", inbox, []byte(`{"key":"hung","timeout_ms":30000,"payload":"aGVsbG8="}`))
		})
	})
}
