package service

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
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
		at0 := Timestamp(uint64(at) % 4_000_000_000_000)
		r := &Record{V: 1, Key: word(key), Holder: word(holder), TTLMillis: ttl, AcquiredAt: at0, WrittenAt: at0 + 1, Event: Acquired, Nonce: word(holder + "x"), Meta: meta, Revision: rev}
		if bits&1 != 0 {
			r.Horizon = at0 + 2
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
		checkPlainRecord(t, got)
	})
}

// FuzzPlainRecord: what the plain reader takes, encoding/json reads alike.
func FuzzPlainRecord(f *testing.F) {
	r := &Record{V: 1, Key: "k", Holder: "h", TTLMillis: 5000, AcquiredAt: 1_800_000_000_000, WrittenAt: 1_800_000_000_001, Event: Acquired, Nonce: "n", Horizon: 1_800_000_000_002,
		Meta: "some where", Previous: &Previous{"p", 7, EndedExpired}, Revision: 8, Evicted: true}
	if _, ok := plainRecord(r.encode()); !ok {
		f.Fatalf("%s is not plain", r.encode())
	}
	f.Add(r.encode())
	f.Add((&Record{V: 1, Key: "k", WrittenAt: 1, Event: Released, Nonce: "n"}).encode())
	f.Fuzz(func(t *testing.T, data []byte) { checkPlainRecord(t, data) })
}

func checkPlainRecord(t *testing.T, data []byte) {
	got, ok := plainRecord(data)
	if !ok {
		return
	}
	var want Record
	if err := json.Unmarshal(data, &want); err != nil {
		t.Fatalf("%q is plain, but %v", data, err)
	}
	if !reflect.DeepEqual(want, got) {
		t.Fatal(cmp.Diff(want, got))
	}
}

// FuzzPlainMessage: what the plain reader takes of a reply, encoding/json and
// nats.go read alike.
func FuzzPlainMessage(f *testing.F) {
	f.Add([]byte(plainNone))
	hdr := base64.StdEncoding.EncodeToString([]byte("NATS/1.0\r\nNats-TTL: 5s\r\nDagnats-Lease-Event: acquired\r\n\r\n"))
	reply := plainFound + `k","seq":7,"hdrs":"` + hdr + `","data":"e30=","time":"2027-01-15T08:00:00.001002003Z"}}`
	if m, _, ok := plainMessage("k", []byte(reply), nil); !ok || m.seq != 7 || m.hdr.Get("Nats-TTL") != "5s" || string(m.data) != "{}" {
		f.Fatalf("%+v %v", m, ok)
	}
	f.Add([]byte(reply))
	f.Fuzz(func(t *testing.T, reply []byte) {
		got, _, ok := plainMessage("k", reply, nil)
		if !ok {
			return
		}
		var want struct {
			Message *struct {
				Subject string
				Seq     uint64
				Hdrs    []byte
				Data    []byte
				Time    time.Time
			}
			Error *apiError
		}
		if err := json.Unmarshal(reply, &want); err != nil {
			t.Fatalf("%q is plain, but %v", reply, err)
		}
		if want.Message == nil {
			if codeOf(want.Error) != codeNoMessage || got.seq != 0 {
				t.Fatalf("%q: got %+v", reply, got)
			}
			return
		}
		m := want.Message
		h, err := nats.DecodeHeadersMsg(m.Hdrs)
		if err != nil {
			t.Fatalf("%q: %v", m.Hdrs, err)
		}
		if m.Subject != SubjectPrefix+"k" || m.Seq != got.seq || !m.Time.Equal(got.at) {
			t.Fatalf("%q: got %+v", reply, got)
		}
		if diff := cmp.Diff(string(m.Data), string(got.data)) + cmp.Diff(h, got.hdr); diff != "" {
			t.Fatal(diff)
		}
	})
}

func TestTimestampText(t *testing.T) {
	for _, ms := range []int64{0, 1, 999, 1_800_000_000_009, 1_771_977_600_000, -1, -62_167_219_200_000, 253_402_300_799_999, 253_402_300_800_000} {
		want := Timestamp(ms).Time().Format(timestampLayout)
		if got := string(appendTimestamp(nil, Timestamp(ms))); got != want {
			t.Errorf("%d: got %s, want %s", ms, got, want)
		}
	}
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
