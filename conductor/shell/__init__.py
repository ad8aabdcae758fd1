"""The uvloop shell round the core: sockets, processes, timers."""
