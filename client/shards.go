package client

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"regexp"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/leased/leased/service/kinds"
)

// ShardsOptions say how to hold shards and what to do with them.
type ShardsOptions struct {
	HoldOptions // Wait, NoWait, OnRenew and OnDenied are not used
	// Work is done for one key, each in its own goroutine. Its context ends when
	// the key is to be given to another member, is lost, or the member leaves; the
	// lease is released when Work has returned. Returning earlier gives the key up
	// to whoever takes it next, which may be this process.
	Work func(ctx context.Context, h *Hold)
}

// maxName is how many characters a key or a holder has at most.
const maxName = 128

// KeySetError says that another member of a group shares other keys than this one,
// as long as their number is being changed, or because one of them is wrong.
type KeySetError struct {
	Group  string
	Member string
	// Keys describes what the member shares: the number of keys and a hash of
	// them, empty when it does not tell, as members of an older version.
	Keys string
	Ours string // the same of this process
}

func (e *KeySetError) Error() string {
	return fmt.Sprintf("group %s: member %s does not share the same keys as this process (%s here, %s there): each takes its part only of the keys that the other does not hold", e.Group, e.Member, e.Ours, cmp.Or(e.Keys, "not told"))
}

// Shards shares keys fairly among all processes that call it with the same group
// and keys, until ctx ends; then it gives up everything, releases it as its work
// ends, and returns the cause of ctx. An error that no waiting mends, of those that
// Hold lists, ends it too.
//
// Members with other keys are told to OnError, as a *KeySetError each. To change the
// keys, start members with the new ones before those with the old ones leave: keys
// that only some know are shared among these, so none is without an owner, and shares
// are fair among those with the same keys.
//
// Nothing but leases is needed: each member holds the lease <group>-member-<holder>
// while it takes part, so whoever can list leases knows the members and who has
// which key, and from that each computes its own share (see plan). A look is taken
// every third of the TTL, and when an event tells that a key became free. A member
// that joins or leaves moves no more keys than it must; one that dies leaves its
// keys when they expire. The service must have the list extension; renewals go
// together in one request where it has renew_many. Keys with a common prefix keep
// the lists short.
func (c *Client) Shards(ctx context.Context, group string, keys []string, o ShardsOptions) error {
	members := group + "-member-"
	most := maxName - len("-member-") - len(o.Holder)
	if o.Holder == "" {
		o.Holder = NewHolder(group)
		most = (maxName - len("-member-") - len(NewHolder(""))) / 2
	}
	if len(group) > most {
		return kinds.Errorf(kinds.Invalid, "group %s has %d characters and can have %d: the key of a member, <group>-member-<holder>, has at most %d", group, len(group), most, maxName)
	}
	if err := o.defaults(); err != nil {
		return err
	}
	if len(keys) == 0 {
		return kinds.Errorf(kinds.Invalid, "group %s has no keys", group)
	}
	s := &sharer{
		client: c, options: o, group: group, members: members, prefix: commonPrefix(keys),
		keys: map[string]bool{}, running: map[string]*shard{}, told: map[string]bool{}, wake: make(chan struct{}, 1),
	}
	for _, k := range keys {
		s.keys[k] = true
	}
	s.set = describe(s.keys)
	if len(o.Meta)+len(keysMark)+len(s.set) > maxMeta {
		return kinds.Errorf(kinds.Invalid, "Meta: a member of a group has at most %d bytes, got %d", maxMeta-len(keysMark)-len(s.set), len(o.Meta))
	}
	s.options.batch = newBatcher(c, o.Holder, o.TTL)
	var hints []func()
	for _, k := range keys {
		cancel, err := c.hints(k, s.wake)
		if err != nil {
			o.OnError(err) // the regular look will do
			break
		}
		hints = append(hints, cancel)
	}
	defer func() {
		for _, cancel := range hints {
			cancel()
		}
	}()
	if err := s.run(ctx); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// sharer is one member of a group.
type sharer struct {
	client  *Client
	options ShardsOptions
	group   string
	members string // prefix of the members' keys
	set     string // describes keys
	prefix  string // of the shards' keys
	keys    map[string]bool
	wake    chan struct{}
	all     sync.WaitGroup
	told    map[string]bool // members of which OnError was told that they have other keys

	mu      sync.Mutex
	running map[string]*shard
}

// shard is a key that this process holds.
type shard struct {
	leave   context.CancelCauseFunc
	leaving bool
	since   time.Time
}

func (s *sharer) run(ctx context.Context) error {
	defer s.all.Wait()
	ctx, end := context.WithCancel(ctx)
	defer end()
	joined, refused := make(chan struct{}), make(chan error, 1)
	s.all.Go(func() { refused <- s.member(ctx, sync.OnceFunc(func() { close(joined) })) })
	select {
	case <-joined:
	case err := <-refused:
		return err
	}
	for ctx.Err() == nil {
		err := s.round(ctx)
		switch {
		case err == nil, ctx.Err() != nil:
		case lasting(err):
			return err
		default:
			s.options.OnError(err)
		}
		t := time.NewTimer(jitter(s.options.TTL/3, 0.2))
		select {
		case <-t.C:
		case err := <-refused:
			return err // nil when ctx has ended
		case <-ctx.Done():
		case <-s.wake:
			sleep(ctx, jitter(50*time.Millisecond, 0.5)) // let more events come
		}
		t.Stop()
	}
	return nil
}

// member holds the membership. It is released at once when ctx ends, before the
// shards are, so that the others know whom to count when those become free. Its
// error is one that no waiting mends: the group cannot stand in a key, for one.
func (s *sharer) member(ctx context.Context, joined func()) error {
	o := s.holdOptions()
	o.Meta = strings.TrimPrefix(o.Meta+keysMark+s.set, " ")
	for ctx.Err() == nil {
		err := s.client.Run(ctx, s.members+s.options.Holder, o, func(ctx context.Context, _ *Hold) error {
			joined()
			<-ctx.Done()
			return nil
		})
		_, twice := errors.AsType[*HeldHereError](err)
		if ctx.Err() == nil && (twice || lasting(err)) {
			return err
		}
		if err != nil && ctx.Err() == nil {
			s.options.OnError(err)
			sleep(ctx, jitter(time.Second, 0.5))
		}
	}
	return nil
}

func (s *sharer) holdOptions() HoldOptions {
	o := s.options.HoldOptions
	o.NoWait, o.Wait, o.OnRenew = false, 0, nil
	return o
}

// round looks at the group once and acts on its plan.
func (s *sharer) round(ctx context.Context) error {
	view, free, err := s.look(ctx)
	if err != nil {
		return err
	}
	give, take := view.plan()
	s.give(give)
	for take > 0 && len(free) > 0 && ctx.Err() == nil {
		// As many at once as are wanted; those that others were quicker to take are
		// made up for by the next.
		n := min(take, len(free))
		var got int
		var tried sync.WaitGroup
		var mu sync.Mutex
		for _, key := range free[:n] {
			tried.Go(func() {
				ok := s.take(ctx, key)
				mu.Lock()
				defer mu.Unlock()
				if ok {
					got++
				}
			})
		}
		tried.Wait()
		free, take = free[n:], take-got
	}
	return nil
}

// look lists members and keys. What this process runs it knows better itself. Of the
// members only those with the same keys are counted on: what another holds is not to
// be had, and what nobody holds another may never take.
func (s *sharer) look(ctx context.Context) (view shares, free []string, err error) {
	view = shares{self: s.options.Holder, counts: map[string]int{s.options.Holder: 0}}
	members, err := s.list(ctx, s.members)
	if err != nil {
		return view, nil, err
	}
	others := map[string]bool{}
	for _, l := range members {
		switch set := describedBy(l.Meta); {
		case l.Key != s.members+l.Holder || l.Holder == view.self:
		case set == s.set:
			view.counts[l.Holder] = 0
		default:
			others[l.Holder] = true
			if !s.told[l.Holder] {
				s.options.OnError(&KeySetError{Group: s.group, Member: l.Holder, Keys: set, Ours: s.set})
			}
		}
	}
	s.told = others
	leases, err := s.list(ctx, s.prefix)
	if err != nil {
		return view, nil, err
	}
	holder := map[string]string{}
	for _, l := range leases {
		holder[l.Key] = l.Holder
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.keys {
		mine, other := s.running[key], holder[key]
		_, live := view.counts[other]
		switch {
		case mine != nil && mine.leaving:
			view.gone++
		case mine != nil:
			view.counts[view.self]++
		case other == "" || other == view.self: // ours but not running: from a life before, or just released
			view.free++
			free = append(free, key)
		case live:
			view.counts[other]++
		case others[other]:
		default:
			view.gone++
		}
	}
	mathrand.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	return view, free, nil
}

// What a member says of its keys stands at the end of its lease's meta.
const keysMark = " keys="

var keysInMeta = regexp.MustCompile(`(?:^| )keys=([0-9]+-[0-9a-f]{16})$`)

// describe says which keys a member shares: how many, and a hash of them in order.
func describe(keys map[string]bool) string {
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(keys)) {
		fmt.Fprintln(h, k)
	}
	return fmt.Sprintf("%d-%x", len(keys), h.Sum(nil)[:8])
}

// describedBy reads that from a member's meta, empty if it is not there.
func describedBy(meta string) string {
	if m := keysInMeta.FindStringSubmatch(meta); m != nil {
		return m[1]
	}
	return ""
}

// maxMeta is how many bytes meta has at most.
const maxMeta = 512

func (s *sharer) list(ctx context.Context, prefix string) (all []Lease, err error) {
	for r := (ListRequest{Prefix: prefix, Limit: 1000}); ; {
		page, next, err := s.client.List(ctx, r)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next == "" {
			return all, nil
		}
		r.After = next
	}
}

// give asks the work of n keys to end, the youngest first.
func (s *sharer) give(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var mine []*shard
	for _, sh := range s.running {
		if !sh.leaving {
			mine = append(mine, sh)
		}
	}
	sort.Slice(mine, func(i, j int) bool { return mine[i].since.After(mine[j].since) })
	for _, sh := range mine[:min(n, len(mine))] {
		sh.leaving = true
		sh.leave(ErrResigned)
	}
}

// take tries to acquire a free key and starts its work.
func (s *sharer) take(ctx context.Context, key string) bool {
	o := s.holdOptions()
	o.NoWait = true
	h, err := s.client.Hold(ctx, key, o)
	if err != nil {
		var denied *DeniedError
		if !errors.As(err, &denied) {
			s.options.OnError(err)
		}
		return false
	}
	work, leave := context.WithCancelCause(h.Context())
	sh := &shard{leave: leave, since: time.Now()}
	s.mu.Lock()
	s.running[key] = sh
	s.mu.Unlock()
	s.all.Go(func() {
		early := false
		err := h.run(ctx, func(context.Context, *Hold) error {
			s.options.Work(work, h)
			early = work.Err() == nil
			s.mu.Lock()
			sh.leaving = true
			s.mu.Unlock()
			return nil
		})
		leave(nil)
		if early {
			sleep(ctx, jitter(time.Second, 0.5)) // the others' turn
		}
		s.mu.Lock()
		delete(s.running, key)
		s.mu.Unlock()
		if err != nil {
			s.options.OnError(err)
			// The event that told that it was lost came while its work was still ending.
			select {
			case s.wake <- struct{}{}:
			default:
			}
		}
	})
	return true
}

func commonPrefix(keys []string) string {
	prefix := keys[0]
	for _, k := range keys {
		for !strings.HasPrefix(k, prefix) {
			prefix = prefix[:len(prefix)-1]
		}
	}
	return prefix
}
