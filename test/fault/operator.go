package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/leased/leased/internal/testnats"
	"github.com/leased/leased/service/kinds"
)

// Preparation is what a fault may ask for before the system starts.
type Preparation struct {
	T      testing.TB
	Leased string // variant of leased that is under test, "" for the usual one
}

// injectOperator does to the bucket what operators and other programs do.
func injectOperator(ctx context.Context, e *Env) (int, error) {
	turn := e.Rng.IntN(4)
	return every(ctx, e, 3*time.Second, func() error {
		turn++
		switch turn % 4 {
		case 0:
			return e.deleteBucket()
		case 1:
			return e.editBucket(map[string]any{"max_age": int64(time.Hour)}, true)
		case 2:
			return e.editBucket(map[string]any{"description": "edited", "allow_direct": true}, false)
		default:
			return e.restoreBucket()
		}
	})
}

// wiped records that the bucket loses its content between now and the end of
// what do does.
func (e *Env) wiped(do func() error) error {
	op := Op{Call: Wipe, Outcome: OK, Start: e.Rec.Clock.Now()}
	err := do()
	op.End = e.Rec.Clock.Now()
	e.Rec.Add(op)
	return err
}

// deleteBucket deletes the bucket under the running service, which makes it
// again. Until then every call is answered, within 1 s, as unavailable.
func (e *Env) deleteBucket() error {
	defer e.Fault("bucket deleted", Window{Wiped: true})()
	return e.wiped(func() error {
		if err := e.api("STREAM.DELETE."+bucketStream, nil); err != nil {
			return err
		}
		for _, call := range []Call{Acquire, Owner} {
			op := e.admin.Do(Op{Call: call, Key: "deleted", Holder: "deleted", TTL: time.Second})
			if took := time.Duration(op.End - op.Start); took > 1500*time.Millisecond || op.Kind == "" || op.Kind == kinds.Internal {
				return fmt.Errorf("bucket deleted: %v after %v: %s", &op, took, op.Text)
			}
		}
		e.WaitReady(60 * time.Second)
		return nil
	})
}

// bucketConfig reads the bucket's configuration.
func (e *Env) bucketConfig() (map[string]any, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	si, err := bucketInfo(ctx, e.admin.Conn)
	if err != nil {
		return nil, err
	}
	return si.Config, nil
}

// editBucket changes the bucket's configuration for a few seconds. A forbidden
// change must stop the service within that time, another must not.
func (e *Env) editBucket(change map[string]any, forbidden bool) error {
	defer e.Fault(fmt.Sprintf("bucket edited: %v", change), Window{})()
	cfg, err := e.bucketConfig()
	if err != nil {
		return err
	}
	edited := map[string]any{}
	for k, v := range cfg {
		edited[k] = v
	}
	for k, v := range change {
		edited[k] = v
	}
	if err := e.api("STREAM.UPDATE."+bucketStream, edited); err != nil {
		return err
	}
	stopped := false
	for deadline := time.Now().Add(8 * time.Second); time.Now().Before(deadline) && !stopped; time.Sleep(200 * time.Millisecond) {
		op := e.admin.Do(Op{Call: Owner, Key: "edited"})
		if forbidden {
			stopped = op.Kind == kinds.Unavailable
		} else if op.Outcome != OK {
			return fmt.Errorf("%v stopped the service: %v %s", change, &op, op.Text)
		}
	}
	if err := e.api("STREAM.UPDATE."+bucketStream, cfg); err != nil {
		return err
	}
	if forbidden && !stopped {
		return fmt.Errorf("%v did not stop the service within 8 s", change)
	}
	e.WaitReady(60 * time.Second)
	return nil
}

// restoreBucket restores a backup that is older than the bucket: fences would
// be issued again, so nothing may be granted until the operator lifts them.
func (e *Env) restoreBucket() error {
	cli := testnats.Tool(e.T, "nats")
	run := func(args ...string) error {
		cmd := exec.Command(cli, append([]string{"--server", strings.Join(e.urls, ","), "--no-context"}, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nats %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	backup := filepath.Join(e.T.TempDir(), "backup")
	if err := run("stream", "backup", bucketStream, backup, "--no-progress"); err != nil {
		return err
	}
	time.Sleep(e.between(time.Second, 3*time.Second))
	defer e.Fault("backup restored", Window{Wiped: true, Restored: true})()
	return e.wiped(func() error {
		// The service must not make the bucket before the backup is there.
		for _, s := range e.Services {
			s.Pause()
		}
		err := errors.Join(e.api("STREAM.DELETE."+bucketStream, nil), run("stream", "restore", backup, "--no-progress"))
		for _, s := range e.Services {
			s.Resume()
		}
		if err != nil {
			return err
		}
		for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
			e.probe++
			name := fmt.Sprintf("restored-%d", e.probe)
			if op := e.admin.Do(Op{Call: Acquire, Key: name, Holder: name, TTL: time.Second}); op.Outcome == OK {
				return fmt.Errorf("granted in a restored bucket: %v", &op)
			}
		}
		if err := e.liftFences(); err != nil {
			return err
		}
		e.WaitReady(60 * time.Second)
		return nil
	})
}

// liftFences does what the operator's manual says after a restore: the next
// fence is higher than any that was issued.
func (e *Env) liftFences() error {
	cmd := exec.Command(e.bin, "fence", "lift", "--yes", "--server", strings.Join(e.urls, ","))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("leased fence lift: %w\n%s", err, out)
	}
	return nil
}

// The server of the fault "permissions" has two users; the harness is the one that needs no name.
const permissionsConfig = `
no_auth_user: anybody
authorization {
  users = [
    { user: anybody, password: anybody }
    { user: leased, password: leased, permissions: { publish: { deny: [%s] } } }
  ]
}
`

func preparePermissions(Preparation) Variant {
	return Variant{Config: fmt.Sprintf(permissionsConfig, ""), Args: []string{"--user", "leased", "--password", "leased"}}
}

// injectPermissions takes away what the service needs and gives it back.
func injectPermissions(ctx context.Context, e *Env) (int, error) {
	file, err := e.configFile(0)
	if err != nil {
		return 0, err
	}
	good, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	reload := func(deny string) error {
		conf := strings.Replace(string(good), fmt.Sprintf(permissionsConfig, ""), fmt.Sprintf(permissionsConfig, deny), 1)
		if deny != "" && conf == string(good) {
			return errors.New("the configuration is not as expected")
		}
		if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
			return err
		}
		e.Servers[0].Signal(syscall.SIGHUP)
		return nil
	}
	return every(ctx, e, 3*time.Second, func() error {
		deny := []string{`"$KV.leases.>"`, `"$JS.API.STREAM.MSG.GET.>"`, `"dagnats.lease.inbox.>"`, `"$JS.API.>"`}[e.Rng.IntN(4)]
		defer e.Fault("denied "+deny, Window{})()
		if err := reload(deny); err != nil {
			return err
		}
		time.Sleep(e.between(2*time.Second, 5*time.Second))
		if !strings.Contains(e.Servers[0].Output(), "Reloaded") {
			return errors.New("the server did not reload its configuration")
		}
		if err := reload(""); err != nil {
			return err
		}
		e.WaitReady(60 * time.Second)
		return nil
	})
}
