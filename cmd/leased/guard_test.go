//go:build unix

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// TestGuardStart: a guard starts the command as long as the lease is held by the last
// that it was told, however long it took to get there, and not when that was its end.
func TestGuardStart(t *testing.T) {
	t.Parallel()
	deadline := func(in time.Duration) string { return fmt.Sprintf("deadline %d\n", bootNow()+in) }
	const hour, past = time.Hour, -time.Second
	for name, c := range map[string]struct {
		told []string
		want []string // the first words of what it says
	}{
		"in time":         {[]string{deadline(hour)}, []string{"started", "exit", "gone"}},
		"renewed":         {[]string{deadline(past), deadline(past), deadline(hour)}, []string{"started", "exit", "gone"}},
		"gone":            {[]string{deadline(past)}, []string{"failed"}},
		"ended":           {[]string{deadline(past), "end\n"}, []string{"failed"}},
		"ended, not over": {[]string{deadline(past), "end\n", deadline(hour)}, []string{"failed"}},
		"gone at once":    {nil, []string{"failed"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			controlRead, control, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			report, reportWrite, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer report.Close()
			fmt.Fprint(control, strings.Join(c.told, "")) // before it is there
			cmd := exec.Command(testnats.LeasedBinary(t), guardArgs(time.Second, time.Millisecond, 0, false, []string{"true"})...)
			cmd.ExtraFiles = []*os.File{controlRead, reportWrite}
			cmd.Stderr = os.Stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			controlRead.Close()
			reportWrite.Close()
			if strings.HasPrefix(name, "gone") {
				control.Close()
			} else {
				defer control.Close()
			}
			var got []string
			for s := bufio.NewScanner(report); s.Scan(); {
				word, _, _ := strings.Cut(s.Text(), " ")
				got = append(got, word)
			}
			if err := cmd.Wait(); err != nil || !slices.Equal(got, c.want) {
				t.Errorf("it said %q, want %q; %v", got, c.want, err)
			}
		})
	}
}
