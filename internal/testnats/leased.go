package testnats

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

// Service is leased as a child process.
type Service struct {
	*Process
	address struct {
		sync.Mutex
		nats, http string
	}
}

// Leased starts leased with the arguments, such as "serve", and waits until it says that it serves.
func Leased(t testing.TB, args ...string) *Service {
	t.Helper()
	return LeasedEnv(t, nil, args...)
}

// LeasedEnv does so with more environment, as "NAME=value".
func LeasedEnv(t testing.TB, env []string, args ...string) *Service {
	t.Helper()
	return LeasedFrom(t, LeasedBinary(t), env, args...)
}

// LeasedFrom does so with another program than LeasedBinary, a variant of it.
func LeasedFrom(t testing.TB, binary string, env []string, args ...string) *Service {
	t.Helper()
	s := &Service{Process: newProcess(t, "leased", binary, args)}
	s.env = env
	s.out.onLine = s.line
	s.Restart()
	return s
}

// line looks for the log line that says where the service is reached.
func (s *Service) line(line []byte) {
	var rec struct{ Msg, NATS, HTTP string }
	if json.Unmarshal(line, &rec) == nil && rec.Msg == "serving" {
		s.address.Lock()
		s.address.nats, s.address.http = rec.NATS, rec.HTTP
		s.address.Unlock()
	}
}

// NATS is the URL of the NATS server that the service uses.
func (s *Service) NATS() string {
	s.address.Lock()
	defer s.address.Unlock()
	return s.address.nats
}

// HTTP is the host:port of /metrics and /readyz.
func (s *Service) HTTP() string {
	s.address.Lock()
	defer s.address.Unlock()
	return s.address.http
}

// Restart kills the process if it runs, starts it with the same arguments and waits until it serves.
func (s *Service) Restart() {
	s.t.Helper()
	s.Kill()
	s.address.Lock()
	s.address.nats, s.address.http = "", ""
	s.address.Unlock()
	s.start()
	s.await(60*time.Second, func() error {
		if s.NATS() == "" {
			return errors.New(`no log line with msg "serving"`)
		}
		return nil
	})
}

var leasedBinary struct {
	once sync.Once
	path string
	err  error
}

// LeasedBinary returns the path of leased, built once by this process, with the race detector when
// the test has it.
func LeasedBinary(t testing.TB) string {
	t.Helper()
	b := &leasedBinary
	b.once.Do(func() { b.path, b.err = buildLeased() })
	if b.err != nil {
		t.Fatal(b.err)
	}
	return b.path
}

// buildLeased leaves one program a checkout in the cache, so that nothing piles up there.
func buildLeased() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	h := fnv.New32a()
	h.Write([]byte(root))
	name := "leased"
	args := []string{"build"}
	if raceEnabled {
		name += "-race"
		args = append(args, "-race")
	}
	path, err := cached(name, fmt.Sprintf("leased-%08x", h.Sum32()))
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	unlock, err := lockFile(path + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	next := path + ".new"
	if err := run(root, nil, "go", append(args, "-o", next, "./cmd/leased")...); err != nil {
		return "", err
	}
	// Renamed, as a program that runs cannot be written to.
	return path, os.Rename(next, path)
}
