package contract

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/leased/leased/internal/corpus"
	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// inputLimit is how long any input may take to be answered.
const inputLimit = 50 * time.Millisecond * slowness

func loadCorpus(t testing.TB) []corpus.Case {
	t.Helper()
	cases, err := corpus.Load(os.DirFS("../../testdata/corpus"))
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) < 120 {
		t.Fatalf("the corpus has %d cases", len(cases))
	}
	return cases
}

// large lets through what the default max_payload would keep from the service.
func large(o *server.Options) { o.MaxPayload = 8 << 20 }

// TestCorpusOverTheWire: every input gets exactly one reply, in time, of the
// kind that its file says, and what is invalid leaves no trace. It is about
// time, so no other test runs beside it, and the best answer of five counts.
func TestCorpusOverTheWire(t *testing.T) {
	r := newRig(t, setup{nats: []testnats.Option{large}})
	counts := map[bool]int{}
	last := r.stream().LastSeq
	for _, c := range loadCorpus(t) {
		t.Run(c.Name, func(t *testing.T) {
			counts[c.Valid]++
			r.t = t
			var got *reply
			limit := inputLimit
			if q, err := r.set.Request(c.Call).Decode(c.Body); err == nil {
				limit += time.Duration(len(q.Leases)) * time.Millisecond * slowness // each is a call
			}
			for try := 0; try == 0 || try < 5 && got.took() > limit; try++ {
				got = r.call(c.Call, c.Body)
			}
			before := last
			last = r.stream().LastSeq
			if got.took() > limit {
				t.Errorf("answered after %v: %s", got.took(), got.raw)
			}
			switch {
			case c.Valid && got.kind == kinds.Invalid:
				t.Errorf("is valid (%s), answered: %s", c.Why, got.raw)
			case c.Valid:
				if got.kind == kinds.Internal || got.kind == kinds.Unavailable || got.kind == kinds.Unknown {
					t.Errorf("answered: %s", got.raw)
				}
			case got.kind != kinds.Invalid:
				t.Errorf("is invalid (%s), answered: %s", c.Why, got.raw)
			case !strings.Contains(got.Error, c.Member):
				t.Errorf("the sentence does not name %s: %s", c.Member, got.Error)
			case last > before && len(r.written(before)) > 0:
				t.Errorf("an invalid request wrote %v", r.written(before))
			case len(got.Error) > 500:
				t.Errorf("a sentence of %d bytes", len(got.Error))
			}
		})
	}
	r.t = t
	t.Logf("%d valid and %d invalid inputs", counts[true], counts[false])
}

// fuzz sends raw bytes to one call and checks what must hold for any input.
func fuzz(f *testing.F, call string) {
	r := newRig(f, setup{nats: []testnats.Option{large}, faulty: true, uncounted: true})
	r.hold("A", func(m *nats.Msg) { m.Respond(m.Data) })
	r.acquire("k", "A", 600000)
	// Without -fuzz a few will do: TestCorpusOverTheWire sends them all.
	step := 15
	if flag.Lookup("test.fuzz").Value.String() != "" {
		step = 1
	}
	for n, c := range loadCorpus(f) {
		if c.Call == call && len(c.Body) < 8<<10 && n%step == 0 {
			f.Add(c.Body)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r.t = t
		req, invalid := r.set.Request(call).Decode(body)
		if req.Wait > 20*time.Millisecond {
			t.Skip("it may wait, and does nothing else meanwhile")
		}
		before := r.stream().LastSeq
		got, err := r.ask(call, body)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case (invalid != nil) != (got.kind == kinds.Invalid):
			t.Errorf("the decoder says %v, the service answers %s", invalid, got.raw)
		case invalid != nil && len(r.written(before)) > 0:
			t.Errorf("an invalid request wrote %v", r.written(before))
		}
		switch got.kind {
		case "malformed", kinds.Internal, kinds.Unavailable, kinds.Unknown, kinds.Busy, kinds.Unsupported, kinds.OwnerTimeout:
			t.Errorf("answered %s", got.raw)
		case kinds.Forwarded:
			if !bytes.Equal(req.Payload, *got.Payload) {
				t.Errorf("sent %q, the owner's echo is %q", req.Payload, *got.Payload)
			}
		}
	})
}

func FuzzAcquire(f *testing.F) { fuzz(f, "acquire") }
func FuzzRenew(f *testing.F)   { fuzz(f, "renew") }
func FuzzRelease(f *testing.F) { fuzz(f, "release") }
func FuzzOwner(f *testing.F)   { fuzz(f, "owner") }
func FuzzForward(f *testing.F) { fuzz(f, "forward") }
func FuzzList(f *testing.F)    { fuzz(f, "list") }
func FuzzEvict(f *testing.F)   { fuzz(f, "evict") }

func FuzzRenewMany(f *testing.F) { fuzz(f, "renew_many") }
