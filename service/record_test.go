package service

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// FuzzRecord: the stored form is what encoding/json makes of it, and reads back.
func FuzzRecord(f *testing.F) {
	f.Add("k", "A", "", int64(5000), int64(1_800_000_000_000), uint64(0), uint8(0))
	f.Add("k-1_Z", "holder", "http://h:1 <é\u2028\x00>", int64(600000), int64(1), uint64(1<<63), uint8(255))
	f.Fuzz(func(t *testing.T, key, holder, meta string, ttl, at int64, rev uint64, bits uint8) {
		word := func(s string) string {
			b := []byte(s)
			for i, c := range b {
				b[i] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[c%64]
			}
			return string(b)
		}
		time := Timestamp(uint64(at) % 4_000_000_000_000)
		r := &Record{V: 1, Key: word(key), Holder: word(holder), TTLMillis: ttl, AcquiredAt: time, WrittenAt: time + 1, Event: Acquired, Nonce: word(holder + "x"), Meta: meta, Revision: rev}
		if bits&1 != 0 {
			r.Horizon = time + 2
		}
		if bits&2 != 0 {
			r.Previous = &Previous{Holder: word(holder), Revision: rev, Ended: EndedReleased}
		}
		r.Evicted = bits&4 != 0
		want, err := json.Marshal(r)
		if err != nil {
			t.Skip(err)
		}
		got := r.encode()
		if !bytes.Equal(want, got) {
			t.Fatal(cmp.Diff(string(want), string(got)))
		}
	})
}

func TestPlainAck(t *testing.T) {
	for data, want := range map[string]uint64{
		`{"stream":"KV_leases", "seq":1795978572968380}`:      1795978572968380,
		`{"stream":"KV_leases","seq":7}`:                      7,
		`{"stream":"KV_other", "seq":7}`:                      0,
		`{"stream":"KV_leases", "seq":7,"duplicate":true}`:    0,
		`{"stream":"KV_leases", "seq":7, "domain":"hub"}`:     0,
		`{"stream":"KV_leases", "seq":-7}`:                    0,
		`{"stream":"KV_leases", "seq":}`:                      0,
		`{"stream":"KV_leases", "seq":0}`:                     0,
		`{"error":{"code":400},"stream":"KV_leases","seq":0}`: 0,
		``: 0,
	} {
		if got, ok := plainAck([]byte(data)); got != want || ok != (want != 0) {
			t.Errorf("plainAck(%s) = %d, %v", data, got, ok)
		}
	}
}
