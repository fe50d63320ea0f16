"""Whose tensors they are: from the user, the config, the names, the shapes; never by guessing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from family_models import NAMES, as_it_has_them, config_of, hub_shapes

from ckpt_tool.errors import CkptError, InputError, UsageError
from ckpt_tool.families.models import FAMILIES, family_of, family_of_class, known_family
from ckpt_tool.families.registry import by_name, find
from ckpt_tool.families.rewrite import mapping

LOADED = """
import sys
from ckpt_tool.families.registry import find
{call}
front = "ckpt_tool.families.models."
print(*sorted(name.removeprefix(front) for name in sys.modules if name.startswith(front)))
"""
PAIRS = [(family.name, dialect) for family in FAMILIES for dialect in family.known_dialects]
# {a dialect: another with its names and shapes, which lays elements out differently}
TWO_LAYOUTS = {("gemma2", "torchtune"): "torchtune-0.6", ("gemma2", "torchtune-0.6"): "torchtune"} | {
    (family.name, "megatron"): "megatron-swift"  # gated delta nets
    for family in FAMILIES
    if "megatron-swift" in family.dialects and "linear_num_key_heads" in family.axes.values()
}


def shapes_in(name: str, dialect: str) -> dict[str, tuple[int, ...]]:
    config = as_it_has_them(dialect, config_of(name))
    shapes = hub_shapes(name, config)
    if dialect == "hf":
        return shapes
    if dialect.startswith("maxtext"):  # it has the language model alone
        shapes = {key: n for key, n in shapes.items() if not key.startswith("model.visual.")}
    return {made.name: made.shape for made in mapping(by_name(name), "hf", dialect, shapes, config).made}


@pytest.mark.parametrize(("name", "dialect"), PAIRS)
def test_names_and_shapes_tell_the_dialect(name: str, dialect: str) -> None:
    shapes = shapes_in(name, dialect)
    if dialect in ("paddle-grouped", "paddle-contiguous"):
        config = config_of(name)  # heads share keys: ERNIE's own code reads [Q | K | V] then, else head by head
        apart = {**config, "num_key_value_heads": config["num_attention_heads"]}
        assert find(config, shapes).dialect == "paddle-contiguous"
        whole = {key: n for key, n in shapes.items() if "qkv" not in key} | {
            "ernie.layers.0.self_attn.qkv_proj.weight": (18, 72)
        }
        assert find(apart, whole).dialect == "paddle-grouped"
        with pytest.raises(UsageError) as error:
            find(None, shapes, family=name)
        assert error.value.code == "E1233"
        assert f"--family {name}:paddle-grouped or --family {name}:paddle-contiguous" in (error.value.hint or "")
        assert find(None, shapes, family=f"{name}:{dialect}") == (by_name(name), dialect)
    elif (name, dialect) in TWO_LAYOUTS:
        with pytest.raises(UsageError, match="arrange the elements differently") as error:
            find(config_of(name), shapes)  # the same names and shapes
        assert error.value.code == "E1233" and f"{name}:{TWO_LAYOUTS[name, dialect]}" in (error.value.hint or "")
        assert find(config_of(name), shapes, family=f"{name}:{dialect}").dialect == dialect
        assert dialect != "megatron" or find(config_of(name), shapes, stated=dialect).dialect == dialect
    else:
        found = find(config_of(name), shapes)
        assert found.family.name == name  # `hf-packed` is `hf` where there is no layer of multi-token prediction
        assert found.dialect == dialect or shapes == shapes_in(name, found.dialect)
        if dialect.startswith("paddle"):
            assert find(config_of(name), shapes, stated="paddle") == (by_name(name), dialect)


@pytest.mark.parametrize("name", NAMES)
def test_the_family_comes_from_the_model_type_or_from_a_class(name: str) -> None:
    config = config_of(name)
    shapes = shapes_in(name, "hf")
    kind = {key: value for key, value in config.items() if key != "architectures"}
    classes = {key: value for key, value in config.items() if key != "model_type"}
    assert find(kind, shapes, stated="hf").family.name == name
    assert find({**classes, "architectures": [f"{classes['architectures'][0]}Pipe"]}, shapes).family.name == name


def test_a_family_is_found_as_if_all_were_looked_at() -> None:
    """`family_of` and `family_of_class` go by what the files say; each word is of one family."""
    kinds = [(kind, family) for family in FAMILIES for kind in family.model_types]
    assert len(dict(kinds)) == len({*kinds})
    for kind, family in kinds:
        assert family_of(kind) is family
    for family in FAMILIES:
        for name in (name for each in family.classes for name in each.architectures):
            first = next(each for each in FAMILIES if any(name in known.architectures for known in each.classes))
            assert family_of_class(name) is first
    for unknown in ("nonsense", "", '"', None, ["llama"], 3, "../llama"):
        assert known_family(unknown) is known_family(str(unknown)) is family_of_class(str(unknown)) is None
    with pytest.raises(KeyError):
        family_of("nonsense")


@pytest.mark.parametrize(
    ("call", "loaded"),
    [
        ("find({'model_type': 'mistral'}, {'model.norm.weight': (4,)})", ["llama"]),
        ("find({'architectures': ['Qwen3ForCausalLM']}, {'model.norm.weight': (4,)})", ["qwen3"]),
        ("find(None, {'model.norm.weight': (4,)}, family='phi3')", ["phi3"]),
        ("", []),
        ("from ckpt_tool.families.models import FAMILIES; list(FAMILIES)", NAMES),
    ],
)
def test_no_more_families_are_loaded_than_are_looked_at(call: str, loaded: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED.format(call=call)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == loaded


def test_names_that_one_family_has_need_no_config() -> None:
    assert find(None, shapes_in("gpt2", "hf")).family.name == "gpt2"
    assert find({}, shapes_in("ernie4_5_moe", "paddle")) == (by_name("ernie4_5_moe"), "paddle")
    assert find(None, shapes_in("llama", "paddle-nlp")) == (by_name("llama"), "paddle-nlp")


def test_names_that_many_have_are_told_as_such() -> None:
    with pytest.raises(UsageError, match="several families") as error:
        find(None, shapes_in("llama", "hf"))
    (listed,) = error.value.faults
    assert "llama, " in listed and "more" in listed  # those that want no more than there is come first
    assert error.value.code == "E1232" and "--config" in (error.value.hint or "")


def test_a_name_outside_the_layers_is_no_family_s_alone() -> None:
    """DeepSeek V4's have no root: what has a `norm.weight` and layers of its own need not be one."""
    with pytest.raises(UsageError, match="several families") as error:
        find(None, {"norm.weight": (4,), "blocks.0.w": (4, 4), "head.weight": (9, 4)})
    assert error.value.code == "E1232"
    with pytest.raises(InputError, match="no family knows a name like blocks.0.w"):
        find(None, {"blocks.0.w": (4, 4), "head.weight": (9, 4)})


def test_names_alone_do_not_tell_two_layouts() -> None:
    with pytest.raises(UsageError, match="the names fit several dialects of llama") as error:
        find(config_of("llama"), list(shapes_in("llama", "hf")))
    assert error.value.code == "E1233"
    assert "--family llama:hf or --family llama:paddle" in (error.value.hint or "")
    assert find(config_of("llama"), list(shapes_in("llama", "hf")), stated="paddle").dialect == "paddle"


def test_what_a_format_says_is_taken_where_it_fits() -> None:
    names = list(shapes_in("ernie4_5", "paddle"))  # a Trainer's Hugging Face save has them too
    assert find(config_of("ernie4_5"), names, stated="paddle").dialect == "paddle"
    with pytest.raises(UsageError, match="paddle, paddle-hf"):
        find(config_of("ernie4_5"), names)


def test_square_shapes_do_not_tell_either_unless_told() -> None:
    square = config_of("llama", hidden_size=24, intermediate_size=24, num_key_value_heads=6)
    shapes = hub_shapes("llama", square)
    with pytest.raises(UsageError, match="names and shapes fit"):
        find(square, shapes)
    assert find(square, shapes, stated="hf").dialect == "hf"
    assert find(square, shapes, family="llama:paddle").dialect == "paddle"


def test_shapes_of_another_config_are_no_question_of_dialects() -> None:
    """Neither way round fits: the mapping tells which shapes are wrong, better than a choice between two."""
    shapes = hub_shapes("llama", config_of("llama"))
    assert find({**config_of("llama"), "hidden_size": 999}, shapes).dialect == "hf"


def test_tensors_that_lie_alike_in_both_are_no_question() -> None:
    assert find(config_of("llama"), {"model.norm.weight": (18,), "model.embed_tokens.weight": (22, 18)}).dialect == "hf"


FAULTS = {
    "no family": (lambda: find(None, ["x"], family="lama"), UsageError, "E1230", "did you mean llama"),
    "nobody's": (lambda: by_name("olmo2").table("megatron"), UsageError, "E1231", "no project that ckpt knows maps it"),
    "nobody's in Paddle": (lambda: by_name("mistral4").table("paddle"), UsageError, "E1231", "maps it to Paddle"),
    "another core's": (lambda: by_name("step3p5").table("megatron"), UsageError, "E1231", "no gate a head"),
    "no dialect": (lambda: find(None, ["x"], family="llama:padle"), UsageError, "E1231", "did you mean paddle"),
    "a told dialect": (lambda: find(config_of("llama"), ["x"], stated="onnx"), UsageError, "E1231", "it has hf"),
    "no such names": (lambda: find(config_of("llama"), ["x.y"]), InputError, "E1373", "right family"),
    "names of nobody": (lambda: find(None, ["x.y"]), InputError, "E1372", "--dialect keep"),
    "no names": (lambda: find(None, []), InputError, "E1372", "--dialect keep"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_say_what_to_pass(fault: str) -> None:
    call, kind, code, hint = FAULTS[fault]
    with pytest.raises(CkptError) as error:
        call()
    assert isinstance(error.value, kind) and error.value.code == code
    assert hint in f"{error.value.message}; {error.value.hint}"


@pytest.mark.parametrize("case", ["mistral3", "internvl", "gemma4_vl", "gemma4_unified"])
def test_a_tower_tells_whose_language_model_it_is(case: str) -> None:
    """By names alone, on the hub and in Megatron: a Mistral or Qwen with a tower of its own."""
    document = json.loads((Path(__file__).parents[2] / "fixtures" / "bridge" / f"{case}.json").read_text())
    for names, stated in ((document["hub"], None), (document["megatron"], "megatron")):
        shapes = {name: tuple(each[0] if stated else each) for name, each in names.items()}
        assert find(None, shapes, stated=stated).family.name == case.removesuffix("_vl")
