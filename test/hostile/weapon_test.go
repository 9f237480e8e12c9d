package hostile

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
)

// replySubjects makes the service, or the micro framework inside it, publish where
// only the service may: 25 requests a second by each role, of those it may make.
// Nobody reads the answers, as they go elsewhere; what they did, the judge sees in the
// stream, among the change events and in the inboxes of the honest.
func replySubjects(ctx context.Context, s *stage, t *tally) {
	together(len(s.outsiders), func(i int) {
		r := s.outsiders[i]
		nc := s.connect(r, name("reply"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		calls := slices.DeleteFunc([]string{
			"api.leases.owner", "api.leases.list", "api.leases.acquire", "api.leases.renew", "api.leases.renew_many", "api.leases.forward",
			"$SRV.PING", "$SRV.PING.dagnats-api", "$SRV.INFO", "$SRV.INFO.dagnats-api", "$SRV.STATS.dagnats-api",
		}, func(call string) bool { return !r.sends(call) })
		every(ctx, 40*time.Millisecond, func() {
			victim := rand.IntN(keepers)
			call := pick(calls...)
			reply := pick(
				"$KV.leases."+keeperKey(victim), "$KV.leases."+name("forged"), "$KV.leases."+officeKey,
				"$JS.API.STREAM.PURGE.KV_leases", "$JS.API.STREAM.DELETE.KV_leases", "$JS.API.STREAM.UPDATE.KV_leases", "$JS.ACK.KV_leases.x.1.1.1.1.1",
				"$SRV.PING", "$SYS.REQ.SERVER.PING",
				"dagnats.lease.inbox."+keeperHolder(victim)+"."+keeperKey(victim), "dagnats.lease.changed."+keeperKey(victim),
				"api.leases.owner", "api.leases.release", "api.leases.evict",
				"$KV.leases.>", "dagnats.lease.inbox.*.x", ">", "*",
				s.roles["leased"].inbox+".x.1",
			)
			body := pick(
				fmt.Sprintf(`{"key":%q,"holder":"thief","ttl_ms":10000,"revision":1,"leases":[{"key":%[1]q,"revision":1}]}`, keeperKey(victim)),
				`{"key":"`+name("nobody")+`","timeout_ms":100}`, `{}`, ``,
			)
			t.try(1)
			if err := nc.PublishMsg(&nats.Msg{Subject: call, Reply: reply, Data: []byte(body)}); err != nil {
				t.end("not sent: " + err.Error())
				return
			}
			t.end("sent")
		})
		_ = nc.FlushTimeout(time.Second)
	})
}

// direct goes past the service: 10 messages a second by each role, all of which the
// permissions must refuse.
func direct(ctx context.Context, s *stage, t *tally) {
	together(len(s.outsiders), func(i int) {
		r := s.outsiders[i]
		nc := s.connect(r, name("direct"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		every(ctx, 100*time.Millisecond, func() {
			key := keeperKey(rand.IntN(keepers))
			to := pick(
				"$KV.leases."+key, "$KV.leases."+name("forged"),
				"$JS.API.STREAM.PURGE.KV_leases", "$JS.API.STREAM.DELETE.KV_leases", "$JS.API.STREAM.MSG.DELETE.KV_leases",
				"$JS.API.STREAM.CREATE.TAP", "$JS.API.STREAM.LEADER.STEPDOWN.KV_leases",
				"dagnats.lease.changed."+key, "dagnats.lease.inbox."+keeperHolder(0)+"."+key, "api.leases.evict",
				"$SRV.STATS.dagnats-api.x",
			)
			if r.sends(to) {
				// A role with the right to do so, and the duty not to, is not attacked.
				return
			}
			body := pick(
				fmt.Sprintf(`{"v":1,"key":%q,"holder":"thief","ttl_ms":600000,"event":"acquired","nonce":"forged"}`, key),
				fmt.Sprintf(`{"key":%q,"revision":1}`, key),
				`{"name":"TAP","subjects":["api.>","dagnats.>"],"storage":"memory"}`,
			)
			t.try(1)
			if _, err := nc.Request(to, []byte(body), 20*time.Millisecond); err == nil {
				s.judge.found("not refused", "%s was answered on %s", r.name, to)
			}
		})
	})
}

// pick is one of them, by chance.
func pick[T any](of ...T) T { return of[rand.IntN(len(of))] }
