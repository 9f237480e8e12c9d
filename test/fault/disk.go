package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// smallDisk mounts a file system of 64 MiB and gives its directory.
func smallDisk(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatalf("mount a small tmpfs: %v", err)
	}
	t.Cleanup(func() {
		// The server on it is gone by then: cleanups run last come, first gone.
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// storeDir finds the store directory of server i in its configuration.
func (e *Env) storeDir(i int) (string, error) {
	file, err := e.configFile(i)
	if err != nil {
		return "", err
	}
	conf, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	m := regexp.MustCompile(`store_dir: "([^"]+)"`).FindSubmatch(conf)
	if m == nil {
		return "", errors.New("no store_dir in the server's configuration")
	}
	return string(m[1]), nil
}

// configFile finds the configuration file of server i, which must run.
func (e *Env) configFile(i int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", e.Servers[i].PID()))
	if err != nil {
		return "", err
	}
	args := strings.Split(string(b), "\x00")
	for j, a := range args {
		if a == "-c" && j+1 < len(args) {
			return args[j+1], nil
		}
	}
	return "", errors.New("the server has no -c")
}

// injectDiskFull fills the server's disk, holds it, and frees it again. A server
// that has given JetStream up then needs a restart; that is an operator's part.
func injectDiskFull(ctx context.Context, e *Env) (int, error) {
	store, err := e.storeDir(0)
	if err != nil {
		return 0, err
	}
	ballast := filepath.Join(filepath.Dir(store), "ballast")
	return every(ctx, e, 4*time.Second, func() error {
		defer e.Fault("disk full", Window{})()
		if err := fill(ballast); err != nil {
			return err
		}
		hold := 20 * time.Second
		if until, ok := ctx.Deadline(); ok {
			hold = min(hold, max(5*time.Second, time.Until(until)/2))
		}
		time.Sleep(hold)
		if err := os.Remove(ballast); err != nil {
			return err
		}
		e.Servers[0].Term()
		e.Servers[0].Wait(30 * time.Second)
		e.Servers[0].Restart()
		e.WaitReady(60 * time.Second)
		return nil
	})
}

// fill writes to path until nothing more fits.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; ; {
		_, err := f.Write(make([]byte, size))
		switch {
		case err == nil:
		case !errors.Is(err, syscall.ENOSPC):
			return err
		case size == 1:
			return nil
		default:
			size /= 2
		}
	}
}

// injectOldStore takes a copy of a node's store, lets some seconds pass, kills
// the node and starts it on the copy: what a node is that lost what it had not
// synced.
func injectOldStore(ctx context.Context, e *Env) (did int, err error) {
	for pause(ctx, time.Second) {
		node := e.Rng.IntN(3)
		store, err := e.storeDir(node)
		if err != nil {
			return did, err
		}
		s := e.Servers[node]
		end := e.Fault("pause for a copy", Window{Stale: true})
		s.Pause()
		backup := filepath.Join(e.T.TempDir(), "copy")
		err = os.CopyFS(backup, os.DirFS(store))
		s.Resume()
		end()
		if err != nil {
			return did, err
		}
		pause(ctx, e.between(2*time.Second, 8*time.Second))
		end = e.Fault("old store", Window{Stale: true})
		s.Kill()
		if err := errors.Join(os.RemoveAll(store), os.CopyFS(store, os.DirFS(backup))); err != nil {
			return did, err
		}
		s.Restart()
		e.WaitReady(90 * time.Second)
		end()
		did++
	}
	return did, nil
}

// injectDamage flips a bit in, or cuts the end off, a file of one stopped node.
func injectDamage(ctx context.Context, e *Env) (int, error) {
	return every(ctx, e, 4*time.Second, func() error {
		node := e.Rng.IntN(3)
		store, err := e.storeDir(node)
		if err != nil {
			return err
		}
		defer e.Fault("damage", Window{Stale: true})()
		e.Servers[node].Kill()
		var files []string
		err = filepath.WalkDir(store, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && strings.Contains(path, bucketStream) && (strings.HasSuffix(path, ".blk") || strings.HasSuffix(path, "index.db")) {
				if i, err := d.Info(); err == nil && i.Size() > 64 {
					files = append(files, path)
				}
			}
			return err
		})
		if err != nil || len(files) == 0 {
			return fmt.Errorf("no file of the bucket to damage below %s: %v", store, err)
		}
		if err := e.damage(files[e.Rng.IntN(len(files))]); err != nil {
			return err
		}
		e.Servers[node].Restart()
		e.WaitReady(90 * time.Second)
		return nil
	})
}

func (e *Env) damage(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if e.Rng.IntN(2) == 0 {
		return f.Truncate(size - e.Rng.Int64N(size/2))
	}
	at := e.Rng.Int64N(size)
	var b [1]byte
	if _, err := f.ReadAt(b[:], at); err != nil {
		return err
	}
	b[0] ^= 1 << e.Rng.IntN(8)
	_, err = f.WriteAt(b[:], at)
	return err
}

// refusedSecond starts leased again with the same arguments as the embedded one:
// it must end with a clear text, and the first must go on.
func (e *Env) refusedSecond() error {
	first := e.Services[0]
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", first.PID()))
	if err != nil {
		return err
	}
	args := strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	for i, a := range args {
		if a == "--nats-listen" {
			args[i+1] = "127.0.0.1:0" // the port is not what shall stop it
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("a second leased on the same store runs on:\n%s", out)
	case err == nil || !errors.As(err, &exit) || exit.ExitCode() <= 0:
		return fmt.Errorf("a second leased on the same store: %v\n%s", err, out)
	case !strings.Contains(string(out), "store"):
		return fmt.Errorf("a second leased on the same store says nothing of it:\n%s", out)
	case !first.Running():
		return errors.New("the first leased ended")
	}
	return nil
}
