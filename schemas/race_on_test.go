//go:build race

package schemas

const raceEnabled = true // then times mean nothing
