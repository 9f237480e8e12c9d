package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"
)

// Event names what a stored message did to its key. It is the value of the
// Dagnats-Lease-Event header and stands in the record too.
type Event string

// The events of a key's life. Acquired and renewed messages are leases,
// released and expired messages are tombstones.
const (
	Acquired Event = "acquired"
	Renewed  Event = "renewed"
	Released Event = "released"
	Expired  Event = "expired"
)

// How a lease ended, as Previous tells it.
const (
	EndedExpired  = "expired"
	EndedReleased = "released"
	EndedEvicted  = "evicted"
)

// Bounds of a lease's TTL. JetStream truncates a message TTL to whole seconds,
// so a TTL is a whole number of them.
const (
	MinTTL = time.Second
	MaxTTL = 10 * time.Minute
)

// recordVersion is the "v" this code writes. A reader takes records up to its
// own version and ignores members it does not know, so within version 1 members
// may be added; a record with a higher version is foreign to it.
const recordVersion = 1

// Record is the body of every message the service stores, and so of every
// change event. Times are on the NATS server's clock as the writer estimated it
// just before the write, in milliseconds, never later than the message time.
type Record struct {
	V          int       `json:"v"`
	Key        string    `json:"key"`
	Holder     string    `json:"holder,omitempty"` // this and the next two: absent only for an evicted record of a stranger
	TTLMillis  int64     `json:"ttl_ms,omitempty"`
	AcquiredAt Timestamp `json:"acquired_at,omitzero"` // start of the tenure
	WrittenAt  Timestamp `json:"written_at"`
	Event      Event     `json:"event"`
	// Nonce is random per call: it alone proves, after a write without a
	// verdict, that a stored message is that write.
	Nonce string `json:"nonce"`
	// Horizon is when the last of all earlier revisions of this key is over, if
	// that is later than this revision's own end (doc.go, "Horizon").
	Horizon Timestamp `json:"horizon,omitzero"`
	Meta    string    `json:"meta,omitempty"`
	// Previous, on acquired, is the lease that ended before this one, when known.
	Previous *Previous `json:"previous,omitempty"`
	// Revision, on tombstones, is the revision that ended.
	Revision uint64 `json:"revision,omitempty"`
	Evicted  bool   `json:"evicted,omitempty"`
}

// Previous tells how the lease before an acquired one ended.
type Previous struct {
	Holder   string `json:"holder"`
	Revision uint64 `json:"revision"`
	Ended    string `json:"ended"`
}

// TTL is the lease's time to live.
func (r *Record) TTL() time.Duration { return time.Duration(r.TTLMillis) * time.Millisecond }

// Timestamp is a time in milliseconds since the Unix epoch; 0 is no time. It is
// written as RFC 3339 in UTC with exactly three decimals.
type Timestamp int64

// timestampLayout is RFC 3339 with milliseconds.
const timestampLayout = "2006-01-02T15:04:05.000Z"

// TimestampOf cuts t to milliseconds, downward.
func TimestampOf(t time.Time) Timestamp { return Timestamp(t.UnixMilli()) }

// Time is the instant as a time.Time in UTC.
func (t Timestamp) Time() time.Time { return time.UnixMilli(int64(t)).UTC() }

// IsZero says that there is no time.
func (t Timestamp) IsZero() bool { return t == 0 }

func (t Timestamp) String() string { return t.Time().Format(timestampLayout) }

// MarshalJSON writes the RFC 3339 form.
func (t Timestamp) MarshalJSON() ([]byte, error) {
	return t.AppendJSON(make([]byte, 0, len(timestampLayout)+2)), nil
}

// AppendJSON appends the quoted RFC 3339 form to b.
func (t Timestamp) AppendJSON(b []byte) []byte {
	b = append(b, '"')
	b = appendTimestamp(b, t)
	return append(b, '"')
}

// UnmarshalJSON reads any RFC 3339 time.
func (t *Timestamp) UnmarshalJSON(b []byte) error {
	if len(b) < 2 || b[0] != '"' {
		return fmt.Errorf("a time must be a string")
	}
	v, err := time.Parse(time.RFC3339, string(b[1:len(b)-1]))
	if err != nil {
		return err
	}
	*t = TimestampOf(v)
	return nil
}

// encode gives the stored form: what json.Marshal gives (a test holds it), at a
// fraction of its cost, once a write. Everything but meta is of an alphabet that
// needs no escaping.
func (r *Record) encode() []byte {
	b := make([]byte, 0, 384)
	b = append(b, `{"v":`...)
	b = strconv.AppendInt(b, int64(r.V), 10)
	b = appendText(b, `,"key":"`, r.Key)
	if r.Holder != "" {
		b = appendText(b, `,"holder":"`, r.Holder)
	}
	if r.TTLMillis != 0 {
		b = append(b, `,"ttl_ms":`...)
		b = strconv.AppendInt(b, r.TTLMillis, 10)
	}
	if !r.AcquiredAt.IsZero() {
		b = append(b, `,"acquired_at":`...)
		b = r.AcquiredAt.AppendJSON(b)
	}
	b = append(b, `,"written_at":`...)
	b = r.WrittenAt.AppendJSON(b)
	b = appendText(b, `,"event":"`, string(r.Event))
	b = appendText(b, `,"nonce":"`, r.Nonce)
	if !r.Horizon.IsZero() {
		b = append(b, `,"horizon":`...)
		b = r.Horizon.AppendJSON(b)
	}
	if r.Meta != "" {
		meta, _ := json.Marshal(r.Meta) // a string can be encoded
		b = append(b, `,"meta":`...)
		b = append(b, meta...)
	}
	if p := r.Previous; p != nil {
		b = appendText(b, `,"previous":{"holder":"`, p.Holder)
		b = append(b, `,"revision":`...)
		b = strconv.AppendUint(b, p.Revision, 10)
		b = appendText(b, `,"ended":"`, p.Ended)
		b = append(b, '}')
	}
	if r.Revision != 0 {
		b = append(b, `,"revision":`...)
		b = strconv.AppendUint(b, r.Revision, 10)
	}
	if r.Evicted {
		b = append(b, `,"evicted":true`...)
	}
	return append(b, '}')
}

// appendText appends a member that opens with name and a text that needs no
// escaping.
func appendText(b []byte, name, text string) []byte {
	b = append(b, name...)
	b = append(b, text...)
	return append(b, '"')
}

// maxMeta bounds a lease's meta, in bytes.
const maxMeta = 512

// isToken says whether s can be a key or a holder: 1 to 128 of A-Z a-z 0-9 _ - (P3).
func isToken(s string) bool {
	if len(s) == 0 || len(s) > 128 {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// errForeign says that a message under the bucket is not one of ours.
var errForeign = errors.New("not a record of this service")

// decodeRecord reads the stored form of key's record and refuses whatever this
// service cannot have written.
func decodeRecord(key string, data []byte) (*Record, error) {
	r, plain := plainRecord(data)
	if !plain {
		r = Record{}
		if err := json.Unmarshal(data, &r); err != nil {
			return nil, fmt.Errorf("%w: %v", errForeign, err)
		}
	}
	tomb := r.Event == Released || r.Event == Expired
	stranger := r.Evicted && r.Holder == "" // the tombstone of a foreign record
	switch {
	case r.V < 1 || r.V > recordVersion:
		return nil, fmt.Errorf("%w: version %d, this instance reads up to %d", errForeign, r.V, recordVersion)
	case r.Key != key:
		return nil, fmt.Errorf("%w: it names another key", errForeign)
	case !tomb && r.Event != Acquired && r.Event != Renewed:
		return nil, fmt.Errorf("%w: unknown event", errForeign)
	case r.Nonce == "" || len(r.Nonce) > 64 || r.WrittenAt == 0 || r.AcquiredAt == 0 && !stranger:
		return nil, fmt.Errorf("%w: a member is missing", errForeign)
	case !stranger && (r.TTL() < MinTTL || r.TTL() > MaxTTL):
		return nil, fmt.Errorf("%w: ttl_ms %d is out of bounds", errForeign, r.TTLMillis)
	// Holders stand in subjects and in replies: as strict here as in a request,
	// for anybody who may publish to the bucket can write a record.
	case !stranger && !isToken(r.Holder), r.Previous != nil && !isToken(r.Previous.Holder):
		return nil, fmt.Errorf("%w: its holder is none", errForeign)
	case r.Previous != nil && r.Previous.Ended != EndedExpired && r.Previous.Ended != EndedReleased && r.Previous.Ended != EndedEvicted:
		return nil, fmt.Errorf("%w: unknown end of the lease before", errForeign)
	case len(r.Meta) > maxMeta || !utf8.ValidString(r.Meta):
		return nil, fmt.Errorf("%w: its meta is none", errForeign)
	}
	return &r, nil
}
