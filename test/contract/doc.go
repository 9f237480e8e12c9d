// Package contract holds the service to its contract over the wire: every kind
// that every call can answer, every input of the corpus, the lives and ends of
// leases, fences, forwards, events, growth and leaving. The servers are real,
// the service is the root package inside the test process, or the binary where
// a process has to be killed or told to stop.
//
// Every reply that a test gets goes through rig.ask, which holds it against its
// schema, its row of the table and the rules for error headers; at the end of
// every test the replies that it saw are held against Prometheus and
// $SRV.STATS. Names such as F01 or L06 in names of tests are cases that were
// collected from reports about other lease and lock services.
package contract
