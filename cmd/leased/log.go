package main

import (
	"log/slog"
	"os"

	"golang.org/x/term"
)

// logFlags are the flags of the log, which goes to stderr.
type logFlags struct {
	LogLevel  string `group:"logs" enum:"debug,info,warn,error" default:"info" placeholder:"LEVEL" help:"Least level that is logged: debug, info, warn or error (default info)."`
	LogFormat string `group:"logs" enum:"auto,text,json" default:"auto" placeholder:"FORMAT" help:"text, json, or auto: text on a terminal, else json (default auto)."`
}

// logger makes the logger of the flags, raised to atLeast.
func (f logFlags) logger(atLeast slog.Level) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.LogLevel)); err != nil {
		level = slog.LevelInfo
	}
	options := &slog.HandlerOptions{Level: max(level, atLeast)}
	text := f.LogFormat == "text" ||
		f.LogFormat == "auto" && term.IsTerminal(int(os.Stderr.Fd()))
	if text {
		return slog.New(slog.NewTextHandler(os.Stderr, options))
	}
	return slog.New(slog.NewJSONHandler(os.Stderr, options))
}
