"""Adapter configs by strangers: whatever stands in them, settings or an error of ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import CkptError
from ckpt_tool.formats.adapters.settings import _KNOWN, paddle_settings_of, settings_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(_KNOWN)) | st.text(max_size=5), JSON, max_size=6))
def test_settings_or_an_error_of_ours(config):
    for given_config in (config, {**config, "peft_type": "LORA"}):
        try:
            made = settings_of(given_config, "adapter_config.json")
            made.scaling("model.layers.0.q", made.rank_of("model.layers.0.q"))
        except CkptError as e:
            assert e.code in ("E1422", "E1423", "E1426") and e.hint
        try:
            paddle_settings_of(given_config, "lora_config.json")
        except CkptError as e:
            assert e.code in ("E1422", "E1423") and e.hint


@pytest.mark.parametrize(
    ("config", "module", "rank", "scaling"),
    [
        ({"r": 8, "lora_alpha": 16}, "q", 8, 2.0),
        ({"r": 4, "lora_alpha": 6, "use_rslora": True}, "q", 4, 3.0),
        ({"r": 8, "lora_alpha": 16, "rank_pattern": {"a.q": 32, "q": 4}}, "b.a.q", 32, 0.5),
        ({"r": 8, "lora_alpha": 16, "alpha_pattern": {"q": 1}}, "x.q", 8, 0.125),
        ({}, "q", 8, 1.0),
    ],
)
def test_ranks_and_scalings(config, module, rank, scaling):
    made = settings_of({"peft_type": "LORA", **config}, "adapter_config.json")
    assert made.rank_of(module) == rank and made.scaling(module, rank) == scaling


def test_unknown_settings_pass_where_they_are_off():
    settings_of({"peft_type": "LORA", "use_next_year": False, "next_config": None, "next_size": 16}, "c")
    with pytest.raises(CkptError, match="next_config"):
        settings_of({"peft_type": "LORA", "next_config": {"a": 1}}, "c")
    settings_of({"peft_type": "LORA", "next_config": {"a": 1}}, "c", lenient=True)


def test_an_initialisation_that_is_not_known_is_refused():
    """Several of them change the base, which is then another one than the base on disk."""
    for known in (True, False, "gaussian", "Gaussian", "eva", "orthogonal"):
        settings_of({"peft_type": "LORA", "init_lora_weights": known}, "c")
    with pytest.raises(CkptError, match="init_lora_weights milora") as e:
        settings_of({"peft_type": "LORA", "init_lora_weights": "milora"}, "c")
    assert e.value.code == "E1422"
    settings_of({"peft_type": "LORA", "init_lora_weights": "milora"}, "c", lenient=True)
