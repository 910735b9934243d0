"""`peagle-convert`: PyTorch checkpoints <-> Orbax. Uses the name tables of peagle_jax.checkpoint."""
