"""PaddleFormers reads the config.json that `ckpt` writes for Paddle, and holds what transformers holds (marker
`peers`).

Every class that both have: a config of transformers' own, its defaults left unsaid, in Paddle's words; what
PaddleFormers' `AutoConfig` makes of it is compared value by value, so that no default of Paddle's own slips in. Needs a
Python with paddleformers 1.2.0:

    CKPT_PADDLE_PYTHON=/venv/bin/python pytest tests/acceptance/test_paddle_configs.py -m peers
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers
from test_paddle_loads import program, pytestmark

from ckpt_tool.families.config.words import OTHER_WORDS
from ckpt_tool.families.models import CLASSES
from ckpt_tool.systems.paddle.config import from_paddle, paddle_config

__all__ = ["pytestmark"]
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 60,
}
THERE = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
    "ernie4_5",
    "ernie4_5_moe",
    "glm4_moe",
    "phi3",
    "gpt_oss",
)
UNSAID = ("hidden_activation", "attention_dropout", "n_positions")  # Paddle has other words, or none


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """{class: what PaddleFormers holds}, all in one process."""
    folder = tmp_path_factory.mktemp("paddle")
    (folder / "configs").mkdir(), (folder / "reports").mkdir()
    for kind in THERE:
        (folder / "configs" / kind).mkdir()
        told = paddle_config(
            {"architectures": [CLASSES[kind].architecture], "model_type": kind, **SMALL, "dtype": "bfloat16"}
        )
        (folder / "configs" / kind / "config.json").write_text(json.dumps(told.config))
    program("tests/acceptance/load_paddle_config.py", folder / "configs", folder / "reports")
    return {kind: json.loads((folder / "reports" / f"{kind}.json").read_text()) for kind in THERE}


@pytest.mark.parametrize("kind", THERE)
def test_paddle_holds_what_transformers_holds(kind: str, read: dict[str, dict[str, Any]]) -> None:
    have = read[kind]["values"]
    loaded = transformers.AutoConfig.for_model(kind, **SMALL).to_dict()
    rope = loaded["rope_parameters"]
    assert have["model_type"] == kind and have["dtype"] == "bfloat16"
    assert have["rope_theta"] == rope["rope_theta"]
    for key in (*SMALL, *CLASSES[kind].defaults):
        own = CLASSES[kind].keys.get(key, key)
        if own in loaded and own not in UNSAID and loaded[own] is not None and own != "num_nextn_predict_layers":
            found = [have[name] for name in (own, *OTHER_WORDS.get(own, ())) if name in have]
            assert found[:1] == [loaded[own]], own
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        assert have["partial_rotary_factor"] == rope["partial_rotary_factor"]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("kind", THERE)
def test_and_back(kind: str, plain: bool) -> None:
    config: dict[str, Any] = {"architectures": [CLASSES[kind].architecture], "model_type": kind, **SMALL}
    if plain:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 7e5}
    back = from_paddle({**paddle_config(config).config, "paddleformers_version": "1.2.0"}).config
    want, have = (transformers.AutoConfig.for_model(**each).to_dict() for each in (config, back))
    want["rope_parameters"].pop("type", None), have["rope_parameters"].pop("type", None)  # the old word for `rope_type`
    silent = {"num_nextn_predict_layers", *CLASSES[kind].paddle}  # MTP layers: true to the tensors
    differing = {key: (want[key], have.get(key)) for key in want if key not in silent and want[key] != have.get(key)}
    assert not differing
