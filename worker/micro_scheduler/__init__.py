"""The micro-scheduler: pure. Events in, decisions out; knows no thread, clock, socket or torch."""
