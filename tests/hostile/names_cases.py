"""Names and states that no rule places, table F of the threat list: nothing of a model is left out or mixed in silence.

`CASES` lists `(row, make(folder) -> path, exit code, words of the message, options of convert)`; the exit code may be a
dict by verb, `"*"` for the others, and so may the options. A row is a small Llama or adapter with one thing next to it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "convert/llama/hf"
ADAPTER = FIXTURES / "peft/given"
UNREAD = {"inspect": 0, "*": 3}  # inspect names what can't be read, everything else refuses
CONVERTED = {"convert": 3, "*": 0}  # what only another system, or an option, has no place for
AUDITED = {**CONVERTED, "audit": 1}
WRITTEN = {"inspect": 0, "verify": 0, "*": 2}
KEPT = {"merge": 2, "*": 0}  # merge keeps names, convert changes them
MIXTRAL = FIXTURES / "convert/mixtral/hf/config.json"
SMALLER = FIXTURES / "safetensors/llama_one_file/config.json"  # of another Llama


def torch_or_skip():
    """torch, which writes some of the files; without it their rows are skipped."""
    return pytest.importorskip("torch")


def weights():
    torch = torch_or_skip()
    return {name: torch.from_numpy(array) for name, array in load_file(LLAMA / "model.safetensors").items()}


def llama(**more):
    """The model with more tensors, by name."""

    def make(folder):
        shutil.copy(LLAMA / "config.json", folder)
        arrays = {name: np.ones(shape, np.float32) for name, shape in more.items()}
        save_file({**load_file(LLAMA / "model.safetensors"), **arrays}, folder / "model.safetensors")
        return folder

    return make


def saved(build):
    """What `build` makes of the model's weights, as a file of torch."""

    def make(folder):
        torch = torch_or_skip()
        torch.save(build(weights()), folder / "state.pt")
        return folder / "state.pt"

    return make


def adapter_with(file):
    """An adapter, and a file of weights next to it."""

    def make(folder):
        torch = torch_or_skip()
        shutil.copytree(ADAPTER, folder, dirs_exist_ok=True)
        torch.save({"mm_projector.weight": torch.ones(2, 3)}, folder / file)
        return folder

    return make


def matrix():
    return torch_or_skip().ones(3, 4)


def row():
    return torch_or_skip().ones(3)


def in_parts(build):
    """A parameter that is what `build` gives."""
    return saved(lambda model: {**model, "fc.weight": build()})


def halved(model):
    return {name: value / 2 for name, value in model.items()}


def averages_without(lost):
    return saved(lambda m: {"model": m, "ema": {name: value for name, value in halved(m).items() if name != lost}})


def kept_names(to):
    """Options of the verb that keeps names, for a target with names of its own."""
    return {"merge": ("--to", to)}


def of_config(file):
    return ("--to", "safetensors", "--config", str(file))


NORM = "model.norm.weight"
HEAD = {"my_head.weight": (3, 8)}
OTHER = {"teacher.model.norm.weight": (5,), "teacher.deep.weight": (2, 2)}
CASES = [
    ("F1-head-to-megatron", llama(**HEAD), AUDITED, ("my_head", "--remove-keys"), ("--to", "megatron-dist")),
    ("F1-head-to-gguf", llama(**HEAD), AUDITED, ("my_head", "--dialect keep"), ("--to", "gguf")),
    ("F1-head-to-paddle", llama(**HEAD), AUDITED, ("my_head", "--rename"), ("--to", "paddle")),
    ("F2-parameter-of-a-tuple", in_parts(lambda: (matrix(), row())), UNREAD, ("fc.weight", "--remove-keys")),
    ("F2-parameter-of-a-list", in_parts(lambda: [matrix()]), UNREAD, ("fc.weight", "--remove-keys")),
    ("F2-parameter-of-a-dict", in_parts(lambda: {"codes": matrix(), "scales": row()}), UNREAD, ("fc.weight", "codes")),
    (
        "F3-average-without-a-norm",
        averages_without(NORM),
        CONVERTED,
        (NORM, "ema,model"),
        ("--to", "safetensors", "--as-model", "ema"),
    ),
    ("F4-teacher-of-another-size", llama(**OTHER), UNREAD, ("teacher.", "--remove-keys")),
    ("F4-teacher-in-a-pickle", saved(lambda m: {**m, "teacher.x.weight": matrix()}), UNREAD, ("teacher.x.weight",)),
    ("F6-projector-next-to-an-adapter", adapter_with("mm_projector.bin"), WRITTEN, ("mm_projector.bin",)),
    ("F6-value-head-next-to-an-adapter", adapter_with("value_head.pt"), WRITTEN, ("value_head.pt",)),
    *(
        (f"F7-names-of-the-hub-kept-for-{to}", llama(), KEPT, ("ckpt convert", "--dialect keep"), kept_names(to))
        for to in ("megatron", "megatron-dist", "megatron-fsdp", "gguf", "paddle", "paddle-flex", "meta")
    ),
    ("F8-config-of-another-family", llama(), CONVERTED, ("--config", "--lenient"), of_config(MIXTRAL)),
    ("F8-config-of-other-sizes", llama(), CONVERTED, ("by the config", "--lenient"), of_config(SMALLER)),
]
