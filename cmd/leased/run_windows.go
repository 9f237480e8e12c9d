package main

// runCmd needs process groups and signals.
type runCmd struct{ rest []string }

func (runCmd) Run() error { return usagef("leased run: not available on Windows") }

func runGuard([]string) int { return exitUsage }
