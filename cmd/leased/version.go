package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/alecthomas/kong"
)

type versionCmd struct{}

func (versionCmd) Run(command *kong.Context) error {
	fmt.Fprintf(command.Stdout, "leased %s\n%s %s/%s\n", version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			switch m.Path {
			case "github.com/nats-io/nats-server/v2", "github.com/nats-io/nats.go":
				fmt.Fprintf(command.Stdout, "%s %s\n", m.Path, m.Version)
			}
		}
	}
	return nil
}

// release is set by the linker for a released binary, such as 1.4.0.
var release string

// version is a semantic version without a leading v: that of the release, else
// of the module as the go command stamped it.
func version() string {
	if release != "" {
		return strings.TrimPrefix(release, "v")
	}
	if info, ok := debug.ReadBuildInfo(); ok && strings.HasPrefix(info.Main.Version, "v") {
		return strings.TrimPrefix(info.Main.Version, "v")
	}
	return "0.0.0-devel"
}
