package service

import (
	"slices"
	"testing"
)

// TestShared: callers that come while a request is under way share the next one,
// which begins when they have asked, and keys do not wait for each other.
func TestShared(t *testing.T) {
	var s shared[int]
	type begun struct {
		key  string
		tell func(int, error)
	}
	var requests []begun
	var told []int
	ask := func(key string) {
		s.start(key, func(done func(int, error)) { requests = append(requests, begun{key, done}) },
			func(n int, _ error) { told = append(told, n) })
	}
	for _, key := range []string{"a", "a", "b", "a"} {
		ask(key)
	}
	if len(requests) != 2 || requests[0].key != "a" || requests[1].key != "b" {
		t.Fatalf("%d requests are under way", len(requests))
	}
	requests[0].tell(1, nil)
	if len(requests) != 3 || requests[2].key != "a" || !slices.Equal(told, []int{1}) {
		t.Fatalf("after the first answer %d requests were made, told %v", len(requests), told)
	}
	ask("a")
	requests[2].tell(2, nil)
	requests[1].tell(3, nil)
	requests[3].tell(4, nil)
	if !slices.Equal(told, []int{1, 2, 2, 3, 4}) {
		t.Errorf("told %v", told)
	}
	if len(s.flying) != 0 {
		t.Errorf("%d keys stay", len(s.flying))
	}
}
