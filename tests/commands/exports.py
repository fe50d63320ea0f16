"""What known exporters have written by mistake, made again from whole models as the threads tell it.

`bridge_export` is Megatron-Bridge's `SafeTensorsStateSource.save_generator` of 0.4.0 as the threads describe it: a file
of the reference is written once all of its tensors have come, the index names what was written. The threads, on GitHub:

    AReaL #1403              no `mtp.*` comes: whole files are left out, with lm_head and decoder layers in them
    Megatron-Bridge #4188    the same of GLM-4.7-Flash, whose MTP layer is `model.layers.N`
    Megatron-Bridge #1883    the model has other sizes than the reference: few files or none are written
    Relax #148               the incomplete file is written, the index names what it should have held
    Megatron-Bridge #4083    the index ends early, the files are whole
    speculators #739         a save killed in model.safetensors or in optimizer_state_dict.pt
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensors = dict[str, np.ndarray]
BRIDGE = Path(__file__).parents[2] / "fixtures/bridge"


def whole_model(case: str, seed: int = 0) -> tuple[dict[str, Any], Tensors]:
    """A config and random tensors of every name that the real model has, those of MTP too: one of `fixtures/bridge`."""
    config = json.loads((BRIDGE / f"{case}.config.json").read_text())
    shapes = json.loads((BRIDGE / f"{case}.json").read_text())["hub"]
    rng = np.random.default_rng(seed)
    return config, {name: rng.normal(0, 0.05, shape).astype(np.float32) for name, shape in shapes.items()}


def shards_of(names: Sequence[str], count: int) -> dict[str, list[str]]:
    """Files of a release: names in order, about as many in each."""
    size = -(-len(names) // count)
    parts = [list(names[at : at + size]) for at in range(0, len(names), size)]
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts)}


def write(folder: Path, config: Mapping[str, Any], files: Mapping[str, Tensors], index: Mapping[str, str]) -> Path:
    """A folder as it lies on a hub; index: tensor -> file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    size = sum(array.nbytes for tensors in files.values() for array in tensors.values())
    value = {"metadata": {"total_size": size}, "weight_map": dict(index)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(value, indent=2))
    return folder


def release(folder: Path, config: Mapping[str, Any], tensors: Tensors, count: int = 6) -> Path:
    """The whole model."""
    return bridge_export(folder, config, shards_of(list(tensors), count), tensors)


def bridge_export(folder: Path, config: Mapping[str, Any], shards: Mapping[str, list[str]], yielded: Tensors) -> Path:
    """What is written when only `yielded` comes. shards: of the reference."""
    files = {
        file: {name: yielded[name] for name in names}
        for file, names in shards.items()
        if all(name in yielded for name in names)
    }
    return write(folder, config, files, {name: file for file, tensors in files.items() for name in tensors})


def ghost_export(folder: Path, config: Mapping[str, Any], shards: Mapping[str, list[str]], yielded: Tensors) -> Path:
    """Relax #148: files of what came, an index of what was to come."""
    files = {file: {name: yielded[name] for name in names if name in yielded} for file, names in shards.items()}
    index = {name: file for file, names in shards.items() for name in names if files[file]}
    return write(folder, config, {file: tensors for file, tensors in files.items() if tensors}, index)


def tail_export(folder: Path, config: Mapping[str, Any], shards: Mapping[str, list[str]], tensors: Tensors) -> Path:
    """Megatron-Bridge #4083: the index lacks the end of the last file."""
    files = {file: {name: tensors[name] for name in names} for file, names in shards.items()}
    index = {name: file for file, names in shards.items() for name in names}
    last = list(files)[-1]
    for name in list(files[last])[len(files[last]) // 2 :]:
        del index[name]
    return write(folder, config, files, index)
