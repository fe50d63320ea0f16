"""Finds weights in separate files next to an adapter: those that were trained in full and that PEFT does not save.

    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
    non_lora_state_dict.bin      base_model.model.visual.merger.mlp.0.weight, ...     whole tensors of the base

They are read with the adapter, like its own full tensors (`modules_to_save`), so that merging puts them in place of
the base's. A file of weights with an unknown name is an error wherever the adapter is merged or written
(`refuse_unknown_weights`): a result without a trained projector would look complete and would not be.

Source: LLaVA `train.py` and Qwen-VL-Series-Finetune `train_sft.py` (get_peft_state_non_lora_maybe_zero_3: all that has
a gradient and no `lora_` in its name, under the wrapped model's names), LongLoRA `get_trainable_weights.py`.
Cost: the headers of these files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ckpt_tool.core.tensor import LogicalTensor, TensorKey, simple_tensor
from ckpt_tool.errors import CorruptFile, Incomplete, InconsistentCheckpoint, UsageError
from ckpt_tool.storage.safetensors_files.safetensors_file import read_header
from ckpt_tool.storage.safetensors_files.safetensors_table import HeaderTable
from ckpt_tool.storage.source import Tree

if TYPE_CHECKING:
    from ckpt_tool.core.catalog import Unread

TWICE = "E2930"
LOST_PART = "E3025"
NO_STATE_DICT = "E1432"
UNKNOWN_WEIGHTS = "E2931"
SAFETENSORS = ".safetensors"
_STEMS = ("non_lora_state_dict", "non_lora_trainables", "trainable_params")
_WEIGHTS = (".bin", SAFETENSORS, ".pt", ".pth", ".ckpt", ".npz", ".npy", ".th", ".h5", ".msgpack")
_PART = re.compile(rf"({'|'.join(_STEMS)})-(\d{{5}})-of-(\d{{5}})(\.bin|\.safetensors)")
_INDEXES = frozenset(f"{stem}{ending}.index.json" for stem in _STEMS for ending in (".bin", SAFETENSORS))
_CONFIG_OF_BASE = "config.json"
_OF_BASE = ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model.bin", "pytorch_model-*-of-*.bin")
# Files that trainers store next to weights with the same suffixes. Words that may also occur in the names of weights
# (new embeddings of a tokenizer, a scaler head) count only with the endings that trainers give them: numbers, ranks,
# `state_dict`.
_OF_TRAINING = re.compile(
    r"""
    adapter_model\..*
    |.*_adapters\.safetensors  # older steps of mlx-lm's
    |(training_args|trainer_state|rng_state|random_states|extra_state|global_step).*
    |((\w+_)?scheduler|optim(izer)?|scaler|sampler|dataloader|dl_state|.+_dl_state|tokenizer|vocab|recipe_state)
     ([_-]?(states?|dict|world_size|rank|\d+))*\.[a-z]+
    """,
    re.VERBOSE,
)


def trained_files(names: Iterable[str]) -> list[str]:
    """The files that hold weights trained in full, by the names that trainers give them; several numbered ones too."""
    known = {f"{stem}{ending}" for stem in _STEMS for ending in (".bin", SAFETENSORS)}
    return sorted(name for name in names if name in known or _PART.fullmatch(name))


def is_of_trained(name: str) -> bool:
    """Is it a file of such weights, or the index of several?"""
    return name in _INDEXES or bool(trained_files([name]))


def refuse_lost_parts(names: Collection[str], path: str) -> None:
    """Raise Incomplete E3025 where of several numbered files of trained weights one is not there. path: the folder."""
    for name in trained_files(names):
        part = _PART.fullmatch(name)
        if part is None:
            continue
        stem, _, count, ending = part.groups()
        expected = [f"{stem}-{number:05d}-of-{count}{ending}" for number in range(1, min(int(count), 1000) + 1)]
        lost = [each for each in expected if each not in names]
        if lost:
            raise Incomplete(
                f"{lost[0]} is missing, one of {int(count)} files of weights that were trained with the adapter",
                code=LOST_PART,
                path=path,
                faults=lost[1:50],
                hint="fetch it into the folder of the adapter",
            )


def unknown_weights(names: Collection[str]) -> list[str]:
    """Files next to an adapter that look like weights and have an unknown name. If there is a config.json, the usual
    names of the base model's files are known too."""
    known = set(trained_files(names))
    if _CONFIG_OF_BASE in names:
        known.update(name for name in names if _fits_any(name, _OF_BASE))

    weights = [name for name in names if name.lower().endswith(_WEIGHTS) and "/" not in name]
    return [name for name in weights if name not in known and _OF_TRAINING.fullmatch(name) is None]


def _fits_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_unknown_weights(tree: Tree, files: Collection[str]) -> None:
    """Raise UsageError E2931 for files of weights with unknown names next to an adapter. files: the adapter's own."""
    names = tree.names() if tree.single is None else ()
    unknown = [name for name in unknown_weights(names) if name not in files]
    if unknown:
        raise UsageError(
            f"{unknown[0]} is stored next to the adapter, and nothing says whether its weights belong to the model",
            code=UNKNOWN_WEIGHTS,
            path=tree.display(),
            faults=unknown[1:20],
            hint="move it elsewhere, or pass --lenient to go on without it; a file of weights that were trained in full"
            f" is read under the name {_STEMS[1]}.bin or {_STEMS[1]}{SAFETENSORS}",
        )


def read_trained(
    tree: Tree, file: str, *, lenient: bool
) -> tuple[Mapping[TensorKey, LogicalTensor], tuple[Unread, ...], tuple[str, ...]]:
    """The tensors of one such file, those that can't be read, and what in it asks for code. Raises CorruptFile E1432
    for a file that is no state dict, and what the containers raise."""
    if file.endswith(SAFETENSORS):
        return HeaderTable([read_header(tree, file, lenient=lenient)]), (), ()
    return read_state_dict(tree, file)


def join_tensors(
    adapter: Mapping[TensorKey, LogicalTensor], trained: Mapping[TensorKey, LogicalTensor], file: str, path: str
) -> dict[TensorKey, LogicalTensor]:
    """The adapter's tensors and those of `file`. Raises InconsistentCheckpoint E2930 for a name that both have."""
    twice = [str(key) for key in trained if key in adapter]
    if twice:
        first = next(chunk.array.file for key in trained if key in adapter for chunk in adapter[key].chunks)
        raise InconsistentCheckpoint(
            f"{twice[0]} is in {first} and in {file}",
            code=TWICE,
            path=path,
            key=twice[0],
            faults=twice[1:50],
        )
    return {**adapter, **trained}


def read_state_dict(
    tree: Tree, file: str
) -> tuple[dict[TensorKey, LogicalTensor], tuple[Unread, ...], tuple[str, ...]]:
    """The tensors of a torch file that holds one state dict, those that can't be read, and what in it asks for code."""
    from ckpt_tool.formats.state_dict.content import read_content
    from ckpt_tool.formats.state_dict.tree import dotted
    from ckpt_tool.formats.state_dict.unread import set_apart

    content = read_content(tree, file)
    if isinstance(content.extras, Mapping):
        odd = [str(key) for key in content.extras]
    else:
        odd = [str(type(content.extras))]
    odd += [dotted(path) for path, _ in content.leaves if len(path) != 1]
    if odd and not content.unsafe:
        raise CorruptFile(
            f"{file} is no plain state dict: it holds {odd[0][:200]}",
            code=NO_STATE_DICT,
            path=tree.display(file),
            hint="fetch the adapter again",
            faults=[name[:200] for name in odd[1:50]],
        )
    tensors = {}
    for path, array in content.leaves:
        key = TensorKey(dotted(path))
        tensors[key] = simple_tensor(key, array)
    return *set_apart(tensors), tuple(content.unsafe)
