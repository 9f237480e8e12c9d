//go:build mutant

package service

import (
	"context"
	"os"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/leased/leased/service/kinds"
)

// The mutants are broken variants of this package, one at a time, chosen by the
// environment. Each breaks one line where it stands; test/fault lists them and
// what must notice each.
var chosen = os.Getenv("LEASED_MUTANT")

func mutant(name string) bool { return name == chosen }

// mutantConflict takes a write in flight for a lease that is held.
func mutantConflict(err error) error {
	if codeOf(err) == codeInFlight {
		return kinds.Errorf(kinds.Lost, "mutant: another write is in flight")
	}
	return err
}

// mutantGet reads a key from whichever replica answers first.
func (j *js) mutantGet(ctx context.Context, key string) (Entry, error) {
	msg, err := j.nc.RequestWithContext(ctx, j.api+"DIRECT.GET."+StreamName+"."+SubjectPrefix+key, nil)
	if err != nil {
		return Entry{}, ErrNoAnswer
	}
	seq, err := strconv.ParseUint(msg.Header.Get("Nats-Sequence"), 10, 64)
	if err != nil {
		return Entry{Key: key}, nil
	}
	at, err := time.Parse(time.RFC3339Nano, msg.Header.Get("Nats-Time-Stamp"))
	if err != nil {
		return Entry{}, ErrNoAnswer
	}
	e, _ := decodeEntry(key, seq, at, msg.Header, msg.Data)
	return e, nil
}

// mutantConfig changes the bucket as it is made and as it must be.
func mutantConfig(cfg jetstream.StreamConfig) jetstream.StreamConfig {
	switch {
	case mutant("direct-get"):
		cfg.AllowDirect = true
	case mutant("markers"):
		cfg.SubjectDeleteMarkerTTL = time.Second
	case mutant("fence-from-one") && cfg.FirstSeq != 0:
		cfg.FirstSeq = 1
	}
	return cfg
}
