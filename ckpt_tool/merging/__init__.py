"""Merging models: the options, what is merged with what, and each method's arithmetic as a recipe (`run.computed`)."""
