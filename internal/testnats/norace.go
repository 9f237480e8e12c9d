//go:build !race

package testnats

const raceEnabled = false
