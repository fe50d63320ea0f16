"""The module of a DeepSpeed checkpoint: 16-bit weights, buffers, frozen parameters, ties, layers, experts, client
tensors.

Where they are stored depends on the stage. 0-2: everything in `mp_rank_00_model_states.pt`, with a pipeline in layer
files; experts in files of their own. 3: buffers in every rank's file, frozen parameters in fragments (`ceil(n / ranks)`
elements a rank), and NOTHING of all others: DeepSpeed rounds their 16-bit values from the fp32 ones when it resumes.
`Module` returns the tensors as (key, tensor) and records what a writer needs. Source: DeepSpeed 0.19.8
`runtime/engine.py` (`_common_checkpoint_state`, `load_module_state_dict`), `runtime/pipe/module.py`. Cost: none beyond
the pickles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt_tool.core.bounds import numeral
from ckpt_tool.core.box import whole
from ckpt_tool.core.catalog import Note
from ckpt_tool.core.faults import read_by_file
from ckpt_tool.core.tensor import EMA, EXTRAS, Chunk, LogicalTensor, StoredArray, TensorKey, simple_tensor
from ckpt_tool.formats.state_dict.tree import dotted
from ckpt_tool.formats.state_dict.words import is_average
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.deepspeed.described import UNUSED
from ckpt_tool.systems.deepspeed.files import EXPERT, LAYER, ModuleFile, ZeroFiles, disagree, lost, read_tensors
from ckpt_tool.systems.deepspeed.job import Shape, shares
from ckpt_tool.systems.deepspeed.stored_names import expert_name_of, global_name, key_of_layer, tied_keys

K = TypeVar("K", int, tuple[int, int])


@dataclass(slots=True)
class Module:
    """Reads the module files of one checkpoint and collects the module's tensors."""

    tree: Tree
    files: ZeroFiles
    modules: Mapping[tuple[int, int], ModuleFile]  # (data rank, model rank) -> file
    trained: Mapping[str, Shape]  # shapes of the parameters that are stored in flat tensors
    dp: int
    pp: int
    stage: int
    arrays: dict[str, list[StoredArray]] = field(default_factory=dict)  # name -> its stored arrays, all replicas
    fragments: dict[str, LogicalTensor] = field(default_factory=dict)
    order: dict[str, None] = field(default_factory=dict)  # the names of the module
    buffers: dict[str, None] = field(default_factory=dict)
    dtypes: Counter[str] = field(default_factory=Counter)  # dtype -> number of parameters
    layers: dict[str, int] = field(default_factory=dict)  # of a pipeline, tied key -> layer
    moe: dict[int, str] = field(default_factory=dict)  # number of each MoE layer -> prefix
    shared: dict[str, str] = field(default_factory=dict)  # alias -> kept name
    clients: dict[TensorKey, LogicalTensor] = field(default_factory=dict)  # tensors of the client's state
    notes: list[Note] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    globals: dict[str, None] = field(default_factory=dict)

    def read(self) -> None:
        """Read all module, layer and expert files.

        Raises InconsistentCheckpoint E0359 (shapes that contradict each other), Incomplete E0302 (parameters, experts).
        """
        for file in self.modules.values():
            self.shared |= file.shared
        for _, file in sorted(self.modules.items()):
            self._one(file)
        self._layers()
        self._experts()
        self._complete()
        if self.stage == 3:
            self._frozen_shares()
        self._ties()
        self._client()

    def names(self) -> dict[str, None]:
        """Return the names of all tensors in the module's order."""
        return self.order | dict.fromkeys(self.arrays)

    def tensors(self) -> dict[TensorKey, LogicalTensor]:
        """Return the tensors that have values, in the module's order."""
        return {key: self._tensor(key) for key in map(TensorKey, self.names()) if self._is_stored(key.name)}

    def _is_stored(self, name: str) -> bool:
        return name in self.fragments or name in self.arrays

    def _tensor(self, key: TensorKey) -> LogicalTensor:
        if key.name in self.fragments:
            return self.fragments[key.name]
        first = self.arrays[key.name][0]
        box = whole(first.shape)
        chunks = (Chunk(box, array, box, number) for number, array in enumerate(self.arrays[key.name]))
        return LogicalTensor(key, first.shape, first.dtype, tuple(chunks))

    def parameters(self) -> dict[str, StoredArray]:
        """Return the tensors that may have an optimizer's states: all except buffers and experts."""
        names = (name for name in self.names() if name not in self.buffers and expert_name_of(name) is None)
        return {name: self.arrays[name][0] for name in names if name in self.arrays}

    def experts(self) -> dict[str, StoredArray]:
        """Return the experts' tensors in the order of layers, experts and parts."""
        return {name: places[0] for name, places in self.arrays.items() if expert_name_of(name) is not None}

    def frozen(self) -> list[str]:
        """Return the names of frozen parameters: those without optimizer states, except buffers and aliases of trained
        parameters."""
        known = self.trained.keys() | self.buffers.keys()
        return [name for name in self.names() if name not in known and self.shared.get(name) not in self.trained]

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _one(self, file: ModuleFile) -> None:
        buffers = set(file.buffers)
        self.buffers |= dict.fromkeys(file.buffers)
        for name, array in file.module.items():
            self.order[name] = None
            if name not in buffers:
                self.dtypes[array.dtype.name] += 1
            if self.stage != 3 or name in buffers or array.numel:  # no placeholder
                self._add(name, array)
            elif name not in self.trained and name not in file.frozen and self.shared.get(name, name) == name:
                self.notes.append(
                    Note("W-no-values", f"{name} is a placeholder without values anywhere", file.path, name)
                )
        for name, array in file.fragments.items() if self.stage != 3 else ():
            self._add(name, array)

    def _add(self, name: str, array: StoredArray) -> None:
        """Add a stored array of `name`, unless the same bytes are already listed.

        Raises InconsistentCheckpoint E0359 if its shape is not that of the other arrays.
        """
        places = self.arrays.setdefault(name, [])
        shape = self.trained.get(name, places[0].shape if places else array.shape)
        if array.shape != shape:
            what = f"the module has shape {list(array.shape)}, want {list(shape)} as elsewhere"
            raise disagree(what, self.tree.display(array.path), name)
        if places and array.dtype != places[0].dtype:
            return  # a tie kept in another precision: each keeps its own
        at = (array.path, array.offset, array.strides)
        if all((place.path, place.offset, place.strides) != at for place in places):
            places.append(array)

    def _files_of(self, files: Mapping[K, str]) -> Iterator[tuple[K, str, dict[str, StoredArray]]]:
        """Yield (key, file name, tensors) of files that hold only named tensors, in the order of the keys."""
        read = read_by_file((name for _, name in sorted(files.items())), lambda name: read_tensors(self.tree, name))
        for key, name in sorted(files.items()):
            arrays, content = read[name]
            self.unsafe += content.unsafe
            self.globals |= dict.fromkeys(content.globals)
            self.dtypes.update(array.dtype.name for array in arrays.values())
            yield key, name, arrays

    def _layers(self) -> None:
        """Read the layer files of a pipeline."""
        tied = dict(tied_keys(self.trained, self.shared))
        for index, _, arrays in self._files_of(self.files.layers):
            key = key_of_layer(index, {local: a.shape for local, a in arrays.items()}, self.trained, tied)
            if key is not None:
                del tied[key]
                self.layers[key] = index
            for local, array in arrays.items():
                name = global_name(index, key, local)
                self.order[name] = None
                self._add(name, array)

    def _experts(self) -> None:
        """Read the expert files, and raise Incomplete E0302 unless every expert has one.

        Experts are counted by the files, by the optimizer's names, and by `num_experts` in the first module file.
        """
        for (layer, number), file, arrays in self._files_of(self.files.experts):
            for name, array in arrays.items():
                found = expert_name_of(name)
                shown = self.tree.display(file)
                if found is None or found.number != number:
                    hint = "the file was renamed: its names say which expert it holds"
                    raise disagree(f"the file of expert {number} holds {name[:200]}", shown, name[:200], hint)
                if self.moe.setdefault(layer, found.layer) != found.layer or name in self.arrays:
                    hint = "a file was renamed, or comes from another run"
                    what = f"{name[:200]} is in the files of two MoE layers, or twice in those of one"
                    raise disagree(what, shown, name[:200], hint)
                self._add(name, array)

        numbers: dict[str, int] = {}
        for name in (*self.arrays, *self.trained):
            if found := expert_name_of(name):
                numbers[found.layer] = max(numbers.get(found.layer, 0), found.number + 1)

        stated = self.modules[min(self.modules)].values.get("num_experts")
        for number, prefix in self.moe.items():
            count = stated[number] if isinstance(stated, list) and number < len(stated) else 0
            if type(count) is int and 0 < count < 1 << 20:
                numbers[prefix] = max(numbers.get(prefix, 0), count)

        layers = {prefix: number for number, prefix in self.moe.items()}
        absent = {
            EXPERT.format(layer=layers.get(prefix, 0), expert=expert, model=0): f"{prefix}{expert}"
            for prefix, count in numbers.items()
            for expert in range(count)
            if (layers.get(prefix), expert) not in self.files.experts
        }
        if absent:
            raise lost(
                f"{len(absent)} experts have no file: {', '.join([*absent][:8])}",
                self.tree.display(),
                "every expert parallel rank writes its own: fetch them all",
                next(iter(absent.values())),
                [*absent][8:],
            )

    def _complete(self) -> None:
        """Raise Incomplete E0302 unless the module has all trained parameters; at stage 3 it has none of them."""
        if self.stage == 3:
            return
        absent = [name for name in self.trained if name not in self.arrays]
        if absent and self.files.layers:
            index = absent[0].partition(".")[0]
            file = LAYER.format(layer=int(index)) if numeral(index) else "of the tied layer"
            raise lost(
                f"{len(absent)} parameters are in no layer file; the first: {absent[0]}, missing file: {file}",
                self.tree.display(),
                "fetch the missing layer_*-model_states.pt",
                absent[0],
                absent[1:],
            )
        if absent:
            raise lost(
                f"{len(absent)} parameters of the optimizer are not in the module; the first: {absent[0]}",
                self.modules[0, 0].path,
                "module and optimizer come from two runs: fetch the whole save again",
                absent[0],
                absent[1:],
            )

    def _frozen_shares(self) -> None:
        """Join the frozen parameters of stage 3, of which every rank's file holds a share."""
        for mp in range(self.pp):
            for name, shape in self.modules[0, mp].frozen.items():
                chunks: list[Chunk] = []
                for rank in range(self.dp):
                    file = self.modules[rank, mp]
                    array = file.fragments.get(name)
                    line, _ = shares({name: shape}, self.dp, rank)
                    if array is None or array.numel < line.end or len(array.shape) != 1 or array.strides is not None:
                        what = f"the share of frozen {name} is missing or too small"
                        raise lost(what, file.path, "the ranks' files come from two runs", name)
                    chunks += (chunk for _, chunk in line.chunks(array))
                    dtype = array.dtype
                self.fragments[name] = LogicalTensor(TensorKey(name), shape, dtype, tuple(chunks))

    def _ties(self) -> None:
        """List an alias and the parameter that it shares as replicas, if they are stored separately.

        They must hold the same values; that is checked when replicas are compared.
        """
        for alias, kept in self.shared.items():
            if alias in self.arrays and kept in self.arrays and alias != kept:
                mine = list(self.arrays[alias])
                theirs = list(self.arrays[kept])
                for array in mine:
                    self._add(kept, array)
                for array in theirs:
                    self._add(alias, array)

    def _client(self) -> None:
        """Add the tensors of the client's state in the first file; those of other ranks are reported.

        Averages of weights become the state `EMA`, all others extras.
        """
        first, *others = (file for _, file in sorted(self.modules.items()))
        for path, array in first.others:
            averaged = len(path) == 2 and is_average(str(path[0]))
            key = TensorKey(str(path[1]), EMA) if averaged else TensorKey(dotted(path[path[0] == UNUSED :]), EXTRAS)
            self.clients[key] = simple_tensor(key, array, path)
        left = sorted({dotted(path) for file in others for path, _ in file.others})
        if left:
            self.notes.append(Note("W-rank-tensors", f"kept of rank 0 alone: {', '.join(left[:20])}"))
