"""Meta's own checkpoints: `format.py` is the specification."""
