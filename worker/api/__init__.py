"""What a model author imports."""
