"""What the acceptance tests share: the command as a user runs it, the fixtures' truth, and readers that are not ours.

Every judgement here is made by torch and safetensors, never by `ckpt_tool`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"

Tensors = dict[str, torch.Tensor]  # "STATE/NAME" -> the whole tensor


class Case(NamedTuple):
    """A fixture and its truth. name: `dcp/fsdp2_dp4`. path: the folder or file."""

    name: str
    path: Path

    @property
    def format(self) -> str:
        return self.name.split("/")[0]

    def truth(self) -> Tensors:
        return load_file(self.path.parent / f"{self.path.stem}.truth.safetensors")

    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = json.loads((self.path.parent / f"{self.path.stem}.truth.json").read_text())["extras"]
        return extras


def cases(*formats: str) -> list[Any]:
    """Every fixture of the formats that has a truth beside it, as pytest parameters."""
    found = []
    for name in formats:
        for truth in sorted((FIXTURES / name).glob("*.truth.safetensors")):
            stem = truth.name.removesuffix(".truth.safetensors")
            here = [path for path in truth.parent.glob(f"{stem}*") if path.stem == stem and path != truth]
            found += [pytest.param(Case(f"{name}/{stem}", path), id=f"{name}/{stem}") for path in here]
    return found


class Ran(NamedTuple):
    """A finished command. out: stdout's JSON document, None when there is none."""

    code: int
    out: Any
    err: str


class Runner:
    """`ckpt VERB ... --json` in a process of its own, forked from one that has the tool imported already."""

    def __init__(self, scratch: Path) -> None:
        self._out = scratch / "stdout"
        self._err = scratch / "stderr"
        command = [sys.executable, str(Path(__file__).with_name("warm_command.py"))]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._warm = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *args: object) -> Ran:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        line = [str(self._out), str(self._err), *map(str, args), "--json", "--progress", "none"]
        self._warm.stdin.write(json.dumps(line) + "\n")
        self._warm.stdin.flush()
        code = int(self._warm.stdout.readline())
        out = self._out.read_text()
        err = self._err.read_text()
        assert "Traceback" not in err, err
        return Ran(code, json.loads(out) if out.strip() else None, err)

    def __call__(self, *args: object) -> Any:
        """The JSON document of a command that must succeed."""
        ran = self.run(*args)
        assert ran.code == 0, f"ckpt {' '.join(map(str, args))}: exit {ran.code}\n{ran.err}{json.dumps(ran.out)[:2000]}"
        return ran.out

    def close(self) -> None:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=60)
        self._warm.stdout.close()


# -- reading outputs with the real libraries ---------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(path, leaf) of nested dicts; lists count as leaves unless a dict or tensor is in them."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping | torch.Tensor) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def by_state(nested: Mapping[str, Any]) -> Tensors:
    """`STATE/NAME` of every tensor of a training state dict, by the field's own conventions alone: `model`, `ema`,
    `optim.state.NAME.STATE` (or its flat spelling); a dict without any of these is a bare model."""
    found: Tensors = {}
    roots = [key for key in ("model", "ema", "model_state_dict") if isinstance(nested.get(key), Mapping)]
    for path, value in leaves(nested):
        if not isinstance(value, torch.Tensor):
            continue
        words = [str(word) for word in path]
        if words[0] in ("optim", "optimizer", "optimizer_state_dict") or ".".join(words).startswith("state."):
            dotted = ".".join(words).split("state.", 1)[1]
            name, state = dotted.rsplit(".", 1)
        elif words[0] in roots:
            name = ".".join(words[1:])
            state = words[0].removesuffix("_state_dict")
        else:
            name = ".".join(words)
            state = "extras" if roots else "model"
        assert f"{state}/{name}" not in found
        found[f"{state}/{name}"] = value
    return found


def named(tensors: Tensors, ids: Mapping[str, str]) -> Tensors:
    """Optimizer states that stand under their parameter's number, under its name; `ids`: number -> name."""
    out: Tensors = {}
    for key, tensor in tensors.items():
        state, name = key.split("/", 1)
        out[key if state in ("model", "ema", "extras") else f"{state}/{ids.get(name, name)}"] = tensor
    return out


def param_names(optimizer: Mapping[str, Any]) -> dict[str, str]:
    """Number -> name from an optimizer state dict whose groups carry `param_names` (torch >= 2.6)."""
    pairs = [zip(g["params"], g.get("param_names", ()), strict=False) for g in optimizer["param_groups"]]
    return {str(number): name for group in pairs for number, name in group}


def load_dcp(folder: Path) -> dict[str, Any]:
    """A DCP folder by `torch.distributed.checkpoint` alone, in one process: path tuple -> tensor or object, nested."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder).read_metadata()
    flat: dict[str, Any] = {
        name: torch.empty(info.size, dtype=info.properties.dtype) if isinstance(info, TensorStorageMetadata) else ""
        for name, info in metadata.state_dict_metadata.items()
    }
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "torch.distributed is disabled": so it should be
        dcp.load(flat, checkpoint_id=folder, no_dist=True, planner=planner)
    if metadata.planner_data is None:
        return flat
    return dict(unflatten_state_dict(flat, metadata.planner_data))


def load_dcp_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    """A DCP folder whose files are safetensors (torch 2.13 has no reader for it): boxes put together by the offsets
    that the writer left in each header. The checkpoint's flat names -> whole tensors."""
    found: dict[str, torch.Tensor] = {}
    parts = []
    for file in sorted(folder.glob("*.distcp")):
        with safe_open(file, "pt") as opened:
            offsets = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            parts += [(name, offsets[name]["saved_offsets"], opened.get_tensor(name)) for name in opened.keys()]
    for name, _, part in parts:
        ends = [[o + n for o, n in zip(at, piece.shape, strict=True)] for key, at, piece in parts if key == name]
        found.setdefault(name, torch.full([max(end) for end in zip(*ends, strict=True)], -99.0, dtype=part.dtype))
    for name, at, part in parts:
        found[name][tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))] = part
    return found


def load_sharded(folder: Path) -> Tensors:
    """The `sharded` layout without degrees by safetensors alone: the state is the file's name."""
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> None:
    """Same keys, dtypes, shapes and bits; every difference is told at once."""
    faults = [f"missing: {key}" for key in sorted(want.keys() - got.keys())]
    faults += [f"not wanted: {key}" for key in sorted(got.keys() - want.keys())]
    for key in sorted(want.keys() & got.keys()):
        a = got[key].detach()
        b = want[key].detach()
        if a.dtype != b.dtype or a.shape != b.shape:
            faults.append(f"{key}: {a.dtype} {tuple(a.shape)}, want {b.dtype} {tuple(b.shape)}")
        elif not torch.equal(bits(a), bits(b)):
            faults.append(f"{key}: {int((bits(a) != bits(b)).sum())} bytes of {bits(b).numel()} differ")
    assert not faults, "\n".join(faults)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
