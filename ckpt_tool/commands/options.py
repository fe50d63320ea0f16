"""What the verbs take, as values: `Reading`, `Writing`, and how text from a command line becomes them.

The command line and the Python face use the same two builders, so `--max-shard-size 5GB` and
`max_shard_size="5GB"` (or `5_000_000_000`) are one thing:

    >>> writing_from({"tp": 2, "remove_keys": ["lm_head.*"], "memory": "64MiB"}).degrees
    {'tp': 2}

Every fault of a call is collected and raised at once, as one UsageError (E0280). What only the checkpoint can tell
(does this degree divide? does this pattern match?) is left to the commands. Nothing here reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

from ckpt_tool.commands import values
from ckpt_tool.commands.reading import Reading as Reading
from ckpt_tool.commands.values import BadValue
from ckpt_tool.errors import UsageError, near_misses
from ckpt_tool.formats.entry import entries

FORMATS = tuple(entries())
SHARDINGS = ("v1", "v2")  # what Paddle calls its stages of sharding: whole tensors by owner, slices of fused buffers
SPECS = ("local", "te")  # Megatron's layers: of its own modules, of Transformer Engine's
DIALECTS = ("hf", "megatron", "paddle", "meta", "keep")
DEGREES = ("tp", "pp", "ep", "etp", "dp", "cp", "vpp")
POLICIES = ("largest-dim", "prefix", "best-subset", "dtensor", "pad", "replicate", "error")
METHODS = (
    "union",
    "lora",
    "linear",
    "slerp",
    "nuslerp",
    "task-arithmetic",
    "ties",
    "dare-linear",
    "dare-ties",
    "della",
    "della-linear",
    "breadcrumbs",
    "breadcrumbs-ties",
    "model-stock",
    "passthrough",
    "ema",
)
TIED_HEAD = ("keep", "tie", "untie")
VERIFY = ("off", "quick", "full")
DEVICES = ("cpu", "cuda")
DEFAULT_POLICY = "largest-dim"
MOST_ROWS = (1 << 31) - 1  # of --vocab-size: token ids are 32-bit numbers
DEFAULT_SHARD_SIZE = 5_000_000_000  # bytes; what `save_pretrained` of transformers calls "5GB"
DEFAULT_MEMORY = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Writing:
    """How an output is laid out and written. None and empty mean "not asked for": the command takes its default.

    degrees: mesh dim -> size, only those that were given. dtypes: state ("" for all) -> the house's dtype name.
    states, drop: as given; "all" and "optimizer" are the command's to expand. remove_keys, keep_keys: patterns
    (`@FILE` already read). max_shard_size, memory: bytes. threads: None lets the executor choose. pinned: bytes of
    large and of small blocks of pinned memory that `device` sets aside before it begins; (0, 0) for what the run needs.
    """

    to: str | None = None
    dialect: str | None = None
    aoa: str | None = None
    degrees: Mapping[str, int] = field(default_factory=dict)
    layout: str | None = None
    pp_split: tuple[int, ...] = ()
    zero: int | None = None
    sharding: str | None = None
    spec: str | None = None
    on_indivisible: str | None = None
    states: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    as_model: str | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    dequantize: bool = False
    vocab_size: int | None = None
    tied_head: str | None = None
    allow_lossy: bool = False
    remove_keys: tuple[str, ...] = ()
    keep_keys: tuple[str, ...] = ()
    model_only: bool = False
    max_shard_size: int | None = None
    force: bool = False
    resume: bool = True
    fsync: bool = True
    memory: int = DEFAULT_MEMORY
    threads: int | None = None
    verify: str = "quick"
    dry_run: bool = False
    plan_file: str | None = None
    ray: str | None = None
    device: str = "cpu"
    pinned: tuple[int, int] = (0, 0)


class ReadingOptions(TypedDict, total=False):
    """The options of reading as keywords, by their long names."""

    from_format: str | None
    follow_symlinks: bool
    lenient: bool
    allow_compressed: bool
    require_checksums: bool
    prefer: str | None
    replica_policy: str | None
    family: str | None
    config: str | None


class WritingOptions(TypedDict, total=False):
    """The options of writing as keywords, by their long names (`--plan` is `plan`, `--no-resume` is `resume=False`)."""

    to: str | None
    dialect: str | None
    aoa: str | None
    tp: int | None
    pp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    cp: int | None
    vpp: int | None
    layout: str | None
    pp_split: str | Iterable[int] | None
    zero: int | None
    sharding: str | None
    spec: str | None
    on_indivisible: str | None
    strict_shard: bool
    state: str | Iterable[str] | None
    drop: str | Iterable[str] | None
    as_model: str | None
    dtype: str | Iterable[str] | Mapping[str, str] | None
    dequantize: bool
    vocab_size: int | None
    tied_head: str | None
    allow_lossy: bool
    remove_keys: str | Iterable[str] | None
    keep_keys: str | Iterable[str] | None
    model_only: bool
    max_shard_size: str | int | None
    force: bool
    resume: bool
    fsync: bool
    memory: str | int | None
    threads: int | None
    verify: str | None
    dry_run: bool
    plan: str | None
    ray: str | None
    device: str | None
    pinned: str | int | None


class MergeOptions(TypedDict, total=False):
    """The options of `merge` as keywords (`--weight` is `weight`, `--lambda` is `lambda_`)."""

    method: str | None
    weight: str | float | Iterable[float] | None
    base: str | None
    density: str | float | Iterable[float] | None
    t: float | None
    seed: int | None
    epsilon: float | None
    gamma: float | None
    lambda_: float | None
    normalize: bool | None
    decay: float | None
    last: int | None
    tokenizer: str | None
    merge_config: str | None
    on_conflict: str | None


class CallOptions(ReadingOptions, WritingOptions, total=False):
    """Both, for the verbs that read and write."""


T = TypeVar("T")
D = TypeVar("D")


class Taken:
    """Options taken out of a mapping one by one; every fault is kept until `settle`."""

    def __init__(self, given: Mapping[str, Any], known: Iterable[str] = ()) -> None:
        self._given = given
        self._faults: list[BadValue] = []
        for name in given if known else ():
            if name not in known:
                hint = near_misses(name, known) or f"the options are {', '.join(known)}"
                self._faults.append(BadValue(f"unknown option {name!r}", hint=hint))

    def take(self, name: str, parse: Callable[[Any], T], default: D) -> T | D:
        """The parsed value of `name`; `default` when it is missing, None or bad."""
        value = self._given.get(name)
        if value is None:
            return default
        try:
            return parse(value)
        except BadValue as fault:
            self._faults.append(BadValue(f"{flag(name)}: {fault}", hint=fault.hint, path=fault.path))
            return default

    def fault(self, message: str, hint: str) -> None:
        self._faults.append(BadValue(message, hint=hint))

    def settle(self) -> None:
        """Raise all faults as one UsageError (E0280), if there are any."""
        if not self._faults:
            return
        first, *others = self._faults
        faults = [f"{fault} ({fault.hint})" if fault.hint else str(fault) for fault in others]
        raise UsageError(str(first), code="E0280", path=first.path, hint=first.hint, faults=faults)


def flag(name: str) -> str:
    """The option as it is typed: `from_format` -> `--from`."""
    return "--" + {"from_format": "from", "map_file": "map", "lambda_": "lambda", "merge_config": "config"}.get(
        name, name
    ).replace("_", "-")


def reading_from(given: Mapping[str, Any]) -> Reading:
    """`Reading` from keywords. Raises UsageError."""
    taken = Taken(given, ReadingOptions.__annotations__)
    reading = _reading(taken)
    taken.settle()
    return reading


def writing_from(given: Mapping[str, Any]) -> Writing:
    """`Writing` from keywords. Raises UsageError."""
    taken = Taken(given, WritingOptions.__annotations__)
    writing = _writing(taken)
    taken.settle()
    return writing


def merging_from(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `commands.merge.merge` takes, from keywords. Raises UsageError."""
    taken = Taken(given, MergeOptions.__annotations__)
    take = taken.take
    found = {
        "method": take("method", values.one_of(METHODS), None),
        "weights": take("weight", values.numbers, ()),
        "base": take("base", values.text, None),
        "density": take("density", values.numbers, ()),
        "t": take("t", values.number, None),
        "seed": take("seed", values.integer, None),
        "epsilon": take("epsilon", values.number, None),
        "gamma": take("gamma", values.number, None),
        "factor": take("lambda_", values.number, None),
        "normalize": take("normalize", bool, None),
        "decay": take("decay", values.number, None),
        "last": take("last", values.count, None),
        "tokenizer": take("tokenizer", values.one_of(("base",)), None),
        "config": take("merge_config", values.text, None),
        "on_conflict": take("on_conflict", values.one_of(("error", "first", "last")), "error"),
    }
    taken.settle()
    return found


def both_from(given: Mapping[str, Any]) -> tuple[Reading, Writing]:
    """Both from one set of keywords, all faults at once. Raises UsageError."""
    taken = Taken(given, CallOptions.__annotations__)
    reading, writing = _reading(taken), _writing(taken)
    taken.settle()
    return reading, writing


def _reading(taken: Taken) -> Reading:
    return Reading(
        from_format=taken.take("from_format", values.one_of(FORMATS), None),
        follow_symlinks=taken.take("follow_symlinks", bool, False),
        lenient=taken.take("lenient", bool, False),
        allow_compressed=taken.take("allow_compressed", bool, False),
        require_checksums=taken.take("require_checksums", bool, False),
        prefer=taken.take("prefer", values.text, None),
        replica_policy=taken.take("replica_policy", values.one_of(("error", "first")), None),
        family=taken.take("family", values.text, None),
        config=taken.take("config", values.text, None),
    )


def _writing(taken: Taken) -> Writing:
    take = taken.take
    degrees = {name: size for name in DEGREES if (size := take(name, values.count, 0))}
    policy = take("on_indivisible", values.one_of(POLICIES), "")
    if take("strict_shard", bool, False):
        if policy not in ("", "error"):
            taken.fault(
                f"--strict-shard means --on-indivisible error, but --on-indivisible is {policy}", "give one of the two"
            )
        policy = "error"
    return Writing(
        to=take("to", values.one_of(FORMATS), None),
        dialect=take("dialect", values.one_of(DIALECTS), None),
        aoa=take("aoa", values.text, None),
        degrees=degrees,
        layout=take("layout", values.text, None),
        pp_split=take("pp_split", values.counts, ()),
        zero=take("zero", values.between(0, 3), None),
        sharding=take("sharding", values.one_of(SHARDINGS), None),
        spec=take("spec", values.one_of(SPECS), None),
        on_indivisible=policy or None,
        states=take("state", values.words, ()),
        drop=take("drop", values.words, ()),
        as_model=take("as_model", values.one_of(("ema", "master")), None),
        dtypes=take("dtype", values.dtypes, {}),
        dequantize=take("dequantize", bool, False),
        vocab_size=take("vocab_size", values.between(1, MOST_ROWS), None),
        tied_head=take("tied_head", values.one_of(TIED_HEAD), None),
        allow_lossy=take("allow_lossy", bool, False),
        remove_keys=take("remove_keys", values.patterns, ()),
        keep_keys=take("keep_keys", values.patterns, ()),
        model_only=take("model_only", bool, False),
        max_shard_size=take("max_shard_size", values.size, None),
        force=take("force", bool, False),
        resume=take("resume", bool, True),
        fsync=take("fsync", bool, True),
        memory=take("memory", values.size, DEFAULT_MEMORY),
        threads=take("threads", values.count, None),
        verify=take("verify", values.one_of(VERIFY), "quick"),
        dry_run=take("dry_run", bool, False),
        plan_file=take("plan", values.output, None),
        ray=take("ray", values.text, None),
        device=take("device", values.one_of(DEVICES), "cpu"),
        pinned=take("pinned", values.sizes, (0, 0)),
    )
