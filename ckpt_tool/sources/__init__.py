"""Sources: a path becomes an open checkpoint, its model's config, and the tensors chosen of it."""
