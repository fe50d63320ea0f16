"""What a job loads: modules of ours that a plain reshard imports, and those that it has no use for.

A pass, a system or a library that was not asked for costs start-up, and a reader who wonders whether it matters.
The bound is what is there today, rounded up; it only goes down.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from ckpt_tool.conversion.passes import PASSES, Pass
from ckpt_tool.formats.entry import Dialect, DialectQuestion, Question, System, of_dialect, offered, systems

FIXTURES = Path(__file__).parents[1] / "fixtures"
MOST = 164  # of our modules
OTHERS = ("deepspeed.zero", "megatron", "megatron.legacy", "jax.orbax", "paddle.pdparams", "llamacpp.gguf")
# What a plain reshard between two layouts of one format has no use for. Packages (`__init__`) and the entries of lists
# are allowed: they are how a thing is found without being loaded.
UNASKED = (
    "adapters.",
    "algebra.",
    "auditing.",
    "conversion.accounted",
    "conversion.naming",
    "deltas.",
    "device.",
    "families.models.",
    "families.registry",
    "families.rewrite",
    "families.table",
    "merging.",
    "quantised.dequantize",
    "quantised.keep_together",
    "quantised.quantize",
    "quantised.repack",
    "weight_schemes.declared_scheme.",
    "signing.",
    *(f"systems.{folder}.{module}" for folder in OTHERS for module in ("format", "read", "target", "args")),
    "systems.megatron.torch_dist",
    "systems.megatron.fsdp_dtensor",
    "formats.adapters.pairs",
    "formats.adapters.inside",
)  # fmt: skip
PROGRAM = """
import sys
from ckpt_tool.__main__ import main
sys.argv = ["ckpt", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(*(name.removeprefix("ckpt_tool.") for name in sys.modules if name.startswith("ckpt_tool.")), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Our modules that a reshard of a DCP, dp 4 to dp 2, has imported when it ends."""
    out = tmp_path_factory.mktemp("loaded") / "out"
    source = FIXTURES / "dcp" / "fsdp2_dp4"
    command = [sys.executable, "-c", PROGRAM, "reshard", str(source), str(out), "--dp", "2", "-q"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stderr.split()


def test_a_plain_reshard_loads_few_modules(loaded: list[str]) -> None:
    """Fewer than the bound, and enough that something was counted."""
    assert 100 < len(loaded) <= MOST, f"{len(loaded)} modules: {' '.join(sorted(loaded))}"


def test_a_plain_reshard_loads_nothing_unasked(loaded: list[str]) -> None:
    """No pass, system or feature that no option and no tensor asks for."""
    unasked = [name for name in loaded if name.startswith(UNASKED)]
    assert not unasked


@pytest.mark.parametrize("one", PASSES, ids=[one.name for one in PASSES])
def test_each_pass_names_a_function(one: Pass) -> None:
    """What a row calls `module:function` is there, and takes what is chosen and the job."""
    module, _, name = one.function.partition(":")
    function = getattr(import_module(f"ckpt_tool.{module}"), name)
    assert list(inspect.signature(function).parameters) == ["chosen", "job"]


def test_each_answer_of_a_system_is_a_function() -> None:
    """What a row calls `module:function` for a question is there, and each question is one that rows can answer."""
    for question in get_args(Question):
        stated = [folder for folder, system in systems().items() if getattr(system, question)]
        answers = list(offered(question))
        assert len(answers) == len(stated) > 0 and all(map(callable, answers)), question
    dialects = [dialect.name for system in systems().values() for dialect in system.dialects]
    for question in get_args(DialectQuestion):
        assert any(of_dialect(name, question) for name in dialects), question


def test_a_dialect_is_asked_of_its_system() -> None:
    """A variant's name leads to the row of the dialect that it is of; other systems are not asked."""
    assert of_dialect("megatron-swift", "leaving") is of_dialect("megatron", "leaving") is not None
    assert of_dialect("meta", "leaving") is None and of_dialect("megatronic", "leaving") is None
    assert Dialect("x", 1).leaving == System().job_config == ""
