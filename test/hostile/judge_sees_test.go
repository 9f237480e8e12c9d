package hostile

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/test/fault"
)

// TestJudgeSees forges one thing at a time.
func TestJudgeSees(t *testing.T) {
	now := time.Now()
	header := func(change map[string]string) nats.Header {
		h := nats.Header{}
		for k, v := range map[string]string{"Nats-TTL": "10s", "Nats-Expected-Last-Subject-Sequence": "7", "Nats-Expected-Stream": "KV_leases", "Dagnats-Lease-Event": "acquired"} {
			h.Set(k, v)
		}
		for k, v := range change {
			h.Set(k, v)
		}
		return h
	}
	record := func(change object) []byte {
		r := object{"v": 1, "key": "k", "holder": "h", "ttl_ms": 10_000, "written_at": now, "event": "acquired", "nonce": "n"}
		for k, v := range change {
			r[k] = v
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct {
		name   string
		header map[string]string
		record object
		body   string
		want   string // what is found; empty: nothing
	}{
		{name: "a lease of the service"},
		{name: "a reply", header: map[string]string{"Dagnats-Lease-Event": ""}, body: `{"held":false,"key":"k"}`, want: "not ours"},
		{name: "a reply with our header", body: `{"held":false}`, want: "not ours"},
		{name: "for ever", header: map[string]string{"Nats-TTL": ""}, want: "lives for ever"},
		{name: "shorter than it says", header: map[string]string{"Nats-TTL": "5s"}, want: "shorter than the lease"},
		{name: "unconditional", header: map[string]string{"Nats-Expected-Last-Subject-Sequence": ""}, want: "no expected sequence"},
		{name: "without a nonce", record: object{"nonce": ""}, want: "no nonce"},
		{name: "centuries", record: object{"ttl_ms": 9e12}, header: map[string]string{"Nats-TTL": "9000000000"}, want: "a ttl that cannot be asked for"},
		{name: "of a later version", record: object{"v": 2}, want: "a version"},
		{name: "of another year", record: object{"written_at": now.AddDate(1, 0, 0)}, want: "another time"},
		{name: "an eviction", record: object{"event": "released", "evicted": true}, header: map[string]string{"Dagnats-Lease-Event": "released", "KV-Operation": "PURGE"}, want: "eviction"},
	} {
		j := newJudge(fault.NewClock())
		body := []byte(c.body)
		if c.body == "" {
			body = record(c.record)
		}
		j.log.Stored(8, "$KV.leases.k", now, header(c.header), body)
		j.log.Stored(8, "$KV.leases.k", now, header(c.header), body) // as a change event tells it again
		if got := strings.Join(j.wrong["forged effect"], "; "); !strings.Contains(got, c.want) || c.want == "" && got != "" || j.counts["forged effect"] > 1 {
			t.Errorf("%s: found %q, want %q", c.name, got, c.want)
		}
	}
}

// TestJudgeTold: an end that is told by nobody is found, one that is told is not.
func TestJudgeTold(t *testing.T) {
	j := newJudge(fault.NewClock())
	old := time.Now().Add(-time.Minute)
	store := func(seq uint64, key, event string) {
		h := nats.Header{}
		h.Set("Dagnats-Lease-Event", event)
		j.log.Stored(seq, "$KV.leases."+key, old, h, fmt.Appendf(nil, `{"key":%q,"event":%q,"ttl_ms":1000}`, key, event))
	}
	store(1, stormPrefix+"told", "acquired")
	store(2, stormPrefix+"untold", "acquired")
	store(3, stormPrefix+"told", "expired")
	if n := j.untold(); n != 1 {
		t.Errorf("%d ends were told by nobody, want 1", n)
	}
}

// tenant is somebody who believes in having the office while err is nil.
type tenant struct {
	name string
	err  error
}

func (t *tenant) Check() error   { return t.err }
func (t *tenant) Holder() string { return t.name }
func (t *tenant) Tenure() uint64 { return 1 }

// TestJudgeOffice: two who have the office at once are found, one after the other not.
func TestJudgeOffice(t *testing.T) {
	j := newJudge(fault.NewClock())
	first, second, third := &tenant{name: "first"}, &tenant{name: "second"}, &tenant{name: "third"}
	j.elected(first)
	j.resigns(first)
	j.elected(second)
	second.err = errors.New("lost")
	j.elected(third)
	if len(j.counts) != 0 {
		t.Errorf("one after the other: found %v", j.wrong)
	}
	j.elected(first)
	if j.counts["two holders"] != 1 {
		t.Errorf("two at once: found %v", j.wrong)
	}
}
