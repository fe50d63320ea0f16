"""`--vocab-size` against NumPy slices, whatever holds the rows: bands, columns, flat slices, replicas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"


def training(rows: int = 12) -> dict[str, object]:
    """A model and its moments; every value is another."""
    shapes = {"embed_tokens.weight": (rows, 6), "lm_head.weight": (rows, 6), "norm.weight": (6,)}
    count = iter(range(10_000))

    def ramp(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([float(next(count)) for _ in range(int(np.prod(shape)))]).reshape(shape)

    model = {name: ramp(shape) for name, shape in shapes.items()}
    state = {i: {"exp_avg": ramp(shape), "step": torch.tensor(3.0)} for i, shape in enumerate(shapes.values())}
    groups = [{"params": [0, 1, 2], "lr": 0.1}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


@pytest.mark.parametrize("degrees", [{}, {"tp": 4}, {"dp": 5}, {"tp": 2, "dp": 3}])
def test_rows_are_cut_in_every_state(tmp_path: Path, degrees: dict[str, int]) -> None:
    source = tmp_path / "training.pt"
    torch.save(training(), source)
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    ckpt.convert(str(source), str(whole), to="sharded", **degrees)
    report = ckpt.convert(str(whole), str(out), to="sharded", vocab_size=10)
    before = ckpt.open(str(source))
    after = ckpt.open(str(out))
    for state in ("model", "exp_avg"):
        for name in before.state(state):
            have = after.state(state)[name].numpy()
            want = before.state(state)[name].numpy()
            assert np.array_equal(have, want if name == "norm.weight" else want[:10]), (state, name)
    went = {entry["state"]: entry for entry in report["dropped"]}
    assert went["model"]["bytes"] == 2 * 2 * 6 * 4 and went["exp_avg"]["names"] == [
        "embed_tokens.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize("degrees", [{}, {"tp": 4}, {"tp": 2, "dp": 3}])
def test_rows_of_zeros_are_added_in_every_state(tmp_path: Path, degrees: dict[str, int]) -> None:
    source = tmp_path / "training.pt"
    whole = tmp_path / "whole"
    out = tmp_path / "out"
    state = training()
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"].bfloat16()  # type: ignore[index]
    torch.save(state, source)
    ckpt.convert(str(source), str(whole), to="sharded", **degrees)
    report = ckpt.convert(str(whole), str(out), to="sharded", vocab_size=15, tp=3)
    before = ckpt.open(str(source))
    after = ckpt.open(str(out))
    for state_name in ("model", "exp_avg"):
        for name in before.state(state_name):
            have = after.state(state_name)[name].numpy()
            want = before.state(state_name)[name].numpy()
            if name != "norm.weight":
                want = np.concatenate([want, np.zeros((3, 6), want.dtype)])
            assert have.dtype == want.dtype and np.array_equal(have, want), (state_name, name)
    assert sum("3 rows of zeros are added" in note for note in report["notes"]) == 4, report["notes"]


def test_sizes_that_make_no_sense(tmp_path: Path) -> None:
    source = tmp_path / "training.pt"
    torch.save(training(), source)
    with pytest.raises(UsageError, match="saved plan"):
        ckpt.convert(str(source), str(tmp_path / "out"), to="sharded", vocab_size=13, plan=str(tmp_path / "plan"))
    torch.save({"w": torch.zeros(4, 4)}, source)
    with pytest.raises(UsageError, match="no tensor here"):
        ckpt.convert(str(source), str(tmp_path / "out"), to="sharded", vocab_size=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", ["", "sharded"])
def test_as_model_takes_the_other_state(tmp_path: Path, first: str) -> None:
    """Through a source that records digests too: the model's are not those of the state that becomes the model."""
    source = str(FIXTURES / "torch" / "ema.pt")
    want = ckpt.open(source)
    if first:
        ckpt.convert(source, str(tmp_path / "first"), to=first)
        source = str(tmp_path / "first")
    ckpt.convert(source, str(tmp_path / "out"), to="sharded", as_model="ema")
    have = ckpt.open(str(tmp_path / "out"))
    ema = want.state("ema")
    assert ema and any(not np.array_equal(ema[name].numpy(), want.state("model")[name].numpy()) for name in ema)
    for name in ema:
        assert np.array_equal(have.state("model")[name].numpy(), ema[name].numpy())


@pytest.mark.parametrize(("head", "embedding"), [(64, 63), (63, 64), (66, 64)])
def test_a_head_and_an_embedding_of_other_rows_become_one_size(head: int, embedding: int, tmp_path: Path) -> None:
    """One of the two was padded or cut before: both are of the same tokens."""
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((embedding, 16)).astype(np.float32),
        "lm_head.weight": rng.standard_normal((head, 16)).astype(np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt.convert(tmp_path / "model.safetensors", tmp_path / "out", to="safetensors", vocab_size=62, dialect="keep")
    for name, values in tensors.items():
        np.testing.assert_array_equal(ckpt.open(tmp_path / "out")[name].numpy(), values[:62])


@pytest.mark.parametrize("other", [(16, 64), (64, 8), (20, 16)], ids=["transposed", "another width", "other tokens"])
def test_a_vocabulary_of_something_else_is_refused(other: tuple[int, int], tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": np.ones((66, 16), np.float32),
        "lm_head.weight": np.ones(other, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        ckpt.convert(tmp_path / "model.safetensors", tmp_path / "out", to="safetensors", vocab_size=62, dialect="keep")
    assert caught.value.code == "E2302"
