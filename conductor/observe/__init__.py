"""What operators see: snapshots and the stats socket."""
