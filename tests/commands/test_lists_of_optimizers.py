"""A state with a list of optimizers: names, filters and groups reach into it as into a single optimizer.

`{"model": ..., "optimizers": [state, ...]}` of plain loops, `optimizer_states` of Lightning. Judge: torch's own
`get_optimizer_state_dict` with `torch.distributed.checkpoint.load`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from ckpt_tool.commands.convert import convert, reshard
from ckpt_tool.core.progress import Silent
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing

LAYOUTS = {"plain": ("model", "optimizers"), "Lightning": ("state_dict", "optimizer_states")}


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 6), torch.nn.Linear(6, 3, bias=False))


def optimizers_of(net: torch.nn.Module, count: int, lr: float) -> list[torch.optim.Optimizer]:
    parameters = list(net.parameters())
    if count == 1:
        return [torch.optim.AdamW(parameters, lr=lr)]
    return [torch.optim.AdamW(parameters[:2], lr=lr), torch.optim.SGD(parameters[2:], lr=lr, momentum=0.9)]


def stepped(count: int, lr: float, grad: float) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
    net = model()
    optimizers = optimizers_of(net, count, lr)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, grad * (number + 1))
    for optimizer in optimizers:
        optimizer.step()
    return net, optimizers


def saved(layout: str, count: int, path: Path) -> dict[str, Any]:
    of_model, of_optimizers = LAYOUTS[layout]
    net, optimizers = stepped(count, 0.5, 1.0)
    state = {of_model: net.state_dict(), of_optimizers: [each.state_dict() for each in optimizers]}
    torch.save(state, path)
    return state


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_loads_them_by_name(layout: str, count: int, tmp_path: Path) -> None:
    source = saved(layout, count, tmp_path / "source.pt")
    convert(str(tmp_path / "source.pt"), str(tmp_path / "out"), Reading(), Writing(to="dcp", fsync=False), Silent())

    of_model, of_optimizers = LAYOUTS[layout]
    net, optimizers = stepped(count, 9.0, 0.0)
    state = {
        of_model: get_model_state_dict(net),
        of_optimizers: [get_optimizer_state_dict(net, each) for each in optimizers],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "out")

    names = iter(name for name, _ in net.named_parameters())
    for loaded, want in zip(state[of_optimizers], source[of_optimizers], strict=True):
        assert loaded["param_groups"][0]["lr"] == 0.5
        for moments in want["state"].values():
            found = loaded["state"][next(names)]
            assert all(torch.equal(found[kind], value) for kind, value in moments.items())


def test_a_removed_parameter_leaves_the_groups_too(tmp_path: Path) -> None:
    saved("plain", 2, tmp_path / "source.pt")
    writing = Writing(remove_keys=("2.weight",), fsync=False)
    reshard(str(tmp_path / "source.pt"), str(tmp_path / "out.pt"), Reading(), writing, Silent())
    optimizers = torch.load(tmp_path / "out.pt", weights_only=True)["optimizers"]
    assert [len(each["param_groups"][0]["params"]) for each in optimizers] == [2, 1]
    assert [len(each["state"]) for each in optimizers] == [2, 1]
