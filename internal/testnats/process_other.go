//go:build !linux

package testnats

import "os/exec"

// Elsewhere a child outlives a test process that is killed.
func setDeathSignal(*exec.Cmd) {}
