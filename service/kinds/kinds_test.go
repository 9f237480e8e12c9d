package kinds

import (
	"errors"
	"fmt"
	"testing"
)

func TestKindsAreClosedAndDistinct(t *testing.T) {
	seen := map[Kind]bool{}
	for _, i := range All() {
		if seen[i.Kind] {
			t.Errorf("kind %q stands twice", i.Kind)
		}
		seen[i.Kind] = true
		if i.Meaning == "" {
			t.Errorf("kind %q has no meaning", i.Kind)
		}
		if got, ok := Lookup(i.Kind); !ok || got != i {
			t.Errorf("Lookup(%q) = %v, %v", i.Kind, got, ok)
		}
		if i.Kind.IsError() != (i.Code != "") || i.Kind.Code() != i.Code {
			t.Errorf("kind %q: IsError %v with code %q", i.Kind, i.Kind.IsError(), i.Kind.Code())
		}
	}
	if _, ok := Lookup("no_such_kind"); ok {
		t.Error("Lookup knows a kind that is not in the set")
	}
}

func TestErrorsToKindsAndBack(t *testing.T) {
	cause := errors.New("disk on fire")
	err := fmt.Errorf("renew: %w", Errorf(Unavailable, "no leader: %w", cause))
	if got := Of(err); got != Unavailable {
		t.Errorf("Of = %q", got)
	}
	if !errors.Is(err, &Error{Kind: Unavailable}) || errors.Is(err, &Error{Kind: Lost}) {
		t.Error("errors.Is does not compare kinds")
	}
	if !errors.Is(err, cause) {
		t.Error("the cause is lost")
	}
	if Of(cause) != Internal || Of(nil) != "" {
		t.Errorf("Of(plain) = %q, Of(nil) = %q", Of(cause), Of(nil))
	}
}
