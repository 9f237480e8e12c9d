//go:build mutant

package service

import (
	"os"

	"github.com/leased/leased/service/kinds"
)

// The mutants are broken variants of this package, one at a time, chosen by the
// environment. Each is one line where it breaks something; test/fault lists them
// and what must notice each.
var chosen = os.Getenv("LEASED_MUTANT")

func mutant(name string) bool { return name == chosen }

func mutantConflict(err error) error {
	if codeOf(err) == codeInFlight {
		return kinds.Errorf(kinds.Lost, "mutant: another write is in flight")
	}
	return err
}
