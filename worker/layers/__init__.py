"""Blocks shared by models, over api handles."""
