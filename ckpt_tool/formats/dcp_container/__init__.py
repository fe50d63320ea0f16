"""Containers that several formats keep their tensors in, read and written from one statement each."""
