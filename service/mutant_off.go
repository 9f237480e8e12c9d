//go:build !mutant

package service

import (
	"context"

	"github.com/nats-io/nats.go/jetstream"
)

// mutant says whether the named fault is built in. It never is: only the build
// with which test/fault proves that its checks notice has any.
func mutant(string) bool { return false }

func mutantConflict(err error) error { return err }

func (j *js) mutantGet(context.Context, string) (Entry, error) { panic("no mutant") }

func mutantConfig(cfg jetstream.StreamConfig) jetstream.StreamConfig { return cfg }
