package hostile

import (
	"context"
	"time"
)

// blockedLog has nobody read what the first instance logs, for 15 s of each minute,
// from 20 s after the start on: its pipe fills, and it must serve on.
func blockedLog(ctx context.Context, s *stage, t *tally) {
	for pause(ctx, 20*time.Second); ctx.Err() == nil; pause(ctx, 45*time.Second) {
		release := s.services[0].HoldOutput()
		t.try(1)
		pause(ctx, 15*time.Second)
		release()
		t.end("blocked")
	}
}

// joining has the second instance leave in good order and join again, from 45 s
// after the start on and each minute.
func joining(ctx context.Context, s *stage, t *tally) {
	for pause(ctx, 45*time.Second); ctx.Err() == nil; pause(ctx, 45*time.Second) {
		select {
		case s.rejoin <- struct{}{}:
			t.try(1)
			t.end("asked to leave")
		case <-ctx.Done():
		}
	}
}
