package testnats

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

// DefaultVersion is the nats-server that Child runs when no version is asked for: the one
// of go.mod, which needs no installation.
const DefaultVersion = server.VERSION

// Programs that tests run and that are not built from this module. Install fetches them.
const (
	natsCLI = "v0.5.0"
	// debianVersion is the nats-server of Debian 12, the one that is too old for leases.
	debianVersion = "2.9.10"
)

var serverVersions = []string{debianVersion, "2.11.9", "2.11.10", "2.12.0", "2.12.1", "2.14.10"}

// errMissing says that a program is not installed.
var errMissing = errors.New("is not installed (run `make tools`, which fetches it)")

// Tool returns the path of a program, "nats", the command line client, or
// "nats-server@<version>". The test is skipped where the program is not installed.
func Tool(t testing.TB, name string) string {
	t.Helper()
	if version, isServer := strings.CutPrefix(name, "nats-server@"); isServer {
		return serverProgram(t, strings.TrimPrefix(version, "v"))
	}
	if name != "nats" {
		t.Fatalf("testnats knows no tool %q", name)
	}
	path, err := installed("nats", natsCLI)
	if err != nil {
		t.Skip(err)
	}
	return path
}

// serverProgram is Binary for a test, which is skipped where the program is missing.
func serverProgram(t testing.TB, version string) string {
	t.Helper()
	path, err := Binary(version)
	switch {
	case errors.Is(err, errMissing):
		t.Skip(err)
	case err != nil:
		t.Fatal(err)
	}
	return path
}

// Binary returns the path of nats-server of a version, such as "2.12.1".
func Binary(version string) (string, error) {
	switch version {
	case DefaultVersion:
		return install("nats-server", "v"+version, func(dir string) error {
			root, err := moduleRoot()
			if err != nil {
				return err
			}
			return run(root, []string{"CGO_ENABLED=0"}, "go", "build", "-o", filepath.Join(dir, "nats-server"), "github.com/nats-io/nats-server/v2")
		})
	case debianVersion:
		for _, name := range []string{"nats-server", "/usr/sbin/nats-server", "/usr/bin/nats-server"} {
			path, err := exec.LookPath(name)
			if err != nil {
				continue
			}
			if out, err := exec.Command(path, "--version").Output(); err == nil && bytes.Contains(out, []byte(debianVersion)) {
				return path, nil
			}
		}
		return installed("nats-server", "debian-"+debianVersion)
	}
	return installed("nats-server", "v"+version)
}

// Modules returns a directory whose node_modules has what the package.json at path asks for. The test is
// skipped where that is not installed.
func Modules(t testing.TB, path string) string {
	t.Helper()
	name, err := modulesName(path)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := installed("js", name)
	if err != nil {
		t.Skip(err)
	}
	return dir
}

// modulesName tells apart what different files ask for.
func modulesName(path string) (string, error) {
	body, err := os.ReadFile(path)
	return fmt.Sprintf("npm-%x", sha256.Sum256(body))[:20], err
}

// Install fetches all that tests run and that is not there yet; packages are the package.json
// files whose modules are wanted. It goes on after a failure and returns all of them.
func Install(packages ...string) error {
	var errs []error
	add := func(_ string, err error) { errs = append(errs, err) }
	add(install("nats", natsCLI, goInstall("github.com/nats-io/natscli/nats@"+natsCLI)))
	for _, version := range serverVersions {
		if _, err := Binary(version); err == nil {
			continue
		}
		if version == debianVersion {
			add(install("nats-server", "debian-"+version, unpackDebian))
			continue
		}
		add(install("nats-server", "v"+version, goInstall("github.com/nats-io/nats-server/v2@v"+version)))
	}
	add(Binary(DefaultVersion))
	for _, path := range packages {
		name, err := modulesName(path)
		if err == nil {
			_, err = install("js", name, func(dir string) error { return npmInstall(path, filepath.Join(dir, "js")) })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// unpackDebian fetches Debian's package and puts its program into dir.
func unpackDebian(dir string) error {
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
}

// npmInstall puts what the package.json at path asks for into dir.
func npmInstall(path, dir string) error {
	body, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "package.json"), body, 0o644); err != nil {
		return err
	}
	return run(dir, nil, "npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--silent")
}

// moduleRoot is the directory of this module.
func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	return filepath.Dir(strings.TrimSpace(string(out))), err
}

// cached is where a program is kept between runs.
func cached(name, version string) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "leased-test", "bin", version, name), nil
}

// installed returns the path of a program that is kept already.
func installed(name, version string) (string, error) {
	path, err := cached(name, version)
	if err != nil {
		return "", err
	}
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%s %s %w", name, version, errMissing)
	}
	return path, nil
}

// install is installed, and has make put what is missing into a directory first. Processes
// that run at the same time wait for each other.
func install(name, version string, make func(dir string) error) (string, error) {
	path, err := cached(name, version)
	if err != nil {
		return "", err
	}
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
