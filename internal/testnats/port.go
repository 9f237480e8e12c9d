package testnats

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
)

// The ports of tests lie below the range from which the kernel gives ports to outgoing
// connections, in blocks. A test process owns a block while it listens on the block's first
// port, so that what tests run beside each other do not take each other's ports, not even
// while the server of one is down.
const (
	firstPort, lastPort = 10000, 32000
	portBlock           = 100
)

var ports struct {
	sync.Mutex
	owners []net.Listener // one for each block of this process, for as long as it runs
	next   int            // the next port to give
	left   int            // how many are left in the block
}

// FreePort gives a port of 127.0.0.1 that nobody listens on and that no test has been given, so
// that it stays free while a server on it restarts.
func FreePort(t testing.TB) int {
	t.Helper()
	ports.Lock()
	defer ports.Unlock()
	for range 10 * portBlock {
		if ports.left == 0 && !ownBlock() {
			break
		}
		port := ports.next
		ports.next, ports.left = port+1, ports.left-1
		if ln, err := listen(port); err == nil {
			ln.Close()
			return port
		}
	}
	t.Fatalf("no free port from %d to %d", firstPort, lastPort)
	return 0
}

func ownBlock() bool {
	const blocks = (lastPort - firstPort) / portBlock
	for _, i := range rand.Perm(blocks) {
		base := firstPort + i*portBlock
		if ln, err := listen(base); err == nil {
			ports.owners = append(ports.owners, ln)
			ports.next, ports.left = base+1, portBlock-1
			return true
		}
	}
	return false
}

func listen(port int) (net.Listener, error) {
	return net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
}
