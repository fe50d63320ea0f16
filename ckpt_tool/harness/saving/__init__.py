"""Writing the harness's states as the real systems write them, one file a format.

The one idea: these writers share no code with `ckpt`'s own (torch.save, torch's distributed checkpointing, safetensors
and hand-built files), so that a reader and a writer that err in the same way are found out. Order of reading: `whole`
(what the ranks hold together), `formats` (which writer takes which layout), `sharded`, then any other.
"""
