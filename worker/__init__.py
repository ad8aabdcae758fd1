"""The worker process: one device, one engine, the step-level loop."""
