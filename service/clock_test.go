package service

import (
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// TestClockStep: a server's clock that is set is noticed as far as two readings prove
// it; one that is slewed, a slow answer, a stop of this process and another
// leader are none.
func TestClockStep(t *testing.T) {
	const rtt = 10 * time.Millisecond
	start := time.Now()
	type look struct {
		server string
		after  time.Duration // since the look before
		off    time.Duration // of the server's clock
		rtt    time.Duration
	}
	for name, c := range map[string]struct {
		looks []look
		want  []time.Duration // steps, to 100 ms
	}{
		"an hour forward":                 {[]look{{"", 0, 0, rtt}, {"", 2 * time.Second, time.Hour, rtt}}, []time.Duration{time.Hour}},
		"an hour back":                    {[]look{{"", 0, 0, rtt}, {"", 2 * time.Second, -time.Hour, rtt}}, []time.Duration{-time.Hour}},
		"1.5 s forward":                   {[]look{{"", 0, 0, rtt}, {"", 2 * time.Second, 1500 * time.Millisecond, rtt}}, []time.Duration{1500 * time.Millisecond}},
		"there and back":                  {[]look{{"", 0, 0, rtt}, {"", 2 * time.Second, time.Minute, rtt}, {"", 2 * time.Second, 0, rtt}}, []time.Duration{time.Minute, -time.Minute}},
		"the second leader's":             {[]look{{"n1", 0, 0, rtt}, {"n2", time.Second, 0, rtt}, {"n2", time.Second, 3 * time.Second, rtt}}, []time.Duration{3 * time.Second}},
		"less than a second":              {[]look{{"", 0, 0, rtt}, {"", 2 * time.Second, 900 * time.Millisecond, rtt}}, nil},
		"slewed by a tenth at most":       {[]look{{"", 0, 0, rtt}, {"", 30 * time.Second, 2900 * time.Millisecond, rtt}}, nil},
		"slewed over many looks":          {[]look{{"", 0, 0, rtt}, {"", 9 * time.Second, 900 * time.Millisecond, rtt}, {"", 9 * time.Second, 1800 * time.Millisecond, rtt}, {"", 9 * time.Second, 2700 * time.Millisecond, rtt}}, nil},
		"a slow answer":                   {[]look{{"", 0, 0, rtt}, {"", 5 * time.Second, -2 * time.Second, 5 * time.Second}}, nil},
		"a slow answer before":            {[]look{{"", 0, 0, 5 * time.Second}, {"", 5 * time.Second, 2 * time.Second, rtt}}, nil},
		"a leader whose clock is another": {[]look{{"n1", 0, 0, rtt}, {"n2", time.Second, time.Minute, rtt}, {"n1", time.Second, 0, rtt}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var steps []time.Duration
			ck := &clock{stepped: func(_ string, by time.Duration) { steps = append(steps, by) }}
			at := start
			for _, l := range c.looks {
				at = at.Add(l.after)
				ck.sample(l.server, at.Add(-l.rtt), at, at.Add(l.off-l.rtt/2))
			}
			if len(steps) != len(c.want) {
				t.Fatalf("steps %v, want %v", steps, c.want)
			}
			for i, s := range steps {
				if (s - c.want[i]).Abs() > 100*time.Millisecond {
					t.Errorf("steps %v, want %v", steps, c.want)
				}
			}
			if told := ck.trouble(at); (len(steps) > 0) != strings.Contains(told, "was set") {
				t.Errorf("told: %q", told)
			}
			if told := ck.trouble(at.Add(clockKept)); strings.Contains(told, "was set") {
				t.Errorf("told for ever: %q", told)
			}
		})
	}
}

// TestClockSpread: servers that lead in turn are held against each other and against
// this machine.
func TestClockSpread(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		offs  map[string]time.Duration
		rtt   time.Duration
		apart time.Duration // at least, to 100 ms
		names []string
	}{
		"all the same":         {map[string]time.Duration{"n1": 0, "n2": 100 * time.Millisecond}, 10 * time.Millisecond, 0, nil},
		"two servers":          {map[string]time.Duration{"n1": -700 * time.Millisecond, "n2": 800 * time.Millisecond}, 10 * time.Millisecond, 1500 * time.Millisecond, []string{"n1", "n2"}},
		"this machine":         {map[string]time.Duration{"": 5 * time.Second}, 10 * time.Millisecond, 5 * time.Second, []string{"the NATS server", "this machine"}},
		"slow answers hide it": {map[string]time.Duration{"n1": 0, "n2": 2 * time.Second}, 4 * time.Second, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			ck := &clock{}
			for server, off := range c.offs {
				ck.sample(server, now.Add(-c.rtt), now, now.Add(off-c.rtt/2))
			}
			d, _, _ := ck.spread(now)
			if (d - c.apart).Abs() > 100*time.Millisecond {
				t.Errorf("apart by %v, want %v", d, c.apart)
			}
			told := ck.trouble(now)
			if (c.names == nil) != (told == "") {
				t.Errorf("told: %q", told)
			}
			for _, n := range c.names {
				if !strings.Contains(told, n) {
					t.Errorf("%q does not name %s", told, n)
				}
			}
		})
	}
}

// TestClockStepSuspends: after a step forward nothing is granted until the leases from
// before are over by this machine's clock, and leases are renewed; after a step back
// all goes on.
func TestClockStepSuspends(t *testing.T) {
	for _, by := range []time.Duration{time.Hour, 2 * time.Second, -time.Hour} {
		t.Run(by.String(), func(t *testing.T) {
			c := &clock{}
			v := newView(c, nil)
			k := newKeeper(&js{}, v, 1, "x.changed", nil, slog.New(slog.NewTextHandler(io.Discard, nil)))
			k.health.Store(&Health{Verdict: Sound})
			c.stepped = k.stepped
			now := time.Now()
			rec := &Record{V: recordVersion, Key: "k", Holder: "A", TTLMillis: 2000, AcquiredAt: TimestampOf(now), WrittenAt: TimestampOf(now), Event: Acquired}
			v.wrote("k", 7, rec, false, 2*time.Second, now, now)
			c.sample("", now, now, now)
			if err := k.Allow(OpAcquire); err != nil {
				t.Fatal(err)
			}
			c.sample("", now, now.Add(time.Millisecond), now.Add(by))
			err := k.Allow(OpAcquire)
			if (err != nil) != (by > 0) {
				t.Errorf("an acquire after the step: %v", err)
			}
			if by > 0 && !strings.Contains(err.Error(), "was set forward by") {
				t.Errorf("it does not say why: %v", err)
			}
			if err := k.Allow(OpRenew); err != nil {
				t.Errorf("a renewal after the step: %v", err)
			}
			v.alive.Store(v.local(time.Now()))
			if err := k.Acked(OpAcquire, k.Bucket(), 7, 8); err != nil {
				t.Errorf("a grant that was under way is taken back: %v", err)
			}
			if p := k.early.Load(); p != nil {
				if left := p.until.Sub(now); left > 2100*time.Millisecond || left < 1900*time.Millisecond {
					t.Errorf("suspended for %v, the lease lasts 2 s", left)
				}
				k.early.Store(&suspension{now, ""})
				if err := k.Allow(OpAcquire); err != nil {
					t.Errorf("when it is over: %v", err)
				}
			}
		})
	}
}
