//go:build !mutant

package service

// mutant says whether the named fault is built in. It never is: only a test
// build, which proves that the tests notice, has any (test/fault, Mutants).
func mutant(string) bool { return false }

// mutantConflict is what the mutant in-flight-denied makes of a conflict.
func mutantConflict(err error) error { return err }
