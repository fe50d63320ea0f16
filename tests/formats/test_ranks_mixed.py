"""Rank files that contradict each other, over the registry and the fixtures: a file or a folder in another's place, a
file of another step, ranks that disagree. Each is an error of ours that names a file, or the values are all the same.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rank_files import edit, of_another_step, places, put, scalars_of

from ckpt_tool.commands.convert import convert
from ckpt_tool.commands.diff import diff
from ckpt_tool.commands.inspect import inspect
from ckpt_tool.commands.verify import verify
from ckpt_tool.core.progress import Silent
from ckpt_tool.errors import CkptError, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).parents[2] / "fixtures"
PAIRS = 24  # of a fixture: spread over all there are
MADE = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "all": {"tp": 2, "pp": 2, "dp": 2},
    "ep2": {"ep": 2, "dp": 2},
}
SOURCES = {  # training states of which every format and degree can be made, with sizes that divide
    "megatron": "megatron/moe_tp2ep2etp1",
    "megatron-dist": "megatron/moe_tp2ep2etp1",
    "paddle": "paddle/llama_bf16_legacy_tp2",
    "paddle-flex": "paddle/llama_bf16_legacy_tp2",
    "paddle-unified": "paddle/llama_bf16_legacy_tp2",
    "deepspeed": "deepspeed/moe_z2_ep2_dp4",
    "deepspeed-universal": "deepspeed/pipe_pp2_dp2_z1",
    "meta": "convert/llama/hf",
}


def _fixtures() -> list[Any]:
    found = []
    for name in registry.NAMES:
        for path in sorted((FIXTURES / name).glob("*")):
            if path.is_dir() and next(places(path), None):
                found.append(pytest.param(path, id=f"{name}-{path.name}"))
    return found


def some(pairs: list[Any], most: int = PAIRS) -> list[Any]:
    return pairs if len(pairs) <= most else [pairs[i * (len(pairs) - 1) // (most - 1)] for i in range(most)]


def outcome(source: Path, truth: Path, out: Path) -> CkptError | None:
    """The error of a conversion, which names a place; None where all values (RNG states aside) are those of `truth`."""
    shutil.rmtree(out, ignore_errors=True)
    try:
        convert(str(source), str(out), Reading(), Writing(to="sharded"), Silent())
    except CkptError as fault:
        assert fault.exit_code in (3, 4), fault  # 4: an item of DCP that another size cuts reads as a zip in a zip
        assert fault.message and (fault.path or fault.key), f"the error names no place: {fault}"
        assert not out.exists()
        return fault
    same = diff(str(truth), str(out), Reading(), progress=Silent())
    left = [
        one for one in same["differences"] if one["state"] != "extras"
    ]  # an RNG state says of no rank that it is its own
    assert not left, f"values went in silence: {len(left)} of {same['compared']}, {left[:2]}"
    return None


def in_each_others_place(truth: Path, work: Path, most: int) -> set[str]:
    """The codes of the errors, for all pairs of a checkpoint's files and folders."""
    codes = set()
    for one, other in some(list(places(truth)), most):
        source = work / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(truth, source)
        if put(source, one, other):
            try:
                fault = outcome(source, truth, work / "out")
            except AssertionError as e:
                raise AssertionError(f"{one} over {other}: {e}") from e
            codes |= {fault.code} if fault else set()
    return codes


@pytest.mark.share(12)
@pytest.mark.parametrize("path", _fixtures())
def test_a_file_in_anothers_place(path: Path, tmp_path: Path) -> None:
    in_each_others_place(path, tmp_path, PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("path", _fixtures())
def test_every_file_in_every_others_place(path: Path, tmp_path: Path) -> None:
    in_each_others_place(path, tmp_path, 400)


@pytest.mark.share(15)
@pytest.mark.parametrize("degrees", MADE)
@pytest.mark.parametrize("to", registry.NAMES)
def test_a_file_in_anothers_place_where_all_sizes_are_equal(to: str, degrees: str, tmp_path: Path) -> None:
    """Real fixtures have odd sizes, by which much is found: here ranks' files differ in nothing but their values."""
    made = tmp_path / "made"
    source = FIXTURES / SOURCES.get(to, "megatron/moe_tp2ep2etp1")
    try:
        convert(
            str(source),
            str(made),
            Reading(),
            Writing(to=to, degrees=MADE[degrees], dialect="keep" if to != "meta" else None),
            Silent(),
        )
    except UsageError as e:
        pytest.skip(f"{e.code}: {to} can't take it at {degrees}")
    if not made.is_dir() or next(places(made), None) is None:
        pytest.skip("one file")
    in_each_others_place(made, tmp_path, PAIRS)


def test_equal_files_are_both_named_and_lenient_takes_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "meta" / "llama2_tp2", source)
    put(source, "consolidated.00.pth", "consolidated.01.pth")
    with pytest.raises(
        CkptError, match=r"consolidated\.00\.pth and consolidated\.01\.pth have the same bytes"
    ) as caught:
        inspect(str(source), Reading())
    assert caught.value.code == "E1630" and "--lenient" in (caught.value.hint or "")
    assert any("same bytes" in note for note in inspect(str(source), Reading(lenient=True))["notes"])


def test_equal_constants_are_no_copies(tmp_path: Path) -> None:
    """What no training has changed yet is equal on all ranks."""
    import torch

    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "meta" / "llama2_tp2", source)
    for file in sorted(source.glob("*.pth")):
        state = torch.load(file, weights_only=True)
        torch.save({name: torch.ones_like(value) for name, value in state.items()}, file)
    assert inspect(str(source), Reading())["total"]["tensors"]


def test_tied_weights_in_files_of_their_own_are_no_copies(tmp_path: Path) -> None:
    """One array under two names, a file each, equal in every state."""
    made = tmp_path / "made"
    source = FIXTURES / "dcp" / "tied"
    convert(str(source), str(made), Reading(), Writing(to="deepspeed-universal", dialect="keep"), Silent())
    assert diff(str(source), str(made), Reading(), progress=Silent())["equal"]


@pytest.mark.parametrize("case", ["dcp_hf_sharded", "dcp_uneven"])
def test_a_part_saved_twice_is_taken_with_lenient(case: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "safetensors" / case, source)
    one, other = sorted(path.name for path in source.glob("shard-*-model-00001-*"))[:2]
    put(source, one, other)
    with pytest.raises(CkptError, match=f"{one} and {other} hold the same part") as caught:
        inspect(str(source), Reading())
    assert caught.value.code == "E1631"
    try:
        assert any("hold the same part" in note for note in inspect(str(source), Reading(lenient=True))["notes"])
    except CkptError as fault:
        assert fault.code == "E0309"  # what the lost file held is missing


# -- another step ------------------------------------------------------------------------------------------------------


@pytest.mark.share(9)
@pytest.mark.parametrize("path", _fixtures())
def test_a_file_of_another_step(path: Path, tmp_path: Path) -> None:
    """Where anything in the file says its step, it is found; where nothing does, there is nothing to find."""
    scalars = scalars_of(path)
    for file in some(
        sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.suffix in (".pt", ".pth", ".distcp", ".pdopt")), 8
    ):
        source = tmp_path / "source"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(path, source)
        stale = of_another_step(source, file)
        others = [count for other, count in scalars.items() if other != file and count >= 2]
        says = (stale.plain and not file.endswith(".distcp")) or (scalars.get(file, 0) >= 2 and others)
        if not says or not stale.values or _alone(path, file):
            continue
        try:
            convert(str(source), str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())
        except CkptError as fault:
            assert fault.exit_code == 3 and fault.path, (file, fault)
            continue
        pytest.fail(f"{file} of another step went in silence ({stale})")


def test_counters_tell_files_of_two_saves_apart(tmp_path: Path) -> None:
    source = tmp_path / "source"
    file = "__1_0.distcp"
    shutil.copytree(FIXTURES / "dcp" / "fsdp2_dp3_bf16", source)
    of_another_step(source, file)
    with pytest.raises(CkptError, match=r"all step in \S+ are [23], all in \S+ [23]") as caught:
        convert(str(source), str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())
    assert caught.value.code == "E0305" and "--lenient" in (caught.value.hint or "")
    found = verify(str(source), Reading(), progress=Silent())["findings"]
    assert [one["code"] for one in found] == ["E0305"]
    convert(str(source), str(tmp_path / "out"), Reading(lenient=True), Writing(to="sharded"), Silent())


def test_parameters_that_count_apart_are_none(tmp_path: Path) -> None:
    """torch counts a parameter without a gradient apart: one of a file's counters differs."""
    source = tmp_path / "source"
    file = "__1_0.distcp"
    shutil.copytree(FIXTURES / "dcp" / "safetensors_inside", source)
    catalog = open_source(str(source), Reading()).catalog
    array = next(
        t.chunks[0].array for t in catalog.tensors.values() if t.key.state == "step" and t.chunks[0].array.path == file
    )
    raw = bytearray((source / file).read_bytes())
    raw[array.offset : array.offset + 4] = struct.pack("<f", 1.0)
    (source / file).write_bytes(raw)
    convert(str(source), str(tmp_path / "out"), Reading(), Writing(to="sharded"), Silent())


def _alone(root: Path, file: str) -> bool:
    """Is it the only one of its kind? Then no other says another step."""
    kind = re.sub(r"\d+", "#", file)
    return sum(re.sub(r"\d+", "#", str(p.relative_to(root))) == kind for p in root.rglob("*")) < 2


@pytest.mark.parametrize("case", ["megatron/moe_tp2ep2etp1", "deepspeed/pipe_pp2_dp2_z1", "paddle-flex/llama_tied_pp2"])
def test_masters_of_another_step_are_found_by_verify(case: str, tmp_path: Path) -> None:
    """Files without any counter: 16-bit weights that are no rounding of their masters."""
    file = {
        "megatron": "iter_0000002/mp_rank_00_000/distrib_optim.pt",
        "deepspeed": "layer_01-model_states.pt",
        "paddle-flex": "model_state/0_0.distcp",
    }[case.partition("/")[0]]
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / case, source)
    if case.startswith("megatron"):  # (a master's last bits round away)
        _swap_values(source / file)
    else:
        of_another_step(source, file)
    found = verify(str(source), Reading(), progress=Silent())
    assert not found["ok"] and "W-master" in {one["code"] for one in found["findings"]}


def _swap_values(path: Path) -> None:
    """Masters become moments, and moments masters."""

    def change(value: Any) -> None:
        for part in value if isinstance(value, list) else [value]:
            for buffers in part[0].values():
                buffers["param"], buffers["exp_avg"] = buffers["exp_avg"], buffers["param"]

    edit(path, change)


# -- ranks that disagree -----------------------------------------------------------------------------------------------

ARGUMENTS = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_query_groups": 1,
    "ffn_hidden_size": 8,
    "kv_channels": 4,
    "num_experts": 8,
    "swiglu": False,
    "untie_embeddings_and_output_weights": None,
    "vocab_size": 7,
    "padded_vocab_size": 128,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "data_parallel_size": 1,
    "world_size": 2,
    "consumed_train_samples": 99,
    "transformer_impl": "x",
    "use_distributed_optimizer": None,
}


def arguments_of(value: Any) -> dict[str, Any]:
    args = value["args"].state
    assert isinstance(args, dict)
    return args


@pytest.mark.share(3)
@pytest.mark.parametrize("rank", ["mp_rank_00_000", "mp_rank_01_001"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_megatron_ranks_that_disagree(name: str, rank: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "megatron" / "moe_tp2ep2etp1", source)
    file = source / "iter_0000002" / rank / "model_optim_rng.pt"
    edit(file, lambda value: arguments_of(value).update({name: ARGUMENTS[name]}))
    with pytest.raises(CkptError) as caught:
        inspect(str(source), Reading())
    lines = " ".join((caught.value.message, *caught.value.faults))
    assert caught.value.exit_code == 3 and name in lines and "mp_rank_" in lines and str(ARGUMENTS[name]) in lines


def test_megatron_arguments_that_decide_nothing_are_a_note(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "megatron" / "moe_tp2ep2etp1", source)
    edit(
        source / "iter_0000002/mp_rank_01_001/model_optim_rng.pt",
        lambda value: arguments_of(value).update(log_interval=77),
    )
    assert any("log_interval" in note for note in inspect(str(source), Reading())["notes"])


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_megatron_a_rank_says_where_it_belongs(number: int, tmp_path: Path) -> None:
    """A repeat does not switch the check off; only where all say the same, nothing is said."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "megatron" / "moe_tp2ep2etp1", source)
    edit(
        source / "iter_0000002/mp_rank_01_001/model_optim_rng.pt", lambda value: arguments_of(value).update(rank=number)
    )
    if number in (1, 3, 0):  # 3 shares tensor rank 1 with 1; where both say 0, a converter wrote them
        inspect(str(source), Reading())
        return
    with pytest.raises(CkptError, match="expert rank 1, the file in it tensor rank 0") as caught:
        inspect(str(source), Reading())
    assert caught.value.code == "E0305" and "mp_rank_01_001" in (caught.value.path or "")


def test_megatron_a_repeat_among_others(tmp_path: Path) -> None:
    made = tmp_path / "made"
    convert(
        str(FIXTURES / "megatron/moe_tp2ep2etp1"),
        str(made),
        Reading(),
        Writing(to="megatron", degrees={"tp": 2, "pp": 2}),
        Silent(),
    )
    (folder,) = {path.parent.parent for path in made.rglob("model_optim_rng.pt")}
    edit(folder / "mp_rank_01_001" / "model_optim_rng.pt", lambda value: arguments_of(value).update(rank=0))
    with pytest.raises(CkptError) as caught:
        inspect(str(made), Reading())
    assert "mp_rank_01_001" in (caught.value.path or "") and "as in" in caught.value.message


def _swapped(shapes: Any) -> None:
    """Two parameters change places."""
    names = list(shapes[-1])
    values = {name: shapes[-1][name] for name in [*names[1:2], *names[:1], *names[2:]]}
    shapes[-1].clear()
    shapes[-1].update(values)


def _renamed(shapes: Any) -> None:
    name = next(iter(shapes[0]))
    values = {("else." if key == name else "") + key: item for key, item in shapes[0].items()}
    shapes[0].clear()
    shapes[0].update(values)


def _turned(shapes: Any) -> None:
    for group in shapes:
        for name, shape in group.items():
            if len(shape) == 2 and shape[0] != shape[1]:
                group[name] = type(shape)(shape[::-1])
                return
    pytest.skip("every shape is square")


SHAPES: dict[str, Callable[[Any], None]] = {
    "param_shapes swapped": lambda value: _swapped(value["param_shapes"]),
    "param_shapes renamed": lambda value: _renamed(value["param_shapes"]),
    "param_shapes turned": lambda value: _turned(value["param_shapes"]),
    "param_shapes lost": lambda value: value["param_shapes"].pop(),
    "frozen_param_shapes renamed": lambda value: _renamed([value["frozen_param_shapes"]]),
    "frozen_param_shapes turned": lambda value: _turned([value["frozen_param_shapes"]]),
    "buffer_names": lambda value: value["buffer_names"].append("else"),
    "ds_version": lambda value: value.update(ds_version="0.0.1"),
    "global_steps": lambda value: value.update(global_steps=77),
    "ds_config": lambda value: value["ds_config"]["zero_optimization"].update(round_robin_gradients=True),
}


@pytest.mark.share(2)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("case", ["z3_bf16_dp4", "z3_sub_groups_dp4"])
def test_deepspeed_ranks_that_disagree(case: str, what: str, rank: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    truth = FIXTURES / "deepspeed" / case
    shutil.copytree(truth, source)
    file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    edit(source / file, SHAPES[what])
    fault = outcome(source, truth, tmp_path / "out")
    assert fault is not None and fault.code == "E0359"
    assert "zero_pp_rank_" in " ".join((fault.path or "", fault.message, *fault.faults))
