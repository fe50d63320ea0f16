"""Mappings that change values, and tensors of several sources under one name, against NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpt_tool.algebra.element_map import ElementMap
from ckpt_tool.algebra.mapped import Made, Mapped
from ckpt_tool.algebra.piece import Piece, Side
from ckpt_tool.conversion.mapping_inputs import moves_alone
from ckpt_tool.conversion.passes import selected
from ckpt_tool.conversion.vocabulary import grown_vocabulary
from ckpt_tool.conversion.writing import write
from ckpt_tool.core.progress import Silent
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.mapping import apply_mapping
from ckpt_tool.run.lazy import OpenCatalog
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.opening import open_source

WRITING = {"to": "sharded"}
NORM = torch.linspace(0.5, 1.5, 6)


def opened(folder: Path, writing: dict[str, Any] = WRITING) -> Chosen:
    model = {
        "norm": NORM.bfloat16(),
        "embed_tokens.weight": torch.arange(8.0).reshape(2, 4).bfloat16(),
        "k": torch.arange(4.0).reshape(1, 4).bfloat16(),
    }
    state = {0: {"exp_avg": NORM * 3, "step": torch.tensor(1.0)}}
    saved = {"model": model, "optimizer": {"state": state, "param_groups": [{"params": [0, 1, 2], "lr": 0.1}]}}
    torch.save(saved, folder / "in.pt")
    reading = Reading()
    source = open_source(str(folder / "in.pt"), reading)
    return selected(source, Conversion.of(source, reading, Writing(**writing)))


def written(chosen: Chosen, out: Path) -> OpenCatalog:
    job = Conversion(Reading(), Writing(**WRITING), registry.by_name("sharded"))
    write(chosen, str(out), job, Silent())
    source = open_source(str(out), Reading())
    return OpenCatalog(source.tree, source.catalog)


def one_to_one(name: str, to: str, n: int, by: float) -> Made:
    return Made(to, (n,), (Piece((n,), Side(name, 0, (1,)), Side(to, 0, (1,)), (ElementMap("add", by),)),))


def test_a_number_is_added_to_values_and_not_to_moments(tmp_path: Path) -> None:
    writing = Writing(**WRITING)
    chosen, mapped = moves_alone(opened(tmp_path), Mapped((one_to_one("norm", "gamma", 6, 1),)), writing, "the test")
    assert not any(piece.maps for made in mapped.made for piece in made.pieces)
    applied = apply_mapping(chosen.stored, mapped)
    casts = {TensorKey("gamma"): chosen.casts[TensorKey("norm")]}
    have = written(replace(chosen, stored=applied.stored, casts=casts), tmp_path / "out")
    want = (NORM.bfloat16().float() + 1).bfloat16().float().numpy()
    assert have["gamma"].dtype == "BF16" and np.array_equal(have["gamma"].numpy().astype(np.float32), want)
    assert np.array_equal(have.state("exp_avg")["gamma"].numpy(), (NORM * 3).numpy())
    assert any("a number is added to 1 tensors" in note for note in chosen.notes)


def test_two_changes_of_one_source_are_refused(tmp_path: Path) -> None:
    made = (one_to_one("norm", "a", 6, 1), one_to_one("norm", "b", 6, 2))
    with pytest.raises(UsageError, match="in more than one way"):
        moves_alone(opened(tmp_path), Mapped(made), Writing(**WRITING), "the test")


def test_what_one_tensor_is_made_of_may_lie_in_two_sources(tmp_path: Path) -> None:
    writing = Writing(**WRITING, vocab_size=3)
    chosen = grown_vocabulary(opened(tmp_path), writing)  # the embedding is computed now, k is not
    assert len({row.source for row in chosen.stored}) == 2
    pieces = (
        Piece((12,), Side("embed_tokens.weight", 0, (1,)), Side("qk", 0, (1,))),
        Piece((4,), Side("k", 0, (1,)), Side("qk", 12, (1,))),
    )
    chosen, mapped = moves_alone(chosen, Mapped((Made("qk", (4, 4), pieces),)), writing, "the test")
    applied = apply_mapping(chosen.stored, mapped)
    have = written(
        replace(chosen, stored=applied.stored, casts={TensorKey("qk"): chosen.casts[TensorKey("k")]}), tmp_path / "out"
    )
    want = np.concatenate([np.arange(8.0), np.zeros(4), np.arange(4.0)]).reshape(4, 4).astype(ml_dtypes.bfloat16)
    assert have["qk"].dtype == "BF16" and np.array_equal(have["qk"].numpy(), want)
