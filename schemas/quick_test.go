package schemas

import (
	"encoding/json"
	"testing"
)

// TestQuicken holds quick schemas to the verdicts of the library on values around every bound.
func TestQuicken(t *testing.T) {
	quickened := 0
	for _, text := range []string{
		`{"type":"integer","minimum":1000,"maximum":600000,"multipleOf":1000}`,
		`{"type":"integer","minimum":1,"maximum":18446744073709551615}`,
		`{"type":"integer","minimum":0,"maximum":30000}`,
		`{"type":"integer","minimum":0,"maximum":30000,"exclusiveMinimum":5,"not":{"const":7}}`,
		`{"type":"integer","minimum":0,"maximum":30000,"enum":[5,7]}`,
		`{"type":"integer","minimum":-5,"maximum":30000}`,
		`{"type":"integer","minimum":0.5,"maximum":10,"multipleOf":2.5}`,
		`{"type":"integer","minimum":1}`,
		`{"type":"integer","maximum":18446744073709551616,"minimum":0}`,
		`{"type":["integer","null"],"minimum":1,"maximum":9}`,
		`{"type":"string"}`,
	} {
		js, err := compile("x.json", text)
		if err != nil {
			t.Fatal(err)
		}
		quick := quicken(js)
		if quick != js {
			quickened++
		}
		for _, v := range []any{
			nil, true, "5", "", []any{}, map[string]any{},
			json.Number("-0"), json.Number("-1"), json.Number("-5"), json.Number("-6"), json.Number("0"), json.Number("0.0"), json.Number("0.5"), json.Number("1"), json.Number("1.5"), json.Number("2"),
			json.Number("5"), json.Number("5.0"), json.Number("5e0"), json.Number("6"), json.Number("7"), json.Number("9"), json.Number("10"), json.Number("999"), json.Number("1000"), json.Number("1001"),
			json.Number("1e3"), json.Number("2000.0"), json.Number("30000"), json.Number("30001"), json.Number("599999"), json.Number("600000"), json.Number("600001"), json.Number("601000"),
			json.Number("18446744073709551615"), json.Number("18446744073709551616"), json.Number("18446744073709552616"), json.Number("1e999"), json.Number("1e-999"),
		} {
			want, got := js.Validate(v), quick.Validate(v)
			if (want == nil) != (got == nil) {
				t.Errorf("%s with %v: the library says %v, quick says %v", text, v, want, got)
			}
		}
	}
	if quickened != 5 {
		t.Errorf("%d schemas are quick, want 5", quickened)
	}
}
