"""`import ckpt_tool as ckpt`: what is exported, how things show themselves, and what is said of a wrong name."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool as ckpt
from ckpt_tool import errors
from ckpt_tool.cli.verbs import VERBS
from ckpt_tool.core import documents
from ckpt_tool.core.catalog import Catalog
from ckpt_tool.core.tensor import TensorKey

HF = Path(__file__).resolve().parents[2] / "fixtures" / "convert" / "llama" / "hf"
FUNCTIONS = sorted(ckpt._FUNCTIONS)  # type: ignore[attr-defined]


def test_every_error_and_result_is_exported() -> None:
    kinds = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.CkptError)]
    assert {kind.__name__ for kind in kinds} <= set(dir(ckpt))
    assert all(getattr(ckpt, kind.__name__) is kind for kind in kinds)
    assert set(documents.RESULTS) <= set(dir(ckpt))
    assert {"LazyTensor", "OpenCatalog", "Progress", "Silent"} <= set(dir(ckpt))
    assert all(hasattr(ckpt, name) for name in dir(ckpt))


def test_every_verb_that_returns_a_document_of_a_checkpoint_has_a_function() -> None:
    """The others are of the machine, the tool itself or its guide."""
    assert set(VERBS) - set(FUNCTIONS) == {"clean", "doctor", "explain", "help", "kernels", "validate"}


@pytest.mark.parametrize("before", ["", "import ckpt_tool.plan.plan, ckpt_tool.signing; from ckpt_tool import api"])
def test_plan_is_the_function_whatever_was_imported(before: str) -> None:
    """A folder of the package has the name of the function, and Python would bind it there."""
    code = f"{before}\nimport ckpt_tool\nprint(ckpt_tool.plan.__module__, ckpt_tool.signing)"
    code = code if before else code.replace(", ckpt_tool.signing", "")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ckpt_tool.api")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_are_of_python(name: str) -> None:
    function = getattr(ckpt, name)
    text = inspect.getdoc(function)
    assert text and "Args:\n" in text and "Returns:\n" in text and "Raises:\n" in text
    assert "--" not in text, "an option of the command line"
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter}: " in text, parameter


def test_defaults_are_the_real_ones() -> None:
    """What a signature shows may be given, and means what leaving it out means."""
    for name in FUNCTIONS:
        if name in ("open", "plan"):
            continue
        shown = {
            parameter.name: parameter.default
            for parameter in inspect.signature(getattr(ckpt, name)).parameters.values()
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "progress"
        }
        assert VERBS[name].groups(shown) == VERBS[name].groups({}), name
    shown = inspect.signature(ckpt.convert).parameters
    assert shown["memory"].default == 1 << 30 and shown["verify"].default == "quick" and shown["resume"].default is True


def test_docstrings_may_be_left_out() -> None:
    """`python -OO` has none."""
    code = "import ckpt_tool; print(ckpt_tool.convert.__doc__)"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


@pytest.mark.parametrize("path", [str, Path])
def test_one_path_is_one_source(path: type, tmp_path: Path) -> None:
    """The letters of a path are no sources."""
    written = ckpt.merge(path(HF), tmp_path / "out")
    assert written["source"]["path"] == str(HF) and "paths" not in written["source"]
    assert ckpt.diff(HF, tmp_path / "out")["equal"]


@pytest.mark.parametrize(
    ("function", "wrong"),
    [("inspect", {"depth": 2}), ("plan", {"dry_run": True}), ("plan", {"plan": "x"}), ("apply", {"to": "dcp"})],
)
def test_options_of_the_command_line_alone_are_refused(function: str, wrong: dict[str, object], tmp_path: Path) -> None:
    arguments = [HF, tmp_path / "out"] if function == "plan" else [HF]
    with pytest.raises(ckpt.UsageError, match="unknown option"):
        getattr(ckpt, function)(*arguments, **wrong)


# -- catalogs ----------------------------------------------------------------------------------------------------------


def test_short_reprs() -> None:
    checkpoint = ckpt.open(HF)
    assert repr(checkpoint) == f"OpenCatalog(safetensors, 'model': {len(checkpoint)} tensors, states ('model',))"
    weight = checkpoint["model.norm.weight"]
    assert repr(weight) == f"LazyTensor('model.norm.weight', {weight.dtype}, {weight.shape})"
    assert isinstance(weight, ckpt.LazyTensor) and isinstance(checkpoint, ckpt.OpenCatalog)
    assert repr(weight[:2]).endswith("(2,))") and (weight.name, weight.state, weight.ndim) == (
        "model.norm.weight",
        "model",
        1,
    )


def test_key_errors_name_what_is_near() -> None:
    checkpoint = ckpt.open(HF)
    with pytest.raises(KeyError, match="did you mean model.norm.weight"):
        checkpoint["norm.weight"]
    with pytest.raises(KeyError, match=r"did you mean model\.layers\.0\.self_attn\.q_proj\.weight"):
        checkpoint["q_proj"]  # far from any whole name
    with pytest.raises(KeyError, match="no state 'exp_av'; there are model"):
        checkpoint.state("exp_av")


def test_a_name_of_another_state_is_said(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    opened = ckpt.open(tmp_path / "m.safetensors")
    tensor = opened.catalog.tensors[TensorKey("w", "model")]
    moment = tensor._replace(key=TensorKey("only.here", "exp_avg"))
    checkpoint = ckpt.OpenCatalog(opened._tree, Catalog("made", {tensor.key: tensor, moment.key: moment}))
    with pytest.raises(KeyError, match="it is in exp_avg: use state"):
        checkpoint["only.here"]
    with pytest.raises(KeyError, match="did you mean exp_avg"):
        checkpoint.state("exp_av")
    assert repr(checkpoint.state("exp_avg")["only.here"]) == "LazyTensor('only.here', state='exp_avg', F32, (2,))"


def test_asking_whether_a_name_is_there_is_cheap(tmp_path: Path) -> None:
    """`in` and `get` look nothing up among names that are near, which takes a while with many."""
    save_file({f"layers.{n}.weight": np.zeros(1, np.float32) for n in range(20_000)}, tmp_path / "m.safetensors")
    checkpoint = ckpt.open(tmp_path / "m.safetensors")
    began = time.process_time()  # other programs may have the processor meanwhile
    assert not any(f"layer.{n}.weight" in checkpoint for n in range(100))
    assert checkpoint.get("layers.nothing") is None and checkpoint.get("layers.7.weight") is not None
    assert time.process_time() - began < 0.5


def test_numpy_takes_the_values_of_a_lazy_tensor() -> None:
    """Without `__array__` it would wrap the tensor in an array of one object."""
    weight = ckpt.open(HF)["model.embed_tokens.weight"]
    assert np.asarray(weight).shape == weight.shape and len(weight) == weight.shape[0]
    assert np.array_equal(np.asarray(weight, np.float64), weight.numpy().astype(np.float64))
