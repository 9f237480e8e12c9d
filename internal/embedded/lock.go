package embedded

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// errLocked is what lockFile returns when another process, or this one, holds the lock.
var errLocked = errors.New("locked")

// lockStore makes dir and takes its lock, which the kernel frees when the process ends, however it
// ends. nats-server itself would let two servers write to one store and ruin it.
func lockStore(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--store-dir: %w", err)
	}
	f, err := lockFile(filepath.Join(dir, "leased.lock"))
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("--store-dir %s: in use by another process%s: a store has one server at a time", dir, owner(f))
	}
	if err != nil {
		return nil, fmt.Errorf("--store-dir %s: lock it: %w", dir, err)
	}
	// For people and for the message above; the lock itself does not depend on it.
	if err := f.Truncate(0); err == nil {
		fmt.Fprintln(f, os.Getpid())
	}
	return f, nil
}

// owner reads who holds the lock from its file, if that can be read, and closes it.
func owner(f *os.File) string {
	if f == nil {
		return ""
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 32))
	if err != nil {
		return ""
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return ""
	}
	return fmt.Sprintf(" (pid %d)", pid)
}
