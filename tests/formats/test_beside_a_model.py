"""An optimizer in a file beside its model: its numbers get the names that one order alone allows, or the file is left.

Fixtures: `fixtures/safetensors/{accelerate,trainer_qwen3}`, `fixtures/torch/lightning_average.pt`, saved by the real
trainers; `test_conformance` holds every value against the live run. Here: what is ambiguous, and what is not read.
The table of orders against the real classes: `families/test_parameter_order.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tool.cli import run
from ckpt_tool.formats.beside import UNREAD
from ckpt_tool.formats.state_dict.parameter_order import class_order, tree_order
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.in_memory import in_memory
from ckpt_tool.sources.opening import open_source

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def test_a_class_or_a_name_that_is_not_known_has_no_order() -> None:
    assert class_order(["model.norm.weight"], "bloom") is None
    assert class_order(["model.norm.weight", "model.odd.weight"], "llama") is None


def test_one_tree_that_fits_is_the_answer_and_two_are_none() -> None:
    shapes = {
        "embed.weight": (7, 3), "head.weight": (7, 3), "layers.0.a.bias": (5,), "layers.0.a.weight": (5, 3),
        "layers.0.b.weight": (3, 5), "layers.1.a.bias": (5,), "layers.1.a.weight": (5, 3), "layers.1.b.weight": (3, 5),
    }  # fmt: skip
    layers = [f"layers.{i}.{name}" for i in range(2) for name in ("a.weight", "a.bias", "b.weight")]
    walked = [shapes[name] for name in layers]
    assert tree_order(shapes, [[(7, 3), *walked, (7, 3)]]) is None, "either of the two may be the first"
    shapes["head.weight"] = (7, 4)
    assert tree_order(shapes, [[(7, 3), *walked, (7, 4)]]) == ["embed.weight", *layers, "head.weight"]
    assert tree_order(shapes, [[(7, 3), *walked[3:], *walked[:3], (7, 4)]]) is not None
    assert tree_order(shapes, [[(7, 3), (3, 5), *walked[:2], *walked[3:], (7, 4)]]) is None, "modules alike differ"
    matrices = [shape for shape in walked if len(shape) == 2]
    assert tree_order(shapes, [[(7, 3), *matrices, (7, 4)], [(5,), (5,)]]) is not None, "decayed apart from biases"


def test_a_deep_model_is_walked_too() -> None:
    layers = [f"layers.{i}.{name}" for i in range(600) for name in ("a.weight", "b.weight")]
    shapes = {name: (5, 3) if ".a." in name else (3, 5) for name in sorted(layers)}
    assert tree_order(shapes, [[shapes[name] for name in layers]]) == layers


def test_two_norms_alike_are_not_told_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same decoder without the config that names its class."""
    shutil.copytree(FIXTURES / "safetensors/trainer_qwen3", tmp_path / "run")
    (tmp_path / "run/config.json").unlink()
    opened = open_source(str(tmp_path / "run"), Reading())
    assert opened.catalog.states() == ("model",)
    assert any(note.code == UNREAD and "order" in note.message for note in opened.catalog.notes)
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp", "--json"]) == 2
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E1643"


def test_moments_go_along_under_their_names(tmp_path: Path) -> None:
    source = FIXTURES / "safetensors/trainer_qwen3"
    assert run(["convert", str(source), str(tmp_path / "all.pt"), "--to", "torch", "-q"]) == 0
    saved = torch.load(tmp_path / "all.pt")
    truth = load_file(f"{source}.truth.safetensors")
    groups = saved["optimizer"]["param_groups"]
    assert len(groups) == 2 and groups[0]["weight_decay"] == 0.1
    given = torch.load(source / "optimizer.pt")["state"]
    assert all(torch.equal(saved["optimizer"]["state"][n]["exp_avg"], given[n]["exp_avg"]) for n in given)
    assert run(["convert", str(tmp_path / "all.pt"), str(tmp_path / "dcp"), "--to", "dcp", "--dp", "2", "-q"]) == 0
    opened = open_source(str(tmp_path / "dcp"), Reading())
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors} == truth.keys()


@pytest.mark.parametrize("broken", ["cut", "code", "strange"])
def test_what_can_not_be_read_is_left_with_its_reason(broken: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "safetensors/accelerate", tmp_path / "run")
    file = tmp_path / "run/optimizer.bin"
    if broken == "cut":
        file.write_bytes(file.read_bytes()[:-400])
    elif broken == "code":
        torch.save({"state": {}, "param_groups": [], "hook": print}, file)
    else:
        state = torch.load(file)
        state["state"][3]["exp_avg"] = torch.zeros(2, 2)
        torch.save(state, file)
    opened = open_source(str(tmp_path / "run"), Reading())
    assert opened.catalog.states() == ("model",)
    assert any(note.code == UNREAD for note in opened.catalog.notes) == (broken != "code")
    assert bool(opened.catalog.unsafe) == (broken == "code")


def test_a_frozen_weight_is_passed_over(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2), torch.nn.Linear(2, 4))
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("1.")])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    opened = open_source(str(tmp_path), Reading())
    moments = {key.name for key in opened.catalog.tensors if key.state == "exp_avg"}
    assert moments == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_averages_of_lightning_are_not_the_model(tmp_path: Path) -> None:
    source = FIXTURES / "torch/lightning_average.pt"
    truth = load_file(FIXTURES / "torch/lightning_average.truth.safetensors")
    for state, more in (("model", ()), ("ema", ("--as-model", "ema"))):
        assert run(["convert", str(source), str(tmp_path / state), "--to", "safetensors", "-q", *more]) == 0
        written = load_file(tmp_path / state / "model.safetensors")
        assert all(torch.equal(value, truth[f"{state}/{name}"]) for name, value in written.items())
    assert not torch.equal(truth["model/net.embed.weight"], truth["ema/net.embed.weight"])


def test_a_rate_that_is_a_tensor_is_no_parameter(tmp_path: Path) -> None:
    """As torchao's optimizers keep it in their groups."""
    shapes = {"a.bias": (5,), "a.weight": (5, 3)}
    saved = tmp_path / "saved"
    saved.mkdir()
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, saved / "model.safetensors")
    moments = [{"exp_avg": torch.full(shapes[name], 2.0)} for name in ("a.weight", "a.bias")]
    groups = [{"lr": torch.tensor(0.25), "params": [0, 1]}]
    torch.save({"state": dict(enumerate(moments)), "param_groups": groups}, saved / "optimizer.bin")
    assert run(["convert", str(saved), str(tmp_path / "out"), "--to", "sharded", "-q"]) == 0
    assert {n: tuple(t.shape) for n, t in load_file(tmp_path / "out/exp_avg.safetensors").items()} == shapes
    (rate,) = load_file(tmp_path / "out/extras.safetensors").values()
    assert rate.item() == 0.25


FUSED = ("trainer_qwen3_moe", "trainer_mixtral", "trainer_deepseek_v3")


def fused_states(case: str, tmp_path: Path) -> dict[int, dict[str, torch.Tensor]]:
    """A copy of a Trainer's folder, and the states of its optimizer, to be changed and saved again."""
    shutil.copytree(FIXTURES / "safetensors" / case, tmp_path / "run")
    return torch.load(tmp_path / "run/optimizer.pt")


@pytest.mark.parametrize("case", FUSED)
def test_moments_of_fused_experts_go_to_the_experts(case: str, tmp_path: Path) -> None:
    """Written as torch has them by name: one number of the trainer's is of several experts."""
    source = FIXTURES / "safetensors" / case
    truth = load_file(f"{source}.truth.safetensors")
    assert run(["convert", str(source), str(tmp_path / "all.pt"), "--to", "torch", "-q"]) == 0
    saved = torch.load(tmp_path / "all.pt")["optimizer"]
    for key in (key for key in truth if key.startswith(("exp_avg", "step/"))):
        state, _, name = key.partition("/")
        assert torch.equal(saved["state"][name][state], truth[key]), key
    listed = [name for group in saved["param_groups"] for name in group["params"]]
    assert sorted(listed) == sorted(key.removeprefix("exp_avg/") for key in truth if key.startswith("exp_avg/"))
    opened = open_source(str(tmp_path / "all.pt"), Reading())
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors if key.state != "model"} == {
        key for key in truth if not key.startswith("model/")
    }


@pytest.mark.parametrize("wrong", ["order", "split", "factors", "short"])
def test_states_of_experts_that_do_not_fit_are_left(
    wrong: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In another order; one by one, as transformers 4 numbered them; as factors of Adafactor's; of an unknown shape."""
    saved = fused_states("trainer_mixtral", tmp_path)
    states = saved["state"]
    fused = next(n for n, own in states.items() if own["exp_avg"].dim() == 3)
    if wrong == "order":
        states[fused], states[fused + 1] = states[fused + 1], states[fused]
    elif wrong == "split":
        own = states.pop(fused)
        numbers = saved["param_groups"][0]["params"]
        for k, moment in enumerate(own["exp_avg"].reshape(6, 20, 12)):
            states[100 + k] = {"step": own["step"], "exp_avg": moment, "exp_avg_sq": moment}
        numbers[numbers.index(fused) : numbers.index(fused) + 1] = range(100, 106)
    elif wrong == "factors":
        for own in states.values():
            own["exp_avg_sq_row"] = own.pop("exp_avg_sq")[..., 0].clone()
            del own["exp_avg"]
        model = {name: value.shape for name, value in load_file(tmp_path / "run/model.safetensors").items()}
        walked = in_memory(json.loads((tmp_path / "run/config.json").read_text()), model)
        assert walked is not None
        order = class_order(walked.shapes, "mixtral") or []
        for group, norms in zip(saved["param_groups"], (False, True), strict=True):  # decayed, and not
            group["param_names"] = [name for name in order if ("norm" in name) == norms]
    else:
        del states[fused]["exp_avg"], states[fused]["exp_avg_sq"]
        states[fused]["odd"] = torch.zeros(2, 2)
    torch.save(saved, tmp_path / "run/optimizer.pt")
    opened = open_source(str(tmp_path / "run"), Reading())
    assert opened.catalog.states() == ("model",)
    said = next(note.message for note in opened.catalog.notes if note.code == UNREAD)
    assert ("is not its parameter's" in said) == (wrong == "factors")
    assert run(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "dcp", "--json"]) == 2
    assert json.loads(capfd.readouterr().err)["error"]["code"] == "E1643"


def test_what_is_saved_as_in_memory_takes_its_class_from_the_config(tmp_path: Path) -> None:
    """accelerate saves no config: norms alike are told apart by the one that `--config` gives."""
    shutil.copytree(FIXTURES / "safetensors/accelerate_qwen2_moe", tmp_path / "run")
    shutil.move(tmp_path / "run/config.json", tmp_path / "config.json")
    assert open_source(str(tmp_path / "run"), Reading()).catalog.states() == ("model",)
    opened = open_source(str(tmp_path / "run"), Reading(config=str(tmp_path / "config.json")))
    truth = load_file(FIXTURES / "safetensors/accelerate_qwen2_moe.truth.safetensors")
    assert {f"{key.state}/{key.name}" for key in opened.catalog.tensors} == truth.keys()
