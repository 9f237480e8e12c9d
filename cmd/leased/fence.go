package main

import (
	"context"
	"fmt"

	"github.com/alecthomas/kong"

	"github.com/leased/leased"
	"github.com/leased/leased/service"
)

// fenceCmd holds what an operator does to revisions.
type fenceCmd struct {
	Lift liftCmd `cmd:"" help:"Raise the revisions of a bucket that went back in time. All leases end."`
}

type liftCmd struct {
	callFlags
	Yes bool `help:"Do not ask: all leases end."`
}

// Help is shown by --help.
func (liftCmd) Help() string {
	return `After a backup of the bucket was restored its revisions would be issued again,
and a fence would no longer protect anything; leased notices and refuses to
grant. This command raises the next revision above all that the bucket and the
server's clock prove to have been issued. What an instance claims beyond that is
said and not followed. All leases end, without events; their holders find out at
the next renewal.

A store directory that was copied back by hand cannot be noticed: run this
before leased serves again.`
}

func (l *liftCmd) Run(command *kong.Context) error {
	if !l.Yes {
		return usagef("--yes: all leases end; say that you mean it")
	}
	e, err := l.resolve(given(command), true)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*l.Timeout)
	defer cancel()
	nc, err := e.connect(ctx, "leased-fence")
	if err != nil {
		return err
	}
	defer nc.Close()
	done, err := service.Lift(ctx, nc, e.jsDomain, e.jsAPIPrefix, leased.MicroName)
	if err != nil {
		return &exitError{exitService, err}
	}
	if done.Claimed != 0 {
		fmt.Fprintf(command.Stderr, "leased: the instance %s says that revision %d was issued; nothing proves it, and the bucket was not lifted above it\n", done.By, done.Claimed)
	}
	if l.JSON {
		fmt.Fprintf(command.Stdout, "{\"was\":%d,\"next\":%d,\"purged\":%d}\n", done.Was, done.Next, done.Purged)
		return nil
	}
	fmt.Fprintf(command.Stdout, "the last revision was %d, the next is %d; %d messages are gone\n", done.Was, done.Next, done.Purged)
	return nil
}
