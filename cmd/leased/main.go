// Command leased is a lease service over NATS: leader election, shard ownership
// and requests to whoever holds a key, for any program that speaks NATS.
//
//	leased serve      answer lease calls, with a NATS server inside or beside
//	leased run        run a command while a key is held
//	leased acquire    and renew, release, owner, forward, ls, watch, evict: ask
//	leased fence      what an operator does to revisions
//	leased version    say what this binary is made of
//	leased help       show the help of a command
package main

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"github.com/leased/leased"
)

// commands is the command line: one field and one file a command.
type commands struct {
	Serve   serveCmd   `cmd:"" help:"Answer lease calls on NATS."`
	Run     runCmd     `cmd:"" aliases:"lock" help:"Run a command while a key is held."`
	Acquire acquireCmd `cmd:"" help:"Take a key."`
	Renew   renewCmd   `cmd:"" help:"Keep a key."`
	Release releaseCmd `cmd:"" help:"Give a key back."`
	Owner   ownerCmd   `cmd:"" help:"Say who holds a key."`
	Forward forwardCmd `cmd:"" help:"Send a payload to whoever holds a key and print the answer."`
	Ls      lsCmd      `cmd:"" aliases:"list" help:"List leases."`
	Watch   watchCmd   `cmd:"" help:"Print changes as they happen, as NDJSON."`
	Evict   evictCmd   `cmd:"" help:"Free a key whoever holds it."`
	Fence   fenceCmd   `cmd:"" help:"What an operator does to revisions."`
	Version versionCmd `cmd:"" help:"Say what this binary is made of; so does leased --version."`
	Help    helpCmd    `cmd:"" help:"Show the help of a command, as its --help does."`
}

const description = `Leases over NATS: a key that one holder owns for a bounded time.

Replicas of a service elect a leader or split work by asking api.leases.acquire,
renew, release, owner and forward over plain NATS request/reply. "leased serve"
answers those calls; it needs nothing else on the machine.

Exit codes: 0 yes, or done; 1 no (another holds it, nobody does, lost, nobody took
it); 64 wrong usage; 69 no NATS or no service; 70 the service failed, or what
answered is no lease service; 75 the time to wait is over; 77 not permitted; 128+N
ended by signal N. "leased run" has more.`

func main() {
	os.Exit(run(os.Args[1:]))
}

// run is the program: it parses args, runs the command they name and returns
// the exit code. Errors go to stderr.
func run(args []string) int {
	switch {
	case len(args) > 0 && args[0] == "guard":
		return runGuard(args[1:])
	case len(args) > 0 && args[0] == "help":
		args = append(args[1:], "--help")
	case len(args) == 1 && args[0] == "--version":
		args = []string{"version"}
	}
	var c commands
	parser, err := newParser(&c)
	if err != nil {
		panic(err) // a tag of a command's flags is wrong
	}
	if len(args) > 0 && (args[0] == "run" || args[0] == "lock") {
		// The parser takes a time quadratic in the number of arguments.
		if i := slices.Index(args, "--"); i >= 0 {
			args, c.Run.rest = args[:i], args[i:]
		}
	}
	command, err := parser.Parse(args)
	if err != nil {
		lastWords("leased: %s\nTry \"leased --help\" or \"leased COMMAND --help\".\n", visible(err.Error()))
		return exitUsage
	}
	if err := command.Run(); err != nil {
		if code, ok := errors.AsType[silentExit](err); ok {
			return int(code)
		}
		lastWords("leased: %s\n", visible(err.Error()))
		return exitCode(err)
	}
	return exitOK
}

func newParser(c *commands) (*kong.Kong, error) {
	return kong.New(c,
		kong.Name("leased"),
		kong.Description(description),
		kong.Vars{"apiPrefix": leased.DefaultAPIPrefix, "eventPrefix": leased.DefaultEventPrefix},
		kong.TypeMapper(reflect.TypeFor[time.Duration](), kong.MapperFunc(durations)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.ExplicitGroups([]kong.Group{
			{Key: "embedded", Title: "The NATS server inside:"},
			{Key: "connection", Title: "A NATS that runs already (flags and environment as the nats CLI has them):"},
			{Key: "service", Title: "The service:"},
			{Key: "http", Title: "Metrics and health:"},
			{Key: "logs", Title: "Logs:"},
		}),
	)
}

// helpCmd stands for a first argument that run turns into --help, so that the help
// names it.
type helpCmd struct {
	Command []string `arg:"" optional:"" help:"Which command."`
}

// durations reads every duration of the command line, and names the unit where it is
// missing.
func durations(ctx *kong.DecodeContext, target reflect.Value) error {
	var text string
	if err := ctx.Scan.PopValueInto("duration", &text); err != nil {
		return err
	}
	d, err := time.ParseDuration(text)
	if err != nil && text != "" && strings.Trim(text, "0123456789.") == "" {
		return fmt.Errorf("%s has no unit: write %ss", text, text)
	}
	if err != nil {
		return fmt.Errorf("%q is not a duration, such as 500ms, 5s or 2m", text)
	}
	target.SetInt(int64(d))
	return nil
}

// given tells which flags stand on the command line, as opposed to those that
// have their value from the environment or by default.
func given(command *kong.Context) map[string]bool {
	flags := map[string]bool{}
	for _, p := range command.Path {
		if p.Flag != nil && !p.Resolved {
			flags[p.Flag.Name] = true
		}
	}
	return flags
}
