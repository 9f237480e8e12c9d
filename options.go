package leased

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"regexp"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased/metrics"
)

// Defaults of Options.
const (
	DefaultAPIPrefix   = "api.leases"
	DefaultEventPrefix = "dagnats.lease"
	DefaultMaxInFlight = 4096
	DefaultMaxForwards = 512
)

// Options of a Service. The three connections are needed; what else is zero has its
// default.
type Options struct {
	// Front receives requests and sends replies and is used for nothing else: all its
	// subscriptions belong to the micro service, but one, where NATS says that nobody
	// heard a reply.
	Front *nats.Conn
	// Store reads and writes the bucket (but see Dial), Hop carries forwards to owners. Both
	// are made with nats.ReconnectBufSize(-1).
	Store, Hop *nats.Conn
	// Dial makes one more connection like Store: over it writes go straight to the
	// server that leads the bucket's stream, where Store goes to another one of its
	// cluster. nil: they go over Store.
	Dial                  func(...nats.Option) (*nats.Conn, error)
	JSDomain, JSAPIPrefix string
	Replicas              int              // of the bucket when the service makes it: 1, 3 or 5; default 1
	APIPrefix             string           // default DefaultAPIPrefix
	EventPrefix           string           // default DefaultEventPrefix
	GroupCommit           bool             // batch writes: for servers that flush each one to disk
	MaxInFlight           int              // calls being answered, forwards aside; over it busy; default DefaultMaxInFlight
	MaxForwards           int              // forwards being answered; over it busy; default DefaultMaxForwards
	MaxLeases             int              // that are held at a time; over it over_quota; 0: no limit
	MaxLeasesPerHolder    int              // likewise, of one holder
	Version               string           // semantic version, without a leading v; default 0.0.0
	Logger                *slog.Logger     // default: nothing is logged
	Metrics               *metrics.Metrics // of Endpoints; default: some that nobody reads
}

// complete is o with its defaults, if it can be used.
func (o Options) complete() (Options, error) {
	for name, nc := range map[string]*nats.Conn{"Front": o.Front, "Store": o.Store, "Hop": o.Hop} {
		if nc == nil {
			return o, fmt.Errorf("options: %s: a connection is needed", name)
		}
	}
	if o.Front == o.Store || o.Front == o.Hop {
		return o, errors.New("options: Front: must be used for nothing else, and is Store or Hop too")
	}
	o.Replicas = cmp.Or(o.Replicas, 1)
	o.APIPrefix = cmp.Or(o.APIPrefix, DefaultAPIPrefix)
	o.EventPrefix = cmp.Or(o.EventPrefix, DefaultEventPrefix)
	o.MaxInFlight = cmp.Or(o.MaxInFlight, DefaultMaxInFlight)
	o.MaxForwards = cmp.Or(o.MaxForwards, DefaultMaxForwards)
	o.Version = cmp.Or(o.Version, "0.0.0")
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		var rows []metrics.Endpoint
		for _, row := range table {
			rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
		}
		o.Metrics = metrics.New(rows, metrics.Build{Version: o.Version})
	}
	for _, c := range []struct {
		name  string
		value any
		err   error
	}{
		{"Replicas", o.Replicas, CheckReplicas(o.Replicas)},
		{"APIPrefix", o.APIPrefix, CheckPrefix(o.APIPrefix)},
		{"EventPrefix", o.EventPrefix, CheckPrefix(o.EventPrefix)},
		{"MaxInFlight", o.MaxInFlight, CheckLimit(o.MaxInFlight)},
		{"MaxForwards", o.MaxForwards, CheckLimit(o.MaxForwards)},
		{"MaxLeases", o.MaxLeases, CheckQuota(o.MaxLeases)},
		{"MaxLeasesPerHolder", o.MaxLeasesPerHolder, CheckQuota(o.MaxLeasesPerHolder)},
	} {
		if c.err != nil {
			return o, fmt.Errorf("options: %s %v: %w", c.name, c.value, c.err)
		}
	}
	return o, nil
}

// CheckReplicas says whether the bucket can have n replicas.
func CheckReplicas(n int) error {
	if n != 1 && n != 3 && n != 5 {
		return errors.New("must be 1, 3 or 5")
	}
	return nil
}

// CheckLimit says whether n can be a limit of calls in flight.
func CheckLimit(n int) error {
	if n < 1 || n > 1_000_000 {
		return errors.New("must be 1 to 1000000")
	}
	return nil
}

// CheckQuota says whether n can be a limit of leases.
func CheckQuota(n int) error {
	if n < 0 || n > 1_000_000_000 {
		return errors.New("must be 1 to 1000000000, or 0 for no limit")
	}
	return nil
}

var prefixForm = regexp.MustCompile(`^[^\s.*>$][^\s.*>]*(\.[^\s.*>]+)*$`)

// CheckPrefix says whether subject can be APIPrefix or EventPrefix.
func CheckPrefix(subject string) error {
	if !prefixForm.MatchString(subject) || len(subject) > 128 {
		return errors.New("must be a subject of at most 128 bytes, without wildcards and not beginning with $")
	}
	return nil
}
