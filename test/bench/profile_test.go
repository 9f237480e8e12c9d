//go:build linux

package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/leased/leased"
	"github.com/leased/leased/metrics"
)

// BenchmarkService runs the service inside the benchmark's process and nothing
// else: nats-server and the callers are other processes. A CPU profile of it is
// therefore a profile of the service alone:
//
//	go test -run '^$' -bench Service/renew -benchtime 200000x -cpuprofile cpu.out ./test/bench
func BenchmarkService(b *testing.B) {
	o, err := parseFlags(nil)
	if err != nil {
		b.Fatal(err)
	}
	o.logf = b.Logf
	e := &env{opts: o, nursery: newNursery(), dir: b.TempDir(), bins: map[string]string{}}
	b.Cleanup(e.nursery.end)
	procs, urls, err := startNATS(b.Context(), e, topologies[0])
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { stopAll(procs) })
	ncs, err := connect(urls, 3)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { closeAll(ncs) })

	var rows []metrics.Endpoint
	for _, row := range leased.Endpoints() {
		rows = append(rows, metrics.Endpoint{Name: row.Name, Kinds: row.Kinds})
	}
	service, err := leased.Start(leased.Options{
		Front: ncs[0], Store: ncs[1], Hop: ncs[2], Replicas: 1,
		APIPrefix: leased.DefaultAPIPrefix, EventPrefix: leased.DefaultEventPrefix,
		MaxInFlight: leased.DefaultMaxInFlight, MaxForwards: leased.DefaultMaxForwards,
		Version: "0.0.0", Logger: slog.New(slog.DiscardHandler), Metrics: metrics.New(rows, metrics.Build{Version: "0.0.0"}),
	})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := service.Drain(ctx); err != nil {
			b.Error(err)
		}
	})
	for !isReady(service) {
		pause(b.Context(), 5*time.Millisecond)
		if b.Context().Err() != nil {
			b.Fatal("the service is not ready")
		}
	}

	for _, call := range []string{"renew", "cycle", "owner"} {
		b.Run(call, func(b *testing.B) {
			load := exec.Command(os.Args[0], "load", urls[0], call, strconv.Itoa(b.N))
			load.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			load.Stderr = os.Stderr
			stdin, err := load.StdinPipe()
			if err != nil {
				b.Fatal(err)
			}
			stdout, err := load.StdoutPipe()
			if err != nil {
				b.Fatal(err)
			}
			if err := load.Start(); err != nil {
				b.Fatal(err)
			}
			if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
				b.Fatalf("the load is not ready: %v", err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			before := selfCPU()
			if err := stdin.Close(); err != nil {
				b.Fatal(err)
			}
			if err := load.Wait(); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64((selfCPU()-before).Nanoseconds())/float64(b.N), "cpu-ns/op")
		})
	}
}

func isReady(s *leased.Service) bool {
	for _, c := range s.Ready() {
		if !c.OK {
			return false
		}
	}
	return true
}

// runLoad is the callers' process: it makes ready, says so, and when its
// standard input ends it has n operations made by 64 callers.
func runLoad(url, call, count string) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	ncs, err := connect([]string{url}, 2)
	if err != nil {
		return err
	}
	defer closeAll(ncs)
	s := &natsSystem{ncs: ncs, conns: len(ncs), urls: []string{url}}
	s.make = func(nc *nats.Conn) caller { return &wireCaller{nc: nc, prefix: leased.DefaultAPIPrefix + "."} }
	const callers, held = 64, 1024
	r := &run{system: s}
	r.serial.Store(uint64(time.Now().UnixNano())) // keys that no earlier load has used
	if err := r.prepare(context.Background(), callers, workload{held: held}); err != nil {
		return err
	}
	unit := map[string]func(*run, int) func(context.Context, *worker) error{
		"renew": renewUnit, "cycle": cycleUnit, "owner": ownerUnit(held),
	}[call](r, callers)
	each := 1
	if call == "cycle" {
		each = 5
	}
	fmt.Println("ready")
	if _, err := bufio.NewReader(os.Stdin).ReadByte(); err == nil {
		return fmt.Errorf("a byte instead of the end of input")
	}
	var left atomic.Int64
	left.Store(int64((n + each - 1) / each))
	var all sync.WaitGroup
	var failed atomic.Pointer[error]
	for i := range callers {
		all.Go(func() {
			w := &worker{id: i}
			for left.Add(-1) >= 0 && failed.Load() == nil {
				if err := unit(context.Background(), w); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	all.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}
