package service

import (
	"hash/maphash"
	"iter"
	"slices"
	"sort"
)

// table has the items of some keys. There may be millions of them, so it is made of
// memory without pointers, which the garbage collector does not look into: items lie
// in slots, slots go by numbers, and the texts of an item lie somewhere in the table's
// texts.
type table struct {
	seed  maphash.Seed
	index map[uint32]uint32 // hash of a key: the first slot of a key that has it
	order [][]uint32        // the slots in use by key, in blocks: all keys of one are below those of the next
	pages []*[pageSlots]slot
	made  uint32 // slots that were ever in use: 1 to made
	free  uint32 // the first of them that is not any more
	items int    // in use
	most  int    // that there were since the table was made
	texts texts
}

// pageSlots is how many slots are made at a time.
const pageSlots = 64

// slot holds one key's item. The numbers of slots begin at 1, 0 is none.
type slot struct {
	item

	link   uint32 // the next slot of a key with the same hash, or of those not in use
	block  uint32 // key, holder and meta lie in texts.blocks[block], from here on
	from   uint16
	key    uint16 // these are lengths; 0: not in use
	holder uint16
	meta   uint16
}

// length is that of all texts.
func (s *slot) length() int { return int(s.key) + int(s.holder) + int(s.meta) }

// short is the part of a key's hash that its table goes by.
func short(hash uint64) uint32 { return uint32(hash >> 32) }

// at is slot n. It stays where it is.
func (t *table) at(n uint32) *slot { return &t.pages[(n-1)/pageSlots][(n-1)%pageSlots] }

// find is the slot of key, nil when it has none.
func (t *table) find(hash uint64, key string) (n uint32, it *slot) {
	for n = t.index[short(hash)]; n != 0; n = it.link {
		if it = t.at(n); string(t.key(it)) == key {
			return n, it
		}
	}
	return 0, nil
}

// add takes a slot for key, which has none.
func (t *table) add(hash uint64, key, holder, meta string) (n uint32, it *slot) {
	if n = t.free; n != 0 {
		it = t.at(n)
		t.free = it.link
	} else {
		if int(t.made) == len(t.pages)*pageSlots {
			t.pages = append(t.pages, new([pageSlots]slot))
		}
		t.made++
		n = t.made
		it = t.at(n)
	}
	if t.index == nil {
		t.index = make(map[uint32]uint32)
	}
	it.link = t.index[short(hash)]
	t.index[short(hash)] = n
	t.write(it, key, holder, meta)
	t.sort(n, key)
	t.items++
	t.most = max(t.most, t.items)
	return n, it
}

// remove gives slot n back.
func (t *table) remove(n uint32) {
	it := t.at(n)
	t.unlink(short(maphash.Bytes(t.seed, t.key(it))), n)
	t.unsort(string(t.key(it)))
	t.texts.unused += it.length()
	*it = slot{link: t.free}
	t.free = n
	t.items--
	t.compact()
}

// unlink takes slot n out of the chain of its hash.
func (t *table) unlink(hash, n uint32) {
	after := t.at(n).link
	if first := t.index[hash]; first != n {
		before := t.at(first)
		for before.link != n {
			before = t.at(before.link)
		}
		before.link = after
	} else if after != 0 {
		t.index[hash] = after
	} else {
		delete(t.index, hash)
	}
}

// all are the slots in use. The one at hand may be removed.
func (t *table) all() iter.Seq2[uint32, *slot] {
	return func(yield func(uint32, *slot) bool) {
		for n := uint32(1); n <= t.made; n++ {
			if it := t.at(n); it.key != 0 && !yield(n, it) {
				return
			}
		}
	}
}

// orderBlock is how many slots a block of the order has room for.
const orderBlock = 256

// seek finds the first key at or above key: number i of block b. There is none if b is
// the number of blocks.
func (t *table) seek(key string) (b, i int) {
	reaches := func(n uint32) bool { return string(t.key(t.at(n))) >= key }
	b = sort.Search(len(t.order), func(b int) bool { return reaches(t.order[b][len(t.order[b])-1]) })
	if b == len(t.order) {
		return b, 0
	}
	return b, sort.Search(len(t.order[b]), func(i int) bool { return reaches(t.order[b][i]) })
}

// sort puts slot n, whose key is not in the order, in its place. A key above all others
// leaves full blocks behind: keys often come in order.
func (t *table) sort(n uint32, key string) {
	b, i := t.seek(key)
	if b == len(t.order) {
		if b == 0 || len(t.order[b-1]) == orderBlock {
			t.order = append(t.order, make([]uint32, 0, orderBlock))
			b++
		}
		t.order[b-1] = append(t.order[b-1], n)
		return
	}
	if len(t.order[b]) == orderBlock {
		const half = orderBlock / 2
		above := append(make([]uint32, 0, orderBlock), t.order[b][half:]...)
		t.order[b] = t.order[b][:half]
		t.order = slices.Insert(t.order, b+1, above)
		if i > half {
			b, i = b+1, i-half
		}
	}
	t.order[b] = slices.Insert(t.order[b], i, n)
}

// unsort takes key, which has a slot, out of the order. Two blocks that fill half of
// one become one.
func (t *table) unsort(key string) {
	b, i := t.seek(key)
	t.order[b] = slices.Delete(t.order[b], i, i+1)
	if len(t.order[b]) == 0 {
		t.order = slices.Delete(t.order, b, b+1)
		return
	}
	if b > 0 && (b+1 == len(t.order) || len(t.order[b-1]) < len(t.order[b+1])) {
		b--
	}
	if b+1 < len(t.order) && len(t.order[b])+len(t.order[b+1]) <= orderBlock/2 {
		t.order[b] = append(t.order[b], t.order[b+1]...)
		t.order = slices.Delete(t.order, b+1, b+2)
	}
}

// from are the slots in use whose keys are at or above key, by key.
func (t *table) from(key string) iter.Seq[*slot] {
	return func(yield func(*slot) bool) {
		for b, i := t.seek(key); b < len(t.order); b, i = b+1, 0 {
			for _, n := range t.order[b][i:] {
				if !yield(t.at(n)) {
					return
				}
			}
		}
	}
}

// texts lie one after the other in blocks.
type texts struct {
	blocks [][]byte
	size   int // bytes in all
	unused int // of them, by no slot any more
}

// textBlock is the size of a block, unless a slot's texts take more.
const textBlock = 4 << 10

// add copies parts, one after the other.
func (t *texts) add(parts ...string) (block uint32, from uint16) {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	last := len(t.blocks) - 1
	if last < 0 || cap(t.blocks[last])-len(t.blocks[last]) < n {
		t.blocks = append(t.blocks, make([]byte, 0, max(n, textBlock)))
		last++
	}
	b := t.blocks[last]
	from = uint16(len(b))
	for _, p := range parts {
		b = append(b, p...)
	}
	t.blocks[last] = b
	t.size += n
	return uint32(last), from
}

// text is all texts of a slot.
func (t *table) text(it *slot) []byte { return t.texts.blocks[it.block][it.from:][:it.length()] }

func (t *table) key(it *slot) []byte    { return t.text(it)[:it.key] }
func (t *table) holder(it *slot) []byte { return t.text(it)[it.key:][:it.holder] }
func (t *table) meta(it *slot) []byte   { return t.text(it)[it.key+it.holder:] }

// write gives texts to a slot that has none.
func (t *table) write(it *slot, key, holder, meta string) {
	it.block, it.from = t.texts.add(key, holder, meta)
	it.key, it.holder, it.meta = uint16(len(key)), uint16(len(holder)), uint16(len(meta))
}

// describe changes what a slot says of its key.
func (t *table) describe(it *slot, holder, meta string) {
	if string(t.holder(it)) == holder && string(t.meta(it)) == meta {
		return
	}
	t.texts.unused += it.length()
	t.write(it, string(t.key(it)), holder, meta)
	t.compact()
}

// compact leaves out the texts of no slot, when they are most.
func (t *table) compact() {
	if t.texts.unused <= max(textBlock, t.texts.size/2) {
		return
	}
	old := *t
	t.texts = texts{}
	for _, it := range old.all() {
		it.block, it.from = t.texts.add(string(old.text(it)))
	}
}
