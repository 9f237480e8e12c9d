package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// visible is text of others as a person may read it, in one line. What a terminal
// would obey instead of showing it (control characters, also those of C1, line breaks,
// and what turns the direction of writing) stands as an escape: holders, metas, events
// and the sentences of replies are written by whoever may publish.
func visible(s string) string {
	return escaped(s, func(r rune) bool { return false })
}

// visiblePage is visible for text that is shown by itself: its lines and tabs stay.
func visiblePage(s string) string {
	return escaped(s, func(r rune) bool { return r == '\n' || r == '\t' })
}

func escaped(s string, keep func(rune) bool) string {
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			b.WriteString(`\x` + strconv.FormatUint(uint64(s[0]), 16))
		case unicode.IsPrint(r) || keep(r):
			b.WriteString(s[:n])
		default:
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
		s = s[n:]
	}
	return b.String()
}

// visibleJSON is valid JSON that a terminal shows and does not obey, with the same
// meaning: it has such characters inside strings only, but for white space.
func visibleJSON(text []byte) string {
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return visible(string(text))
	}
	var b strings.Builder
	for _, r := range compact.String() {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}
