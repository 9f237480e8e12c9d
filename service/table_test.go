package service

import (
	"container/heap"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// texted is what a table is asked for.
type texted struct {
	rev          uint64
	holder, meta string
}

func (t *table) hash(key string) uint64 { return maphash.String(t.seed, key) }

func (t *table) get(key string) (texted, bool) {
	_, it := t.find(t.hash(key), key)
	if it == nil {
		return texted{}, false
	}
	return texted{it.rev, string(t.holder(it)), string(t.meta(it))}, true
}

// TestTable: a shard holds what a map would, over many additions, changes, removals
// and copies, and gives the room of what is gone back.
func TestTable(t *testing.T) {
	t.Parallel()
	seed := [2]uint64{rand.Uint64(), rand.Uint64()}
	r := rand.New(rand.NewPCG(seed[0], seed[1]))
	s := &shard{table: table{seed: maphash.MakeSeed()}}
	model := map[string]texted{}
	text := func(most int) string { return strings.Repeat(string('a'+rune(r.IntN(26))), r.IntN(most+1)) }
	check := func(when string) {
		t.Helper()
		if s.items != len(model) || len(s.index) > s.items {
			t.Fatalf("%s (seed %v): %d items of %d hashes, want %d", when, seed, s.items, len(s.index), len(model))
		}
		for key, want := range model {
			if got, ok := s.get(key); !ok || got != want {
				t.Fatalf("%s (seed %v): %q is %+v %v, want %+v", when, seed, key, got, ok, want)
			}
		}
		shown := 0
		for _, it := range s.all() {
			if _, ok := model[string(s.key(it))]; !ok {
				t.Fatalf("%s (seed %v): %q should be gone", when, seed, s.key(it))
			}
			shown++
		}
		if shown != len(model) {
			t.Fatalf("%s (seed %v): %d items of %d are shown", when, seed, shown, len(model))
		}
		sorted, before := 0, ""
		for it := range s.from("") {
			if key := string(s.key(it)); key <= before || key == "" {
				t.Fatalf("%s (seed %v): %q comes after %q", when, seed, key, before)
			} else {
				before = key
			}
			sorted++
		}
		if sorted != len(model) || len(s.order) > 4*sorted/orderBlock+1 {
			t.Fatalf("%s (seed %v): %d items of %d are in order, in %d blocks", when, seed, sorted, len(model), len(s.order))
		}
		stands := map[uint32]int{}
		for i, d := range s.due {
			if d.at == s.at(d.slot).sched && s.at(d.slot).key != 0 {
				stands[d.slot]++
			}
			if i > 0 && s.due.Less(i, (i-1)/2) {
				t.Fatalf("%s (seed %v): what is due is no heap", when, seed)
			}
		}
		for n, it := range s.all() {
			if stands[n] != 1 {
				t.Fatalf("%s (seed %v): %d elements stand for %q", when, seed, stands[n], s.key(it))
			}
		}
	}
	for phase, keys := range []int{3000, 40, 3000} {
		for range 20_000 {
			key := fmt.Sprintf("k%d", r.IntN(3000))
			n, it := s.find(s.hash(key), key)
			switch remove := r.IntN(3000) >= keys || r.IntN(4) == 0; {
			case remove && it != nil:
				s.remove(n)
				s.shrink()
				delete(model, key)
			case remove:
			case it == nil:
				want := texted{r.Uint64(), text(128), text(512)}
				n, it = s.add(s.hash(key), key, want.holder, want.meta)
				it.rev, it.next = want.rev, r.Int64()
				s.schedule(n, it)
				model[key] = want
			default:
				want := texted{r.Uint64(), text(128), model[key].meta}
				it.rev = want.rev
				s.describe(it, want.holder, want.meta)
				model[key] = want
			}
		}
		check(fmt.Sprintf("phase %d", phase))
		used := 0
		for _, it := range s.all() {
			used += it.length()
		}
		if got := s.texts.size - s.texts.unused; got != used {
			t.Errorf("%d bytes of text are said to be in use, %d are", got, used)
		}
		if s.texts.size > 2*used+used/8+8*textBlock {
			t.Errorf("phase %d: %d bytes of text for %d in use", phase, s.texts.size, used)
		}
		if keys == 40 && len(s.pages) > 10 {
			t.Errorf("%d pages for %d items", len(s.pages), s.items)
		}
	}
}

// TestTableChurn: keys that come and go, each another, take no more room than those
// that are there at a time.
func TestTableChurn(t *testing.T) {
	t.Parallel()
	const at = 1000 // keys at a time
	s := &shard{table: table{seed: maphash.MakeSeed()}}
	name := func(i int) string { return fmt.Sprintf("key-%012d", i) }
	for i := range 100 * at {
		n, it := s.add(s.hash(name(i)), name(i), "holder", "")
		it.next = int64(i)
		s.schedule(n, it)
		if i < at {
			continue
		}
		n, _ = s.find(s.hash(name(i-at)), name(i-at))
		s.remove(n)
		s.shrink()
		heap.Pop(&s.due)
	}
	if s.items != at {
		t.Errorf("%d items, want %d", s.items, at)
	}
	if used := at * len(name(0)+"holder"); s.texts.size > 2*used+textBlock+1000 {
		t.Errorf("%d bytes of text for %d in use", s.texts.size, used)
	}
	if most := at/pageSlots + 2; len(s.pages) > most || len(s.due) > at {
		t.Errorf("%d pages and %d due, want at most %d and %d", len(s.pages), len(s.due), most, at)
	}
}

// TestTableCollisions: keys whose hashes are the same are told apart, whichever of
// them goes first.
func TestTableCollisions(t *testing.T) {
	t.Parallel()
	tab := &table{seed: maphash.MakeSeed()}
	const hash = 7 << 32 // of all of them: find and add believe it
	keys := []string{"a", "b", "c", "d"}
	for _, key := range keys {
		_, it := tab.add(hash, key, "of-"+key, "")
		it.rev = uint64(key[0])
	}
	for _, key := range keys {
		if _, it := tab.find(hash, key); it == nil || it.rev != uint64(key[0]) || string(tab.holder(it)) != "of-"+key {
			t.Errorf("%s is %+v", key, it)
		}
	}
	if _, it := tab.find(hash, "e"); it != nil {
		t.Errorf("a key that was not added is %+v", it)
	}

	for range 20 { // in every order, with luck
		for _, i := range rand.Perm(len(keys)) {
			n, _ := tab.find(hash, keys[i])
			tab.unlink(short(hash), n)
			for j, key := range keys {
				if _, it := tab.find(hash, key); (it == nil) != (i == j) {
					t.Fatalf("%s was taken out of the chain: %s is %+v", keys[i], key, it)
				}
			}
			tab.at(n).link = tab.index[short(hash)]
			tab.index[short(hash)] = n
		}
	}
	for _, key := range keys {
		n, _ := tab.find(hash, key)
		tab.unlink(short(hash), n)
	}
	if len(tab.index) != 0 {
		t.Errorf("%d hashes of no key are left", len(tab.index))
	}

	// remove computes the hash, so it takes keys that collide by themselves.
	seen := map[uint32]string{}
	var pairs [][2]string
	for i := 0; len(pairs) < 3; i++ {
		key := fmt.Sprint(i)
		h := short(tab.hash(key))
		if other, ok := seen[h]; ok {
			pairs = append(pairs, [2]string{other, key})
		}
		seen[h] = key
	}
	for i, pair := range pairs {
		for _, key := range pair {
			tab.add(tab.hash(key), key, key, "")
		}
		gone, stays := pair[i%2], pair[1-i%2]
		n, _ := tab.find(tab.hash(gone), gone)
		tab.remove(n)
		if _, ok := tab.get(gone); ok {
			t.Errorf("%s is still there", gone)
		}
		if got, _ := tab.get(stays); got.holder != stays {
			t.Errorf("%s went with %s: %+v", stays, gone, got)
		}
		n, _ = tab.find(tab.hash(stays), stays)
		tab.remove(n)
		if _, ok := tab.get(stays); ok || len(tab.index) != 0 {
			t.Errorf("%s is still there, or its hash of %d", stays, len(tab.index))
		}
	}
}

// TestTableHasNoPointers: the collector has nothing to look at in a slot.
func TestTableHasNoPointers(t *testing.T) {
	var look func(path string, typ reflect.Type)
	look = func(path string, typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Struct:
			for i := range typ.NumField() {
				look(path+"."+typ.Field(i).Name, typ.Field(i).Type)
			}
		case reflect.Bool, reflect.Int64, reflect.Int32, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		default:
			t.Errorf("%s is a %s", path, typ)
		}
	}
	look("slot", reflect.TypeFor[slot]())
	look("dueItem", reflect.TypeFor[dueItem]())
}
