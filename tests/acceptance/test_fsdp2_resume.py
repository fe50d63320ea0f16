"""A converted checkpoint resumes a real FSDP2 job on another number of ranks, and one more step is the same step.

Reference: torch itself loads the fixture on the 4 ranks that wrote it and takes a step. Over 2 ranks the mean of equal
gradients is exact, so the step must be equal bit for bit; over 3 ranks g + g + g rounds, so it is compared bit for bit
with torch's own resharding load on 3 ranks, and within a few units in the last place with the 4-rank run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import FIXTURES, ROOT, Runner, Tensors, assert_same
from safetensors.torch import load_file

pytestmark = pytest.mark.peers
SOURCE = FIXTURES / "dcp" / "fsdp2_dp4"


def resumed(checkpoint: Path, world: int, out: Path, layout: str = "states") -> Tensors:
    script = Path(__file__).with_name("resume_step.py")
    command = [sys.executable, "-W", "ignore", str(script), layout, str(checkpoint), str(world), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(out)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """One more step from the original, on the ranks that wrote it."""
    return resumed(SOURCE, 4, tmp_path_factory.mktemp("reference") / "four.safetensors")


def test_the_step_moves_every_parameter(reference: Tensors) -> None:
    """The yardstick itself: the loaded state is the fixture's truth, and the step changes what it should."""
    truth = load_file(SOURCE.with_name("fsdp2_dp4.truth.safetensors"))
    assert_same({k.removeprefix("loaded/"): v for k, v in reference.items() if k.startswith("loaded/")}, truth)
    assert reference["rates"].tolist() == [1e-2, 3e-2], "the groups' learning rates come from the checkpoint"
    still = [key for key in truth if torch.equal(reference[f"stepped/{key}"], truth[key])]
    assert still == ["model/scale"], "only the buffer keeps its value"


@pytest.mark.parametrize("degree", [2, 3, 1])
def test_another_degree_takes_the_same_step(degree: int, reference: Tensors, ckpt: Runner, tmp_path: Path) -> None:
    ckpt("convert", SOURCE, tmp_path / "out", "--to", "dcp", "--dp", degree)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.distcp"))
    assert files == [f"__{rank}_0.distcp" for rank in range(degree)]
    ours = resumed(tmp_path / "out", degree, tmp_path / "ours.safetensors")
    if degree == 3:
        assert_same(ours, resumed(SOURCE, 3, tmp_path / "torch.safetensors"))
        for key, value in reference.items():
            torch.testing.assert_close(
                ours[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}"
            )
    else:
        assert_same(ours, reference)


def test_a_sharded_checkpoint_comes_back_to_the_same_job(reference: Tensors, ckpt: Runner, tmp_path: Path) -> None:
    """DCP 4 -> sharded tp 2 x dp 2 -> DCP 2 -> the job."""
    ckpt("convert", SOURCE, tmp_path / "sharded", "--to", "sharded", "--tp", "2", "--dp", "2")
    ckpt("convert", tmp_path / "sharded", tmp_path / "back", "--to", "dcp", "--dp", "2")
    assert_same(resumed(tmp_path / "back", 2, tmp_path / "ours.safetensors"), reference)


@pytest.mark.parametrize(
    ("case", "layout", "after"),
    [
        ("titan", "titan", 3),
        ("accelerate_fsdp2", "accelerate", 3),
        ("fsdp1_dp2", "fsdp1", 3),
        ("file_per_item", "states", 4),
        ("no_collectives", "states", 3),
        ("tp2_dp2", "tp", 2),
    ],
)
def test_other_trainers_resume_on_other_ranks(case: str, layout: str, after: int, ckpt: Runner, tmp_path: Path) -> None:
    """The trainer's own loading code takes the resharded folder as it took its own; then the step is the same."""
    source = FIXTURES / "dcp" / case
    degrees = ["--tp", 2, "--dp", after // 2] if layout == "tp" else ["--dp", after]
    ckpt("reshard", source, tmp_path / "out", *degrees)
    ours = resumed(tmp_path / "out", after, tmp_path / "ours.safetensors", layout)
    loaded = {k.removeprefix("loaded/"): v for k, v in ours.items() if k.startswith("loaded/")}
    assert_same(loaded, load_file(source.with_name(f"{case}.truth.safetensors")))
    assert ours["rates"].tolist() == [1e-2, 3e-2]
    if case != "no_collectives":  # torch 2.13 itself can't load that one on other ranks
        assert_same(ours, resumed(source, after, tmp_path / "theirs.safetensors", layout))


def boxes(folder: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """(offset, shape) of every chunk by torch's own metadata, sorted; a chunk without elements is none."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    said = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in info.chunks if 0 not in chunk.sizes)
        for name, info in said.items()
        if isinstance(info, TensorStorageMetadata) and name != "model.scale"  # FSDP2 leaves buffers whole
    }


@pytest.mark.parametrize(
    ("degrees", "like"), [(("--dp", 3), "fsdp2_dp3_bf16"), (("--dp", 2), "async_dp2"), ((), "fsdp2_dp4")]
)
def test_uneven_boxes_are_those_of_dtensor(
    degrees: tuple[object, ...], like: str, ckpt: Runner, tmp_path: Path
) -> None:
    """33, 23 and 10 rows are cut as FSDP2 did on as many ranks; no degrees keep the source's."""
    ckpt("reshard", SOURCE, tmp_path / "out", *degrees)
    assert boxes(tmp_path / "out") == boxes(FIXTURES / "dcp" / like)
    assert ckpt("inspect", tmp_path / "out")["mesh"] == ckpt("inspect", FIXTURES / "dcp" / like)["mesh"]
    assert ckpt("diff", SOURCE, tmp_path / "out")["equal"] is True
