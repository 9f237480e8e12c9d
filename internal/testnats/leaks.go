package testnats

import "go.uber.org/goleak"

// ServersOwn leaves nats-server's own ticker out of what goleak finds: a server
// in this process may leave it behind, and nobody outside can end it.
func ServersOwn() goleak.Option {
	return goleak.IgnoreAnyFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1")
}
