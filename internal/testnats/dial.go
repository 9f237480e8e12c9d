package testnats

import (
	"time"

	"github.com/nats-io/nats.go"
)

// Dial is nats.Connect without a URL, for who gives it with the options; change has the last
// word on them.
func Dial(change func(*nats.Options) error) func(...nats.Option) (*nats.Conn, error) {
	return func(options ...nats.Option) (*nats.Conn, error) {
		o := nats.GetDefaultOptions()
		o.Timeout = 5 * time.Second
		for _, set := range append(options, change) {
			if err := set(&o); err != nil {
				return nil, err
			}
		}
		return o.Connect()
	}
}
