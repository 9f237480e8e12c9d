package testnats

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// DefaultVersion is the nats-server that Child runs when no version is asked for.
const DefaultVersion = "2.15.3"

// debianVersion is the nats-server of Debian 12, the one that is too old for leases.
const debianVersion = "2.9.10"

const natsCLI = "v0.5.0"

// Tool returns the path of a program, installed on first use and kept for later runs: "nats", the
// command line client, or "nats-server@<version>".
func Tool(t testing.TB, name string) string {
	t.Helper()
	var path string
	var err error
	switch version, isServer := strings.CutPrefix(name, "nats-server@"); {
	case isServer:
		path, err = Binary(strings.TrimPrefix(version, "v"))
	case name == "nats":
		path, err = install("nats", natsCLI, goInstall("github.com/nats-io/natscli/nats@"+natsCLI))
	default:
		err = fmt.Errorf("testnats knows no tool %q", name)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Binary returns the path of nats-server of a version, such as "2.12.1", installed on first use.
// 2.9.10 is Debian's package.
func Binary(version string) (string, error) {
	if version == debianVersion {
		return debianServer()
	}
	return install("nats-server", "v"+version, goInstall("github.com/nats-io/nats-server/v2@v"+version))
}

// debianServer finds the package's program where it is installed, or fetches the package.
func debianServer() (string, error) {
	for _, name := range []string{"nats-server", "/usr/sbin/nats-server", "/usr/bin/nats-server"} {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if out, err := exec.Command(path, "--version").Output(); err == nil && bytes.Contains(out, []byte(debianVersion)) {
			return path, nil
		}
	}
	path, err := install("nats-server", "debian-"+debianVersion, func(dir string) error {
		if err := run(dir, nil, "apt-get", "download", "nats-server"); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(dir, "nats-server_"+debianVersion+"-*.deb"))
		if err != nil || len(debs) != 1 {
			return fmt.Errorf("apt-get download gave no nats-server %s", debianVersion)
		}
		if err := run(dir, nil, "dpkg-deb", "-x", debs[0], dir); err != nil {
			return err
		}
		for _, sub := range []string{"usr/sbin", "usr/bin"} {
			if err := os.Rename(filepath.Join(dir, sub, "nats-server"), filepath.Join(dir, "nats-server")); err == nil {
				return nil
			}
		}
		return fmt.Errorf("no nats-server in %s", debs[0])
	})
	if err != nil {
		return "", fmt.Errorf("nats-server %s is Debian 12's package nats-server: install it (apt-get install nats-server): %w", debianVersion, err)
	}
	return path, nil
}

// install returns the path of a program in the cache, and has make put it into a directory first
// when it is not there. Test processes that run at the same time wait for each other.
func install(name, version string, make func(dir string) error) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(cache, version, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	unlock, err := lockFile(path + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	tmp, err := os.MkdirTemp(filepath.Dir(path), ".install-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := make(tmp); err != nil {
		return "", fmt.Errorf("install %s %s: %w", name, version, err)
	}
	if err := os.Rename(filepath.Join(tmp, name), path); err != nil {
		return "", err
	}
	return path, nil
}

func goInstall(module string) func(dir string) error {
	return func(dir string) error {
		return run(dir, []string{"GOBIN=" + dir, "GOFLAGS=", "GOWORK=off", "CGO_ENABLED=0"}, "go", "install", module)
	}
}

func run(dir string, env []string, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

// cacheDir is where programs are kept between runs.
func cacheDir() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "leased-test", "bin"), nil
}

// lockFile waits for the lock of a file, which the kernel frees when this process ends.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := lock(f); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}
