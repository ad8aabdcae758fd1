"""Bundled models; loaded by name, imported by nobody."""
