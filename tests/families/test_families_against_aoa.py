"""Two roads to one mapping: the families' equations, and the statements that PaddleFormers itself gives for the model.

Statements, names and shapes are a fixture (`fixtures/make/paddle_aoa_families.py`); both are carried out on arrays
whose every element is another number. Casts are left aside: families change no value.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt_tool.algebra.mapped import Mapped
from ckpt_tool.algebra.piece import apply
from ckpt_tool.families.models import FAMILIES
from ckpt_tool.families.rewrite import mapping
from ckpt_tool.systems.paddle.aoa.program import compile_aoa

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "paddle-aoa" / "families.json").read_text()
)
Arrays = dict[str, np.ndarray]
TIED = [name for name in CASES if CASES[name]["config"]["tie_word_embeddings"]]
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def source_of(name: str) -> Arrays:
    out = {}
    tag = 1
    for key, shape in CASES[name]["shapes"].items():
        out[key] = np.arange(tag, tag + int(np.prod(shape))).reshape(shape)
        tag += int(np.prod(shape))
    return out


def shapes_of(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def carried_out(mapped: Mapped, arrays: Arrays) -> Arrays:
    shapes = {made.name: made.shape for made in mapped.made}
    return apply([piece for made in mapped.made for piece in made.pieces], arrays, shapes)


def by_statements(name: str, arrays: Arrays, which: str, *, reverse: bool = False) -> Arrays:
    """The statements name what a model may lack (biases, MTP): those that fit nothing are skipped, as Paddle skips
    them."""
    mapped = compile_aoa(CASES[name][which], shapes_of(arrays), reverse=reverse, skip_unmatched=True)
    return carried_out(mapped, arrays)


def by_family(name: str, arrays: Arrays, source: str, target: str) -> Arrays:
    config = CASES[name]["config"]
    (family,) = (family for family in FAMILIES if config["model_type"] in family.model_types)
    return carried_out(mapping(family, source, target, shapes_of(arrays), config), arrays)


def assert_same(got: Arrays, want: Arrays) -> None:
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_hugging_face_to_paddle(name: str) -> None:
    source = source_of(name)
    want = by_statements(name, source, "forward")
    if name in TIED:  # the statements write the head out; here it stays another name of the embedding
        np.testing.assert_array_equal(want.pop(HEAD), want[EMBEDDING])
    assert_same(by_family(name, source, "hf", "paddle"), want)


@pytest.mark.parametrize("name", CASES)
def test_paddle_to_hugging_face(name: str) -> None:
    """PaddleFormers' own way back; a tied head that its statements drop is a stored tensor for us."""
    source = by_statements(name, source_of(name), "forward")
    want = by_statements(name, source, "inverse")
    got = by_family(name, source, "paddle", "hf")
    if f"{HEAD} -> _" in CASES[name]["inverse"]:
        np.testing.assert_array_equal(got.pop(HEAD), got[EMBEDDING])
    assert_same(got, want)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES
        if name not in TIED and not any("dtype" in line or line.startswith("_ ") for line in CASES[name]["forward"])
    ],
)
def test_statements_in_reverse(name: str) -> None:
    """What Paddle derives where a model has no statements for the way back."""
    paddle = by_family(name, source_of(name), "hf", "paddle")
    assert_same(by_statements(name, paddle, "forward", reverse=True), source_of(name))


def test_enough_models_are_compared() -> None:
    types = {case["config"]["model_type"] for case in CASES.values()}
    assert types >= {
        "llama",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "gemma3_text",
        "phi3",
    }
