package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/leased/leased/service/kinds"
)

// crew is a group whose members come and go. It counts who works on what.
type crew struct {
	t     *testing.T
	ttl   time.Duration
	keys  []string
	group string
	start func() *Client // of a new member, its own connection

	mu       sync.Mutex
	members  map[string]*member
	working  map[string]string // key -> member
	fences   map[string]uint64 // key -> the highest seen
	moves    int
	needed   int // moves that the changes so far call for
	owed     int // of those, not made yet
	changed  time.Time
	troubles map[string]int
	all      sync.WaitGroup
}

type member struct {
	name  string
	leave context.CancelFunc
	dead  bool
}

func newCrew(t *testing.T, ttl time.Duration, keys int, start func() *Client) *crew {
	c := &crew{t: t, group: "crew", ttl: ttl, start: start, members: map[string]*member{}, working: map[string]string{}, fences: map[string]uint64{}, troubles: map[string]int{}}
	for i := range keys {
		c.keys = append(c.keys, fmt.Sprintf("shard-%02d", i))
	}
	return c
}

// join adds a member.
func (c *crew) join(name string) {
	ctx, leave := context.WithCancelCause(context.Background())
	m := &member{name: name, leave: func() { leave(errLeft) }}
	c.change(func() { c.members[name] = m })
	client := c.start()
	c.all.Go(func() {
		err := client.Shards(ctx, c.group, c.keys, ShardsOptions{
			HoldOptions: HoldOptions{Holder: name, TTL: c.ttl, OnError: func(err error) {
				c.mu.Lock()
				defer c.mu.Unlock()
				if !m.dead {
					c.troubles[string(kinds.Of(err))]++
				}
			}},
			Work: func(ctx context.Context, h *Hold) { c.work(ctx, m, h) },
		})
		if !errors.Is(err, errLeft) {
			c.t.Error(err)
		}
	})
}

var errLeft = errors.New("left")

func (c *crew) work(ctx context.Context, m *member, h *Hold) {
	key := h.Key()
	c.mu.Lock()
	if other := c.working[key]; other != "" {
		c.t.Errorf("%s starts on %s while %s works on it", m.name, key, other)
	}
	if h.Revision() <= c.fences[key] {
		c.t.Errorf("%s starts on %s under %d after %d", m.name, key, h.Revision(), c.fences[key])
	}
	if !m.dead {
		c.working[key] = m.name
		c.moves++
		c.owed = max(0, c.owed-1)
	}
	c.mu.Unlock()
	<-ctx.Done()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fences[key] = max(c.fences[key], h.Revision())
	if !m.dead {
		delete(c.working, key)
	}
}

// leave lets a member leave in good order.
func (c *crew) leave(name string) {
	m := c.members[name]
	c.change(func() { delete(c.members, name) })
	m.leave()
}

// die ends a member's work at once and lets it release nothing.
func (c *crew) die(name string, cut func()) {
	m := c.members[name]
	c.change(func() {
		delete(c.members, name)
		m.dead = true
		maps.DeleteFunc(c.working, func(_, who string) bool { return who == name })
	})
	cut()
	m.leave()
}

// change adds up what a change of membership calls for.
func (c *crew) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	c.changed = time.Now()
	if len(c.members) == 0 {
		return
	}
	now := fewestMoves(c.counts(), len(c.keys))
	c.needed += now - c.owed
	c.owed = now
}

// counts is the number of keys that each member works on. Under mu.
func (c *crew) counts() map[string]int {
	n := map[string]int{}
	for name := range c.members {
		n[name] = 0
	}
	for _, who := range c.working {
		if _, ok := n[who]; ok {
			n[who]++
		}
	}
	return n
}

// fair checks that all keys are worked on, in fair shares, unless membership
// changed less than two TTLs ago.
func (c *crew) fair() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.members) == 0 || time.Since(c.changed) < 2*c.ttl {
		return
	}
	n := slices.Sorted(maps.Values(c.counts()))
	if len(c.working) != len(c.keys) || n[len(n)-1]-n[0] > 1 {
		c.t.Errorf("%v after the last change: %d of %d keys, shares %v", time.Since(c.changed), len(c.working), len(c.keys), n)
	}
}

func (c *crew) names() []string { return slices.Sorted(maps.Keys(c.members)) }

// TestShards: 64 keys over 1 to 8 processes that join, leave and die at random for
// ten minutes, in 20 ways.
func TestShards(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() {
		seeds = 3
	}
	for seed := range seeds {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.noBatch = seed%4 == 0
			rng := rand.New(rand.NewPCG(seed, 5))
			processes := map[string]*process{}
			var last *process
			c := newCrew(t, 15*time.Second, 64, func() *Client {
				last = w.process()
				return newClient(last, Options{})
			})
			end := time.Now().Add(10 * time.Minute)
			for i := 0; time.Now().Before(end); i++ {
				names := c.names()
				switch {
				case len(names) == 0, len(names) < 8 && rng.IntN(2) == 0:
					name := fmt.Sprint("p", i)
					c.join(name)
					processes[name] = last
				case rng.IntN(2) == 0:
					c.leave(names[rng.IntN(len(names))])
				default:
					name := names[rng.IntN(len(names))]
					c.die(name, processes[name].kill)
				}
				for wait := time.Duration(rng.Int64N(int64(6 * c.ttl))); wait > 0; wait -= time.Second {
					time.Sleep(time.Second)
					c.fair()
				}
			}
			moves, needed := c.moves, c.needed
			for _, name := range c.names() {
				c.leave(name)
			}
			c.all.Wait()
			time.Sleep(time.Minute)
			w.mu.Lock()
			defer w.mu.Unlock()
			for k := range w.keys {
				if w.live(k) != nil {
					t.Errorf("%s is left", k)
				}
			}
			if moves*10 > needed*11 {
				t.Errorf("%d moves, %d were needed", c.moves, c.needed)
			}
			t.Logf("seed %d: %d moves, %d needed; %d lists, renewals: %d in batches, %d single; troubles %v",
				seed, moves, needed, len(w.sent["list"]), len(w.sent["renew_many"]), len(w.sent["renew"]), c.troubles)
			if single := len(w.sent["renew"]); !w.noBatch && single > 3*c.moves {
				t.Errorf("%d single renewals beside %d batches", single, len(w.sent["renew_many"]))
			}
		})
	}
}

// TestShardsOnABadNetwork: whatever is lost or late, no key has two owners, and
// when the network is well again, all have their share.
func TestShardsOnABadNetwork(t *testing.T) {
	for seed := range uint64(10) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			w.rng = rand.New(rand.NewPCG(seed, 6))
			w.random = true
			c := newCrew(t, 6*time.Second, 12, func() *Client { return newClient(w.process(), Options{Timeout: time.Second}) })
			for i := range 3 {
				c.join(fmt.Sprint("p", i))
			}
			time.Sleep(5 * time.Minute)
			w.mu.Lock()
			w.random = false
			w.mu.Unlock()
			time.Sleep(2 * time.Minute)
			c.fair()
			for _, name := range c.names() {
				c.leave(name)
			}
			c.all.Wait()
			time.Sleep(time.Minute) // what the service was late with
			if c.moves < 30 || len(c.troubles) < 3 {
				t.Errorf("%d moves, troubles %v: the test did not test", c.moves, c.troubles)
			}
		})
	}
}

// TestShardsWithALongTTL: renewals go together and in time.
func TestShardsWithALongTTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		c := newCrew(t, 10*time.Minute, 100, func() *Client { return newClient(w.process(), Options{}) })
		c.join("p")
		time.Sleep(10 * time.Hour)
		c.fair()
		if c.moves != 100 || len(c.troubles) > 0 {
			t.Errorf("%d moves, troubles %v", c.moves, c.troubles)
		}
		if batches, single := w.count("renew_many"), w.count("renew"); batches > 2*3*6*10+10 || single > 110 {
			t.Errorf("%d batches, %d single renewals", batches, single)
		}
		c.leave("p")
		c.all.Wait()
	})
}

// TestShardTakenAgain: work that ends slowly after its key was evicted keeps the key from
// being taken again until then, not until the next look, a third of the TTL later.
func TestShardTakenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		ctx, leave := context.WithCancel(t.Context())
		began := make(chan uint64, 10)
		var shards sync.WaitGroup
		shards.Go(func() {
			_ = newClient(w.process(), Options{}).Shards(ctx, "g", []string{"k"}, ShardsOptions{
				HoldOptions: HoldOptions{TTL: 10 * time.Minute},
				Work: func(ctx context.Context, h *Hold) {
					began <- h.Revision()
					<-ctx.Done()
					time.Sleep(5 * time.Second)
				},
			})
		})
		first := <-began
		w.evict("k")
		evicted := time.Now()
		if second := <-began; second <= first || time.Since(evicted) > 7*time.Second {
			t.Errorf("%d after %d, %v after the evict", second, first, time.Since(evicted))
		}
		leave()
		shards.Wait()
	})
}

// TestShardsWithOtherKeys: members of one group that share different keys. Nothing
// stays without an owner that some member knows, and the difference is told.
func TestShardsWithOtherKeys(t *testing.T) {
	const span = 6 * time.Second
	// group starts members whose number of keys is told, and counts their work.
	type group struct {
		sync.Mutex
		owners map[string]string
		told   map[string]int // who was told of whom
		leave  map[string]func()
	}
	start := func(t *testing.T, w *world) (g *group, join func(name string, keys int)) {
		g = &group{owners: map[string]string{}, told: map[string]int{}, leave: map[string]func(){}}
		return g, func(name string, keys int) {
			var all []string
			for i := range keys {
				all = append(all, fmt.Sprintf("job-%d", i))
			}
			ctx, cancel := context.WithCancel(t.Context())
			left := make(chan struct{})
			g.leave[name] = func() { cancel(); <-left }
			c := newClient(w.process(), Options{})
			go func() {
				defer close(left)
				_ = c.Shards(ctx, "job", all, ShardsOptions{
					HoldOptions: HoldOptions{Holder: name, TTL: span, Meta: "at " + name, OnError: func(err error) {
						g.Lock()
						defer g.Unlock()
						if other, ok := errors.AsType[*KeySetError](err); ok && other.Group == "job" {
							g.told[name+" of "+other.Member]++
						}
					}},
					Work: func(ctx context.Context, h *Hold) {
						g.Lock()
						if g.owners[h.Key()] != "" {
							t.Errorf("%s has two owners", h.Key())
						}
						g.owners[h.Key()] = name
						g.Unlock()
						<-ctx.Done()
						g.Lock()
						delete(g.owners, h.Key())
						g.Unlock()
					},
				})
			}()
		}
	}
	// covered waits and checks that each key has an owner, and returns who has how many.
	covered := func(t *testing.T, g *group, keys int) map[string]int {
		t.Helper()
		time.Sleep(5 * span)
		g.Lock()
		defer g.Unlock()
		counts := map[string]int{}
		for i := range keys {
			if g.owners[fmt.Sprintf("job-%d", i)] == "" {
				t.Errorf("job-%d has no owner", i)
			}
		}
		for _, who := range g.owners {
			counts[who]++
		}
		return counts
	}
	end := func(g *group) {
		for _, leave := range g.leave {
			leave()
		}
	}

	inBubble(t, "more keys, one member after another", func(t *testing.T, w *world) {
		g, join := start(t, w)
		join("old1", 16)
		join("old2", 16)
		covered(t, g, 16)
		join("new1", 32)
		if counts := covered(t, g, 32); counts["new1"] != 16 {
			t.Errorf("%v", counts)
		}
		g.leave["old1"]()
		covered(t, g, 32)
		join("new2", 32)
		if counts := covered(t, g, 32); counts["new1"]-counts["new2"] > 1 || counts["new2"]-counts["new1"] > 1 {
			t.Errorf("those with the same keys do not share them fairly: %v", counts)
		}
		g.leave["old2"]()
		if counts := covered(t, g, 32); counts["new1"] != 16 || counts["new2"] != 16 {
			t.Errorf("%v", counts)
		}
		end(g)
		if g.told["old2 of new1"] != 1 || g.told["new1 of old2"] != 1 || g.told["new1 of new2"] != 0 {
			t.Errorf("told: %v", g.told)
		}
	})

	inBubble(t, "fewer keys", func(t *testing.T, w *world) {
		g, join := start(t, w)
		join("old1", 32)
		join("old2", 32)
		covered(t, g, 32)
		join("new1", 10)
		covered(t, g, 32)
		g.leave["old1"]()
		covered(t, g, 32) // the other old one knows them all
		g.leave["old2"]()
		if counts := covered(t, g, 10); counts["new1"] != 10 {
			t.Errorf("%v", counts)
		}
		end(g)
	})

	inBubble(t, "a member that is wrong starves nobody's keys, whoever comes first", func(t *testing.T, w *world) {
		for _, order := range [][]string{{"right", "wrong"}, {"wrong", "right"}} {
			g, join := start(t, w)
			for _, name := range order {
				join(name, map[string]int{"right": 32, "wrong": 3}[name])
				time.Sleep(5 * span)
			}
			covered(t, g, 32)
			end(g)
			if g.told["right of wrong"] != 1 || g.told["wrong of right"] != 1 {
				t.Errorf("%v: told: %v", order, g.told)
			}
		}
	})

	inBubble(t, "a member of an older version, which counts on all, does not tell its keys", func(t *testing.T, w *world) {
		c := newClient(w.process(), Options{})
		h, err := c.Hold(t.Context(), "job-member-older", HoldOptions{Holder: "older", Meta: "at home"})
		if err != nil {
			t.Fatal(err)
		}
		g, join := start(t, w)
		join("new", 8)
		covered(t, g, 8)
		end(g)
		if g.told["new of older"] != 1 {
			t.Errorf("told: %v", g.told)
		}
		_ = h.Resign(t.Context())
	})

	inBubble(t, "the meta of a member stays what it was, but for its end", func(t *testing.T, w *world) {
		g, join := start(t, w)
		join("p", 2)
		time.Sleep(span)
		w.mu.Lock()
		if meta := w.keys["job-member-p"].meta; !strings.HasPrefix(meta, "at p keys=2-") || describedBy(meta) == "" {
			t.Errorf("%q", meta)
		}
		if meta := w.keys["job-0"].meta; meta != "at p" {
			t.Errorf("%q", meta)
		}
		w.mu.Unlock()
		end(g)
	})
}

func TestDescribeKeys(t *testing.T) {
	set := func(keys ...string) map[string]bool {
		m := map[string]bool{}
		for _, k := range keys {
			m[k] = true
		}
		return m
	}
	a := describe(set("a", "b"))
	if a != describe(set("b", "a")) || a == describe(set("a")) || a == describe(set("a", "c")) || a == describe(set("ab")) {
		t.Error(a)
	}
	for meta, want := range map[string]string{
		"": "", "keys=" + a: a, "x keys=" + a: a, "xkeys=" + a: "", "keys=" + a + " ": "", "keys=3": "",
		"keys=1-0000000000000000 keys=" + a: a,
	} {
		if got := describedBy(meta); got != want {
			t.Errorf("%q describes %q, want %q", meta, got, want)
		}
	}
}

func TestShardsWithoutKeys(t *testing.T) {
	c := newClient(newWorld(t).process(), Options{})
	if err := c.Shards(t.Context(), "g", nil, ShardsOptions{}); kinds.Of(err) != kinds.Invalid {
		t.Error(err)
	}
	if got := commonPrefix([]string{"shard-10", "shard-1", "shard-23"}); got != "shard-" {
		t.Error(got)
	}
}

// paged answers lists with one page after the other.
type paged struct {
	canned
	pages []string
}

func (p *paged) request(ctx context.Context, subject string, body []byte) ([]byte, error) {
	p.reply, p.pages = p.pages[0], p.pages[1:]
	return p.canned.request(ctx, subject, body)
}

// TestListGoesOn: a page without leases is not the last while it names the next.
func TestListGoesOn(t *testing.T) {
	w := &paged{pages: []string{`{"leases":[],"next":"a"}`, `{"leases":[{` + lease + `}],"next":"l"}`, `{"leases":[]}`}}
	s := &sharer{client: newClient(w, Options{})}
	all, err := s.list(t.Context(), "k")
	if err != nil || len(all) != 1 || all[0].Key != "k" || len(w.pages) != 0 || w.body != `{"prefix":"k","after":"l","limit":1000}` {
		t.Errorf("%v, %v; asked last: %s; %d pages are left", all, err, w.body, len(w.pages))
	}
}

// TestShardsOfALongGroup: the key of a member is made of the group, and the limit that is
// told is the group's.
func TestShardsOfALongGroup(t *testing.T) {
	c := newClient(newWorld(t).process(), Options{})
	ended, end := context.WithCancel(t.Context())
	end()
	for _, x := range []struct {
		size   int
		holder string
		want   string // "": it is taken
	}{
		{60, "", "has 60 characters and can have 51"},
		{128, "", "has 128 characters and can have 51"},
		{51, "", ""},
		{119, "h1", "has 119 characters and can have 118"},
		{118, "h1", ""},
	} {
		group := strings.Repeat("g", x.size)
		err := c.Shards(ended, group, []string{"k"}, ShardsOptions{HoldOptions: HoldOptions{Holder: x.holder}})
		if x.want == "" && kinds.Of(err) == kinds.Invalid || x.want != "" && (kinds.Of(err) != kinds.Invalid || !strings.Contains(err.Error(), group+" "+x.want)) {
			t.Errorf("group of %d, holder %q: %v, want %q", x.size, x.holder, err, x.want)
		}
	}
}
