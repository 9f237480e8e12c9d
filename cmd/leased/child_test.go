package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

// child is what the tests give leased run to run, where a shell will not do.
func child() {
	switch args := os.Args[2:]; os.Args[1] {
	case "until": // FILE CODE: waits until the file exists
		fmt.Println("ready")
		for !exists(args[0]) {
			time.Sleep(time.Millisecond)
		}
		code, _ := strconv.Atoi(args[1])
		os.Exit(code)
	case "ticks": // says tick for ever
		for {
			fmt.Println("tick")
			time.Sleep(20 * time.Millisecond)
		}
	case "away": // FILE: leaves the process group, but not its own child, which it never reaps
		if err := exec.Command("sleep", "1000").Start(); err != nil {
			panic(err)
		}
		if _, err := syscall.Setsid(); err != nil {
			panic(err)
		}
		put(args[0], strconv.Itoa(os.Getpid()))
		time.Sleep(time.Hour)
	case "beats": // FILE: appends the time to the file for ever
		signal.Ignore(syscall.SIGTERM)
		put(args[0]+".pids", fmt.Sprint(os.Getppid(), os.Getpid()))
		beats(args[0])
	}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// put writes a file, all of it or nothing.
func put(file, text string) {
	if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		panic(err)
	}
}

// beats appends the boot clock and the wall clock to a file, in a line, every
// millisecond.
func beats(file string) {
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	for {
		if _, err := fmt.Fprintf(f, "%d %d\n", bootNow(), time.Now().UnixNano()); err != nil {
			panic(err)
		}
		time.Sleep(time.Millisecond)
	}
}
