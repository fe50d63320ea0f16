"""Checkpoints of which a reader could lose something without a word: one row for each class of them.

`CASES`: `(row, make(folder) -> path, exit code or {verb: code}, words of the message, options of convert)`. A
fixture is copied and one thing is changed. Where a class is tested in full: the words in brackets.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[2] / "fixtures"
DEQUANTIZE = ("--to", "safetensors", "--dequantize")
ADAPTER = ("--to", "peft")
CASES: list[tuple[str, Callable[[Path], Path], Any, str, tuple[str, ...]]] = []

Edit = Callable[[Path], object]
Tensors = dict[str, tuple[str, list[int], bytes]]


def row(
    name: str, fixture: str, want: int | dict[str, int], words: str, options: tuple[str, ...], *edits: Edit
) -> None:
    """want: of all verbs, or by verb; "*" is of the verbs that are not named."""

    def make(folder: Path) -> Path:
        source = folder / Path(fixture).name
        given = FIXTURES / fixture
        if given.is_dir():
            shutil.copytree(given, source)
        else:
            shutil.copy(given, source)
        for edit in edits:
            edit(source)
        return source

    CASES.append((name, make, want, words, options))


def tensors(file: str, change: Callable[[Tensors], object]) -> Edit:
    """The tensors of a safetensors file, changed."""

    def edit(folder: Path) -> None:
        path = folder / file
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8 : 8 + size])
        metadata = head.pop("__metadata__", None)
        found: Tensors = {}
        for name, each in head.items():
            begin, end = each["data_offsets"]
            found[name] = (each["dtype"], each["shape"], raw[8 + size + begin : 8 + size + end])
        change(found)

        document: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
        body = b""
        for name, (dtype, shape, data) in found.items():
            document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
        text = json.dumps(document).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)

    return edit


def one_number(ending: str) -> Callable[[Tensors], object]:
    """Every tensor whose name ends so is its first number."""

    def change(found: Tensors) -> None:
        for name, (dtype, _, data) in list(found.items()):
            if name.endswith(ending):
                count = max(1, len(data) // (4 if dtype == "F32" else 2))
                found[name] = (dtype, [1], data[: len(data) // count])

    return change


def without(*words: str) -> Callable[[Tensors], object]:
    """No tensor whose name has all of the words."""

    def change(found: Tensors) -> None:
        for name in [name for name in found if all(word in name for word in words)]:
            del found[name]

    return change


def added(name: str, dtype: str, shape: list[int], data: bytes) -> Callable[[Tensors], object]:
    return lambda found: found.update({name: (dtype, shape, data)})


def lora_inside(found: Tensors) -> None:
    """A whole model with an adapter in it, as accelerate saves a PEFT model."""
    for name in [name for name in found if name.endswith("q_proj.weight")]:
        dtype, shape, data = found.pop(name)
        module = name.removesuffix(".weight")
        each = len(data) // (shape[0] * shape[1])
        found[f"{module}.base_layer.weight"] = (dtype, shape, data)
        found[f"{module}.lora_A.default.weight"] = (dtype, [2, shape[1]], bytes(2 * shape[1] * each))
        found[f"{module}.lora_B.default.weight"] = (dtype, [shape[0], 2], bytes(2 * shape[0] * each))


def stated(file: str, key: str, value: Any) -> Edit:
    """A key of a JSON document."""

    def edit(folder: Path) -> None:
        document = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**document, key: value}))

    return edit


def removed(file: str) -> Edit:
    return lambda folder: (folder / file).unlink()


def copied(fixture: str, file: str) -> Edit:
    return lambda folder: shutil.copy(FIXTURES / fixture, folder / file)


def leaf_left_out(folder: Path) -> None:
    """The last row of Orbax's `_METADATA`."""
    document = json.loads((folder / "_METADATA").read_text())
    document["tree_metadata"].popitem()
    (folder / "_METADATA").write_text(json.dumps(document))


MODEL = "safetensors/llama_one_file"
WEIGHTS = "model.safetensors"

# -- names and adapters [commands/test_naming, test_adapter_inside, test_adapters_beside] ------------------------------

STRANGE = tensors(WEIGHTS, added("model.layers.0.strange.weight", "F32", [2], bytes(8)))
row(
    "L1 a name that no rule knows",
    MODEL,
    {"convert": 3, "audit": 1, "*": 0},
    "strange.weight",
    ("--to", "megatron"),
    STRANGE,
)
INSIDE = {"inspect": 0, "verify": 0, "audit": 1, "*": 2}
row(
    "L2 an adapter inside a model",
    MODEL,
    INSIDE,
    "a LoRA is inside",
    ("--to", "megatron"),
    tensors(WEIGHTS, lora_inside),
)
PROMPTS = added("prompt_encoder.default.embedding.weight", "F32", [1, 16], bytes(64))
row("L2b prompts next to a model", MODEL, INSIDE, "prompt_encoder", ("--to", "megatron"), tensors(WEIGHTS, PROMPTS))
TRAINED = copied("torch/weights.pt", "non_lora_trainables.bin")
row("L3 trained weights next to an adapter", "peft/on_llama", 0, "", ADAPTER, TRAINED)

# -- parts of quantised weights [run/test_quantised_parts, commands/test_quantised_targets] ----------------------------

CODES = {"convert": 3, "*": 0}
PARTS = {"verify": 1, "audit": 1, "convert": 3, "*": 0}
BITS_8 = "quantized/int8_channel"
row("L4 codes without a place for scales", BITS_8, CODES, "no place for scales", ("--to", "gguf"))
PARTS_LOST: tuple[tuple[str, str, Callable[[Tensors], object], str], ...] = (
    ("L5 one scale where blocks are declared", "fp8_block", one_number("scale_inv"), "scales of shape [1]"),
    ("L6 no zero points of codes that need them", "int8_channel_asym", without("zero_point"), "without zero_point"),
    ("L7 scales without their blocks", "mxfp4_gpt_oss", without("gate_up_proj_blocks"), "without its codes"),
    ("L8 experts without their bias", "mxfp4_gpt_oss", without("gate_up_proj_bias"), "without"),
    ("L9 codes of 4 bits stored as floats", "bnb_nf4_bf16", without("down_proj.weight."), "a column of 1536"),
)
for name, fixture, change, words in PARTS_LOST:
    row(name, f"quantized/{fixture}", PARTS, words, DEQUANTIZE, tensors(WEIGHTS, change))

# -- parts of a save [formats/test_orbax_parts, test_two_models_in_a_folder, test_parts_of_other_steps] ----------------

ORBAX = "orbax/files_zarr2"
LOST = {"audit": 1, "*": 3}
row(
    "L10 a chunk file that is lost",
    ORBAX,
    LOST,
    "chunks are not there",
    (),
    removed("params.params.embed.embedding/1.0"),
)
row("L11 an array that the metadata lacks", ORBAX, LOST, "names no such array", (), leaf_left_out)
OTHER_MODEL = copied(f"{MODEL}/{WEIGHTS}", WEIGHTS)
row("L12 two models in a folder", "safetensors/hf_llama_sharded", LOST, "two models", (), OTHER_MODEL)


def without_its_index(folder: Path) -> None:
    """Numbered files alone."""
    (folder / "model.safetensors.index.json").unlink()


TWO_SETS = (without_its_index, OTHER_MODEL)
row("L12b one file and numbered ones", "safetensors/hf_llama_sharded", LOST, "two models", (), *TWO_SETS)
STEPS = {"inspect": 0, "verify": 1, "audit": 1, "*": 3}
OTHER_STEP = stated("trainer_state.json", "global_step", 4000)
row("L13 parts of two steps", "safetensors/trainer_qwen3_moe", STEPS, "step 4000", ("--to", "dcp"), OTHER_STEP)

# -- a config and its head [commands/test_tied_head] -------------------------------------------------------------------

TIED_CONFIG = ("--to", "safetensors", "--config", str(FIXTURES / "safetensors/llama_tied/config.json"))
row("L14 a config that ties another head", MODEL, {"convert": 3, "*": 0}, "tie_word_embeddings is true by", TIED_CONFIG)

# -- two tensors of one name [formats/test_state_paths] ----------------------------------------------------------------


def torch_state(make_state: Callable[[], Any]) -> Callable[[Path], Path]:
    """A file of torch.save."""

    def make(folder: Path) -> Path:
        import torch

        torch.save(make_state(), folder / "state.pt")
        return folder / "state.pt"

    return make


def paddle_state(folder: Path) -> Path:
    """A file of paddle.save, which is a pickle of arrays."""
    import pickle

    import numpy as np

    state = {"enc": {"w": np.ones((2, 2), np.float32)}, "enc.w": np.zeros((2, 2), np.float32)}
    (folder / "state.pdparams").write_bytes(pickle.dumps(state, protocol=2))
    return folder / "state.pdparams"


def nested_and_joined() -> Any:
    import torch

    return {"enc": {"w": torch.ones(2, 2)}, "enc.w": torch.zeros(2, 2), "b": torch.ones(3)}


def number_and_text() -> Any:
    import torch

    return {"model": {"layers": {0: torch.ones(2, 2), "0": torch.zeros(2, 2)}}, "epoch": 1}


HIDDEN = {"inspect": 0, "*": 3}
TWO_PLACES: tuple[tuple[str, Callable[[Path], Path], str], ...] = (
    ("L15 keys that join to one name", torch_state(nested_and_joined), "called enc.w"),
    ("L15b a number and its text", torch_state(number_and_text), "called layers.0"),
    ("L15c keys that join to one name, Paddle", paddle_state, "called enc.w"),
)
CASES += [(name, make, HIDDEN, words, ()) for name, make, words in TWO_PLACES]
