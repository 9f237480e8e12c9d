package main

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

type leaseRequest struct {
	Key      string `json:"key"`
	Holder   string `json:"holder"`
	Revision uint64 `json:"revision,omitempty"`
	TTLMs    int64  `json:"ttl_ms,omitempty"`
}

type leaseReply struct {
	Granted  bool   `json:"granted"`
	Held     bool   `json:"held"`
	Holder   string `json:"holder"`
	Revision uint64 `json:"revision"`
	Error    string `json:"error"`
	Kind     string `json:"kind"`
}

func call(nc *nats.Conn, subject string, req leaseRequest) (leaseReply, error) {
	body, err := json.Marshal(req)
	if err != nil {
		return leaseReply{}, err
	}
	msg, err := nc.Request(subject, body, 5*time.Second)
	if err != nil {
		return leaseReply{}, err
	}
	var reply leaseReply
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		return leaseReply{}, err
	}
	if reply.Error != "" {
		return reply, fmt.Errorf("%s: %s", reply.Kind, reply.Error)
	}
	return reply, nil
}

func main() {
	nc, err := nats.Connect(nats.DefaultURL)
	if err != nil {
		panic(err)
	}
	defer nc.Close()

	const ttl = 15 * time.Second
	req := leaseRequest{Key: "notify-leader", Holder: "notify-7f3a", TTLMs: ttl.Milliseconds()}
	got, err := call(nc, "api.leases.acquire", req)
	if err != nil {
		panic(err)
	}
	if !got.Granted {
		fmt.Println("held by", got.Holder)
		return
	}
	for range 3 {
		time.Sleep(ttl / 3)
		req.Revision = got.Revision
		got, err = call(nc, "api.leases.renew", req)
		if err != nil {
			// "lost" means stop acting as owner now.
			fmt.Println("lease lost:", err)
			return
		}
	}
	req.Revision = got.Revision
	if _, err := call(nc, "api.leases.release", req); err != nil {
		fmt.Println("release:", err)
	}
}
