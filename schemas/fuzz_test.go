package schemas

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func FuzzDecode(f *testing.F) {
	set := loadSet(f)
	for _, c := range loadCorpus(f) {
		if len(c.Body) < 4096 {
			f.Add(slices.Index(calls, c.Call), c.Body)
		}
	}
	f.Fuzz(func(t *testing.T, call int, body []byte) {
		if call >= 0 && call < len(calls) {
			checkDecode(t, set, calls[call], body)
		}
	})
}

func FuzzAcquire(f *testing.F) { fuzzCall(f, "acquire") }
func FuzzRenew(f *testing.F)   { fuzzCall(f, "renew") }
func FuzzRelease(f *testing.F) { fuzzCall(f, "release") }
func FuzzOwner(f *testing.F)   { fuzzCall(f, "owner") }
func FuzzForward(f *testing.F) { fuzzCall(f, "forward") }
func FuzzList(f *testing.F)    { fuzzCall(f, "list") }
func FuzzEvict(f *testing.F)   { fuzzCall(f, "evict") }

func FuzzRenewMany(f *testing.F) { fuzzCall(f, "renew_many") }

func fuzzCall(f *testing.F, call string) {
	set := loadSet(f)
	for _, c := range loadCorpus(f) {
		if c.Call == call && len(c.Body) < 4096 {
			f.Add(c.Body)
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) { checkDecode(t, set, call, body) })
}

// checkDecode holds Decode to the naive reading of the contract below, and to what it promises of errors
// and results.
func checkDecode(t *testing.T, set *Set, call string, body []byte) {
	sch := set.Request(call)
	sent := bytes.Clone(body)
	got, err := sch.Decode(body)
	if !bytes.Equal(sent, body) {
		t.Fatal("Decode changed its input")
	}
	if err != nil {
		checkError(t, err)
		if _, again := sch.Decode(body); again == nil || again.Error() != err.Error() {
			t.Fatalf("first %q, then %v", err, again)
		}
	}
	if plain, ok := sch.form.decode(body); ok && plain.check() == nil {
		slow, err := sch.decode(body)
		if err != nil {
			t.Fatalf("plain, but the library says %v", err)
		}
		if diff := cmp.Diff(slow, plain); diff != "" {
			t.Fatal(diff)
		}
	}
	want, valid := naive(call, body)
	if valid != (err == nil) {
		t.Fatalf("naive reading says valid: %v, Decode says %v", valid, err)
	}
	if !reflect.DeepEqual(want, got) {
		t.Fatal(cmp.Diff(want, got))
	}
	if !valid {
		return
	}
	again, err := sch.Decode(encode(got))
	if err != nil {
		t.Fatalf("own encoding %s: %v", encode(got), err)
	}
	if !reflect.DeepEqual(got, again) {
		t.Fatal(cmp.Diff(got, again))
	}
}

// encode is a request as a client would write it.
func encode(r Request) []byte {
	type pair struct {
		Key      string `json:"key"`
		Revision uint64 `json:"revision"`
	}
	var pairs []pair
	for _, p := range r.Leases {
		pairs = append(pairs, pair(p))
	}
	raw, _ := json.Marshal(struct {
		Key      string `json:"key,omitempty"`
		Holder   string `json:"holder,omitempty"`
		TTL      int64  `json:"ttl_ms,omitempty"`
		Revision uint64 `json:"revision,omitempty"`
		Timeout  int64  `json:"timeout_ms,omitempty"`
		Payload  []byte `json:"payload,omitempty"`
		Wait     int64  `json:"wait_ms,omitempty"`
		Meta     string `json:"meta,omitempty"`
		Prefix   string `json:"prefix,omitempty"`
		After    string `json:"after,omitempty"`
		Limit    int    `json:"limit,omitempty"`
		Leases   []pair `json:"leases,omitempty"`
	}{r.Key, r.Holder, r.TTL.Milliseconds(), r.Revision, r.Timeout.Milliseconds(), r.Payload, r.Wait.Milliseconds(), r.Meta, r.Prefix, r.After, r.Limit, pairs})
	return raw
}

// naive reads a request as the contract words it, slowly and with nothing that Decode uses.
func naive(call string, body []byte) (r Request, valid bool) {
	if !utf8.Valid(body) || !json.Valid(body) || loneSurrogate(string(body)) {
		return Request{}, false
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	if tok, _ := dec.Token(); tok != json.Delim('{') {
		return Request{}, false
	}
	uses := map[string][]string{
		"acquire": {"key", "holder", "ttl_ms", "wait_ms", "meta"},
		"evict":   {"key", "revision"},
		"list":    {"prefix", "holder", "after", "limit"},
		"renew":   {"key", "holder", "revision", "ttl_ms"},
		"release": {"key", "holder", "revision"},
		"owner":   {"key"},
		"forward": {"key", "timeout_ms", "payload"},

		"renew_many": {"holder", "ttl_ms", "leases"},
	}[call]
	seen := map[string]bool{}
	for dec.More() {
		tok, _ := dec.Token()
		name := tok.(string)
		if seen[name] || !slices.Contains([]string{"key", "holder", "ttl_ms", "revision", "timeout_ms", "payload", "wait_ms", "meta", "prefix", "after", "limit", "leases"}, name) {
			return Request{}, false
		}
		seen[name] = true
		value, err := dec.Token()
		if err != nil {
			return Request{}, false
		}
		if value == json.Delim('[') && name == "leases" && call == "renew_many" {
			if r.Leases, valid = naivePairs(dec); !valid {
				return Request{}, false
			}
			continue
		}
		if _, nested := value.(json.Delim); nested {
			return Request{}, false
		}
		literal, isNumber := value.(json.Number)
		if isNumber && longNumber(literal) {
			return Request{}, false
		}
		if !slices.Contains(uses, name) {
			continue
		}
		text, isText := value.(string)
		n, isWhole := byHand(string(literal))
		ok := false
		switch name {
		case "key", "holder", "after", "prefix":
			ok = isText && (isName(text) || name == "prefix" && text == "")
			*map[string]*string{"key": &r.Key, "holder": &r.Holder, "after": &r.After, "prefix": &r.Prefix}[name] = text
		case "meta":
			ok = isText && len(text) <= 512
			r.Meta = text
		case "wait_ms":
			ok = isWhole && n <= 30000
			r.Wait = time.Duration(n) * time.Millisecond
		case "limit":
			ok = isWhole && n >= 1 && n <= 1000
			r.Limit = int(n)
		case "ttl_ms":
			ok = isWhole && n >= 1000 && n <= 600000 && n%1000 == 0
			r.TTL = time.Duration(n) * time.Millisecond
		case "revision":
			ok = isWhole && n >= 1
			r.Revision = n
		case "timeout_ms":
			ok = isWhole && n >= 100 && n <= 30000
			r.Timeout = time.Duration(n) * time.Millisecond
		case "payload":
			data, err := base64.StdEncoding.DecodeString(text)
			ok = isText && err == nil && base64.StdEncoding.EncodeToString(data) == text
			if len(data) > 0 {
				r.Payload = data
			}
		}
		if !ok {
			return Request{}, false
		}
	}
	dec.Token()
	if _, err := dec.Token(); err != io.EOF {
		return Request{}, false
	}
	optional := []string{"timeout_ms", "payload", "wait_ms", "meta", "prefix", "after", "limit"}
	for _, name := range uses {
		if !seen[name] && !slices.Contains(optional, name) && call != "list" {
			return Request{}, false
		}
	}
	if call == "list" && !seen["limit"] {
		r.Limit = 100
	}
	if call == "forward" && !seen["timeout_ms"] {
		r.Timeout = 5 * time.Second
	}
	return r, true
}

func isName(s string) bool {
	return len(s) >= 1 && len(s) <= 128 && strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-") == ""
}

func longNumber(n json.Number) bool {
	_, exponent, _ := strings.Cut(strings.ToLower(string(n)), "e")
	return len(n) > 32 || len(strings.Trim(exponent, "+-")) > 3
}

// naivePairs reads the leases of a renew_many after their bracket.
func naivePairs(dec *json.Decoder) (pairs []Pair, valid bool) {
	keys := map[string]bool{}
	for dec.More() {
		if open, _ := dec.Token(); open != json.Delim('{') {
			return nil, false
		}
		item := map[string]json.Token{}
		for dec.More() {
			name, _ := dec.Token()
			value, _ := dec.Token()
			if _, twice := item[name.(string)]; twice {
				return nil, false
			}
			if _, nested := value.(json.Delim); nested {
				return nil, false
			}
			item[name.(string)] = value
		}
		dec.Token()
		key, _ := item["key"].(string)
		literal, _ := item["revision"].(json.Number)
		revision, ok := byHand(string(literal))
		if len(item) != 2 || !isName(key) || keys[key] || !ok || revision < 1 || longNumber(literal) {
			return nil, false
		}
		keys[key] = true
		pairs = append(pairs, Pair{key, revision})
	}
	dec.Token()
	return pairs, len(pairs) >= 1 && len(pairs) <= 1000
}

// loneSurrogate reports whether JSON text escapes half a character.
func loneSurrogate(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			continue
		}
		i++
		if s[i] != 'u' {
			continue
		}
		n, _ := strconv.ParseUint(s[i+1:i+5], 16, 16)
		i += 4
		switch {
		case n >= 0xdc00 && n < 0xe000:
			return true
		case n >= 0xd800 && n < 0xdc00:
			if len(s) < i+7 || s[i+1:i+3] != `\u` {
				return true
			}
			if low, _ := strconv.ParseUint(s[i+3:i+7], 16, 16); low < 0xdc00 || low >= 0xe000 {
				return true
			}
			i += 6
		}
	}
	return false
}

// byHand is the value of a JSON number if it is a whole number from 0 to 2^64-1, by moving its point.
func byHand(literal string) (uint64, bool) {
	if literal == "" {
		return 0, false
	}
	mantissa, exponent, _ := strings.Cut(strings.ToLower(literal), "e")
	mantissa, minus := strings.CutPrefix(mantissa, "-")
	integer, fraction, _ := strings.Cut(mantissa, ".")
	shift, _ := strconv.Atoi(exponent)
	shift -= len(fraction)
	digits := strings.TrimLeft(integer+fraction, "0")
	if digits == "" {
		return 0, true
	}
	for ; shift < 0 && strings.HasSuffix(digits, "0"); shift++ {
		digits = digits[:len(digits)-1]
	}
	if minus || shift < 0 || shift > 20 {
		return 0, false
	}
	n, err := strconv.ParseUint(digits+strings.Repeat("0", shift), 10, 64)
	return n, err == nil
}
