package testnats

import (
	"os"
	"syscall"
)

// Signals that Windows does not have: sending them fails the test.
const (
	stopSignal     = syscall.Signal(19)
	continueSignal = syscall.Signal(18)
)

// lock does nothing: test processes that install the same program at the same time do it twice.
func lock(*os.File) error { return nil }
