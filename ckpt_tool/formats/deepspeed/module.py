"""The module of a DeepSpeed checkpoint: 16-bit weights, buffers, frozen parameters, ties, layers, experts, client
tensors.

What lies where, by stage: 0-2 everything in `mp_rank_00_model_states.pt`; with a pipeline in layer files; experts in
files of their own; at stage 3 buffers in every rank's file, frozen parameters in fragments (`ceil(n / ranks)` elements
a rank), and of all others NOTHING: their 16-bit values are what DeepSpeed rounds from the fp32 ones when it resumes.
`Module` gives the tensors as (key, tensor) and remembers what a writer needs. Source: DeepSpeed 0.19.8
`runtime/engine.py` (`_common_checkpoint_state`, `load_module_state_dict`), `runtime/pipe/module.py`. Cost: none beyond
the pickles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import Box, whole
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import by_file
from ckpt_tool.core.tensor import EMA, EXTRAS, MODEL, Chunk, LogicalTensor, StoredArray, TensorKey
from ckpt_tool.errors import Incomplete, InconsistentCheckpoint
from ckpt_tool.formats.deepspeed.described import UNUSED
from ckpt_tool.formats.deepspeed.files import expert_name, layer_name
from ckpt_tool.formats.deepspeed.flat import share
from ckpt_tool.formats.deepspeed.moe import expert_name_of
from ckpt_tool.formats.deepspeed.pipe import key_of_layer, prefix_of, tied_keys
from ckpt_tool.formats.deepspeed.rank import DISAGREE, ModuleFile, read_tensors
from ckpt_tool.formats.deepspeed.read import Reader
from ckpt_tool.formats.deepspeed.shards import Lying, chunks_of
from ckpt_tool.formats.state_dict.paths import EMA_ROOTS
from ckpt_tool.formats.state_dict.tree import dotted


class Module:
    """The module's tensors. arrays: name -> where it lies (several places: replicas). order: the names of the
    module."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.arrays: dict[str, list[StoredArray]] = {}
        self.fragments: dict[str, LogicalTensor] = {}
        self.order: dict[str, None] = {}
        self.buffers: list[str] = []
        self.dtypes: Counter[str] = Counter()
        self.layers: dict[str, int] = {}
        self.moe: dict[int, str] = {}
        self.shared: dict[str, str] = {}
        self.clients: dict[TensorKey, LogicalTensor] = {}
        for file in reader.modules.values():
            self.shared |= file.shared

    def read(self) -> None:
        """Everything. Raises InconsistentCheckpoint E0359 (shapes that contradict each other), Incomplete E0302
        (experts)."""
        for (_, mp), file in sorted(self.reader.modules.items()):
            self._one(file, mp)
        self._layers()
        self._experts()
        self._complete_module()
        self._frozen_shares()
        self._ties()
        self._client()

    def tensors(self) -> dict[TensorKey, LogicalTensor]:
        """Whole tensors in the module's order."""
        out = {}
        for name in dict.fromkeys([*self.order, *self.arrays]):
            key = TensorKey(name, MODEL)
            if name in self.fragments:
                out[key] = self.fragments[name]
            elif name in self.arrays:
                first, *others = self.arrays[name]
                box = whole(first.shape)
                chunks = [Chunk(box, first, box), *(Chunk(box, a, box, n) for n, a in enumerate(others, 1))]
                out[key] = LogicalTensor(key, first.shape, first.dtype, tuple(chunks))
        return out

    def parameters(self) -> dict[str, StoredArray]:
        """What may have an optimizer's states: all but buffers and experts of other files."""
        out = {}
        for name in dict.fromkeys([*self.order, *self.arrays]):
            if name in self.arrays and name not in self.buffers and expert_name_of(name) is None:
                out[name] = self.arrays[name][0]
        return out

    def experts(self) -> dict[str, StoredArray]:
        """Experts in the order of layers, experts and parts."""
        return {name: places[0] for name, places in self.arrays.items() if expert_name_of(name) is not None}

    def frozen(self) -> list[str]:
        """Parameters that no optimizer knows: no buffers, no aliases of one that it knows."""
        known = self.reader.flat.shapes
        return [
            name
            for name in dict.fromkeys([*self.order, *self.arrays])
            if name not in known and name not in self.buffers and self.shared.get(name) not in known
        ]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _one(self, file: ModuleFile, mp: int) -> None:
        known, stage3 = self.reader.flat.shapes, self.reader.stage == 3
        buffers = set(file.buffers)
        self.buffers = list(dict.fromkeys([*self.buffers, *file.buffers]))
        for name, array in file.module.items():
            self.order[name] = None
            if name not in buffers:
                self.dtypes[array.dtype.name] += 1
            placeholder = stage3 and name not in buffers and not array.numel
            if not placeholder:
                self._add(name, array)
            elif name not in known and name not in file.frozen and self.shared.get(name, name) == name:
                self.reader.notes.append(
                    Note("W-no-values", f"{name} is a placeholder without values anywhere", file.path, name)
                )
        if not stage3:
            for name, array in file.fragments.items():
                self._add(name, array)

    def _add(self, name: str, array: StoredArray) -> None:
        """One more place where `name` lies. The same bytes twice are one place."""
        places = self.arrays.setdefault(name, [])
        shape = self.reader.flat.shapes.get(name, places[0].shape if places else array.shape)
        if array.shape != shape:
            raise InconsistentCheckpoint(
                f"the module has shape {list(array.shape)}, want {list(shape)} as elsewhere",
                code=DISAGREE,
                path=self.reader.tree.display(array.path),
                key=name,
                hint="the files come from two runs",
            )
        if places and array.dtype != places[0].dtype:
            return  # a tie kept in another precision: each keeps its own
        if all(
            (place.path, place.offset, place.strides) != (array.path, array.offset, array.strides) for place in places
        ):
            places.append(array)

    def _layers(self) -> None:
        """The layer files of a pipeline."""
        reader = self.reader
        known = dict(reader.flat.shapes)
        tied = dict(tied_keys(known, self.shared))
        layers = sorted(reader.files.layers.items())
        read = by_file((name for _, name in layers), lambda name: read_tensors(reader.tree, name))
        for index, name in layers:
            arrays, content = read[name]
            reader.unsafe += content.unsafe
            reader.globals.update(dict.fromkeys(content.globals))
            key = key_of_layer(index, {local: a.shape for local, a in arrays.items()}, known, tied)
            if key is not None:
                del tied[key]
                self.layers[key] = index
            for local, array in arrays.items():
                full = prefix_of(index, key) + local
                self.order[full] = None
                self.dtypes[array.dtype.name] += 1
                self._add(full, array)
        if reader.files.layers:
            self._complete_layers(known)

    def _complete_module(self) -> None:
        """Whatever the optimizer trains lies in the module, but at stage 3."""
        reader = self.reader
        if reader.stage == 3 or reader.files.layers:
            return
        lost = [name for name in reader.flat.shapes if name not in self.arrays and expert_name_of(name) is None]
        if lost:
            raise Incomplete(
                f"{len(lost)} parameters of the optimizer are not in the module; the first: {lost[0]}",
                code="E0302",
                path=reader.modules[0, 0].path,
                key=lost[0],
                faults=lost[1:100],
                hint="module and optimizer come from two runs: fetch the whole save again",
            )

    def _complete_layers(self, known: Mapping[str, Any]) -> None:
        lost = [name for name in known if name not in self.arrays]
        if lost:
            index = lost[0].partition(".")[0]
            file = layer_name(int(index)) if numeral(index) else "of the tied layer"
            raise Incomplete(
                f"{len(lost)} parameters are in no layer file; the first: {lost[0]}, missing file: {file}",
                code="E0302",
                path=self.reader.tree.display(),
                key=lost[0],
                faults=lost[1:100],
                hint="fetch the missing layer_*-model_states.pt",
            )

    def _experts(self) -> None:
        """The expert files. Every expert that the optimizer knows must have one."""
        reader = self.reader
        experts = sorted(reader.files.experts.items())
        read = by_file((file for _, file in experts), lambda file: read_tensors(reader.tree, file))
        for (layer, number), file in experts:
            arrays, content = read[file]
            reader.unsafe += content.unsafe
            reader.globals.update(dict.fromkeys(content.globals))
            for name, array in arrays.items():
                found = expert_name_of(name)
                if found is None or found.number != number:
                    raise InconsistentCheckpoint(
                        f"the file of expert {number} holds {name[:200]}",
                        code=DISAGREE,
                        path=reader.tree.display(file),
                        key=name[:200],
                        hint="the file was renamed: its names say which expert it holds",
                    )
                other = self.moe.setdefault(layer, found.layer)
                if other != found.layer or name in self.arrays:
                    raise InconsistentCheckpoint(
                        f"{name[:200]} lies in the files of two MoE layers, or twice",
                        code=DISAGREE,
                        path=reader.tree.display(file),
                        key=name[:200],
                        hint="a file was renamed, or is of another run",
                    )
                self.dtypes[array.dtype.name] += 1
                self._add(name, array)
        self._complete_experts()

    def _complete_experts(self) -> None:
        layers = {prefix: number for number, prefix in self.moe.items()}
        lost = {}
        numbers: dict[str, int] = {}
        for name in (*self.arrays, *self.reader.flat.shapes):
            found = expert_name_of(name)
            if found is not None:
                numbers[found.layer] = max(numbers.get(found.layer, 0), found.number + 1)
        said = self.reader.modules[min(self.reader.modules)].values.get("num_experts")
        for number, prefix in self.moe.items():
            if (
                isinstance(said, list)
                and number < len(said)
                and type(said[number]) is int
                and 0 < said[number] < 1 << 20
            ):
                numbers[prefix] = max(numbers.get(prefix, 0), said[number])
        for prefix, count in numbers.items():
            for expert in range(count):
                if (layers.get(prefix), expert) not in self.reader.files.experts:
                    lost[expert_name(layers.get(prefix, 0), expert)] = f"{prefix}{expert}"
        if lost:
            raise Incomplete(
                f"{len(lost)} experts have no file: {', '.join([*lost][:8])}",
                code="E0302",
                path=self.reader.tree.display(),
                key=next(iter(lost.values())),
                faults=[*lost][8:100],
                hint="every expert parallel rank writes its own: fetch them all",
            )

    def _frozen_shares(self) -> None:
        """Frozen parameters at stage 3: a share in every rank's file."""
        reader = self.reader
        if reader.stage != 3:
            return
        for mp in range(reader.pp):
            for name, shape in reader.modules[0, mp].frozen.items():
                numel = 1
                for extent in shape:
                    numel *= extent
                count = share(numel, reader.dp)
                lying = []
                for rank in range(reader.dp):
                    file = reader.modules[rank, mp]
                    array = file.fragments.get(name)
                    start, stop = min(rank * count, numel), min((rank + 1) * count, numel)
                    if (
                        array is None
                        or array.numel < stop - start
                        or len(array.shape) != 1
                        or array.strides is not None
                    ):
                        raise Incomplete(
                            f"the share of frozen {name} is missing or too small",
                            code="E0302",
                            path=file.path,
                            key=name,
                            hint="the ranks' files come from two runs",
                        )
                    if start < stop:
                        lying.append(Lying(start, stop, array, 0, 0))
                    dtype = array.dtype
                self.fragments[name] = LogicalTensor(TensorKey(name, MODEL), shape, dtype, chunks_of(shape, lying))

    def _ties(self) -> None:
        """An alias that lies elsewhere than the parameter it shares must hold the same values: the two are replicas."""
        for alias, kept in self.shared.items():
            if alias in self.arrays and kept in self.arrays and alias != kept:
                mine, theirs = list(self.arrays[alias]), list(self.arrays[kept])
                for array in mine:
                    self._add(kept, array)
                for array in theirs:
                    self._add(alias, array)

    def _client(self) -> None:
        """Tensors of the client's state: of the first file; those of other ranks are named. Averages are a state."""
        files = [file for _, file in sorted(self.reader.modules.items())]
        for path, array in files[0].others:
            averaged = len(path) == 2 and path[0] in EMA_ROOTS
            key = TensorKey(str(path[1]), EMA) if averaged else TensorKey(dotted(path[path[0] == UNUSED :]), EXTRAS)
            box = Box((0,) * len(array.shape), array.shape)
            self.clients[key] = LogicalTensor(key, array.shape, array.dtype, (Chunk(box, array, box),), path)
        left = sorted({dotted(path) for file in files[1:] for path, _ in file.others})
        if left:
            self.reader.notes.append(Note("W-rank-tensors", f"kept of rank 0 alone: {', '.join(left[:20])}"))
