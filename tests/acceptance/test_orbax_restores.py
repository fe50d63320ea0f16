"""Orbax restores what we wrote: every leaf of dtype, shape and bytes as in the checkpoint that it saved itself.

CKPT_ORBAX_PYTHON names a Python with Orbax (tested: 0.12.8, jax 0.10.2); `fixtures/make/orbax_checkpoints.py --restore`
runs there. Its calls: PyTreeCheckpointer, StandardCheckpointer without a target and with one that is sharded over
another mesh than the job's, v1's load.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ckpt_tool.cli import run

PYTHON = os.environ.get("CKPT_ORBAX_PYTHON")
FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES = ("adamw_ocdbt_zarr2", "dtypes_ocdbt_zarr3", "files_zarr2", "files_zarr3", "plain_ocdbt", "bare_slashes")
pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="CKPT_ORBAX_PYTHON names no Python with Orbax"),
]


def restored(a: Path, b: Path) -> list[dict[str, object]]:
    """What differs of `b` from `a`, by call."""
    maker = FIXTURES / "make/orbax_checkpoints.py"
    done = subprocess.run([str(PYTHON), str(maker), "--restore", str(a), str(b)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("case", CASES)
def test_every_call_restores_what_was_written(case: str, tmp_path: Path) -> None:
    source = FIXTURES / "orbax" / case
    out = tmp_path / "out"
    assert run(["reshard", str(source), str(out), "-q"]) == 0
    found = restored(source, out)
    assert len(found) >= 2 and all(call["leaves"] and not call["wrong"] for call in found), found


def test_a_state_that_came_through_dcp_is_restored(tmp_path: Path) -> None:
    """But for the parts of the chain that hold nothing, which DCP has no place for."""
    source = FIXTURES / "orbax/plain_ocdbt"
    through = tmp_path / "dcp"
    out = tmp_path / "out"
    assert run(["convert", str(source), str(through), "--to", "dcp", "--dp", "2", "-q"]) == 0
    assert run(["convert", str(through), str(out), "--to", "orbax", "-q"]) == 0
    assert all(not call["wrong"] for call in restored(source, out))


COUNT_ON = """
import sys, jax, jax.numpy as jnp, optax, orbax.checkpoint as ocp
params = ocp.PyTreeCheckpointer().restore(sys.argv[1])["params"]
optimizer = optax.adamw(1e-3)
item = {"params": params, "opt_state": optimizer.init(params)}
args = ocp.args.PyTreeRestore(item=item, partial_restore=True)
state = ocp.PyTreeCheckpointer().restore(sys.argv[1], args=args)["opt_state"]
_, after = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
print(state[0].count, state[0].count.dtype, after[0].count)
"""


def test_optax_counts_on_from_the_steps_that_torch_left(tmp_path: Path) -> None:
    source = FIXTURES / "orbax/adamw_ocdbt_zarr2"
    through = tmp_path / "dcp"
    out = tmp_path / "out"
    assert run(["convert", str(source), str(through), "--to", "dcp", "--drop", "extras", "-q"]) == 0
    assert run(["convert", str(through), str(out), "--to", "orbax", "-q"]) == 0
    words = [str(PYTHON), "-c", COUNT_ON, str(out)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["3", "int32", "4"]


def test_maxtext_s_own_tree_is_restored_for_ours(tmp_path: Path) -> None:
    made = FIXTURES / "maxtext/qwen3_moe"
    out = tmp_path / "out"
    assert run(["convert", str(made / "hub"), str(out), "--to", "orbax", "--dialect", "maxtext", "-q"]) == 0
    calls = {call["call"]: call["wrong"] for call in restored(made / "scanned/items", out / "items")}
    del calls["v1"]  # which wants the step's folder, and a model of the hub has no `step`
    assert len(calls) == 3 and all(wrong == ["step"] for wrong in calls.values())
