"""Makes the embedded model: `python -m lab.embedded`."""
