"""Is a checkpoint complete and plausible for its own config? What `ckpt audit` finds, by headers and by values."""
