"""`peagle-convert`: PyTorch checkpoints to Orbax and back."""
