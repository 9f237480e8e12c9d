package hostile

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// sniff listens wherever a role may, and answers in the place of others: whatever is
// heard of an inbox is answered with a forged ack, record or STATS, for it and the
// ten requests that come after it, 220 a second by each role. Where nothing is heard,
// replies go to guessed inboxes, 20 a second.
func sniff(ctx context.Context, s *stage, t *tally) {
	together(len(s.outsiders), func(i int) {
		r := s.outsiders[i]
		nc := s.connect(r, name("sniff"), t)
		if nc == nil {
			return
		}
		defer nc.Close()
		heard := make(chan *nats.Msg, 1)
		for _, subject := range append(s.inboxes(r), ">", "*", "_INBOX.>", "$KV.>", "$JS.>", "$JS.ACK.>", "api.leases.>", "api.leases.acquire") {
			queue := ""
			if strings.HasPrefix(subject, "api.") {
				queue = "dagnats-leases" // would get a share of the calls
			}
			_, err := nc.QueueSubscribe(subject, queue, func(m *nats.Msg) {
				if strings.HasPrefix(m.Subject, r.inbox+".") && !s.shared(r) {
					return // of another of the same role, which cannot be told from this one
				}
				s.judge.found("overheard", "%s reads %s: %q", r.name, m.Subject, clip(m.Data))
				select {
				case heard <- m:
				default:
				}
			})
			t.try(1)
			if err != nil {
				t.end("no subscription")
			}
		}
		every(ctx, 50*time.Millisecond, func() {
			select {
			case m := <-heard:
				for _, to := range following(m.Subject) {
					t.try(1)
					t.end("forged " + forge(nc, to))
				}
			default:
				t.try(1)
				t.end("guessed " + forge(nc, fmt.Sprintf("%s.%s.%d", s.roles["leased"].inbox, name("x"), rand.IntN(1000))))
			}
		})
	})
}

// inboxes are what the inboxes of the roles but r begin with.
func (s *stage) inboxes(r role) (all []string) {
	for _, other := range s.roles {
		if other.name != r.name {
			all = append(all, other.inbox+".>")
		}
	}
	return append(all, judgeRole.inbox+".>")
}

// shared says whether another role has the inbox of r.
func (s *stage) shared(r role) bool {
	for _, other := range s.roles {
		if other.name != r.name && other.inbox == r.inbox {
			return true
		}
	}
	return false
}

// following are the inboxes of the requests after the one whose inbox is given, if
// they are counted, as the service counts its own.
func following(inbox string) (all []string) {
	all = append(all, inbox)
	dot := strings.LastIndexByte(inbox, '.')
	n, err := strconv.ParseUint(inbox[dot+1:], 36, 64)
	if err != nil {
		return all
	}
	for i := range uint64(10) {
		all = append(all, inbox[:dot+1]+strconv.FormatUint(n+i+1, 36))
	}
	return all
}

// forge publishes what a server or a peer would have said.
func forge(nc *nats.Conn, to string) (what string) {
	what = pick("ack", "refusal", "no message", "stats", "nobody")
	m := nats.NewMsg(to)
	switch what {
	case "ack":
		m.Data = fmt.Appendf(nil, `{"stream":"KV_leases","seq":%d}`, uint64(time.Now().UnixMicro())+5)
	case "refusal":
		m.Data = []byte(`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 1"},"stream":"KV_leases","seq":0}`)
	case "no message":
		m.Data = []byte(`{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error":{"code":404,"err_code":10037,"description":"no message found"}}`)
	case "stats":
		m.Data = lie()
	case "nobody":
		m.Header.Set("Status", "503")
	}
	_ = nc.PublishMsg(m)
	return what
}

// lie is an answer of a peer that cannot be true.
func lie() []byte {
	fence := pick(^uint64(0), ^uint64(0)-1, 1<<63, uint64(time.Now().UnixMicro())+1e15)
	held := pick(int64(9_000_000_000_000), 1<<62, -1)
	return fmt.Appendf(nil, `{"type":"io.nats.micro.v1.stats_response","name":"dagnats-api","id":"liar","version":"1.0.0","endpoints":[`+
		`{"name":"acquire","subject":"api.leases.acquire","data":{"instance":"liar","fence":%d,"held_ms":%d}}]}`, fence, held)
}

// liar answers for the service's peers: on $SRV where a role may subscribe to it, on
// every inbox on which it hears a peer answer, and on guessed inboxes all the time,
// 20 a second by each role. The attack join has an instance ask. The roles that may
// ask $SRV do, twice a second.
func liar(ctx context.Context, s *stage, t *tally) {
	together(len(s.outsiders), func(i int) {
		r, own := s.outsiders[i], name("liar")
		nc := s.connect(r, own, t)
		if nc == nil {
			return
		}
		defer nc.Close()
		for _, subject := range []string{"$SRV.>", "$SRV.STATS", "$SRV.STATS.dagnats-api"} {
			t.try(1)
			_, _ = nc.Subscribe(subject, func(m *nats.Msg) {
				t.end("asked")
				_ = m.Respond(lie())
			})
		}
		// Not to the inboxes of its own role: whoever hears a reply keeps NATS from saying
		// that the client of it is gone.
		for _, subject := range s.inboxes(r) {
			t.try(1)
			_, _ = nc.Subscribe(subject, func(m *nats.Msg) {
				if strings.Contains(string(m.Data), "stats_response") && !strings.Contains(string(m.Data), `"id":"liar"`) && !strings.HasPrefix(m.Subject, r.inbox+"."+own) {
					t.end("heard a peer")
					_ = nc.Publish(m.Subject, lie())
				}
			})
		}
		turns := 0
		every(ctx, 50*time.Millisecond, func() {
			t.try(1)
			_ = nc.Publish(fmt.Sprintf("%s.%s", s.roles["leased"].inbox, name("x")), lie())
			if turns++; turns%10 == 0 && r.sends("$SRV.STATS.dagnats-api") {
				if _, err := nc.Request("$SRV.STATS.dagnats-api", nil, time.Second); err != nil {
					t.end("STATS not answered")
				} else {
					t.end("STATS answered")
				}
			}
		})
	})
}
