"""ckpt: read sharded training checkpoints of any format, lay them out anew, prove every value.

    import ckpt_tool as ckpt

    cat = ckpt.open("runs/7/iter_0000100")                     # any format, headers only
    w = cat["model.layers.0.mlp.down_proj.weight"][:16].numpy()  # only these rows are read
    ckpt.convert("runs/7/iter_0000100", "out", to="safetensors", tp=1)

The verbs take the options of the command line as keywords (`--max-shard-size 5GB` is `max_shard_size="5GB"`) and
return the document that `--json` prints; they raise `ckpt_tool.errors.CkptError`. They are loaded on first use, so
importing this package costs nothing.
"""

__version__ = "0.1.0"
__all__ = [
    *("__version__", "audit", "convert", "delta", "diff", "latest", "merge", "open", "patch", "prune", "reshard"),
    "verify",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        from ckpt_tool import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
