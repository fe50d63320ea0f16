"""Optimizer groups when parameters take other names."""

from __future__ import annotations

import pytest

from ckpt_tool.conversion.optimizer_groups import renamed_groups, without_removed
from ckpt_tool.errors import InconsistentCheckpoint

NAMES = {"gate": ("fc",), "up": ("fc",), "qkv": ("q", "k", "v")}


def test_each_made_parameter_is_listed_once() -> None:
    extras = {
        "optim": {"param_groups": [{"lr": 1.0, "params": ["gate", "norm", "up"]}, {"lr": 2.0, "params": ["qkv"]}]}
    }
    found = renamed_groups(extras, NAMES)["optim"]["param_groups"]
    assert found == [{"lr": 1.0, "params": ["fc", "norm"]}, {"lr": 2.0, "params": ["q", "k", "v"]}]


def test_names_beside_numbers() -> None:
    group = {"params": [0, 1, 2], "param_names": ["gate", "up", "norm"], "lr": 1.0}
    assert renamed_groups({"param_groups": [group]}, NAMES)["param_groups"] == [
        {"params": [0, 2], "param_names": ["fc", "norm"], "lr": 1.0}
    ]


def test_the_flat_spelling() -> None:
    flat = {"param_groups.gate.lr": 1.0, "param_groups.up.lr": 1.0, "param_groups.qkv.lr": 3.0, "step": 7}
    assert renamed_groups(flat, NAMES) == {
        "param_groups.fc.lr": 1.0,
        "param_groups.q.lr": 3.0,
        "param_groups.k.lr": 3.0,
        "param_groups.v.lr": 3.0,
        "step": 7,
    }


def test_parts_of_two_groups_are_an_error() -> None:
    with pytest.raises(InconsistentCheckpoint, match="groups 0 and 1"):
        renamed_groups({"param_groups": [{"params": ["gate"]}, {"params": ["up"]}]}, NAMES)
    with pytest.raises(InconsistentCheckpoint, match="differ"):
        renamed_groups({"param_groups.gate.lr": 1.0, "param_groups.up.lr": 2.0}, NAMES)


def test_other_values_stay() -> None:
    extras = {"gate": [1, {"up": None}], "n": 3}
    assert renamed_groups(extras, NAMES) == extras
    assert without_removed({"param_groups": [{"params": ["a", "b"]}]}, {"a"}) == {"param_groups": [{"params": ["b"]}]}
