"""The pure conductor: `machine.handle(event, now) -> [command]`. Knows no socket, thread or clock."""
