"""Reading a checkpoint back into a trainer: box by box, by the tool's own lazy catalog.

    found = prepared("run/step_0000010", scratch)      # once a job: hub names, whatever format it is in
    reader = Loader(found)                             # once a rank
    reader.read("lm_head.weight", "exp_avg", (50, 0), (50, 64))      # only these bytes are read

The one idea: a rank asks for boxes of logical tensors, so nothing here knows layouts. Formats at home with Megatron's
or Paddle's names are first brought to the hub's by the tool itself, as a user would: `ckpt convert SRC DST --to sharded
--dialect hf`.

Cost: headers, and what is requested. What it does not do: guess: a tensor that is missing is an error that names it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckpt_tool.errors import CkptError, Incomplete, InconsistentCheckpoint, near_misses
from ckpt_tool.formats import registry
from ckpt_tool.harness.pieces import RankState
from ckpt_tool.harness.saving.whole import HARNESS
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.storage.opening import open_tree

FOREIGN = frozenset(("megatron", "megatron-dist", "megatron-fsdp", "paddle", "paddle-unified", "paddle-flex", "meta"))
POINTERS = ("latest_checkpointed_iteration.txt", "latest")
TWINS = {"master": "model", "model": "master"}
TIED = {"model.embed_tokens.weight": "lm_head.weight", "lm_head.weight": "model.embed_tokens.weight"}
MISSING = "E1530"
SHAPE = "E1531"
TOOL = "E1532"
SCALARS = "E1533"


class ToolFailed(CkptError):
    """A command of the tool's own ended with an error: the same exit code, and its message."""


def run_tool(*arguments: str | Path, json_output: bool = True) -> dict[str, Any]:
    """`python -m ckpt_tool ARGUMENTS --json` as a user would run it: its document. Raises ToolFailed E1532 with its
    exit code and its own message. `verify` and `diff` exit with 1 on findings: that is an answer, and the document says
    so."""
    words = [str(argument) for argument in arguments] + (["--json", "--progress", "none"] if json_output else [])
    done = subprocess.run([sys.executable, "-m", "ckpt_tool", *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        line, (message, hint) = " ".join(map(str, arguments)), _read_errors(done.stderr)
        error = ToolFailed(f"ckpt {line} ended with exit code {done.returncode}: {message}", code=TOOL, hint=hint)
        error.exit_code = done.returncode  # type: ignore[misc]  # per instance: the tool's own
        raise error
    return dict(json.loads(done.stdout)) if json_output else {}


def _read_errors(errors: str) -> tuple[str, str]:
    """What a command of ours wrote to stderr, and its hint."""
    try:
        error = json.loads(errors)["error"]
        return f"{error['code']}: {error['message']}", error["hint"] or "run the line by hand"
    except (ValueError, KeyError, TypeError):
        return errors.strip()[-2000:] or "it wrote nothing", "run the line by hand"


def folder_of(path: Path) -> Path:
    """The folder that holds the checkpoint itself: the one that a pointer file names, or the given one."""
    for pointer in POINTERS:
        if (path / pointer).is_file():
            name = (path / pointer).read_text().strip()
            return path / (f"iter_{int(name):07d}" if name.isdigit() else name)
    return path


def prepare_checkpoint(path: Path, scratch: Path) -> Path:
    """A checkpoint with the hub's names: the given one, or a conversion of it in `scratch`. Raises ToolFailed."""
    tree = open_tree(str(folder_of(path)))
    fmt, _ = registry.detect(tree)
    if fmt.name not in FOREIGN:
        return folder_of(path)
    run_tool("convert", path, scratch, "--to", "sharded", "--dialect", "hf", "--force")
    return scratch


class Loader:
    """A checkpoint with hub names, open for reading. scalars: the values that the job saved in addition to tensors.
    tied: the head is the embedding."""

    def __init__(self, path: Path) -> None:
        """path: as `prepared` gives it. Raises what the tool's readers raise, and Incomplete E1533 without scalars."""
        tree = open_tree(str(path))
        fmt, _ = registry.detect(tree)
        catalog = fmt.read(tree)
        catalog.check()
        self.path = path
        self._open = OpenCatalog(tree, catalog)
        self._states = {state: self._open.state(state) for state in catalog.states()}
        self.scalars = scalars_of(catalog.extras, path)
        config = path / "config.json"
        self.tied = config.is_file() and json.loads(config.read_text()).get("tie_word_embeddings") is True

    def read(self, name: str, state: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The values of a box. Raises Incomplete E1530 (no such tensor), InconsistentCheckpoint E1531 (it is smaller).

        What a system does not store because it is another state's twin is taken from that: the master of a weight that
        is fp32 anyway (Megatron, Paddle), the 16-bit weight of a master (ZeRO 3; the caller rounds it, as DeepSpeed
        does).
        """
        tensors = self._states.get(state)
        twin = self._states.get(TWINS[state]) if state in TWINS else None

        def stands_in(name: str) -> bool:
            return twin is not None and name in twin and (state == "model" or twin[name].dtype == "F32")

        if self.tied and name in TIED and (tensors is None or name not in tensors) and not stands_in(name):
            name = TIED[name]  # Paddle keeps the states of a tied pair under one of its names
        if (tensors is None or name not in tensors) and stands_in(name):
            tensors = twin
        if tensors is None or name not in tensors:
            raise Incomplete(
                f"the checkpoint has no {name} [{state}]",
                code=MISSING,
                path=str(self.path),
                key=f"{name} [{state}]",
                hint=near_misses(name, list(tensors or ())) or f"its states: {', '.join(self._states)}",
            )
        lazy = tensors[name]
        ends = [o + n for o, n in zip(offset, shape, strict=False)]
        if len(lazy.shape) != len(shape) or any(end > size for end, size in zip(ends, lazy.shape, strict=True)):
            raise InconsistentCheckpoint(
                f"the box at {list(offset)} of {list(shape)} is not inside its {list(lazy.shape)}",
                code=SHAPE,
                path=str(self.path),
                key=f"{name} [{state}]",
                hint="the checkpoint holds a model of another size",
            )
        box = lazy[tuple(slice(o, end) for o, end in zip(offset, ends, strict=True))]
        values: torch.Tensor = box.torch()
        return values.reshape(tuple(shape))

    def names(self) -> frozenset[str]:
        """Parameters of which any state is there."""
        return frozenset(name for tensors in self._states.values() for name in tensors)

    def state(self, like: RankState) -> RankState:
        """The pieces that `like` holds, with the checkpoint's values: a rank's state without a trainer, for tests."""
        pieces = []
        for piece in like.pieces:
            values = self.read(piece.name, piece.state, piece.offset, piece.box)
            if piece.flat is not None:
                values = values.reshape(-1)[slice(*piece.flat)].clone()
            pieces.append(piece._replace(tensor=values))
        return RankState(like.layout, like.shape, like.at, pieces, dict(self.scalars))


def scalars_of(extras: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The job's scalars, wherever the format keeps plain values. Raises Incomplete E1533."""
    scheduler = extras.get("scheduler")
    for place in (extras, scheduler if isinstance(scheduler, Mapping) else {}):
        scalars = place.get(HARNESS)
        if isinstance(scalars, Mapping):
            return dict(scalars)
    raise Incomplete(
        f"no value {HARNESS!r} among the extras: {', '.join(map(str, extras)) or 'none'}",
        code=SCALARS,
        path=str(path),
        hint="step, consumed samples and seed are lost: a run can't go on from here",
    )
