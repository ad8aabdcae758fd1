"""Registers the hypothesis profile `long` before pytest looks for it."""

from tests.support import budget

__all__ = ["budget"]
