package main

// runCmd and guardCmd need process groups and signals.
type runCmd struct{}

func (runCmd) Run() error { return usagef("leased run: not available on Windows") }

type guardCmd struct{}

func (guardCmd) Run() error { return usagef("guard: not available on Windows") }
