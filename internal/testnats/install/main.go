// Command install fetches the programs that tests run and that are not built from this
// module: other versions of nats-server, the nats CLI, and the NATS client for JavaScript.
// A test that misses one is skipped. `make tools` runs it.
package main

import (
	"fmt"
	"os"

	"github.com/leased/leased/internal/testnats"
)

func main() {
	if err := testnats.Install(os.Args[1:]...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
