"""The HTTP gateway, a process of its own. Speaks only `protocol` to the conductor."""
