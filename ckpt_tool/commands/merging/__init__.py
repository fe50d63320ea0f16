"""Merging models by arithmetic: what the command line or a mergekit config asks for, checked, as computed tensors."""
