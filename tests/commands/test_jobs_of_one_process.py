"""`{model, optimizer}` of a job of one process: what DCP asks for, and names without what a compiler put in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import ckpt_tool as ckpt

COMPILED = "_orig_mod."  # what torch.compile's module puts in front of every name
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 2)
    )


def job_of(kind: str, model: torch.nn.Module, *, named: bool = False, front: str = "") -> torch.optim.Optimizer:
    """The optimizer of a trainer that decays matrices alone. named: as `named_parameters` lists them, `front` first."""
    parameters = [(front + name, parameter) for name, parameter in model.named_parameters()]
    groups = [
        {
            "params": [each if named else each[1] for each in parameters if (each[1].ndim > 1) is decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    return OPTIMIZERS[kind](groups)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("names", [("model", "optimizer"), ("model_state_dict", "optimizer_state_dict")])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_s_own_loader_takes_the_dcp(
    kind: str, compiled: bool, named: bool, names: tuple[str, str], tmp_path: Path
) -> None:
    """Every value of every state, under names that `set_optimizer_state_dict` asks for."""
    model = network(0)
    optimizer = job_of(kind, model, named=named)
    train(model, optimizer)
    front = COMPILED if compiled else ""
    weights = {front + name: value for name, value in model.state_dict().items()}
    torch.save({names[0]: weights, names[1]: optimizer.state_dict(), "step": 3}, tmp_path / "job.pt")
    ckpt.convert(str(tmp_path / "job.pt"), str(tmp_path / "dcp"), to="dcp")

    fresh = network(1)
    its = job_of(kind, fresh)
    state = {names[0]: get_model_state_dict(fresh), names[1]: get_optimizer_state_dict(fresh, its)}
    checkpoint.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_model_state_dict(fresh, state[names[0]])
    set_optimizer_state_dict(fresh, its, state[names[1]])

    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
    want = optimizer.state_dict()
    have = its.state_dict()
    for number, states in want["state"].items():
        assert states.keys() == have["state"][number].keys()
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(have["state"][number][name])), (number, name)
    assert [group["weight_decay"] for group in have["param_groups"]] == [0.1, 0.0]


def test_numbers_of_a_dcp_stay_numbers(tmp_path: Path) -> None:
    """A job that saved `optimizer.state_dict()` itself asks for its numbers again."""
    model = network(0)
    optimizer = job_of("adamw", model)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    ckpt.convert(str(tmp_path / "in"), str(tmp_path / "out"), to="dcp")
    keys = checkpoint.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert "optimizer.state.0.exp_avg" in keys


@pytest.mark.parametrize("to", ["torch", "dcp"])
@pytest.mark.parametrize("named", [False, True])
def test_a_compiled_job_s_names_are_those_that_the_note_says(named: bool, to: str, tmp_path: Path) -> None:
    model = network(0)
    optimizer = job_of("adamw", model, named=named, front=COMPILED)
    train(model, optimizer)
    weights = {COMPILED + name: value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    out = tmp_path / ("out.pt" if to == "torch" else "out")
    report = ckpt.convert(str(tmp_path / "job.pt"), str(out), to=to)
    assert any("wrapper parts were taken out" in note for note in report["notes"])
    if to == "torch":
        written = torch.load(out, weights_only=True)
        assert written["model"].keys() == model.state_dict().keys()
        assert "_orig_mod" not in str(written["optimizer"]["param_groups"])
        optimizer.load_state_dict(written["optimizer"])
    else:
        keys = checkpoint.FileSystemReader(out).read_metadata().state_dict_metadata
        assert not [key for key in keys if "_orig_mod" in key]
    kept = tmp_path / ("kept.pt" if to == "torch" else "kept")
    ckpt.convert(str(tmp_path / "job.pt"), str(kept), to=to, dialect="keep")
    if to == "torch":
        assert all(name.startswith(COMPILED) for name in torch.load(kept, weights_only=True)["model"])


def test_groups_follow_into_another_dialect(tmp_path: Path) -> None:
    """Numbers count the parameters of the source: under other names the groups list names."""
    from test_wrapper_prefix import config_file, llama

    tensors = {name: torch.from_numpy(array) for name, array in llama().items()}
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": tensors, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    ckpt.convert(
        str(tmp_path / "job.pt"), str(tmp_path / "o.pt"), to="torch", dialect="megatron", config=config_file(tmp_path)
    )
    written = torch.load(tmp_path / "o.pt", weights_only=True)["optimizer"]
    assert set(written["param_groups"][0]["params"]) == set(written["state"])
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in written["state"]
