package service

import (
	"context"
	"strings"
	"sync"
	"testing"
)

// TestSharedPanic: a panic in a shared request is that of every caller, shows
// where it was, and the next request is as good as ever.
func TestSharedPanic(t *testing.T) {
	var s shared[int]
	ctx := context.Background()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			defer func() {
				switch p := recover().(type) {
				case error: // another's call
					if !strings.Contains(p.Error(), "boom") || !strings.Contains(p.Error(), "shared_test.go") {
						t.Errorf("a caller saw %v", p)
					}
				default: // its own
					if p != "boom" {
						t.Errorf("a caller saw %v", p)
					}
				}
			}()
			_, _ = s.do(ctx, func(context.Context) (int, error) { panic("boom") })
			t.Error("do returned")
		})
	}
	wg.Wait()
	if n, err := s.do(ctx, func(context.Context) (int, error) { return 7, nil }); n != 7 || err != nil {
		t.Errorf("then %d, %v", n, err)
	}
}
