package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
)

// TestScript runs testdata/script. In a script $KEY is a key of its own, $NATS
// the URL of a NATS with a lease service, and beside it, by --api-prefix:
// fixed, whose replies are the file reply; kind.NAME, which fails with that kind;
// none, which nobody serves. Its commands are those in scriptCommands.
func TestScript(t *testing.T) {
	ns := startNATS(t, `authorization { users: [
		{ user: all, password: pw }
		{ user: poor, password: pw, permissions: { publish: { deny: ["api.leases.>"] }, subscribe: { deny: ["dagnats.>"] } } }
		{ user: caller, password: pw, permissions: { publish: ["api.leases.>"] } }
		{ user: inbox, password: pw, permissions: { subscribe: ["mine.>"] } }
	] }`)
	url := strings.Replace(ns.ClientURL(), "://", "://all:pw@", 1)
	start(t, cleanEnv(t), beside("--server", url)...).serving()
	nc := dial(t, url)
	if _, err := nc.Subscribe("kind.*.*", func(m *nats.Msg) {
		kind := strings.Split(m.Subject, ".")[1]
		_ = m.Respond(fmt.Appendf(nil, `{"error":"it is %s","kind":%q}`, kind, kind))
	}); err != nil {
		t.Fatal(err)
	}

	// Beside it two more, on which nobody serves leases: one wants a token, one a
	// client's certificate before it says a word, and an NKEY.
	seed, ca := testSeed(t), newAuthority(t)
	cert, key := ca.client(t)
	token := startNATS(t, `authorization { token: secret }`)
	secure := startNATS(t, fmt.Sprintf("authorization { users: [{nkey: %s}] }\ntls { cert_file: %q, key_file: %q, ca_file: %q, verify: true, handshake_first: true }",
		publicKey(t, seed), cert, key, ca.file))
	seedFile, otherSeed := writeFile(t, "seed.nk", seed), writeFile(t, "other.nk", testSeed(t))

	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(e *testscript.Env) error {
			name := filepath.Base(e.WorkDir)
			e.Setenv("KEY", strings.TrimPrefix(name, "script-"))
			e.Setenv("NATS", url)
			e.Setenv("NATS_URL", url)
			e.Setenv("SERVER", ns.Addr().String())
			e.Setenv("TOKEN_SERVER", token.Addr().String())
			e.Setenv("TLS_SERVER", secure.Addr().String())
			e.Setenv("CA", ca.file)
			e.Setenv("CERT", cert)
			e.Setenv("CERT_KEY", key)
			e.Setenv("SEED", seedFile)
			e.Setenv("OTHER_SEED", otherSeed)
			e.Setenv("HOME", e.WorkDir)
			e.Setenv("XDG_CONFIG_HOME", filepath.Join(e.WorkDir, ".config"))
			p := &parts{ns: ns, nc: nc, running: map[string]*running{}}
			e.Values[partsKey{}] = p
			e.Defer(p.end)
			for _, call := range []string{"acquire", "renew"} {
				tap, err := nc.SubscribeSync("api.leases." + call)
				if err != nil {
					return err
				}
				e.Defer(func() { _ = tap.Unsubscribe() })
				p.taps = append(p.taps, tap)
			}
			sub, err := nc.Subscribe("fixed."+e.Getenv("KEY")+".*", func(m *nats.Msg) {
				reply, err := os.ReadFile(filepath.Join(e.WorkDir, "reply"))
				if err == nil {
					_ = m.Respond(bytes.TrimSuffix(reply, []byte("\n")))
				}
			})
			if err != nil {
				return err
			}
			e.Defer(func() { _ = sub.Unsubscribe() })
			return nc.Flush()
		},
		Cmds: scriptCommands,
	})
}

var scriptCommands = map[string]func(*testscript.TestScript, bool, []string){
	// exits CODE PROGRAM ARG...: runs it and checks its exit code.
	"exits": func(ts *testscript.TestScript, neg bool, args []string) {
		r := begin(ts, args[1:])
		r.exits(ts, args[0], patience)
	},
	// start NAME PROGRAM ARG...: runs it beside the script.
	"start": func(ts *testscript.TestScript, neg bool, args []string) {
		p := of(ts)
		p.running[args[0]] = begin(ts, args[1:])
	},
	// signal SIGNAL NAME or FILE: to what was started, or to the process, or with
	// a minus the group, whose id is in the file.
	"signal": func(ts *testscript.TestScript, neg bool, args []string) {
		s := unix.SignalNum("SIG" + args[0])
		if r := of(ts).running[args[1]]; r != nil {
			ts.Check(r.cmd.Process.Signal(s))
			return
		}
		pid, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile(strings.TrimPrefix(args[1], "-"))))
		ts.Check(err)
		if strings.HasPrefix(args[1], "-") {
			pid = -pid
		}
		ts.Check(syscall.Kill(pid, s))
	},
	// ends CODE NAME [WITHIN]: waits until it has ended.
	"ends": func(ts *testscript.TestScript, neg bool, args []string) {
		within := patience
		if len(args) > 2 {
			var err error
			within, err = time.ParseDuration(args[2])
			ts.Check(err)
		}
		of(ts).running[args[1]].exits(ts, args[0], within)
	},
	// until PROGRAM ARG...: again and again until it succeeds; ! until: until it
	// fails.
	"until": func(ts *testscript.TestScript, neg bool, args []string) {
		for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			r := begin(ts, args)
			<-r.ended
			if r.cmd.ProcessState.Success() != neg {
				r.show(ts)
				return
			}
			if time.Now().After(deadline) {
				ts.Fatalf("never: %v\n%s%s", args, r.stdout.String(), r.stderr.String())
			}
		}
	},
	// forge KEY: publishes an event of KEY that nothing caused, and waits until its
	// holder has asked about it.
	"forge": func(ts *testscript.TestScript, neg bool, args []string) {
		nc := of(ts).nc
		asked, err := nc.SubscribeSync("api.leases.owner")
		ts.Check(err)
		defer func() { _ = asked.Unsubscribe() }()
		ts.Check(nc.Flush())
		ts.Check(nc.PublishMsg(&nats.Msg{
			Subject: "dagnats.lease.changed." + args[0], Data: []byte(`{"evicted":true}`),
			Header: nats.Header{"Dagnats-Lease-Event": {"released"}, "Nats-Sequence": {"9000000000000000000"}},
		}))
		for {
			m, err := asked.NextMsg(patience)
			ts.Check(err)
			if strings.Contains(string(m.Data), `"`+args[0]+`"`) {
				return
			}
		}
	},
	// dies FILE...: waits until no process has an id in the files.
	"dies": func(ts *testscript.TestScript, neg bool, args []string) {
		for _, file := range args {
			pid, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile(file)))
			ts.Check(err)
			for deadline := time.Now().Add(patience); lives(pid); time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					ts.Fatalf("process %d of %s lives", pid, file)
				}
			}
		}
	},
	// dead FILE...: as dies, but now.
	"dead": func(ts *testscript.TestScript, neg bool, args []string) {
		for _, file := range args {
			pid, err := strconv.Atoi(strings.TrimSpace(ts.ReadFile(file)))
			ts.Check(err)
			if lives(pid) {
				ts.Fatalf("process %d of %s lives", pid, file)
			}
		}
	},
	// responder HOLDER: answers what is forwarded to $KEY.
	"responder": func(ts *testscript.TestScript, neg bool, args []string) {
		nc := of(ts).nc
		sub, err := nc.Subscribe("dagnats.lease.inbox."+args[0]+"."+ts.Getenv("KEY"), func(m *nats.Msg) {
			answer := fmt.Appendf(nil, "<%s>\n", m.Data)
			if string(m.Data) != "slow" {
				_ = m.Respond(answer)
				return
			}
			time.AfterFunc(600*time.Millisecond, func() { _ = m.Respond(answer) })
		})
		ts.Check(err)
		ts.Check(nc.Flush())
		ts.Defer(func() { _ = sub.Unsubscribe() })
	},
	// publish SUBJECT TEXT
	"publish": func(ts *testscript.TestScript, neg bool, args []string) {
		ts.Check(of(ts).nc.Publish(args[0], []byte(args[1])))
	},
	// repeat SUBJECT EVENT TEXT: publishes it again and again until the script ends;
	// EVENT and TEXT may have the escapes of Go.
	"repeat": func(ts *testscript.TestScript, neg bool, args []string) {
		event, err1 := strconv.Unquote(`"` + args[1] + `"`)
		text, err2 := strconv.Unquote(`"` + strings.ReplaceAll(args[2], `"`, `\"`) + `"`)
		ts.Check(errors.Join(err1, err2))
		end := make(chan struct{})
		ts.Defer(func() { close(end) })
		go func() {
			for tick := time.NewTicker(20 * time.Millisecond); ; {
				select {
				case <-tick.C:
					_ = of(ts).nc.PublishMsg(&nats.Msg{Subject: args[0], Header: nats.Header{"Dagnats-Lease-Event": {event}}, Data: []byte(text)})
				case <-end:
					tick.Stop()
					return
				}
			}
		}()
	},
	// watched [PREFIX]: waits until leased watch has subscribed.
	"watched": func(ts *testscript.TestScript, neg bool, args []string) {
		prefix := append(args, "dagnats.lease")[0] + ".changed."
		for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			conns, err := of(ts).ns.Connz(&server.ConnzOptions{Subscriptions: true})
			ts.Check(err)
			for _, c := range conns.Conns {
				for _, subject := range c.Subs {
					if c.Name == "leased-cli" && (subject == prefix+">" || subject == prefix+ts.Getenv("KEY")) {
						return
					}
				}
			}
			if time.Now().After(deadline) {
				ts.Fatalf("nobody watches")
			}
		}
	},
	// drain: forgets the requests that asked would find.
	"drain": func(ts *testscript.TestScript, neg bool, args []string) {
		for _, tap := range of(ts).taps {
			for {
				if _, err := tap.NextMsg(time.Millisecond); err != nil {
					break
				}
			}
		}
	},
	// asked CALL: waits for the next request about $KEY or a key that begins with it.
	"asked": func(ts *testscript.TestScript, neg bool, args []string) {
		for _, tap := range of(ts).taps {
			for tap.Subject == "api.leases."+args[0] {
				m, err := tap.NextMsg(patience)
				ts.Check(err)
				if bytes.Contains(m.Data, []byte(`"key":"`+ts.Getenv("KEY"))) {
					return
				}
			}
		}
	},
	// terminal CODE INPUT PROGRAM ARG...: runs it on a terminal that types INPUT, in
	// which ^C and ^Z stand for themselves and ~ for waiting until there is output.
	"terminal": func(ts *testscript.TestScript, neg bool, args []string) {
		onTerminal(ts, args[0], args[1], args[2:])
	},
	// member FILE NAME VALUE: checks a member of the JSON text in a file or stdout.
	"member": func(ts *testscript.TestScript, neg bool, args []string) {
		var m map[string]any
		ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &m))
		if got := fmt.Sprint(m[args[1]]); got != args[2] {
			ts.Fatalf("%s is %s, want %s", args[1], got, args[2])
		}
	},
}

// parts are what a script has running.
type parts struct {
	ns      *server.Server
	nc      *nats.Conn
	taps    []*nats.Subscription
	running map[string]*running
}

type partsKey struct{}

func of(ts *testscript.TestScript) *parts { return ts.Value(partsKey{}).(*parts) }

func (p *parts) end() {
	for _, r := range p.running {
		_ = r.cmd.Process.Kill()
		<-r.ended
	}
}

type running struct {
	cmd            *exec.Cmd
	stdout, stderr lockedBuffer
	ended          chan struct{}
}

// begin starts a program in the script's environment.
func begin(ts *testscript.TestScript, args []string) *running {
	r := &running{cmd: command(ts, args), ended: make(chan struct{})}
	r.cmd.Stdout, r.cmd.Stderr = &r.stdout, &r.stderr
	r.cmd.WaitDelay = 5 * time.Second
	ts.Check(r.cmd.Start())
	go func() {
		_ = r.cmd.Wait()
		close(r.ended)
	}()
	return r
}

func command(ts *testscript.TestScript, args []string) *exec.Cmd {
	path := args[0]
	if !strings.Contains(path, "/") {
		for _, dir := range filepath.SplitList(ts.Getenv("PATH")) {
			if _, err := os.Stat(filepath.Join(dir, path)); err == nil {
				path = filepath.Join(dir, path)
				break
			}
		}
	}
	cmd := exec.Command(path, args[1:]...)
	cmd.Args[0] = args[0]
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"PATH", "HOME", "XDG_CONFIG_HOME", "TMPDIR", "WORK", "KEY", "NATS", "GOCOVERDIR"} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name == "GORACE" {
			cmd.Env = append(cmd.Env, v)
		}
	}
	for _, name := range []string{"NATS_URL", "NATS_CONTEXT", "NATS_USER", "NATS_PASSWORD", "NATS_CREDS", "NATS_TIMEOUT", "NATS_INBOX_PREFIX"} {
		if v := ts.Getenv(name); v != "" {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	return cmd
}

func (r *running) show(ts *testscript.TestScript) {
	_, _ = io.WriteString(ts.Stdout(), r.stdout.String())
	_, _ = io.WriteString(ts.Stderr(), r.stderr.String())
}

func (r *running) exits(ts *testscript.TestScript, code string, within time.Duration) {
	select {
	case <-r.ended:
	case <-time.After(within):
		ts.Fatalf("%v still runs after %v:\n%s%s", r.cmd.Args, within, r.stdout.String(), r.stderr.String())
	}
	r.show(ts)
	if got := strconv.Itoa(exitStatus(r.cmd.ProcessState)); got != code {
		ts.Fatalf("%v ended with code %s, want %s\n%s%s", r.cmd.Args, got, code, r.stdout.String(), r.stderr.String())
	}
}

// exitStatus is what a shell would say.
func exitStatus(s *os.ProcessState) int {
	if w, ok := s.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return exitSignal + int(w.Signal())
	}
	return s.ExitCode()
}

// lives tells whether a process runs; a zombie does not.
func lives(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := bytes.Cut(stat, []byte(") "))
	return !bytes.HasPrefix(rest, []byte("Z")) && !bytes.HasPrefix(rest, []byte("X"))
}

// onTerminal runs a program as the leader of a session on a terminal.
func onTerminal(ts *testscript.TestScript, code, input string, args []string) {
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	ts.Check(err)
	defer master.Close()
	raw, err := master.SyscallConn()
	ts.Check(err)
	var n int
	ts.Check(errors.Join(raw.Control(func(fd uintptr) {
		unlock := 0
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.TIOCSPTLCK, uintptr(unsafe.Pointer(&unlock)))
		n, err = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		if errno != 0 {
			err = cmp.Or[error](err, errno)
		}
	}), err))
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	ts.Check(err)

	cmd := command(ts, args)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	ts.Check(cmd.Start())
	slave.Close()
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	defer func() {
		_ = cmd.Process.Kill()
		<-ended
	}()

	var out lockedBuffer
	more := make(chan struct{}, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			if err != nil {
				return
			}
			_, _ = out.Write(buf[:n])
			select {
			case more <- struct{}{}:
			default:
			}
		}
	}()
	late := time.After(patience)
	fail := func() { ts.Fatalf("%v on a terminal still runs:\n%s", args, out.String()) }
	for i := 0; i < len(input); i++ {
		switch c := input[i]; {
		case c == '~':
			select {
			case <-more:
			case <-late:
				fail()
			}
		case c == '^':
			i++
			_, _ = master.Write([]byte{input[i] - '@'})
		default:
			_, _ = master.Write([]byte{c})
		}
	}
	select {
	case <-ended:
	case <-late:
		fail()
	}
	select {
	case <-read:
	case <-late:
	}
	_, _ = io.WriteString(ts.Stdout(), strings.ReplaceAll(out.String(), "\r\n", "\n"))
	if got := strconv.Itoa(exitStatus(cmd.ProcessState)); got != code {
		ts.Fatalf("%v ended with code %s, want %s\n%s", args, got, code, out.String())
	}
}

// TestScriptsCoverTheCommandLine: every flag of every command that runs or asks,
// and every exit code that it documents, stands in a script.
func TestScriptsCoverTheCommandLine(t *testing.T) {
	files, err := filepath.Glob("testdata/script/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	var lines []string
	for _, file := range files {
		lines = append(lines, strings.Split(readFile(t, file), "\n")...)
	}
	found := func(pattern string) bool {
		re := regexp.MustCompile(pattern)
		return slices.ContainsFunc(lines, re.MatchString)
	}
	var c commands
	parser, err := newParser(&c)
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range parser.Model.Children {
		name := "(" + strings.Join(append(command.Aliases, command.Name), "|") + ")"
		switch command.Name {
		case "serve", "fence", "version", "help":
			continue
		}
		for _, f := range command.Flags {
			spelled := "--" + f.Name
			if f.Short != 0 {
				spelled += "|-" + string(f.Short)
			}
			of := "leased " + name
			if f.Group != nil && f.Name != "json" || f.Name == "help" {
				of = "leased [a-z]+" // the same for all
			}
			if !found(of+` .*(`+spelled+`)[ =]`) && !found(of+` .*(`+spelled+`)$`) {
				t.Errorf("leased %s: no script uses %s", command.Name, spelled)
			}
		}
	}
	for _, code := range []int{exitOK, exitFailed, exitUsage, exitNoService, exitService, exitWaited, exitNotPermitted} {
		if !found(fmt.Sprintf(`^exits %d leased (acquire|renew|release|owner|forward|ls|watch|evict)`, code)) {
			t.Errorf("no script has a call that exits %d", code)
		}
	}
	ends := []int{exitOK, exitFailed, exitUsage, exitWaited, exitLost, exitBefore, 126, 127}
	for _, s := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGKILL, syscall.SIGTERM} {
		ends = append(ends, exitSignal+int(s))
	}
	for _, code := range ends {
		if !found(fmt.Sprintf(`^exits %d leased (run|lock)`, code)) && !found(fmt.Sprintf(`^ends %d `, code)) {
			t.Errorf("no script has a run that ends with %d", code)
		}
	}
	for _, s := range runSignals {
		if name := strings.TrimPrefix(unix.SignalName(s.(syscall.Signal)), "SIG"); !found(`^signal ` + name + ` w$`) {
			t.Errorf("no script sends %s to a run", name)
		}
	}
}
