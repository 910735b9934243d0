"""The engine: host-side scheduling in plain Python, and the loop that drives the device step."""
