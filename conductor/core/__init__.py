"""The pure conductor: `machine.handle(event, now) -> [command]`. It knows no socket, no clock."""
