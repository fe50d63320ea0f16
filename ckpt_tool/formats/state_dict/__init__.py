"""Nested state dicts: how `torch` and `dcp` files name tensors, and how names find their place again."""
