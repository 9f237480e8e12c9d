package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/leased/leased/client"
	"github.com/leased/leased/service/kinds"
	"github.com/nats-io/nats.go/jetstream"
)

// One of several replicas leads. The work's context ends before another replica
// can be elected, and the lease is released when the work has ended.
func ExampleClient_Elect() {
	nc, done := serviceForExample()
	defer done()

	ctx, stop := context.WithCancel(context.Background())
	err := client.New(nc, client.Options{}).Elect(ctx, "notify-leader", client.ElectOptions{
		HoldOptions: client.HoldOptions{Holder: client.NewHolder("notify"), TTL: 15 * time.Second},
		OnElected: func(ctx context.Context, h *client.Hold) {
			fmt.Println("leading")
			stop() // this replica shuts down
			<-ctx.Done()
			fmt.Println("work has ended")
		},
		OnLost: func(cause error) { fmt.Println("released:", cause) },
	})
	fmt.Println("campaign is over:", err)
	// Output:
	// leading
	// work has ended
	// released: context canceled
	// campaign is over: context canceled
}

// One key, one piece of work.
func ExampleClient_Run() {
	nc, done := serviceForExample()
	defer done()
	c := client.New(nc, client.Options{})

	err := c.Run(context.Background(), "nightly-report", client.HoldOptions{TTL: 10 * time.Second}, func(ctx context.Context, h *client.Hold) error {
		err := c.Run(ctx, "nightly-report", client.HoldOptions{NoWait: true}, nil)
		var denied *client.DeniedError
		fmt.Println("a second one is denied:", errors.As(err, &denied) && denied.Lease.Holder == h.Holder())
		// The work, until ctx ends, its writes under h.Tenure().
		return nil
	})
	fmt.Println("done:", err)
	// Output:
	// a second one is denied: true
	// done: <nil>
}

// Two processes share eight shards. When one leaves, the other takes over its part.
func ExampleClient_Shards() {
	nc, done := serviceForExample()
	defer done()

	var shards []string
	for i := range 8 {
		shards = append(shards, fmt.Sprint("orders-", i))
	}
	var mu sync.Mutex
	owned := map[string]int{}
	count := func(process string) int {
		mu.Lock()
		defer mu.Unlock()
		return owned[process]
	}
	start := func(process string) (leave func()) {
		ctx, cancel := context.WithCancel(context.Background())
		left := make(chan struct{})
		go func() {
			defer close(left)
			_ = client.New(nc, client.Options{}).Shards(ctx, "orders", shards, client.ShardsOptions{
				HoldOptions: client.HoldOptions{Holder: client.NewHolder(process), TTL: time.Second},
				Work: func(ctx context.Context, h *client.Hold) {
					mu.Lock()
					owned[process]++
					mu.Unlock()
					<-ctx.Done() // consume the shard until then
					mu.Lock()
					owned[process]--
					mu.Unlock()
				},
			})
		}()
		return func() { cancel(); <-left }
	}

	leaveA := start("a")
	eventually(func() bool { return count("a") == 8 })
	fmt.Println("alone:", count("a"))
	leaveB := start("b")
	eventually(func() bool { return count("a") == 4 && count("b") == 4 })
	fmt.Println("two:", count("a"), count("b"))
	leaveA()
	eventually(func() bool { return count("b") == 8 })
	fmt.Println("alone again:", count("b"))
	leaveB()
	// Output:
	// alone: 8
	// two: 4 4
	// alone again: 8
}

// A request reaches whoever holds the key; the sender does not know who that is.
func ExampleInbox() {
	nc, done := serviceForExample()
	defer done()
	c := client.New(nc, client.Options{})
	ctx := context.Background()

	holder := client.NewHolder("cart-server")
	inbox, err := c.Inbox(holder, client.InboxOptions{Concurrency: 16})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer inbox.Close()
	hold, err := c.Hold(ctx, "cart-17", client.HoldOptions{Holder: holder})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = inbox.Serve(hold, func(ctx context.Context, r client.Request) []byte {
		// The request was meant for this owner: r.Fence is what its writes carry.
		return []byte(strings.ToUpper(string(r.Payload)))
	})
	if err != nil {
		fmt.Println(err)
		return
	}

	answer, err := c.Forward(ctx, client.ForwardRequest{Key: "cart-17", Payload: []byte("add a book")})
	fmt.Printf("%s %v\n", answer.Payload, err)

	_ = hold.Resign(ctx) // takes no more requests, answers those it has, then releases
	_, err = c.Forward(ctx, client.ForwardRequest{Key: "cart-17"})
	fmt.Println(kinds.Of(err))
	// Output:
	// ADD A BOOK <nil>
	// not_held
}

// The store refuses the write of a holder that has lost its lease without noticing.
func ExamplePutFenced() {
	nc, done := serviceForExample()
	defer done()
	ctx := context.Background()
	js, _ := jetstream.New(nc)
	things, err := js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "things"})
	if err != nil {
		fmt.Println(err)
		return
	}
	c := client.New(nc, client.Options{})

	old, _ := c.Hold(ctx, "writer", client.HoldOptions{})
	late := old.Tenure() // the old holder is paused here, before its write
	_ = old.Resign(ctx)  // and loses the lease

	now, _ := c.Hold(ctx, "writer", client.HoldOptions{})
	fmt.Println("the owner writes:", client.PutFenced(ctx, things, "balance", now.Tenure(), []byte("100")))

	var stale *client.StaleError
	err = client.PutFenced(ctx, things, "balance", late, []byte("7"))
	fmt.Println("the late write is stale:", errors.As(err, &stale))
	balance, _, _ := client.GetFenced(ctx, things, "balance")
	fmt.Printf("balance: %s\n", balance)
	_ = now.Resign(ctx)
	// Output:
	// the owner writes: <nil>
	// the late write is stale: true
	// balance: 100
}

// A server that guards something of its own: each write names the tenure it is made
// under, however often the lease was renewed meanwhile.
func ExampleFence() {
	var fence client.Fence
	write := func(tenure uint64, text string) {
		err := fence.Do(context.Background(), "printer", tenure, func() error {
			fmt.Println("printing", text)
			return nil
		})
		if err != nil {
			fmt.Println(err)
		}
	}
	write(42, "page 1")
	write(45, "page 2") // the next owner
	write(42, "page 3") // the first one wakes up
	// Output:
	// printing page 1
	// printing page 2
	// fence 42 is stale: printer has seen 45
}
