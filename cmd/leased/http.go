package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/exporter-toolkit/web"
)

// page is one path of the HTTP port, with a line about it for the list at /.
type page struct {
	path, about string
	handler     http.Handler
}

// httpServer is the HTTP port.
type httpServer struct {
	listener net.Listener
	server   *http.Server
	done     chan struct{}
}

// serveHTTP opens the port. configFile, if any, is an exporter-toolkit web
// configuration: TLS, users, headers.
func serveHTTP(listen, configFile string, pages []page, log *slog.Logger) (*httpServer, error) {
	if err := web.Validate(configFile); err != nil {
		return nil, usagef("--http-config %s: %w", configFile, err)
	}
	listener, err := net.Listen("tcp", listen)
	if err != nil {
		return nil, fmt.Errorf("--http-listen %s: %w", listen, err)
	}
	s := &httpServer{
		listener: listener,
		done:     make(chan struct{}),
		server: &http.Server{
			Handler:           routes(pages),
			ReadHeaderTimeout: 5 * time.Second,
			ReadTimeout:       10 * time.Second,
			WriteTimeout:      30 * time.Second,
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    16 << 10,
			ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		},
	}
	go func() {
		defer close(s.done)
		err := web.Serve(listener, s.server, &web.FlagConfig{WebConfigFile: &configFile}, log)
		if err != nil && !errors.Is(err, http.ErrServerClosed) {
			log.Error("the HTTP port is closed", "error", err)
		}
	}()
	return s, nil
}

// address is where the port really is, also when any free one was asked for.
func (s *httpServer) address() string { return s.listener.Addr().String() }

// close answers what is being asked, for 2 s at most, and closes the port.
func (s *httpServer) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if s.server.Shutdown(ctx) != nil {
		s.server.Close()
	}
	<-s.done
}

// routes serves pages, and a plain list of them at /.
func routes(pages []page) http.Handler {
	mux := http.NewServeMux()
	list := "leased\n\n"
	for _, p := range pages {
		mux.Handle(p.path, p.handler)
		list += fmt.Sprintf("%-10s %s\n", p.path, p.about)
	}
	mux.Handle("/{$}", text(func(*http.Request) (int, string) { return http.StatusOK, list }))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

// text answers with plain text that no cache keeps.
func text(answer func(*http.Request) (code int, body string)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code, body := answer(r)
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	})
}
