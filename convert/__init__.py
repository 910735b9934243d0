"""PyTorch checkpoints <-> Orbax: `peagle-convert`. The tables are those of peagle_jax.checkpoint."""
