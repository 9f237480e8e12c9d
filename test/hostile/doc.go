// Package hostile runs the service among people and crowds that mean it no good,
// and holds it to what it promises to the others.
//
// A run starts real processes: leased with its server inside and a second one
// beside it (embedded), or three nats-servers and two leased (r3), with the users
// of deploy/permissions.conf as they are shipped. Fifty honest holders with a TTL
// of 10 s keep their leases, hand over and forward (honest_test.go) while every
// attack goes on at once, each from a user that the permissions know and at a rate
// that its file states. Attacks are crowds by their number and their cost; none
// wins by taking the machine's processors.
//
// The judge (judge_test.go) knows nothing of the service's code. No honest lease
// may be lost, nobody else may be granted it, every message that the stream ever
// stored must be one that the service writes, and the histories of the honest pass
// the checks of test/fault. No instance may doubt its bucket, p99 of the honest
// renewals stays under 250 ms, and when everything has ended memory, goroutines,
// leases and consumers are back where they began.
//
// Each attack says how often it must have tried: a run in which one did not really
// happen fails.
//
//	go test ./test/hostile -run TestHostile -hostile.length 2m -hostile.topology embedded,r3 -v
//
// -hostile.only names attacks, to find the one that does the harm. Without
// -hostile.length only the judge itself is tested.
package hostile
