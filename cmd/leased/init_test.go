package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TestRunAsInit: the first process of a container has no init above it that reaps what the
// commands leave behind.
func TestRunAsInit(t *testing.T) {
	unshare := []string{"unshare", "--pid", "--fork", "--mount-proc", "--kill-child"}
	if err := exec.Command(unshare[0], append(unshare[1:], "true")...).Run(); err != nil {
		t.Skip("no namespace of processes can be made here: ", err)
	}
	ns := startNATS(t, "")
	start(t, cleanEnv(t), beside("--server", ns.ClientURL())...).serving()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	leased := filepath.Join(t.TempDir(), "leased")
	if err := os.Symlink(self, leased); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"one":    {"run", "--restart", "one"},
		"shards": {"run", "--restart", "--shards", "0-1", "shards"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			// An orphan that outlives the command, and so the guard that would reap it.
			script := `setsid sh -c "sleep 0.5; echo >>` + dir + `/orphans" & sleep 0.1; exit 3`
			cmd := exec.Command(unshare[0], append(append(unshare[1:], leased), append(args, "--ttl", "3s", "--server", ns.ClientURL(), "--", "sh", "-c", script)...)...)
			cmd.Env = cleanEnv(t)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
			var out lockedBuffer
			cmd.Stderr = &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
				if t.Failed() {
					t.Log(out.String())
				}
			})
			eventually(t, "three orphans end", func() bool {
				text, _ := os.ReadFile(dir + "/orphans")
				return bytes.Count(text, []byte("\n")) >= 3
			})
			init := children(cmd.Process.Pid, "")
			if len(init) != 1 {
				t.Fatalf("unshare has the children %v", init)
			}
			eventually(t, "no zombie is left", func() bool { return len(children(init[0], "Z")) == 0 })
			if len(children(init[0], "")) == 0 { // its guard
				eventually(t, "it goes on", func() bool { return len(children(init[0], "")) > 0 })
			}
		})
	}
}

// children lists the child processes of parent, those in one state if it is given.
func children(parent int, state string) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, stat := range stats {
		text, err := os.ReadFile(stat)
		if err != nil {
			continue // it has ended
		}
		f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
		if f[1] == strconv.Itoa(parent) && (state == "" || f[0] == state) {
			pid, _ := strconv.Atoi(strings.Fields(string(text))[0])
			pids = append(pids, pid)
		}
	}
	return pids
}
