"""State that a node's compute needs, driven step by step."""
