"""Values against PaddleFormers itself: what its models hold, and what it saves of them for Hugging Face.

fixtures/families/FAMILY holds both, written by the real library (fixtures/make/paddle_families.py); no element is there
twice, so any wrong place shows. Not here: Mixtral (PaddleFormers has none) and MTP layers of DeepSeek and GLM-4.5 (only
with paddlefleet); their statements are carried out in test_families_against_aoa.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.algebra.piece import apply
from ckpt_tool.families.registry import find
from ckpt_tool.families.rewrite import mapping

safetensors = pytest.importorskip("safetensors.numpy")

ROOT = Path(__file__).parents[2] / "fixtures" / "families"
CASES = sorted(path.name for path in ROOT.iterdir())


def test_every_family_of_paddleformers_is_here() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("source", "target"), [("hf", "paddle"), ("paddle", "hf")])
def test_values_equal_the_real_ones(case: str, source: str, target: str) -> None:
    config = json.loads((ROOT / case / "config.json").read_text())
    arrays = safetensors.load_file(ROOT / case / f"{source}.safetensors")
    want = safetensors.load_file(ROOT / case / f"{target}.safetensors")
    shapes = {name: array.shape for name, array in arrays.items()}
    found = find(config, shapes)
    assert found == (find(config, shapes, family=case).family, source)
    mapped = mapping(found.family, source, target, shapes, config)
    pieces = [piece for made in mapped.made for piece in made.pieces]
    got = apply(pieces, arrays, {made.name: made.shape for made in mapped.made})
    assert got.keys() == want.keys()
    assert not mapped.dropped
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)
