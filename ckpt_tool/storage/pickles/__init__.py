"""Pickles as data: read, written and surveyed without running any of them."""
