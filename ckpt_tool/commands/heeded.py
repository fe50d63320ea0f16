"""Options that can take effect, and names that say what is written: an option that the target ignores is an error.

    --to safetensors --zero 3          E0261: zero has no meaning for safetensors
    --to torch OUT.ckpt                one file: `Holds.single` has the suffix
    --to safetensors OUT.ckpt          E1611: named like a weights file of another format

What a format heeds it says itself (`Holds.heeds`); what it is made to say by what travels (`torch` with training state is one
file) its target says (`Target.by_size`). Only what was given in words counts, and what holds anyway is no fault: `--zero 0`
where there are no data ranks, `--on-indivisible error` where nothing falls back, a degree of 1.
"""

from __future__ import annotations

from pathlib import Path

from ckpt_tool.commands.options import Writing
from ckpt_tool.core.target import Target
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.base import WEIGHT_SUFFIXES, Format

SHARD_SIZE = "max-shard-size"


def refuse_idle(fmt: Format, writing: Writing) -> None:
    """Raise UsageError E0261 for options that would change nothing in silence, all at once."""
    given = {
        SHARD_SIZE: writing.max_shard_size is not None,
        "zero": bool(writing.zero) or writing.zero is not None and "dp" in fmt.holds.mesh,
        "sharding": writing.sharding is not None,
        "spec": writing.spec is not None,
        "pp-split": bool(writing.pp_split),
        "layout": writing.layout is not None,
        "on-indivisible": writing.on_indivisible not in (None, "error"),
    }
    idle = [name for name, said in given.items() if said and name not in fmt.holds.heeds]
    if idle:
        faults = [f"--{name} has no meaning for {fmt.name}: {_whose(name)}" for name in idle]
        raise UsageError(
            faults[0].partition(":")[0], code="E0261", hint=f"{_whose(idle[0])}: leave it off", faults=faults[1:]
        )


def refuse_unsplit(target: Target, fmt: Format, writing: Writing) -> None:
    """Raise UsageError E0261 for `--max-shard-size` where the output is one file whatever its size."""
    if writing.max_shard_size is None or target.by_size:
        return
    if target.single is not None:
        why, hint = f"{target.single} is one file", "leave it off, or name a folder as the output"
    else:
        why = f"{fmt.name} writes training state and extras as one file"
        hint = "leave it off, or write the model alone: --state model"
    raise UsageError(f"--{SHARD_SIZE} has no effect: {why}", code="E0261", hint=hint)


def single_name(destination: Path, fmt: Format) -> str | None:
    """The name of the one file that the output is, None for a folder.

    A format that may be one file takes a name with one of its own suffixes for that. A name with the suffix of another
    format's weights is an error (UsageError E1611): a reader would take the file for what it is not. Formats of folders take
    any name, and a folder that is there keeps being one.
    """
    single, suffix = fmt.holds.single, destination.suffix.lower()
    if not single or destination.is_dir():
        return None
    if suffix in single:
        return destination.name
    if suffix in WEIGHT_SUFFIXES:
        raise UsageError(
            f"{destination.name} is named like a file of another format: one file of {fmt.name} ends in {' or '.join(single)}",
            code="E1611",
            path=destination,
            hint=f"name it {destination.stem}{single[0]} for one file, {destination.stem} for a folder",
        )
    return None


def _whose(option: str) -> str:
    """`it belongs to dcp and sharded`."""
    *most, last = (name for name in registry.NAMES if option in registry.by_name(name).holds.heeds)
    return f"it belongs to {', '.join(most)} and {last}" if most else f"it belongs to {last}"
