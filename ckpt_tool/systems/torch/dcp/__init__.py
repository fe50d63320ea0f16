"""`dcp`: PyTorch distributed checkpoints. `format` is the specification."""
