"""A small multi-rank trainer that proves a reshard: train, save sharded, kill, reshard with `ckpt`, resume, compare
bits.

Order of reading. The trainer: `shape`, `layout`, `tape`, `model`, `gradients`, `schedule`, `train`, with `weights` and
`sharding` for what a rank holds and `comm`, `launch` for how ranks talk and start. What is saved: `pieces`, then
`store`, `saving/`, `loading`. The proof: `runs`, `faults`, `evidence`, `matrix`. Needs torch.
"""
