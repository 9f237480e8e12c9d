package schemas

import (
	"fmt"
	"strings"
	"testing"
)

func BenchmarkDecode(b *testing.B) {
	set, err := Load()
	if err != nil {
		b.Fatal(err)
	}
	var pairs []string
	for i := range 100 {
		pairs = append(pairs, fmt.Sprintf(`{"key":"shard-%d","revision":%d}`, i, 1760788800123456+i))
	}
	for _, c := range []struct{ call, body string }{
		{"acquire", `{"key":"notify-leader","holder":"notify-7f3a","ttl_ms":15000}`},
		{"renew", `{"key":"notify-leader","holder":"notify-7f3a","revision":1760788800123456,"ttl_ms":15000}`},
		{"release", `{"key":"notify-leader","holder":"notify-7f3a","revision":1760788800123456}`},
		{"owner", `{"key":"notify-leader"}`},
		{"forward", `{"key":"notify-leader","timeout_ms":2000,"payload":"` + strings.Repeat("YWJj", 256) + `"}`},
		{"renew_many", `{"holder":"notify-7f3a","ttl_ms":15000,"leases":[` + strings.Join(pairs, ",") + `]}`},
	} {
		b.Run(c.call, func(b *testing.B) {
			sch, body := set.Request(c.call), []byte(c.body)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := sch.Decode(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
