"""Makes the config.json of an output: the source's, in which values that no longer hold are corrected.

    hf -> safetensors --dtype bf16      dtype is bfloat16 now
    hf -> safetensors --vocab-size N    vocab_size is N
    paddle -> safetensors               in the hub's words (`systems.paddle.config`)

Only what the written tensors contradict is changed, and each change is a line of the report. Cost: one look at names
and shapes of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt_tool.conversion.tied_head import HEAD_NAME, TIED, describe_own_head, has_head
from ckpt_tool.conversion.vocabulary import EMBEDDINGS
from ckpt_tool.conversion.whole_layers import removed_layers, without_layers
from ckpt_tool.core.target import Wanted
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import InconsistentCheckpoint
from ckpt_tool.families.config import is_paddle
from ckpt_tool.formats.base import Format
from ckpt_tool.formats.entry import of_dialect
from ckpt_tool.options.writing import Writing
from ckpt_tool.sources.chosen import Chosen
from ckpt_tool.sources.config import NAME, change_config, without_degrees

if TYPE_CHECKING:
    from ckpt_tool.families.table import Table

_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
_HEADLESS = f"{NAME} states a head of its own and there is no {HEAD_NAME}: a library makes up its values"
_BIASES = {"attention_bias": "self_attn", "mlp_bias": "mlp"}  # key -> module of a layer


def config_of_output(
    config_of_source: Mapping[str, Any], chosen: Chosen, fmt: Format, wanted: Wanted, writing: Writing
) -> tuple[Mapping[str, Any], list[str]]:
    """(config.json of the output, lines for the report)."""
    from ckpt_tool.weight_schemes.declared_scheme import without

    dialect = chosen.dialect_in(fmt)
    notes = list[str]()
    config: Mapping[str, Any] = without(config_of_source, chosen.untrue) if chosen.untrue else config_of_source
    if chosen.stated:
        config, more = _with_stated(config, chosen.stated)
        notes += more
    if fmt.holds.dialect == "keep":
        names = [tensor.key.name for tensor in wanted.tensors if tensor.key.state == MODEL]
        config, about_head = untie_own_head(config, names, chosen, writing)
        return config, [*notes, *about_head]
    foreign = is_paddle(config_of_source) or chosen.home == "paddle"
    as_it_was = chosen.home == dialect and chosen.config is None
    if dialect in ("hf", "megatron"):
        in_hub_words = of_dialect("paddle", "hub_config") if foreign and not as_it_was else None
        if in_hub_words is not None:
            config, more = in_hub_words(config)
            notes += more
        config, names = without_degrees(config)
        if names:
            notes.append(f"{NAME} says one rank for {', '.join(names)}: the degrees were the job's")
    elif not foreign:
        in_own_words = of_dialect(dialect, "own_config")
        if in_own_words is not None:
            config, more = in_own_words(config)
            notes += more
    if dialect in ("hf", "paddle"):
        config, about_layers = without_layers(config, removed_layers(chosen), lenient=chosen.lenient)
        notes += about_layers
        config, more = _settled(config, chosen, wanted, writing, as_it_was=as_it_was)
        notes += more
    return config, notes


def _with_stated(config: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config with the keys that the output states; its dtype under the key that the config uses for it."""
    config, notes = corrected(config, rows=None, dtype=stated.get("dtype"), tied=None)
    return {**config, **{key: value for key, value in stated.items() if key != "dtype"}}, notes


def _settled(
    config: Mapping[str, Any], chosen: Chosen, wanted: Wanted, writing: Writing, *, as_it_was: bool
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config adjusted to the tensors that are written.

    as_it_was: the config is a copy of the source's, in which existing values may change but no keys are added.
    """
    model = {tensor.key.name: tensor for tensor in wanted.tensors if tensor.key.state == MODEL}
    if not model:
        return config, ()
    config, about_head = untie_own_head(config, model, chosen, writing)
    language_part = _language_part(config)
    if language_part is not None:
        config, notes = _settled_inside(config, *language_part, model, torch_dtype(wanted))
        return config, (*about_head, *notes, *_missing_head(config, language_part[0], model, chosen, writing))
    if "text_config" in config:  # of several models: which of them the tensors are is not known
        return config, about_head
    config, notes = (config, about_head) if as_it_was else _biased(config, model, about_head)
    says_dtype = ("dtype" in config or "torch_dtype" in config) and "quantization_config" not in config
    rows = _rows_of_vocabulary(config, model)
    out, more = corrected(
        config,
        rows=rows if "vocab_size" in config or not as_it_was else None,
        dtype=torch_dtype(wanted) if says_dtype else None,
        tied=_tied(config, model, chosen, writing, as_it_was=as_it_was),
    )
    if writing.tied_head != "tie" and out.get(TIED) is False and _misses_head(out, model, chosen):
        notes = (*notes, _HEADLESS)
    return out, (*notes, *more)


def untie_own_head(
    config: Mapping[str, Any], names: Collection[str], chosen: Chosen, writing: Writing
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config without the flag that ties the head to the embedding, if the head that is written is no copy of it:
    a library that follows the flag would overwrite the head. The flag may be at the top and in the language model's
    part.

    Raises InconsistentCheckpoint E3017 where `--config` has the flag and the user did not ask for `--tied-head untie`.
    """
    language_part = _language_part(config)
    if language_part is not None:
        path = language_part[0]
    else:
        path = ("text_config",) if isinstance(config.get("text_config"), Mapping) else ()
    levels = [path[:depth] for depth in range(len(path) + 1)]
    tied = [level for level in levels if _inner_config(config, level).get(TIED) is True]
    if path not in tied and TIED not in _inner_config(config, path) and _says_tied(_inner_config(config, path)):
        tied.append(path)

    is_untied = writing.tied_head == "untie" and bool(path) and has_head(names)
    if is_untied:
        # A class of the part may tie without a flag, so the part itself states that it does not.
        changed = [level for level in levels if level in tied or level in ((), path)]
        reason = "the head is written as a tensor of its own"
    else:
        changed = tied
        reason = describe_own_head(chosen, names) if tied else ""
    if not reason:
        return config, ()
    if chosen.config_path is not None and chosen.config is not None and writing.tied_head != "untie":
        raise InconsistentCheckpoint(
            f"{TIED} is true by {chosen.config_path}, and {reason}",
            code="E3017",
            path=chosen.config_path,
            hint=f"state false there, or pass --tied-head untie, which corrects it; --remove-keys {HEAD_NAME} leaves "
            "the head out",
        )

    notes = []
    for level in changed:
        before = _inner_config(config, level).get(TIED)
        if before is not False:
            config = change_config(config, level, {TIED: False})
            where = ".".join((*level, TIED))
            notes.append(f"{where} becomes False: {reason}" + (f"; it was {before}" if before is not None else ""))
    return config, tuple(notes)


def _inner_config(config: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The part of a config at this path of keys."""
    inner: Any = config
    for key in path:
        inner = inner[key]
    return inner if isinstance(inner, Mapping) else {}


def _missing_head(
    config: Mapping[str, Any], path: tuple[str, ...], names: Collection[str], chosen: Chosen, writing: Writing
) -> tuple[str, ...]:
    """A note where a model of several parts states a head of its own, at the top and in its language model's part, and
    holds none."""
    stated = {_inner_config(config, level).get(TIED) for level in ((), path)}
    if writing.tied_head == "tie" or True in stated or False not in stated:
        return ()
    is_whole = any(name.endswith(EMBEDDINGS) for name in names) and any(name.endswith("norm.weight") for name in names)
    if not is_whole or chosen.home not in ("hf", "keep") or has_head(names):
        return ()
    return (_HEADLESS,)


def _language_part(config: Mapping[str, Any]) -> tuple[tuple[str, ...], str] | None:
    """(path of keys to the language model's part, the hub's name of its embedding) for a multimodal model; None for
    other models and for unknown families."""
    from ckpt_tool.families.base import HUB
    from ckpt_tool.families.models import family_of

    try:
        family = family_of(str(config.get("model_type")))
    except KeyError:
        return None
    names = [name for name in family.table(HUB).left if name.endswith(EMBEDDINGS) and "%d" not in name]
    return (tuple(family.language.split(".")), names[0]) if names and family.part(config) is not None else None


def _settled_inside(
    config: Mapping[str, Any], path: tuple[str, ...], embedding: str, model: Mapping[str, Any], dtype: str | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config of a multimodal model, in which the dtype and the vocabulary rows of its language model are adjusted
    to the tensors, if it states them."""
    says = "quantization_config" not in config and any(
        isinstance(config.get(key), str) for key in ("dtype", "torch_dtype")
    )
    out, notes = corrected(config, rows=None, dtype=dtype if says else None, tied=None)
    if not path:
        has_rows = embedding in model and len(model[embedding].shape) == 2
        rows = model[embedding].shape[0] if has_rows and "vocab_size" in config else None
        out, more = corrected(out, rows=rows, dtype=None, tied=None)
        return out, (*notes, *more)
    part, more = _settled_inside(out[path[0]], path[1:], embedding, model, dtype)
    return {**out, path[0]: part}, (*notes, *more)


def corrected(
    config: Mapping[str, Any], *, rows: int | None, dtype: str | None, tied: bool | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config with what the tensors show: rows of the vocabulary, the dtype that was written (as torch calls it),
    whether the head is the embedding. None where the tensors show nothing. A value that changes is in the notes."""
    out = dict(config)
    notes = list[str]()

    def correct(key: str, value: Any) -> None:
        if out.get(key) != value:
            if key in out:
                notes.append(f"{key} becomes {value}, as the tensors are; it was {out[key]}")
            out[key] = value

    if rows is not None:
        correct("vocab_size", rows)
    if dtype is not None:
        names = [key for key in ("dtype", "torch_dtype") if isinstance(out.get(key), str)] or ["torch_dtype"]
        for key in names:
            correct(key, dtype)
    if tied is not None:
        correct(TIED, tied)
    return out, tuple(notes)


def _biased(
    config: Mapping[str, Any], names: Iterable[str], said: tuple[str, ...]
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The config with the biases that the tensors have: Megatron's arguments have no words for some of them. said: the
    notes before these."""
    from ckpt_tool.families.config.translation import kind_of
    from ckpt_tool.families.models import CLASSES

    kind = kind_of(config)
    silent = CLASSES[kind].unsayable if kind is not None else {}  # what a class takes that Megatron has no word for
    knows = _own_table(config)
    biases = [name for name in names if name.endswith("_proj.bias") and (knows is None or knows.knows(name))]
    held = {".".join(name.split(".")[-3:-2]) for name in biases}
    wrong = [key for key, module in _BIASES.items() if config.get(key, silent.get(key)) is False and module in held]
    notes = tuple(f"{key} becomes True: the tensors have biases there" for key in wrong)
    return {**config, **dict.fromkeys(wrong, True)}, (*said, *notes)


def _tied(
    config: Mapping[str, Any], names: Iterable[str], chosen: Chosen, writing: Writing, *, as_it_was: bool
) -> bool | None:
    """Is the head the embedding? None where the tensors do not contradict the config.

    A missing head is evidence only if the rest of the model is there, that is, the family's embedding and last norm
    under their full names. Under other names (an unknown prefix) the tensors prove nothing."""
    held = set(names)
    if has_head(held):
        stated = config.get(TIED)
        says = stated if isinstance(stated, bool) else _says_tied(config)
        return False if writing.tied_head == "untie" and says is not False else None
    table = _own_table(config)
    gone = [tensor.key.name for tensor in chosen.removed]
    requested = writing.tied_head == "tie" or not as_it_was
    if not requested or table is None or has_head(gone):
        return None
    embeddings = [name for name in held if name.endswith(EMBEDDINGS) and table.knows(name)]
    if not embeddings or "model.norm.weight" not in held or not table.knows("model.norm.weight"):
        return None
    if writing.tied_head != "tie" and _misses_head(config, held, chosen):
        return None
    return True if _says_tied(config) is False else None


def _misses_head(config: Mapping[str, Any], names: Collection[str], chosen: Chosen) -> bool:
    """Does the config state a head of its own, and the source, whose names are the hub's or a job's, have none? Then it
    was lost. Other systems have no head where it is the embedding, whatever a config says."""
    if config.get(TIED) is not False or chosen.home not in ("hf", "keep"):
        return False
    table = _own_table(config)
    is_known = table is not None and table.knows(HEAD_NAME)
    return is_known and not has_head(names)


def _rows_of_vocabulary(config: Mapping[str, Any], model: Mapping[str, Any]) -> int | None:
    """The number of rows of the embedding; None if there is none, or if several disagree."""
    tables = {
        name: tensor.shape[0] for name, tensor in model.items() if name.endswith(EMBEDDINGS) and len(tensor.shape) == 2
    }
    family = _own_table(config)
    own = {name: rows for name, rows in tables.items() if family is not None and family.knows(name)}
    rows = set((own or tables).values())
    return rows.pop() if len(rows) == 1 else None


def _own_table(config: Mapping[str, Any]) -> Table | None:
    """The table of hub names of the family that the config names, None for an unknown one."""
    from ckpt_tool.families.base import HUB
    from ckpt_tool.families.models import known_family

    family = known_family(config.get("model_type"))
    return family.table(HUB) if family is not None else None


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """Is the head tied to the embedding by the config, or by the default of its class? None for an unknown class."""
    from ckpt_tool.families.config.translation import kind_of
    from ckpt_tool.families.models import CLASSES

    kind = kind_of(config)
    return bool(config.get(TIED, CLASSES[kind].defaults[TIED])) if kind is not None else None


def torch_dtype(wanted: Wanted) -> str | None:
    """The dtype of most of the model's elements, by torch's name; None if models do not compute in that dtype."""
    sizes: dict[str, int] = {}
    alike = Counter([(tensor.dtype, tensor.shape) for tensor in wanted.tensors if tensor.key.state == MODEL])
    for (dtype, shape), count in alike.items():
        if dtype.is_float:
            sizes[dtype.name] = sizes.get(dtype.name, 0) + count * (dtype.nbytes(prod(shape)) * 8 // max(dtype.bits, 1))
    return _TORCH.get(max(sizes, key=lambda name: sizes[name])) if sizes else None
