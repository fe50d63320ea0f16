"""Which compiled loops a process uses, by processor, copy and CKPT_COMPILED; every path writes the same files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from loops import forget
from safetensors.numpy import save_file

from ckpt_tool import compiled
from ckpt_tool.cli import run
from ckpt_tool.compiled import library, loading
from ckpt_tool.compiled.loading import Opened
from ckpt_tool.errors import UsageError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

IS_CLONE = (loading.FOLDER / "build.py").exists()
is_clone = pytest.mark.skipif(not IS_CLONE, reason="an installed copy has no sources")
if IS_CLONE:
    from ckpt_tool.compiled import build, sources


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known of the library, and nothing is afterwards."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    compiled.notes.clear()
    forget()
    yield
    compiled.notes.clear()
    forget()


# -- the choice --------------------------------------------------------------------------------------------------------


def test_the_best_path_is_used_and_any_can_be_named(loops: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loops.paths[-1] == "baseline" and [*loops.paths] == [p for p in loading.PATHS if p in loops.paths]
    assert loading.chosen().path == loops.paths[0]
    for path in loops.paths:
        monkeypatch.setenv(compiled.VARIABLE, path)
        assert loading.chosen().path == path and path in loading.chosen().reason
    monkeypatch.setenv(compiled.VARIABLE, "off")
    choice = loading.chosen()
    assert (choice.path, choice.library) == ("numpy", None) and "CKPT_COMPILED=off" in choice.reason


@pytest.mark.parametrize("setting", ["on", "avx", "AVX2", "numpy"])
def test_an_unknown_setting_is_an_error(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.VARIABLE, setting)
    with pytest.raises(UsageError, match=f"CKPT_COMPILED={setting} is unknown") as caught:
        loading.chosen()
    assert caught.value.code == "E3040"


def test_a_path_that_the_processor_lacks_is_an_error_and_not_another_one(
    loops: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = functools.cache(lambda folder: loops._replace(paths=("avx2", "baseline")))
    monkeypatch.setattr(loading, "opened_library", fewer)
    assert loading.chosen().path == "avx2"
    monkeypatch.setenv(compiled.VARIABLE, "avx512")
    with pytest.raises(UsageError, match="here are avx2, baseline") as caught:
        loading.chosen()
    assert caught.value.code == "E3041"


def test_a_named_path_without_a_library_ends_the_run(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(loading, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "_shelf", library.BlocksShelf())
    monkeypatch.setenv(compiled.VARIABLE, "baseline")
    assert run([*(word.format(**inputs, out=tmp_path / "out") for word in MERGE), "-q"]) == 2
    assert "E3041" in capfd.readouterr().err and not (tmp_path / "out").exists()


# -- why there is none -------------------------------------------------------------------------------------------------


def test_a_clone_says_what_builds_the_library(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text("")
    assert "python -m ckpt_tool.compiled.build" in loading.opened_library(tmp_path).refusal


@is_clone
def test_a_library_of_older_sources_is_not_used(loops: Opened, tmp_path: Path) -> None:
    for name in (*sources.SOURCES, *sources.HEADERS, "build.py", sources.LIBRARY):
        shutil.copy(loading.FOLDER / name, tmp_path)
    assert sources.is_current(tmp_path / sources.LIBRARY, tmp_path)
    with open(tmp_path / "twins.c", "a") as file:
        file.write("\n")
    assert not sources.is_current(tmp_path / sources.LIBRARY, tmp_path)


@is_clone
def test_a_clone_whose_sources_have_changed_says_so(tmp_path: Path) -> None:
    (tmp_path / "build.py").write_text("")
    (tmp_path / sources.LIBRARY).write_bytes(b"\x7fELF of other sources")
    assert "older than its sources" in loading.opened_library(tmp_path).refusal


def test_a_wheel_without_the_library_says_why(tmp_path: Path) -> None:
    assert "no library is installed" in loading.opened_library(tmp_path).refusal
    (tmp_path / loading.REASON_FILE).write_text("no C compiler: none\n")
    forget()
    assert loading.opened_library(tmp_path).refusal.endswith("without compiled loops: no C compiler: none")


def test_a_file_that_is_no_library_means_numpy(tmp_path: Path) -> None:
    (tmp_path / "libckpt_loops.so").write_bytes(b"not a library")
    opened = loading.opened_library(tmp_path)
    assert opened.library is None and "can't be loaded" in opened.refusal


@pytest.mark.parametrize("source", ["int nothing;", "const char *ck_paths(void) { return 0; }"])
def test_a_library_that_lacks_functions_means_numpy(source: str, tmp_path: Path) -> None:
    target = tmp_path / "libckpt_loops.so"
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-shared", "-x", "c", "-", "-o", str(target)], input=source.encode(), check=True)
    opened = loading.opened_library(tmp_path)
    assert opened.library is None and "not the library of this version" in opened.refusal


def test_functions_that_are_missing_mean_numpy_and_a_note(loops: Opened) -> None:
    shelf = library.BlocksShelf()
    shelf.decide(loading.Choice("avx1024", "", loops.library))
    assert shelf.ready(1 << 30) is None
    assert any("not that of this version" in note for note in compiled.notes)


def test_loops_with_other_bits_are_not_used(loops: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_trial", lambda functions: "sums")
    shelf = library.BlocksShelf()
    assert shelf.ready(1 << 30) is None and "sums differ from NumPy's" in compiled.notes[0]

    monkeypatch.setenv(compiled.VARIABLE, "baseline")
    with pytest.raises(UsageError, match="sums differ from NumPy's") as caught:
        library.BlocksShelf().ready(1)
    assert caught.value.code == "E3041"


def test_small_work_loads_no_library(loops: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = library.BlocksShelf()
    assert shelf.ready(library.LEAST // 2) is None and not compiled.notes
    assert shelf.ready(library.LEAST // 2) is not None, "it counts together"
    monkeypatch.setenv(compiled.VARIABLE, "off")
    off = library.BlocksShelf()
    assert off.ready(1 << 40) is None
    monkeypatch.setenv(compiled.VARIABLE, "baseline")
    assert library.BlocksShelf().ready(1) is not None, "a path that is named is used from the first byte on"


@pytest.mark.parametrize("setting", ["", "baseline", "off", "sse"])
def test_doctor_says_which_loops_are_used_and_why(loops: Opened, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_tool.commands.doctor import doctor

    monkeypatch.setenv(compiled.VARIABLE, setting)
    document = doctor()["compiled"]
    uses = {"": loops.paths[0], "baseline": "baseline", "off": "numpy", "sse": "nothing"}[setting]
    assert document["uses"] == uses and document["reason"]
    assert document["paths"] == [*loops.paths] and document["compiler"]


# -- the same files ----------------------------------------------------------------------------------------------------

HIDDEN = 256
INNER = 384
LAYERS = 2
RANK = 20
SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MERGE = ("merge", "{one}", "{two}", "{out}", "--method", "linear", "--weight", "0.3", "--weight", "0.9")
TO_HUB = ("convert", "{one}", "{out}", "--to", "safetensors")
TO_GGUF = ("convert", "{one}", "{out}", "--to", "gguf", "--gguf-type")
JOBS = {
    "sums": MERGE,
    "sums in fp32": (*MERGE, "--dtype", "fp32"),
    "products": ("merge", "{one}", "{lora}", "{out}", "--method", "lora"),
    "transposes": ("convert", "{one}", "{out}", "--to", "paddle"),
    "codes fp8": (*TO_HUB, "--quantize", "fp8-channel"),
    "codes int8": (*TO_HUB, "--quantize", "int8"),
    "codes int4": (*TO_HUB, "--quantize", "int4-g128"),
    "codes mxfp4": (*TO_HUB, "--quantize", "mxfp4"),
    "floats of blocks": ("convert", str(FIXTURES / "gguf-made" / "quantised.gguf"), *TO_HUB[2:], "--dequantize"),
    **{f"blocks {name}": (*TO_GGUF, name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two small Llamas in bf16, with values of many exponents and zeros of both signs, and an adapter of the first."""
    folder = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(7)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, shape)
        values[..., ::17] = rng.choice([0.0, -0.0], values[..., ::17].shape)
        return values.astype(ml_dtypes.bfloat16)

    for name in ("one", "two"):
        tensors = {"model.embed_tokens.weight": draw((300, HIDDEN)), "lm_head.weight": draw((300, HIDDEN))}
        tensors["model.norm.weight"] = draw((HIDDEN,))
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            for module, shape in SIZES.items():
                tensors[f"{prefix}{module}.weight"] = draw(shape)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = draw((HIDDEN,))
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        write(folder / name, "model.safetensors", tensors, "config.json", config)

    adapter: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for module, (rows, columns) in SIZES.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}."
            adapter[f"{prefix}lora_A.weight"] = rng.standard_normal((RANK, columns)).astype("f4")
            adapter[f"{prefix}lora_B.weight"] = rng.standard_normal((rows, RANK)).astype("f4")
    targets = [module.rpartition(".")[2] for module in SIZES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 7, "target_modules": targets, "bias": "none"}
    write(folder / "lora", "adapter_model.safetensors", adapter, "adapter_config.json", config)
    return {name: folder / name for name in ("one", "two", "lora")}


def write(folder: Path, file: str, tensors: dict[str, np.ndarray], config_file: str, config: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / config_file).write_text(json.dumps(config))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("job", JOBS)
def test_every_path_writes_the_files_of_numpy(
    loops: Opened, inputs: dict[str, Path], job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    if "blocks" in job:
        pytest.importorskip("gguf", reason="gguf makes the blocks without the compiled loops")
    calls: list[str] = []
    for function in ("linear", "folded", "turned", "codes", "blocks", "floats"):
        original = getattr(library.CompiledLibrary, function)

        def counted(*given: Any, original: Any = original, function: str = function) -> Any:
            result = original(*given)
            if result is not False:
                calls.append(function)
            return result

        monkeypatch.setattr(library.CompiledLibrary, function, counted)

    written: dict[str, dict[str, str]] = {}
    for path in ("off", *loops.paths):
        monkeypatch.setenv(compiled.VARIABLE, path)
        shelf = library.BlocksShelf()
        shelf.decide(loading.chosen())
        monkeypatch.setattr(library, "_shelf", shelf)
        calls.clear()  # those of the trial
        out = tmp_path / path
        arguments = [word.format(**inputs, out=out) for word in JOBS[job]]
        assert run([*arguments, "-q", "--no-fsync"]) == 0, capfd.readouterr().err
        written[path] = digests(out)
        is_numpy = path == "off" or (job == "products" and shelf.library is not None and not shelf.library.pair)
        assert bool(calls) != is_numpy, "the path was not used"
    assert written["off"]
    for path in loops.paths:
        assert written[path] == written["off"], path


# -- nothing is compiled, nothing is left behind -----------------------------------------------------------------------


@pytest.mark.parametrize("is_writable", [True, False], ids=["a new HOME", "a HOME that can't be written"])
def test_a_run_starts_no_compiler_and_leaves_nothing_at_home(
    loops: Opened, inputs: dict[str, Path], is_writable: bool, tmp_path: Path
) -> None:
    """A compiler stands on the PATH, and would say that it was called."""
    home = tmp_path / "home"
    tools = tmp_path / "tools"
    for folder in (home, tools):
        folder.mkdir()
    for name in ("cc", "gcc", "clang", "g++"):
        (tools / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
        (tools / name).chmod(0o755)
    if not is_writable:
        home.chmod(0o555)
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("CKPT_", "XDG_"))}
    environment |= {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "CKPT_COMPILED": loops.paths[0]}
    arguments = [word.format(**inputs, out=tmp_path / "out") for word in MERGE]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", *arguments], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not list(home.iterdir()) and not (tmp_path / "called").exists()


# -- what the compiler made of it --------------------------------------------------------------------------------------


@is_clone
@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True], ids=["as it is", "with contraction"])
@pytest.mark.parametrize("source", ("blocks.c", "floats.c"))
def test_fused_multiply_adds_are_only_those_that_are_written(source: str, planted: bool, tmp_path: Path) -> None:
    """In the assembly those that are written stand between #APP and #NO_APP. With contraction there are others."""
    if platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("no gcc for x86-64")
    flags = [*build.FLAGS, *build._X86_64["avx512"], *build._MORE_FLAGS.get((source, "avx512"), ())]
    flags += ["-ffp-contract=fast"] if planted else []
    target = tmp_path / "out.s"
    subprocess.run(["gcc", *flags, "-S", sources.FOLDER / source, "-o", target], check=True)
    without_written = re.sub(r"^#APP$.*?^#NO_APP$", "", target.read_text(), flags=re.M | re.S)
    fused = re.findall(r"^\tvfn?m(?:add|sub)\w+", without_written, re.M)
    assert bool(fused) == planted
