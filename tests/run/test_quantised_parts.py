"""Every scheme's weight with one of its parts taken away, cut short, in another shape or dtype, or with the values
of another part: floats are never other ones with exit 0, and `audit` and `verify` say what is wrong.

The cases are made of `weight_layouts.LAYOUTS`: a layout without a checkpoint of its own library's here fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  gives NumPy its bfloat16
import numpy as np
import pytest

from ckpt_tool.cli import run
from ckpt_tool.core.dtype import DTYPES
from ckpt_tool.quantised.keep_together import found_in
from ckpt_tool.weight_schemes.quantised_weights import TensorKind
from ckpt_tool.weight_schemes.weight_layouts import LAYOUTS, find_layout

FIXTURES = Path(__file__).parents[2] / "fixtures"

# Which checkpoints, written by the real libraries, stand for a layout.
CHECKPOINTS: dict[str, tuple[str, ...]] = {
    "torchao": ("quantized/torchao_float8", "quantized/torchao_int8", "quantized/torchao_mxfp8"),
    "torchao of 4 bits": ("quantized/torchao_nvfp4",),
    "quanto": ("quantized-others/quanto_int8",),
    "fp8": (
        "quantized/fp8_block",
        "quantized/fp8_channel",
        "quantized/fp8_ct_block",
        "quantized/fp8_ct_ragged",
        "quantized/fp8_tensor",
        "quantized/fp8_ue8m0",
        "quantized/mxfp8",
        "quantized-families/minimax_m3_vl",
    ),
    "int8": ("quantized/int8_channel", "quantized/int8_channel_asym"),
    "packed integers": (
        "quantized/int4_group",
        "quantized/int4_group_asym",
        "quantized/int3_channel_asym",
        "quantized/int8_packed",
        "quantized-families/kimi_k25",
    ),
    "nvfp4": ("quantized/nvfp4",),
    "mxfp4": ("quantized/mxfp4",),
    "nvfp4 of ModelOpt": ("quantized-families/nemotron_h",),
    "fp4": ("quantized-families/deepseek_v4",),
    "mxfp4 of gpt-oss": ("quantized/mxfp4_gpt_oss",),
    "gptq": ("quantized-inputs/gptq_int4", "quantized-inputs/gptq_int4_act", "quantized-inputs/gptq_int8_v2"),
    "awq": ("quantized-inputs/awq_gemm",),
    "bitsandbytes of 4 bits": ("quantized/bnb_nf4", "quantized/bnb_fp4_double", "quantized/bnb_nf4_bf16"),
    "bitsandbytes of 8 bits": ("quantized/bnb_int8",),
    "mlx": ("quantized/mlx_4bit", "quantized/mlx_3bit"),
    "mlx of floats": ("quantized/mlx_mxfp4", "quantized/mlx_nvfp4"),
    "bitnet": ("quantized-others/bitnet",),
}


class Stored(NamedTuple):
    """A tensor as a file has it."""

    dtype: str
    shape: list[int]
    data: bytes

    def of_shape(self, shape: list[int]) -> Stored:
        return self._replace(shape=shape)


Tensors = dict[str, Stored]
Change = Callable[[Tensors, str, str], bool]


def read(path: Path) -> Tensors:
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8 : 8 + size])
    body = raw[8 + size :]
    return {
        name: Stored(each["dtype"], each["shape"], body[each["data_offsets"][0] : each["data_offsets"][1]])
        for name, each in head.items()
        if name != "__metadata__"
    }


def write(path: Path, tensors: Tensors) -> None:
    was = path.read_bytes()
    size = int.from_bytes(was[:8], "little")
    head: dict[str, Any] = {"__metadata__": json.loads(was[8 : 8 + size]).get("__metadata__", {})}
    body = b""
    for name, each in tensors.items():
        head[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [len(body), len(body) + len(each.data)]}
        body += each.data
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def taken_away(tensors: Tensors, name: str, lead: str) -> bool:
    del tensors[name]
    return True


def cut_short(tensors: Tensors, name: str, lead: str) -> bool:
    """Without the last row."""
    each = tensors[name]
    if not each.shape or each.shape[0] < 2:
        return False
    kept = each.shape[0] - each.shape[0] // 2
    tensors[name] = Stored(each.dtype, [kept, *each.shape[1:]], each.data[: len(each.data) * kept // each.shape[0]])
    return True


def narrowed(tensors: Tensors, name: str, lead: str) -> bool:
    """Without the last columns."""
    each = tensors[name]
    if len(each.shape) < 2 or each.shape[-1] < 2:
        return False
    rows = int(np.prod(each.shape[:-1]))
    columns = each.shape[-1] - each.shape[-1] // 2
    stored = np.frombuffer(each.data, np.uint8).reshape(rows, each.shape[-1], -1)
    tensors[name] = Stored(each.dtype, [*each.shape[:-1], columns], stored[:, :columns].tobytes())
    return True


def one_number(tensors: Tensors, name: str, lead: str) -> bool:
    each = tensors[name]
    count = int(np.prod(each.shape))
    if count < 2:
        return False
    tensors[name] = Stored(each.dtype, [1], each.data[: len(each.data) // count])
    return True


def reshaped(tensors: Tensors, name: str, lead: str) -> bool:
    each = tensors[name]
    if len(each.shape) < 2 or each.shape[-1] == each.shape[-2]:
        return False
    tensors[name] = each.of_shape([*each.shape[:-2], each.shape[-1], each.shape[-2]])
    return True


def flattened(tensors: Tensors, name: str, lead: str) -> bool:
    each = tensors[name]
    if len(each.shape) < 2:
        return False
    tensors[name] = each.of_shape([int(np.prod(each.shape)), 1])
    return tensors[name] != each


def exchanged(tensors: Tensors, name: str, lead: str) -> bool:
    """With the tensor of its codes."""
    if name == lead:
        return False
    tensors[name], tensors[lead] = tensors[lead], tensors[name]
    return True


def of_another_dtype(tensors: Tensors, name: str, lead: str) -> bool:
    """Bytes of another meaning."""
    each = tensors[name]
    others = {"F32": "I32", "BF16": "I16", "F16": "I16", "U8": "I8", "I8": "BOOL", "I32": "F32", "I64": "F64"}
    others |= {"F8_E4M3": "BOOL", "F8_E8M0": "I8", "U32": "F32"}
    tensors[name] = each._replace(dtype=others[each.dtype])
    return True


def twice(tensors: Tensors, name: str, lead: str) -> bool:
    """A second tensor for the same purpose, under a name that another scheme has for it, of other values."""
    each = tensors[name]
    module = lead
    for ending in (".qweight", ".weight_packed", "_packed", "_blocks", ".weight._data", ".weight"):
        module = module.removesuffix(ending)
    names = [f"{module}.weight"]
    if name != lead:
        names = [f"{module}.weight_scale_inv", f"{module}.weight_scale", f"{module}.SCB"]
    if "._" in lead and not lead.endswith("._data"):
        return False  # torchao's, whose names are looked for first
    other = next((new for new in names if new not in tensors), "")
    if not other:
        return False
    tensors[other] = each._replace(data=bytes(len(each.data)))
    return True


CHANGES: tuple[Change, ...] = (
    twice,
    taken_away,
    cut_short,
    narrowed,
    one_number,
    reshaped,
    flattened,
    exchanged,
    of_another_dtype,
)


@cache
def parts_of(checkpoint: str, layout: str) -> dict[str, str]:
    """Role -> name, of the first weight of a layout in a checkpoint."""
    folder = FIXTURES / checkpoint
    tensors = read(folder / "model.safetensors")
    kinds = {name: TensorKind(DTYPES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}
    _, found = found_in(kinds, json.loads((folder / "config.json").read_text()))
    weight = next(each for each in found.weights.values() if find_layout(each, kinds).name == layout)
    return {"codes": weight.lead, **weight.parts}


def cases() -> Iterator[Any]:
    for layout in LAYOUTS:
        for checkpoint in CHECKPOINTS.get(layout.name, ()):
            case = checkpoint.partition("/")[2]
            for role in parts_of(checkpoint, layout.name):
                for change in CHANGES:
                    yield pytest.param(
                        layout.name,
                        checkpoint,
                        role,
                        change,
                        id=f"{case}-{role}-{change.__name__}",
                    )


def test_every_layout_has_a_checkpoint() -> None:
    assert CHECKPOINTS.keys() == {layout.name for layout in LAYOUTS}
    for layout in LAYOUTS:
        roles = set().union(*(parts_of(checkpoint, layout.name) for checkpoint in CHECKPOINTS[layout.name]))
        needed = {role for role, part in layout.parts.items() if part.is_needed}
        assert needed | {"codes"} <= roles


@cache
def floats_of(checkpoint: str) -> dict[str, bytes]:
    """The floats of a whole checkpoint, by this tool; that they are the library's is proven elsewhere."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return floats_in(FIXTURES / checkpoint, Path(folder) / "out") or {}


def floats_in(source: Path, out: Path) -> dict[str, bytes] | None:
    """None where it is refused."""
    line = ["convert", str(source), str(out), "--to", "safetensors", "--dequantize", "-q", "--no-fsync"]
    if run(line) != 0:
        return None
    return {name: each.data for name, each in read(out / "model.safetensors").items()}


@pytest.mark.share(6)
@pytest.mark.parametrize(("layout", "checkpoint", "role", "change"), list(cases()))
def test_a_part_that_is_not_as_the_scheme_says(
    layout: str, checkpoint: str, role: str, change: Change, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / checkpoint, source)
    roles = parts_of(checkpoint, layout)
    tensors = read(source / "model.safetensors")
    if not change(tensors, roles[role], roles["codes"]):
        pytest.skip("the part has no such shape")
    write(source / "model.safetensors", tensors)

    floats = floats_in(source, tmp_path / "out")
    if floats is not None:
        assert floats == floats_of(checkpoint)
        return
    capfd.readouterr()
    assert run(["audit", str(source), "--json"]) == 1
    assert run(["verify", str(source), "--json"]) == 1


# -- several parts at once, and the config -----------------------------------------------------------------------------


def edited(checkpoint: str, tmp_path: Path, edit: Callable[[Tensors, dict[str, Any]], object]) -> Path:
    """A copy whose tensors and whose section of the config are changed."""
    source = tmp_path / "in"
    shutil.copytree(FIXTURES / checkpoint, source)
    tensors = read(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    edit(tensors, config["quantization_config"])
    write(source / "model.safetensors", tensors)
    (source / "config.json").write_text(json.dumps(config))
    return source


def drop_parts(lead: str) -> Callable[[Tensors, dict[str, Any]], object]:
    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".weight." in name and name.startswith(lead)]:
            del tensors[name]

    return edit


def exchange_states(tensors: Tensors, config: dict[str, Any]) -> None:
    """Of two weights of as many codes, one of which is wide and one high."""
    for name in list(tensors):
        if ".down_proj.weight.quant_state" in name:
            other = name.replace("down_proj", "gate_proj")
            tensors[name], tensors[other] = tensors[other], tensors[name]


def first_group(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


def change_group(tensors: Tensors, config: dict[str, Any]) -> None:
    first_group(config)["group_size"] += 1


def drop_method(tensors: Tensors, config: dict[str, Any]) -> None:
    del config["quant_method"]


@pytest.mark.parametrize(
    ("checkpoint", "edit"),
    [
        ("quantized/bnb_nf4_bf16", drop_parts("model.layers.0.mlp.down_proj.")),
        ("quantized/bnb_nf4_bf16", drop_parts("")),
        ("quantized/bnb_nf4_bf16", exchange_states),
        ("quantized/bnb_fp4_double", exchange_states),
        ("quantized/nvfp4", change_group),
        ("quantized/mxfp4", change_group),
        ("quantized/mxfp8", change_group),
        ("quantized/int4_group", change_group),
        ("quantized-inputs/gptq_int4", drop_method),
        ("quantized-inputs/gptq_int8_v2", drop_method),
        ("quantized-inputs/awq_gemm", drop_method),
    ],
)
def test_parts_and_a_config_that_do_not_belong_together(
    checkpoint: str, edit: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = edited(checkpoint, tmp_path, edit)
    line = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--dequantize"]
    assert run([*line, "--json"]) == 3
    error = json.loads(capfd.readouterr().err.splitlines()[-1])["error"]
    assert error["code"] in ("E1460", "E1461") and not (tmp_path / "out").exists()
    assert run(["audit", str(source), "--json"]) == 1
    assert run(["verify", str(source), "--json"]) == 1


@pytest.mark.parametrize("key", ["block_structure", "weights"])
def test_a_config_that_does_not_say_how_large_blocks_are(
    key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The shape of the scales allows several: 96 rows in three blocks are blocks of 32 to 47 rows."""

    def edit(tensors: Tensors, config: dict[str, Any]) -> None:
        places = {"block_structure": first_group(config), "weights": config["config_groups"]["group_0"]}
        del places.get(key, config)[key]

    source = edited("quantized/fp8_ct_ragged", tmp_path, edit)
    assert floats_in(source, tmp_path / "out") is None
    assert "E1464" in capfd.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["bitnet", "quanto_int8"])
def test_floats_are_those_of_the_library(case: str, tmp_path: Path) -> None:
    source = FIXTURES / "quantized-others" / case
    line = ["convert", str(source), str(tmp_path / "out"), "--to", "safetensors", "--dequantize", "-q"]
    truth = read(FIXTURES / "quantized-others" / f"{case}.truth.safetensors")
    as_fp32 = ["--dtype", "fp32"] if case == "bitnet" else []
    assert run([*line, *as_fp32]) == 0

    found = read(tmp_path / "out/model.safetensors")
    for name, want in truth.items():
        assert found[name] == want
