"""A small multi-rank trainer that proves a reshard: train, save sharded, kill, reshard with `ckpt`, resume, compare bits.

Order of reading: `layout`, `model`, `tape`, `schedule`, `train`; `pieces` is what a rank says about its state. Needs torch.
"""
