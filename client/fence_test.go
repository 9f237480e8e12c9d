package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"testing"

	"github.com/leased/leased/internal/testnats"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// guard admits one write, or says that its fence is stale.
type guard func(resource string, fence uint64) (admitted bool, err error)

// runFenceVectors runs testdata/fence/admit.json: each case on a guard of its own,
// which make gets the number of. A guard may be unable to store some fences.
func runFenceVectors(t *testing.T, make func(t *testing.T, n int) guard, highest func(n int, resource string) uint64) {
	var vectors struct {
		Cases []struct {
			Name  string
			Steps []struct {
				Resource string
				Fence    json.Number
				Admit    bool
				Highest  json.Number
			}
		}
	}
	readVectors(t, "admit.json", &vectors)
	if len(vectors.Cases) < 10 {
		t.Fatal("the vectors are missing")
	}
	for n, v := range vectors.Cases {
		t.Run(v.Name, func(t *testing.T) {
			admit := make(t, n)
			for i, s := range v.Steps {
				fence, _ := strconv.ParseUint(s.Fence.String(), 10, 64)
				got, err := admit(s.Resource, fence)
				if err != nil {
					t.Fatal(err)
				}
				if got != s.Admit {
					t.Errorf("step %d: fence %d for %s admitted: %v", i, fence, s.Resource, got)
				}
				if want, _ := strconv.ParseUint(s.Highest.String(), 10, 64); want > 0 && highest(n, s.Resource) != want {
					t.Errorf("step %d: highest %d, want %d", i, highest(n, s.Resource), want)
				}
			}
		})
	}
}

// verdict turns the error of a guard in Go into the vectors' answer.
func verdict(err error) (bool, error) {
	var stale *StaleError
	if errors.As(err, &stale) {
		return false, nil
	}
	return err == nil, err
}

func TestFenceVectorsInMemory(t *testing.T) {
	var f *Fence
	runFenceVectors(t, func(*testing.T, int) guard {
		f = &Fence{}
		return func(resource string, fence uint64) (bool, error) {
			return verdict(f.Do(t.Context(), resource, fence, nil))
		}
	}, func(_ int, resource string) uint64 { return f.resources[resource].highest })
}

// slowStore is a FenceStore that other processes use too.
type slowStore struct {
	mu      sync.Mutex
	highest map[string]uint64
	err     error
}

func (s *slowStore) Raise(_ context.Context, resource string, fence uint64) (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return 0, s.err
	}
	s.highest[resource] = max(s.highest[resource], fence)
	return s.highest[resource], nil
}

func TestFenceVectorsInAStore(t *testing.T) {
	var s *slowStore
	runFenceVectors(t, func(*testing.T, int) guard {
		s = &slowStore{highest: map[string]uint64{}}
		turn, guards := 0, [2]*Fence{{Store: s}, {Store: s}} // two processes in turn
		return func(resource string, fence uint64) (bool, error) {
			turn++
			return verdict(guards[turn%2].Do(t.Context(), resource, fence, nil))
		}
	}, func(_ int, resource string) uint64 { return s.highest[resource] })
}

// TestFenceDo: rule H6.
func TestFenceDo(t *testing.T) {
	s := &slowStore{highest: map[string]uint64{}}
	f := &Fence{Store: s}
	broken := errors.New("broken")
	s.err = broken
	if err := f.Do(t.Context(), "r", 5, func() error { t.Error("written without the store's word"); return nil }); !errors.Is(err, broken) {
		t.Error(err)
	}
	s.err = nil
	if err := f.Do(t.Context(), "r", 5, func() error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
	err := f.Do(t.Context(), "r", 4, func() error { t.Error("stale, but written"); return nil })
	var stale *StaleError
	if !errors.As(err, &stale) || *stale != (StaleError{"r", 4, 5}) {
		t.Error(err)
	}

	// Of many at once, what is written last has the highest fence, and no write
	// overlaps another.
	var free Fence
	var all sync.WaitGroup
	var busy bool
	var last uint64
	for i := range 200 {
		all.Go(func() {
			fence := uint64(1 + i*7919%200)
			_ = free.Do(t.Context(), "r", fence, func() error {
				if busy || fence < last {
					t.Errorf("fence %d after %d, overlapping: %v", fence, last, busy)
				}
				busy = true
				runtime.Gosched()
				last, busy = fence, false
				return nil
			})
		})
	}
	all.Wait()
	if last != 200 {
		t.Errorf("the last write was under %d", last)
	}
}

// TestFenceVectorsInKV runs the vectors through PutFenced on a real server.
func TestFenceVectorsInKV(t *testing.T) {
	kv := bucket(t, testnats.Server(t).Connect())
	at := func(n int, resource string) string { return fmt.Sprintf("%d.%s", n, resource) }
	runFenceVectors(t, func(t *testing.T, n int) guard {
		return func(resource string, fence uint64) (bool, error) {
			text := []byte(fmt.Sprint("written under ", fence))
			ok, err := verdict(PutFenced(t.Context(), kv, at(n, resource), fence, text))
			if got, _, err := GetFenced(t.Context(), kv, at(n, resource)); ok && (err != nil || string(got) != string(text)) {
				t.Errorf("read %q, %v", got, err)
			}
			return ok, err
		}
	}, func(n int, resource string) uint64 {
		_, fence, err := GetFenced(t.Context(), kv, at(n, resource))
		if err != nil {
			t.Error(err)
		}
		return fence
	})

	// Many writers at once: the fence never goes back, and the highest one wins.
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			if _, err := verdict(PutFenced(t.Context(), kv, "contended", uint64(1+i), nil)); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if _, fence, err := GetFenced(t.Context(), kv, "contended"); fence != 16 || err != nil {
		t.Error(fence, err)
	}
	if _, err := kv.PutString(t.Context(), "foreign", "text"); err != nil {
		t.Fatal(err)
	}
	if err := PutFenced(t.Context(), kv, "foreign", 7, nil); err == nil {
		t.Error("overwrote what was not written under a fence")
	}
}

func bucket(t testing.TB, nc *nats.Conn) jetstream.KeyValue {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	kv, err := js.CreateKeyValue(t.Context(), jetstream.KeyValueConfig{Bucket: "things"})
	if err != nil {
		t.Fatal(err)
	}
	return kv
}
