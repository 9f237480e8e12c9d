// Command natsd is nats-server with the options that the fault harness uses. It
// is there to be built with a clock that can be shifted, which cannot be done to
// a main package of another module.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/nats-io/nats-server/v2/server"
)

func main() {
	fs := flag.NewFlagSet("natsd", flag.ExitOnError)
	opts, err := server.ConfigureOptions(fs, os.Args[1:], func() { fmt.Println("nats-server v" + server.VERSION) }, fs.Usage, nil)
	if err == nil {
		var s *server.Server
		if s, err = server.NewServer(opts); err == nil {
			s.ConfigureLogger()
			err = server.Run(s)
			if err == nil {
				s.WaitForShutdown()
				return
			}
		}
	}
	fmt.Fprintln(os.Stderr, "natsd:", err)
	os.Exit(1)
}
