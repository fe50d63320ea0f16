"""The module files of a universal checkpoint: the 16-bit model, shapes and ties, frozen parameters, the client's state.

    mp_rank_00_model_states.pt  {"module": {name: T}, "param_shapes": [{name: shape}], "global_steps": 3, ...}

They are copies of the checkpoint's own (`deepspeed.format`), or ours (`deepspeed_universal.target`). Cost: a pickle a
file; of ZeRO 3's many only the first, and the others where frozen parameters lie in shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt_tool.core.box import Box, flat_boxes, whole
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import for_each
from ckpt_tool.core.tensor import EXTRAS, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint, InputError
from ckpt_tool.formats.deepspeed.files import Files, model3_name
from ckpt_tool.formats.deepspeed.flat import share
from ckpt_tool.formats.deepspeed.read import COUNTERS, same
from ckpt_tool.formats.deepspeed_universal.record import STATES, TENSORS, Recorded
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.torch.content import TorchContent
from ckpt_tool.storage.source import Tree

MALFORMED, DISAGREE, MISSING = "E0355", "E0359", "E0302"
SHOWN = 100


@dataclass(slots=True)
class Modules:
    """What the module files say. opening: reads a file. values: the first file's plain values. shapes: of each group
    (stage 3: sub-group), name -> shape. tensors: the model, and what the client kept."""

    tree: Tree
    opening: Callable[[str], TorchContent]
    values: dict[str, Any] = field(default_factory=dict)
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)
    tensors: dict[TensorKey, LogicalTensor] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def read(self, files: Files, record: Recorded | None) -> None:
        """Every file that is needed. Raises Incomplete E0302, InconsistentCheckpoint E0359 (shares of frozen
        parameters)."""
        names = [files.model[rank] for rank in sorted(files.model)]
        of_rank = {rank[0]: name for rank, name in sorted(files.model3.items()) if rank[1] == 0}
        if not names:
            names = [name for rank, name in sorted(files.model3.items()) if rank[0] == 0]
        if not names or record is not None and not files.model:  # in ours the stage 3 file has no tensors
            raise Incomplete(
                f"no {'mp_rank_00' if names else '*'}_model_states.pt lies beside zero/",
                code=MISSING,
                path=self.tree.display(),
                hint="copy the module files of the checkpoint into this folder: DeepSpeed reads its counters from them",
            )
        try:
            contents = for_each(names, self.opening)
        except InputError:
            for_each(dict.fromkeys((*names, *of_rank.values())), self.opening)  # names those of the other ranks too
            raise
        self._of_one_save(contents[0], names[0], list(zip(contents[1:], names[1:], strict=True)), ())
        for number, content in enumerate(contents):
            values = content.extras if isinstance(content.extras, dict) else {}
            groups = values.get("param_shapes") or []
            for i, group in enumerate(groups if isinstance(groups, list) else []):
                if i == len(self.shapes):
                    self.shapes.append({})
                self.shapes[i] |= _shape_map(group, names[number])
            shared = values.get("shared_params")
            if isinstance(shared, dict):
                self.shared |= {a: b for a, b in shared.items() if isinstance(a, str) and isinstance(b, str)}
        self.values = contents[0].extras if isinstance(contents[0].extras, dict) else {}
        buffers = self.values.get("buffer_names")
        self.buffers = [name for name in buffers if isinstance(name, str)] if isinstance(buffers, list | tuple) else []
        sliced = len(names) > 1 and any(path[0] == "module" for content in contents for path, _ in content.leaves)
        if sliced:
            self.notes.append(
                Note(
                    "N-sliced-module",
                    f"the 16-bit modules of {len(names)} tensor parallel ranks are not read: the fp32 weights "
                    "below zero/ are whole (write them as the model with --as-model master)",
                )
            )
        self._module(contents[0], sliced=sliced)
        self._frozen(contents[0], of_rank)

    def _of_one_save(
        self, first: TorchContent, name: str, others: Sequence[tuple[TorchContent, str]], lists: Sequence[str]
    ) -> None:
        """Raise InconsistentCheckpoint E0359 for module files of another step, or of another model by those `lists`."""
        faults = []
        for content, other in others:
            mine, theirs = (c.extras if isinstance(c.extras, dict) else {} for c in (content, first))
            faults += [
                f"{other} has {key} {str(mine.get(key))[:80]}, but {name} {str(theirs.get(key))[:80]}"
                for key in (*sorted(COUNTERS), *lists)
                if not same(mine.get(key), theirs.get(key))
            ]
        if faults:
            raise InconsistentCheckpoint(
                faults[0],
                code=DISAGREE,
                path=self.tree.display(faults[0].split(" ")[0]),
                faults=faults[1:SHOWN],
                hint="the files come from two steps or two runs: fetch one save whole",
            )

    def _module(self, content: TorchContent, *, sliced: bool) -> None:
        """Tensors of the first module file: the model, buffers, what the client kept."""
        known = {name: shape for group in self.shapes for name, shape in group.items()}
        frozen = self.values.get("frozen_param_shapes")
        known |= _shape_map(frozen, self.tree.display()) if isinstance(frozen, dict) else {}
        module: dict[str, StoredArray] = {}
        for path, array in content.leaves:
            if path[0] == "module" and len(path) == 2:
                name = str(path[1])
                kept = self.shared.get(name, name)
                shape = known.get(name, known.get(kept))
                holds = array.numel or shape is None or not prod(shape)
                if holds and not sliced:  # at stage 3 parameters are placeholders without elements
                    module[name] = array
            elif path[0] == STATES and len(path) == 3:
                self._add(TensorKey(str(path[2]), str(path[1])), array)
            elif path[0] == TENSORS and len(path) == 2:
                self._add(TensorKey(str(path[1]), EXTRAS), array)
            elif path[0] not in ("module", "frozen_param_fragments"):
                self._add(TensorKey(dotted(path), EXTRAS), array)
        for name, array in module.items():
            other = module.get(self.shared.get(name, name))
            box = whole(array.shape)
            tied = [Chunk(box, other, box, 1)] if other is not None and _differ(array, other) else []
            self._put(LogicalTensor(TensorKey(name), array.shape, array.dtype, (Chunk(box, array, box), *tied)))

    def _frozen(self, content: TorchContent, of_rank: Mapping[int, str]) -> None:
        """Frozen parameters of ZeRO 3: each rank's file holds a share."""
        shapes = self.values.get("frozen_param_shapes")
        found = {
            str(path[1]): a for path, a in content.leaves if path[0] == "frozen_param_fragments" and len(path) == 2
        }
        if not isinstance(shapes, dict) or not found:
            return
        shapes = _shape_map(shapes, self.tree.display())
        if not of_rank:  # stage 2 keeps them whole, in the module too
            for name, array in found.items():
                if name in shapes and TensorKey(name) not in self.tensors:
                    self._put(shaped(TensorKey(name), array, shapes[name]))
            return
        ranks = self.values.get("dp_world_size")
        count = ranks if type(ranks) is int and 0 < ranks < 1 << 20 else 1
        gone = [model3_name(rank, 0) for rank in range(count) if rank not in of_rank]
        if gone:
            raise Incomplete(
                f"{len(gone)} files with shares of the frozen parameters are missing: {', '.join(gone[:8])}",
                code=MISSING,
                path=self.tree.display(),
                faults=gone[8:SHOWN],
                hint="copy every rank's model states into this folder",
            )
        ranked = [of_rank[rank] for rank in range(1, count)]
        others = for_each(ranked, self.opening)
        same_save = list(zip(others, ranked, strict=True))
        self._of_one_save(content, of_rank[0], same_save, ("param_shapes", "frozen_param_shapes"))
        parts = [found] + [
            {str(p[1]): a for p, a in other.leaves if p[0] == "frozen_param_fragments" and len(p) == 2}
            for other in others
        ]
        for name, shape in shapes.items():
            length = share(prod(shape), count)
            chunks: list[Chunk] = []
            for rank, part in enumerate(parts):
                if name not in part or part[name].numel != length:
                    raise InconsistentCheckpoint(
                        f"rank {rank} holds no share of {length} elements",
                        code=DISAGREE,
                        key=name,
                        path=self.tree.display(of_rank[rank]),
                        hint="the files come from two runs: fetch one whole",
                    )
                start, stop = min(rank * length, prod(shape)), min((rank + 1) * length, prod(shape))
                chunks += _line(shape, part[name], start, stop)
            self._put(LogicalTensor(TensorKey(name), shape, found[name].dtype, tuple(chunks)))

    def _add(self, key: TensorKey, array: StoredArray) -> None:
        self._put(shaped(key, array, array.shape))

    def _put(self, tensor: LogicalTensor) -> None:
        self.tensors[tensor.key] = tensor


def _differ(a: StoredArray, b: StoredArray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a.path, a.offset) != (b.path, b.offset)


def shaped(key: TensorKey, array: StoredArray, shape: tuple[int, ...]) -> LogicalTensor:
    """A tensor of `shape` over an array of that shape, or a flat one. Raises InconsistentCheckpoint E0359."""
    if array.shape != shape and (len(array.shape) != 1 or array.numel != prod(shape)):
        raise InconsistentCheckpoint(
            f"{key.state} has shape {list(array.shape)}, the parameter {list(shape)}",
            code=DISAGREE,
            path=array.path,
            key=str(key),
            hint="the file comes from another run: fetch the whole checkpoint again",
        )
    within = whole(array.shape)
    return LogicalTensor(key, shape, array.dtype, (Chunk(whole(shape), array, within),))


def _line(shape: tuple[int, ...], array: StoredArray, start: int, stop: int) -> list[Chunk]:
    """Elements `start` to `stop` of a tensor's line, which begin at element 0 of `array`."""
    chunks, at = [], 0
    for box in flat_boxes(shape, start, stop):
        chunks.append(Chunk(box, array, Box((at,), (box.numel,))))
        at += box.numel
    return chunks


def _shape_map(value: Any, path: str) -> dict[str, tuple[int, ...]]:
    out = {}
    for name, shape in value.items() if isinstance(value, Mapping) else ():
        fits = isinstance(shape, tuple | list) and len(shape) <= 64
        if not isinstance(name, str) or not fits or any(type(n) is not int or not 0 <= n < 1 << 48 for n in shape):
            raise malformed("param_shapes maps no names to shapes", path, str(name)[:200])
        out[name] = tuple(shape)
    return out


def malformed(message: str, path: str, key: str) -> InputError:
    """A file that is not laid out as DeepSpeed does."""
    return CorruptFile(
        message,
        code=MALFORMED,
        path=path,
        key=key,
        hint="the file is damaged, or of a version of DeepSpeed that is not known here",
    )
