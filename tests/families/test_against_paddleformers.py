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
ODD = "gemma3"  # PaddleFormers 1.2.0 saves a tied head never, and takes gate and up apart in layer 0 alone


def test_every_family_of_paddleformers_is_here() -> None:
    assert len(CASES) == 13


@pytest.mark.parametrize("case", [case for case in CASES if case != ODD])
@pytest.mark.parametrize(("source", "target"), [("hf", "paddle"), ("paddle", "hf")])
def test_values_equal_the_real_ones(case: str, source: str, target: str) -> None:
    names = {"hf": "hf-published" if case == "ernie4_5_vl_moe" else "hf", "paddle": "paddle"}
    config = json.loads((ROOT / case / "config.json").read_text())
    arrays = safetensors.load_file(ROOT / case / f"{source}.safetensors")
    want = safetensors.load_file(ROOT / case / f"{target}.safetensors")
    shapes = {name: array.shape for name, array in arrays.items()}
    found = find(config, shapes)
    assert found == (find(config, shapes, family=case).family, names[source])
    mapped = mapping(found.family, names[source], names[target], shapes, config)
    pieces = [piece for made in mapped.made for piece in made.pieces]
    got = apply(pieces, arrays, {made.name: made.shape for made in mapped.made})
    assert got.keys() == want.keys()
    assert not mapped.dropped
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_what_paddleformers_saves_of_gemma3_is_read_as_it_is() -> None:
    """Layer 1 keeps Paddle's fused gate and up, which the dialect of the Trainer's saves has: both roads to one hub."""
    config = json.loads((ROOT / ODD / "config.json").read_text())
    live, saved = (safetensors.load_file(ROOT / ODD / f"{side}.safetensors") for side in ("paddle", "hf"))
    assert "model.layers.1.mlp.up_gate_proj.weight" in saved and "model.layers.0.mlp.up_proj.weight" in saved
    hubs = []
    for arrays, dialect in ((live, "paddle"), (saved, "paddle-hf")):
        shapes = {name: array.shape for name, array in arrays.items()}
        found = find(config, shapes)
        assert (found.family.name, found.dialect) == (ODD, dialect)
        mapped = mapping(found.family, dialect, "hf", shapes, config)
        pieces = [piece for made in mapped.made for piece in made.pieces]
        hubs.append(apply(pieces, arrays, {made.name: made.shape for made in mapped.made}))
    head = hubs[0].pop("lm_head.weight")
    assert head.shape == hubs[0]["model.embed_tokens.weight"].shape and hubs[0].keys() == hubs[1].keys()
    for name, array in hubs[1].items():
        np.testing.assert_array_equal(hubs[0][name], array, err_msg=name)
        if name in saved:
            np.testing.assert_array_equal(saved[name], array, err_msg=name)
