"""ckpt: read sharded training checkpoints of any format, reshard and convert them, prove every value.

    import ckpt_tool as ckpt

    cat = ckpt.open("runs/7/iter_0000100")                     # any format, headers only
    w = cat["model.layers.0.mlp.down_proj.weight"][:16].numpy()  # only these rows are read
    ckpt.convert("runs/7/iter_0000100", "out", to="safetensors", tp=1)

The functions take the options of the command line as keywords (`--max-shard-size 5GB` is `max_shard_size="5GB"`) and
return the document that `--json` prints, as a dict of a type that is exported here too (`WriteResult`, ...). They raise
`CkptError`, whose subclasses are here as well. All of it is loaded on first use, so importing this package costs
nothing.
"""

import sys

__version__ = "0.2.0"

# The exported names, by the module that defines them.
_FUNCTIONS = frozenset(
    "apply audit convert delta diff inspect latest merge open patch plan prune reshard status verify".split()
)
_ERRORS = frozenset(
    "CkptError CorruptFile Incomplete InconsistentCheckpoint InputError InternalError Interrupted OutputExists "
    "ReplicasDiffer SourceChanged StorageError Unexplained UnknownFormat UnmappedTensor UnsafeInput UsageError".split()
)
_PROGRESS = frozenset({"Progress", "Silent"})
_CATALOG = frozenset({"LazyTensor", "OpenCatalog"})
_RESULTS = frozenset(
    "ApplyResult AuditResult DeltaResult DiffResult InspectResult LatestResult PruneResult StatusResult VerifyResult "
    "WriteResult".split()
)

__all__ = sorted({"__version__", *_FUNCTIONS, *_ERRORS, *_PROGRESS, *_CATALOG, *_RESULTS})


class _Package(type(sys)):
    """This module. Its function `plan` stays what `plan` means here, though there is a folder `plan` inside, which
    Python would bind to that name as soon as anything is imported from it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FUNCTIONS and isinstance(value, type(sys)):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name in _FUNCTIONS:
        from ckpt_tool import api as home
    elif name in _ERRORS:
        from ckpt_tool import errors as home
    elif name in _PROGRESS:
        from ckpt_tool.core import progress as home
    elif name in _CATALOG:
        from ckpt_tool.run import lazy as home
    elif name in _RESULTS:
        from ckpt_tool.core import documents as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return list(__all__)
