"""The engine: one path from prepare to postprocess (docs/architecture.md)."""
