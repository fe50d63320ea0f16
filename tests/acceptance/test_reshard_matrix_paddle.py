"""The matrix that Paddle's community asks for: {single, TP, PP, sharding v1, sharding v2, EP, TP+PP+sharding, all} x
the same.

Every pair goes A -> X -> A, and every state of what comes back is held, bit for bit, against the live values of the job
that wrote the source (`fixtures/paddle`, real files of PaddleFormers 1.2.0) or, for the ERNIE MoE shape, against the
arrays that the source was made of. Both are read by safetensors from a layout-free copy. Llama and ERNIE have no
experts, so no EP.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, Tensors, load_sharded
from safetensors.torch import load_file

import ckpt_tool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
import paddle_models as pm

ONE: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": ONE,
    "tp": ONE | {"tp": 2},
    "pp": ONE | {"pp": 2},
    "sharding-v1": ONE | {"dp": 2, "sharding": "v1"},
    "sharding-v2": ONE | {"dp": 2, "sharding": "v2"},
    "ep": ONE | {"ep": 2, "dp": 2, "sharding": "v2"},
    "tp-pp-sharding": ONE | {"tp": 2, "pp": 2, "dp": 2, "sharding": "v1"},
    "all": ONE | {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "sharding": "v2"},
}
REAL = {"llama": "llama_bf16_legacy_tp2", "ernie": "ernie_bf16_io_tp2sd2v2"}
QUICK = {
    ("single", "all"),
    ("all", "single"),
    ("tp", "sharding-v2"),
    ("sharding-v1", "pp"),
    ("pp", "ep"),
    ("ep", "tp-pp-sharding"),
}


def pairs() -> list[Any]:
    found = []
    for model, first, second in product((*REAL, "ernie-moe"), LAYOUTS, LAYOUTS):
        if "ep" in (first, second) and model in REAL:
            continue
        marks = [] if (first, second) in QUICK else [pytest.mark.slow]
        found.append(pytest.param(model, first, second, id=f"{model}-{first}-{second}", marks=marks))
    return found


def degrees(model: str, layout: str) -> dict[str, Any]:
    return LAYOUTS[layout] | ({"ep": 1} if model in REAL else {})


def moe_source(folder: Path) -> tuple[Path, Tensors]:
    """An ERNIE MoE training state as one torch file, brought into Paddle's files; and its values."""
    model = pm.model_of("moe", 2, 4, True, ffn=6)
    truth: Tensors = {}
    nested: dict[str, Any] = {"model": {}, "master": {}, "optimizer": {"state": {}}}
    for (state, name), array in model.arrays.items():
        bits = array.dtype.name == "uint16"
        tensor = torch.from_numpy(array.view("int16")).view(torch.bfloat16) if bits else torch.from_numpy(array)
        truth[f"{state}/{name}"] = tensor
        place = nested[state] if state in nested else nested["optimizer"]["state"].setdefault(name, {})
        place[name if state in nested else state] = tensor
    torch.save(nested, folder / "state.pt")
    out = folder / "moe"
    ckpt_tool.convert(folder / "state.pt", out, to="paddle", dialect="keep")
    config = {
        **pm.CONFIG,
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 2,
    }  # its tensor ranks share the experts out
    (out / "config.json").write_text(json.dumps(config))
    return out, truth


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensors]]:
    folder = FIXTURES / "paddle"
    found = {model: (folder / case, load_file(folder / f"{case}.truth.safetensors")) for model, case in REAL.items()}
    return {**found, "ernie-moe": moe_source(tmp_path_factory.mktemp("moe"))}


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, tuple[Path, Tensors]]) -> Any:
    """(model, layout) -> the model's checkpoint in that layout."""
    made: dict[tuple[str, str], Path] = {}

    def get(model: str, layout: str) -> Path:
        if (model, layout) not in made:
            out = tmp_path_factory.mktemp("laid") / "ckpt"
            ckpt_tool.reshard(sources[model][0], out, **degrees(model, layout))
            made[model, layout] = out
        return made[model, layout]

    return get


def opened(path: Path, scratch: Path) -> Tensors:
    ckpt_tool.convert(path, scratch, to="sharded", dialect="keep")
    return load_sharded(scratch)


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.share(3)
@pytest.mark.parametrize(("model", "first", "second"), pairs())
def test_there_and_back(
    model: str, first: str, second: str, sources: dict[str, tuple[Path, Tensors]], laid: Any, tmp_path: Path
) -> None:
    truth = sources[model][1]
    start = laid(model, first)
    ckpt_tool.reshard(start, tmp_path / "x", **degrees(model, second))
    ckpt_tool.reshard(tmp_path / "x", tmp_path / "back", **degrees(model, first))
    before = opened(start, tmp_path / "before")
    after = opened(tmp_path / "back", tmp_path / "after")
    assert before.keys() <= after.keys()
    assert {key.split("/", 1)[0] for key in after.keys() - before.keys()} <= {"model"}  # rounded masters, as it says
    states = {key.split("/", 1)[0] for key in after}
    assert {"master", "exp_avg", "exp_avg_sq", "beta1_pow_acc", "beta2_pow_acc"} <= states
    for key, tensor in after.items():
        state, name = key.split("/", 1)
        made = state == "model" and key not in truth  # sharding_io of a bf16 job holds masters alone
        want = truth[f"master/{name}"].to(torch.bfloat16) if made else truth[key]
        assert raw(tensor) == raw(want), key
    gone = [key for key in truth if key not in after and key.split("/", 1)[0] != "model"]
    assert not gone, gone[:5]


@pytest.mark.parametrize("model", [*REAL, "ernie-moe"])
def test_a_rank_holds_less_of_what_is_parted(model: str, laid: Any) -> None:
    """The layouts are what they are called: files of every rank, none with the whole."""
    assert {p.name for p in laid(model, "tp").glob("model_state*")} == {f"model_state.tp0{i}.pdparams" for i in (0, 1)}
    every = sorted(p.name for p in laid(model, "tp-pp-sharding").glob("optimizer*"))
    assert every == sorted(f"optimizer.tp0{t}_pp0{p}_shard0{s}.pdopt" for t in (0, 1) for p in (0, 1) for s in (0, 1))
    if model == "ernie-moe":
        assert b"experts.0." not in (laid(model, "tp") / "model_state.tp01.pdparams").read_bytes()
    whole = (laid(model, "single") / "optimizer.pdopt").stat().st_size
    for file in laid(model, "tp-pp-sharding").glob("optimizer*"):
        assert file.stat().st_size < whole / 2


CASES = sorted(path.name for path in (FIXTURES / "paddle").iterdir() if (path / "config.json").is_file())


@pytest.mark.parametrize("case", CASES)
def test_its_own_degrees_give_the_real_job_s_files_byte_for_byte(case: str, tmp_path: Path) -> None:
    real = FIXTURES / "paddle" / case
    ckpt_tool.reshard(real, tmp_path / "out")
    files = {path.name for path in real.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    for name in files - {"model_meta.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (real / name).read_bytes(), name
    if "model_meta.json" in files:  # frozen parameters, which no file holds, aside
        ours, theirs = (json.loads((path / "model_meta.json").read_text()) for path in (tmp_path / "out", real))
        assert ours["parallel_config"] == theirs["parallel_config"]
        for key, stage in theirs["sharding_metas"].items():
            mine = ours["sharding_metas"][key]
            named = mine["structure_name_mapping"]
            assert mine["param2rank"] == stage["param2rank"]
            assert named == {name: static for name, static in stage["structure_name_mapping"].items() if name in named}


def test_other_degrees_give_the_files_that_a_real_job_of_those_writes(tmp_path: Path) -> None:
    real = FIXTURES / "paddle" / "llama_bf16_io_ema_sd2v1"
    source = FIXTURES / "paddle" / "llama_bf16_legacy_tp2"
    ckpt_tool.reshard(source, tmp_path / "out", tp=1, dp=2, sharding="v1")
    for path in real.glob("optimizer.*"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    ckpt_tool.reshard(real, tmp_path / "back", tp=2, dp=1)
    for path in source.glob("optimizer.*"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
