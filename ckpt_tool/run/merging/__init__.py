"""The arithmetic of merges: each method is a recipe (`run.computed`) that makes one tensor from those of several models."""
