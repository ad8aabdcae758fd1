"""Wiring, signals, the conductor link and the main thread of a worker."""
