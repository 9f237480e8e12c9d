//go:build unix

package client

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
)

// database runs SQL in a real database through its own command line client.
type database struct {
	command []string
	// admit makes a script that runs FenceAdmitSQL as it stands, with parameters,
	// and prints how many rows it affected.
	admit func(resource string, fence uint64) string
	// begin starts a transaction that writes, nap lets one second pass in it.
	begin, nap string
}

func (d database) run(sql string) (string, error) {
	cmd := exec.Command(d.command[0], d.command[1:]...)
	cmd.Stdin = strings.NewReader(sql)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", sql, err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// sqlite is a database in a file.
func sqlite(t testing.TB) database {
	path, err := exec.LookPath("sqlite3")
	if err != nil {
		t.Skip("sqlite3 is not installed:", err)
	}
	return database{
		begin: ".timeout 10000\nBEGIN IMMEDIATE", nap: ".shell sleep 1",
		command: []string{path, "-batch", "-bail", filepath.Join(t.TempDir(), "db")},
		admit: func(resource string, fence uint64) string {
			return fmt.Sprintf(".parameter set $1 \"'%s'\"\n.parameter set $2 %d\n%s;\nSELECT changes();\n", resource, fence, FenceAdmitSQL)
		},
	}
}

// postgres is a database in a server of its own, on a socket in a directory.
func postgres(t testing.TB) database {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	if len(found) == 0 {
		t.Skip("PostgreSQL is not installed")
	}
	if testing.Short() {
		t.Skip("starting PostgreSQL takes seconds, and this is -short")
	}
	bin := found[len(found)-1]
	dir, err := os.MkdirTemp("", "pg") // short, for the socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	as := &syscall.SysProcAttr{}
	if os.Getuid() == 0 {
		u, err := user.Lookup("nobody")
		if err != nil {
			t.Skip("PostgreSQL does not run as root, and there is no other user:", err)
		}
		uid, _ := strconv.Atoi(u.Uid)
		gid, _ := strconv.Atoi(u.Gid)
		as.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(dir, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	data := filepath.Join(dir, "data")
	initdb := exec.Command(filepath.Join(bin, "initdb"), "-D", data, "-U", "fence", "-A", "trust", "--no-sync")
	initdb.SysProcAttr, initdb.Dir = as, dir
	if out, err := initdb.CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	server := exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-k", dir, "-c", "listen_addresses=", "-c", "fsync=off")
	server.SysProcAttr, server.Dir = as, dir
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGQUIT)
		_ = server.Wait()
	})
	d := database{
		begin: "BEGIN", nap: "SELECT FROM pg_sleep(1);",
		command: []string{filepath.Join(bin, "psql"), "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", "-h", dir, "-U", "fence", "postgres"},
		admit: func(resource string, fence uint64) string {
			return fmt.Sprintf("PREPARE admit AS %s;\nEXECUTE admit('%s', %d);\n\\echo :ROW_COUNT\n", FenceAdmitSQL, resource, fence)
		},
	}
	testnats.Eventually(t, 30*time.Second, func() bool {
		return exec.Command(filepath.Join(bin, "pg_isready"), "-h", dir).Run() == nil
	}, "PostgreSQL to start")
	return d
}

func TestFenceVectorsInSQL(t *testing.T) {
	for name, start := range map[string]func(testing.TB) database{"SQLite": sqlite, "PostgreSQL": postgres} {
		t.Run(name, func(t *testing.T) {
			d := start(t)
			at := func(n int, resource string) string { return fmt.Sprintf("%d.%s", n, resource) }
			must := func(sql string) string {
				t.Helper()
				out, err := d.run(sql)
				if err != nil {
					t.Fatal(err)
				}
				return out
			}
			must(FenceTableSQL + ";")
			runFenceVectors(t, func(t *testing.T, n int) guard {
				return func(resource string, fence uint64) (bool, error) {
					rows, err := d.run(d.admit(at(n, resource), fence))
					if fence == 0 && err != nil {
						return false, nil // the table's own check
					}
					return rows == "1", err
				}
			}, func(n int, resource string) uint64 {
				out := must(fmt.Sprintf("SELECT fence FROM lease_fence WHERE resource = '%s';", at(n, resource)))
				fence, _ := strconv.ParseUint(out, 10, 64)
				return fence
			})

			// A transaction that was admitted and is slow keeps the next owner's waiting:
			// what is there in the end was written last by the highest fence.
			must("CREATE TABLE thing (id TEXT PRIMARY KEY, value TEXT); INSERT INTO thing VALUES ('t', '');")
			slow := make(chan error, 1)
			go func() {
				_, err := d.run(d.begin + ";\n" + d.admit("t", 42) + d.nap + "\nUPDATE thing SET value = value || 'old' WHERE id = 't';\nCOMMIT;\n")
				slow <- err
			}()
			time.Sleep(300 * time.Millisecond) // either order must do
			must(d.begin + ";\n" + d.admit("t", 50) + "UPDATE thing SET value = value || 'new' WHERE id = 't';\nCOMMIT;\n")
			if err := <-slow; err != nil {
				t.Fatal(err)
			}
			if got := must("SELECT value FROM thing WHERE id = 't';"); got != "oldnew" && got != "new" {
				t.Errorf("in the end %q", got)
			}
			if rows, err := d.run(d.admit("t", 42)); rows != "0" || err != nil {
				t.Errorf("the late write affected %s rows, %v", rows, err)
			}
		})
	}
}
