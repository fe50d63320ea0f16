"""Deltas: what changed between two checkpoints, on disk as slime publishes weights and SGLang reads them (`folder`).

making     BASE and NEW, tensor by tensor, into a folder      `ckpt delta`
patching   BASE and a chain of folders into a checkpoint      `ckpt patch`
archive    the same over every byte of a step's files         `ckpt delta --dedup`, and back
"""
