//go:build unix

package embedded

import (
	"errors"
	"os"
	"syscall"
)

// lockFile opens and locks a file; with errLocked it returns the open file all the same.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
	case errors.Is(err, syscall.EWOULDBLOCK):
		return f, errLocked
	case err != nil:
		f.Close()
		return nil, err
	}
	return f, nil
}
