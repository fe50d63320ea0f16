"""`ckpt merge MODEL OUT --method lora`: an adapter that is inside the model (`formats.adapters.inside`) folded into it.

    base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight  }
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.default...  }  ->  model.layers.0.self_attn.q_proj.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.default...  }

The state is split in two, and the parts are folded as a base and an adapter in files of their own are. The scaling is
that of the adapter_config.json near the checkpoint, or of `--lora-alpha` (`sources.adapter_config`).
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_tool.adapters.adapter import Adapter
from ckpt_tool.conversion.adapter_inside import refuse_several
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import UsageError
from ckpt_tool.formats.adapters.inside import AdapterInside, find_inside
from ckpt_tool.formats.adapters.settings import settings_of
from ckpt_tool.options.reading import Reading
from ckpt_tool.sources.adapter_config import config_of_inside
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.opening import Opened

USAGE = "E1420"
ELSEWHERE = "E2934"


def split_inside(chosen: Chosen, opened: Opened, reading: Reading, weight: float) -> tuple[Chosen, Adapter]:
    """(the base under its own names, the adapter in it). weight: what the user multiplies the adapter by.

    Raises UsageError E1420 for a model without an adapter inside, E2934 for one that is not a single LoRA, and what
    finding and reading its config raise."""
    inside = find_inside(chosen.model)
    if inside is None:
        raise UsageError(
            "--method lora folds adapters into a base, and only one source is given, which has no adapter inside",
            code=USAGE,
            hint="ckpt merge BASE ADAPTER... OUT --method lora",
        )
    refuse_several(inside, opened.path)
    model = chosen.model
    shapes = {name: row.tensor.shape for name, row in model.items()}
    found = config_of_inside(opened, inside, shapes, reading.lora_alpha)
    settings = settings_of(found.config, found.path, weight=weight, lenient=reading.lenient)

    tensors = []
    for stored, name in inside.adapter.items():
        row = model[stored]
        if row.source != 0:  # a computed one: of a quantised adapter, which no library writes
            raise UsageError(
                f"{stored} is quantised: an adapter is folded as floats",
                code=ELSEWHERE,
                key=stored,
                hint="merge it with the library that trained it",
            )
        tensors.append(row.tensor._replace(key=row.tensor.key._replace(name=name)))
    note = f"the adapter inside the model, by {found.path}"
    return _base_alone(chosen, inside).noted(note), Adapter(opened, settings, tuple(tensors), inside=True)


def _base_alone(chosen: Chosen, inside: AdapterInside) -> Chosen:
    """The base's tensors under the names that they have without wrappers. Trained whole ones replace theirs later."""
    stored = []
    for row in chosen.stored:
        key = row.tensor.key
        if key.state == MODEL and key.name in inside.base:
            key = key._replace(name=inside.base[key.name])
            stored.append(row._replace(tensor=row.tensor._replace(key=key, path=())))
    casts = {}
    for old, dtype in chosen.casts.items():
        if old.name in inside.base:
            casts[old._replace(name=inside.base[old.name])] = dtype
    renewed = {key._replace(name=inside.base[key.name]) if key.name in inside.base else key for key in chosen.renewed}
    names: dict[str, tuple[str, ...]] = {stored_as: (name,) for stored_as, name in inside.base.items()}
    for stored_as, name in inside.adapter.items():  # what an adapter's tensor becomes a part of
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        names[stored_as] = (f"{module.replace('.base_layer', '')}.weight", module)
    return replace(chosen, stored=tuple(stored), casts=casts, renewed=frozenset(renewed), names=names)
