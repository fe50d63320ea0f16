"""Paddle's files of ranks as they are written: against NumPy's own slicing (`paddle_models`), and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle_models as pm
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from targets import gather

from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.core.hints import Degrees, Hints
from ckpt_tool.core.layout import Layout
from ckpt_tool.core.mesh import Mesh
from ckpt_tool.core.target import LayoutWish, Target, Wanted, WantedTensor
from ckpt_tool.core.tensor import TensorKey
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.base import ReadOptions
from ckpt_tool.storage.source import Tree
from ckpt_tool.systems.paddle.options import PaddleOptions
from ckpt_tool.systems.paddle.pdparams.format import FORMAT
from ckpt_tool.systems.paddle.pdparams.target import paddle_target
from ckpt_tool.systems.paddle.pickle_file import read_paddle

WORDS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}


def wanted_of(model: pm.Model, job: pm.Job, **hints: Any) -> Wanted:
    tensors = [
        WantedTensor(TensorKey(name, state), array.shape, DTYPES["BF16" if array.dtype == np.uint16 else "F32"])
        for (state, name), array in model.arrays.items()
    ]
    config = dict(pm.CONFIG, model_type="ernie4_5_moe") if job.by_tensor else dict(pm.CONFIG)
    degrees = Degrees(tp=job.tp, pp=job.pp, ep=job.ep, dp=job.sharding)
    wish = LayoutWish(degrees, config=config, of_systems=(PaddleOptions(job.version),))
    return Wanted(tuple(tensors), hints=Hints(hints), wish=wish)


def lay_down(target: Target, wanted: Wanted, model: pm.Model, folder: Path) -> None:
    """The target on disk, element by element; nothing twice."""
    values = [model.arrays[t.key.state, t.key.name] for t in wanted.tensors]
    for file in target.files:
        data = np.zeros(file.size, np.uint8)
        taken = np.zeros(file.size, np.int8)
        for offset, piece in file.literals:
            data[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
            taken[offset : offset + len(piece)] += 1
        for array in file.arrays:
            whole = values[array.tensor]
            where = tuple(slice(o, o + n) for o, n in zip(array.box.offset, array.box.shape, strict=True))
            part = np.ascontiguousarray(whole[where])
            steps = array.strides or tuple(s // part.itemsize for s in part.strides)
            for index in np.ndindex(part.shape):
                at = array.offset + part.itemsize * sum(i * s for i, s in zip(index, steps, strict=True))
                data[at : at + part.itemsize] = np.frombuffer(part[index].tobytes(), np.uint8)
                taken[at : at + part.itemsize] += 1
        assert taken.max(initial=0) <= 1, file.path
        (folder / file.path).write_bytes(data.tobytes())


def stored(folder: Path, path: str) -> dict[tuple[Any, ...], np.ndarray]:
    """Every array of a file, from where our reader says that it lies."""
    tree = Tree(folder)
    out = {}
    for saved in read_paddle(tree, path).leaves:
        (part,) = saved.parts
        dtype = {"U16": np.uint16, "F32": np.float32}[part.dtype.name]
        raw = tree.read(part.path, part.offset, part.dtype.nbytes(part.numel))
        out[saved.path] = np.frombuffer(raw, dtype).reshape(saved.shape)
    return out


def same(got: Mapping[Any, np.ndarray], want: Mapping[Any, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for key, array in want.items():
        assert got[key].dtype == array.dtype, key
        np.testing.assert_array_equal(got[key], array, err_msg=str(key))


def tokens(job: pm.Job, at: pm.Place, *, shard: bool = True, expert: bool = False) -> str:
    here = {"tp": (at.tp, job.tp), "pp": (at.pp, job.pp)}
    here |= {"shard": (at.shard, job.sharding)} if shard else {}
    here |= {"moe_sharding": (at.expert_rank(job)[0], job.ep)} if expert else {}
    return pm.suffix(job, {key: number for key, (number, of) in here.items() if of > 1})


def statics_of(folder: Path, job: pm.Job, at: pm.Place) -> dict[str, str]:
    if job.sharding == 1:
        path = f"model_state{tokens(job, at, expert=True)}.pdparams"
        return {str(saved.path[0]): saved.name for saved in read_paddle(Tree(folder), path).leaves}
    meta = json.loads((folder / "model_meta.json").read_text())
    key = f"tp{at.tp:02d}_pp{at.pp:02d}" + (f"_ep{at.expert_rank(job)[0]:02d}" if job.ep > 1 else "")
    names: dict[str, str] = meta["sharding_metas"][key]["structure_name_mapping"]
    return names


def check_ranks(folder: Path, model: pm.Model, job: pm.Job) -> None:
    """Every rank's files hold just what NumPy cuts for it."""
    weights: dict[tuple[int, int, int], dict[str, int]] = {}
    for at in pm.places(job):
        static = statics_of(folder, job, at)
        want = {}
        for (state, name), array in pm.states(model, job, at).items():
            infix = "_fp32_master_0" if ("master", name) in model.arrays else ""
            key = (
                ("master_weights", static[name])
                if state == "master"
                else (f"{static[name]}{infix}_{WORDS.get(state, state)}_0",)
            )
            want[key] = array
        same(stored(folder, f"optimizer{tokens(job, at)}.pdopt"), want)
        if job.sharding == 1:
            got = stored(folder, f"model_state{tokens(job, at, expert=True)}.pdparams")
            whole = {n: pm.cut(n, model.arrays["model", n], job, at.tp) for n in pm.held(model, job, at)}
            same(got, {(name,): array for name, array in whole.items()})
            continue
        got = stored(folder, f"model_state{tokens(job, at)}.pdparams")
        for (name,), array in got.items():
            np.testing.assert_array_equal(array, pm.cut(name, model.arrays["model", name], job, at.tp))
            seen = weights.setdefault((at.pp, at.tp, at.expert_rank(job)[0]), {})
            seen[name] = seen.get(name, 0) + 1
    for (pp, tp, ep), seen in weights.items():  # a group's files hold each parameter
        at = next(p for p in pm.places(job) if (p.pp, p.tp, p.expert_rank(job)[0]) == (pp, tp, ep))
        mine = [n for n in pm.held(model, job, at) if job.ep == 1 or pm.expert_of(n) is not None]
        assert all(seen.get(name) == 1 for name in mine), (pp, tp, ep)


def check_back(folder: Path, model: pm.Model, config: Mapping[str, Any]) -> None:
    """Our reader gives the whole tensors again."""
    tree = Tree(folder)
    catalog = FORMAT.read(tree, ReadOptions(config=config))
    catalog.check()
    assert {(key.state, key.name) for key in catalog.tensors} == model.arrays.keys()
    for key, tensor in catalog.tensors.items():
        want = model.arrays[key.state, key.name]
        got = gather(tree, tensor).reshape(-1).view(want.dtype).reshape(want.shape)
        np.testing.assert_array_equal(got, want, err_msg=str(key))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[pm.Model, pm.Job]:
    kind = draw(st.sampled_from(("llama", "ernie", "moe")))
    tp = draw(st.sampled_from((1, 2)))
    pp = draw(st.integers(1, 2))
    layers = pp * draw(st.integers(1, 2))
    sharding = draw(st.integers(1, 3))
    version = draw(st.sampled_from(("v1", "v2")))
    ep = 1
    by_tensor = False
    experts = 4
    if kind == "moe":
        layers = max(layers, 2)
        valid = [n for n in (2, 4) if n % tp == 0 and tp * sharding % n == 0]
        ep = draw(st.sampled_from((1, *valid)))
        by_tensor = tp > 1 and ep == 1 and draw(st.booleans())
    model = pm.model_of(kind, layers, experts, draw(st.booleans()), ffn=draw(st.sampled_from((2, 4, 6))))
    return model, pm.Job(tp, pp, ep, sharding, version, by_tensor)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(jobs())
def test_every_rank_holds_what_numpy_cuts_for_it(tmp_path_factory: Any, drawn: tuple[pm.Model, pm.Job]) -> None:
    model, job = drawn
    folder = tmp_path_factory.mktemp("ranks")
    wanted = wanted_of(model, job)
    target = FORMAT.target(wanted, Layout(Mesh(), ()))
    lay_down(target, wanted, model, folder)
    check_ranks(folder, model, job)
    check_back(folder, model, wanted.wish.config)


@pytest.mark.parametrize("version", ["v1", "v2", ""])
@pytest.mark.parametrize("kind", ["ernie", "moe"])
def test_an_average_lies_as_its_master_and_whole_where_there_is_none(tmp_path: Path, kind: str, version: str) -> None:
    model = pm.model_of(kind, 2, 4, True)
    for state, name in list(model.arrays):
        if state == "model":
            model.arrays["ema", name] = pm.ramp(500_000 + len(model.arrays), model.arrays["model", name].shape, False)
    job = pm.Job(tp=2, ep=4 if kind == "moe" and version else 1, sharding=2 if version else 1, version=version or "v1")
    wanted = wanted_of(model, job)
    lay_down(paddle_target(wanted), wanted, model, tmp_path)
    seen: dict[str, int] = {}
    for at in pm.places(job):
        static = statics_of(tmp_path, job, at)
        expected = {name: array for (state, name), array in pm.states(model, job, at).items() if state == "master"}
        got = stored(tmp_path, f"ema{tokens(job, at)}.pdopt")
        assert {path[1] for path in got if path[0] == "master_weights"} == {static[name] for name in expected}
        for path, array in got.items():
            if path[0] == "master_weights":
                assert array.size == next(a.size for n, a in expected.items() if static[n] == path[1])
            else:
                assert path[0].endswith("mlp.gate.weight")
                seen[path[0]] = seen.get(path[0], 0) + 1
                np.testing.assert_array_equal(array, pm.cut(path[0], model.arrays["ema", path[0]], job, at.tp))
    assert set(seen.values()) <= {job.tp}
    check_back(tmp_path, model, wanted.wish.config)


def test_a_stage_names_its_parameters_after_its_own_counters(tmp_path: Path) -> None:
    model = pm.model_of("llama", 2, 0, True)
    job = pm.Job(pp=2)
    wanted = wanted_of(model, job)
    lay_down(paddle_target(wanted), wanted, model, tmp_path)
    last = statics_of(tmp_path, job, pm.Place(1, 0, 0))
    assert last["model.layers.1.self_attn.q_proj.weight"] == "linear_0.w_0"
    assert last["lm_head.weight"] == "lm_head_pipe_0.w_0"


def test_the_source_s_names_are_kept_where_no_rank_holds_another_s(tmp_path: Path) -> None:
    model = pm.model_of("llama", 2, 0, True)
    job = pm.Job(tp=2)
    names = {name: f"mine_{i}.w_0" for i, name in enumerate(model.names)}
    hints = {"degrees": {"tp": 1, "dp": 1}, "paddle": {"names": names}}
    wanted = wanted_of(model, job, **hints)
    lay_down(paddle_target(wanted), wanted, model, tmp_path)
    assert statics_of(tmp_path, job, pm.Place(0, 1, 0)) == names
    twice = names | {model.names[2]: names[model.names[1]]}
    wanted = wanted_of(model, job, degrees=hints["degrees"], paddle={"names": twice})
    lay_down(paddle_target(wanted), wanted, model, tmp_path)
    assert len(set(statics_of(tmp_path, job, pm.Place(0, 0, 0)).values())) == len(model.names)


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        (pm.Job(ep=3, sharding=3), "E1251", "1, 2, 4"),
        (pm.Job(tp=2, ep=1, sharding=1, pp=9), "E1250", "--pp 5"),
        (pm.Job(tp=4, by_tensor=True), "E1251", "1, 2"),  # two groups of heads lie fused
        (pm.Job(tp=3, by_tensor=True), "E1251", "1, 2, 4"),
    ],
)
def test_degrees_that_paddle_can_t_run_name_the_nearest_that_it_can(job: pm.Job, code: str, said: str) -> None:
    model = pm.model_of("moe", 2, 4, True, ffn=6)
    with pytest.raises(UsageError) as caught:
        paddle_target(wanted_of(model, job))
    assert caught.value.code == code and said in (caught.value.hint or "")


def test_a_state_that_no_rank_can_share_is_refused() -> None:
    model = pm.model_of("llama", 2, 0, False)
    model.arrays["factor", "model.layers.0.mlp.up_proj.weight"] = np.zeros((8,), np.float32)
    paddle_target(wanted_of(model, pm.Job()))
    with pytest.raises(UsageError) as caught:
        paddle_target(wanted_of(model, pm.Job(tp=2)))
    assert caught.value.code == "E1254"
