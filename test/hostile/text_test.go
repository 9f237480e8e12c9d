package hostile

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"time"
	"unicode"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/corpus"
	"github.com/leased/leased/internal/testnats"
)

// nasty is what a terminal obeys and a line breaks at.
var nasty = []string{"\x1b[2J\x1b[31m", "\x1b]0;owned\x07", "\x00", "a\r\nb", "\u009b31m", "\u202e", "\u2028", "\x7f", strings.Repeat("\x1b[8m", 100)}

// text puts control characters wherever a caller may write something, 5 a second,
// and reads them back with leased ls, on a terminal, every 5 s.
func text(ctx context.Context, s *stage, t *tally) {
	nc := s.connect(s.roles["holder"], name("text"), t)
	if nc == nil {
		return
	}
	defer nc.Close()
	const prefix = "text-"
	turn := 0
	every(ctx, 200*time.Millisecond, func() {
		turn++
		bad := pick(nasty...)
		key := prefix + name("k")
		t.ask(nc, "acquire", object{"key": key, "holder": "text", "ttl_ms": 10_000, "meta": bad}, 5*time.Second)
		t.ask(nc, "acquire", object{"key": key + bad, "holder": bad, "ttl_ms": 10_000}, 5*time.Second)
		m := nats.NewMsg("api.leases.forward")
		m.Header.Set("Traceparent", strings.NewReplacer("\r", "", "\n", "").Replace(bad))
		m.Data, _ = json.Marshal(object{"key": key, "timeout_ms": 100})
		t.try(1)
		if _, err := nc.RequestMsg(m, 5*time.Second); err != nil {
			t.end("silence")
		}
		if turn%25 != 0 {
			return
		}
		r := s.roles["watcher"]
		// ls shows meta on a terminal only, which script gives it.
		ls := fmt.Sprintf("%s ls --server %s --user %s --password %s --inbox-prefix %s.ls %s",
			testnats.LeasedBinary(s.t), strings.Join(s.urls, ","), r.name, r.password, r.inbox, prefix)
		out, err := exec.CommandContext(ctx, "script", "--quiet", "--return", "--command", ls, "/dev/null").CombinedOutput()
		switch at := bytes.IndexFunc(out, obeyed); {
		case at >= 0:
			s.judge.found("control characters", "leased ls shows %q", clip(out[at:]))
		case ctx.Err() != nil:
		case err != nil || !bytes.Contains(out, []byte(prefix)):
			t.end("ls failed")
			s.judge.found("ls", "%v: %q", err, clip(out))
		default:
			t.end("ls clean")
		}
	})
}

// obeyed says whether a terminal does something else with c than to show it, the ends
// of lines aside.
func obeyed(c rune) bool {
	return unicode.IsControl(c) && !strings.ContainsRune("\r\n\t", c) || unicode.Is(unicode.Bidi_Control, c)
}

// garbage sends what is no request: the corpus of bad requests, nesting, noise, and
// requests without a reply subject, 40 a second. Every one that can be answered must
// be, with invalid or what comes before it in the order of judgement.
func garbage(ctx context.Context, s *stage, t *tally) {
	cases, err := corpus.Load(os.DirFS("../../testdata/corpus"))
	if err != nil || len(cases) == 0 {
		s.judge.found("harness", "no corpus: %v", err)
		return
	}
	holder, watcher := s.connect(s.roles["holder"], name("garbage"), t), s.connect(s.roles["watcher"], name("garbage"), t)
	if holder == nil || watcher == nil {
		return
	}
	defer holder.Close()
	defer watcher.Close()
	next := 0
	every(ctx, 25*time.Millisecond, func() {
		next++
		call, body := pick("acquire", "renew", "owner", "forward", "renew_many"), []byte(nil)
		switch next % 8 {
		case 0:
			body = bytes.Repeat([]byte(`[`), 100_000)
		case 1:
			body = []byte(`{"key":` + strings.Repeat(`{"key":`, 10_000))
		case 2:
			body = make([]byte, rand.IntN(4096))
			for i := range body {
				body[i] = byte(rand.Uint32())
			}
		case 3:
			t.try(1)
			t.end("no reply subject")
			_ = holder.Publish("api.leases."+call, []byte(`{"key":"`+name("silent")+`","holder":"silent","ttl_ms":600000}`))
			return
		default:
			c := cases[next%len(cases)]
			for c.Valid || len(c.Body) > 64<<10 {
				next++
				c = cases[next%len(cases)]
			}
			call, body = c.Call, c.Body
		}
		nc, r := holder, s.roles["holder"]
		if !r.sends("api.leases." + call) {
			nc, r = watcher, s.roles["watcher"]
		}
		if !r.sends("api.leases." + call) {
			t.try(1)
			t.end("nobody may")
			return
		}
		switch a := t.ask(nc, call, body, 5*time.Second); a.how {
		case "invalid", "busy":
		case "silence", "no JSON", "internal", "granted", "renewed", "other":
			s.judge.found("garbage", "%s of %q is answered %s: %q", call, clip(body), a.how, clip(a.raw))
		}
	})
}
