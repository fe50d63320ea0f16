"""A mergekit config as a Job (mergekit 0.1.5 `config.py`, docs/merge configuration).

    merge_method: ties
    base_model: ./llama
    models:
      - model: ./math
        parameters: {weight: 0.5, density: [0.3, 0.7]}
      - model: ./code
        parameters: {weight: [{filter: mlp, value: 0.2}, {value: 0.5}]}
    parameters: {normalize: true}
    dtype: float32
    out_dtype: bfloat16

Paths are relative to the working directory, as mergekit has them. Every key that is not understood is an error with its
place, and what can have no effect is reported; what mergekit knows and this tool does not do is refused by name:
several `modules` that are merged, tokenizers that are built or rows that move (`tokenizer_source: union`, `tokens`),
`chat_template`, `residual_weight`, `model+lora`.

`dtype` is what mergekit computes in; here arithmetic is fp32, so it only says what is written where `out_dtype` does
not.

A YAML file as plain values: mappings with text keys, lists, texts, numbers, flags, nothing.

What could do more than say values is refused: tags (`!!python/...`), merge keys are plain keys, aliases beyond a number
that no config needs (a few kilobytes of them can mean gigabytes), nesting beyond 32 levels, one key twice, files beyond
256 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ckpt_tool.core.dtype import from_name
from ckpt_tool.core.urls import hide_in_argument
from ckpt_tool.errors import UsageError, near_misses, wrap_os_error
from ckpt_tool.merging.job import CaseValue, LayerSlice, LayersOfModel, MergeJob, Setting, Value, all_faults
from ckpt_tool.merging.methods import Method, method_of
from ckpt_tool.storage.texts import strict_yaml

_KEYS = tuple("merge_method base_model models slices parameters dtype out_dtype tokenizer_source tokenizer".split())
_REFUSED = {
    "chat_template": "this build copies the tokenizer's files as they are: set the template in the output's own",
    "residual_weight": "mergekit reads it and does nothing with it",
}
_DTYPES = ("F32", "BF16", "F16")
T = TypeVar("T")


class _Faults(list[tuple[str, str]]):
    """(place in the config, what is wrong there)."""

    def add(self, place: str, message: str) -> None:
        self.append((place, message))

    def unknown(self, place: str, found: Mapping[str, Any], known: tuple[str, ...]) -> None:
        for key in found:
            if key in _REFUSED:
                self.add(f"{place}/{key}", f"{key}: {_REFUSED[key]}")
            elif key not in known:
                near = near_misses(key, known) or f"the keys here are {', '.join(known)}"
                self.add(f"{place}/{key}", f"unknown key {key!r}; {near}")


def read_config(path: str, *, seed: int | None = None, tokenizer: str | None = None) -> MergeJob:
    """The job that the config at `path` describes. tokenizer: as of the command line.

    Raises UsageError E1443 (no YAML), E1444 with every fault of the config, StorageError.
    """
    data = read_yaml(path)
    faults = _Faults()
    if not isinstance(data, dict):
        raise UsageError(
            "the config is not a mapping", code="E1444", path=path, hint="it begins with merge_method: NAME"
        )

    data = _as_one_module(data, faults)
    faults.unknown("", data, _KEYS)
    name = data.get("merge_method")
    method = _try_make(lambda: method_of(name), faults) if isinstance(name, str) else None

    if not isinstance(name, str):
        faults.add(
            "/merge_method", "merge_method is missing" if name is None else f"found {name!r}, want a method's name"
        )

    base = _model(data["base_model"], "/base_model", faults) if data.get("base_model") is not None else None
    slices, sliced = _slices(data, base, method, faults)
    settings = _settings(data.get("parameters"), "/parameters", method, faults)
    dtype = _dtype(data, faults)
    _check_tokenizer(data, base, slices, faults)
    if method and seed is not None and not method.by_chance:
        faults.add("", f"--seed: {method.name} leaves nothing to chance")

    if method and slices and not faults:
        slices, idle = _without_idle(slices, base, method)
        notes = (*_notes(data, settings), *idle)
        job = MergeJob(method, slices, base, settings, sliced, dtype, seed or 0, tokenizer == "base", notes)
        for fault in all_faults(job):
            faults.add("", fault)
        if not faults:
            return job

    first_fault, *other_faults = faults
    raise UsageError(
        first_fault[1],
        code="E1444",
        path=path,
        place=first_fault[0] or None,
        faults=[f"{place}: {text}" if place else text for place, text in other_faults],
        hint="nothing of a config is ignored: mend the key, or take it out",
    )


def _as_one_module(data: Mapping[str, Any], faults: _Faults) -> Mapping[str, Any]:
    """The config without `modules`, where all but one of them are taken as one model has them: that one's slices or
    models are then the config's own, and the rest of the model stays as it is."""
    modules = data.get("modules")
    if modules is None:
        return data
    common = {key: value for key, value in data.items() if key != "modules"}
    if not isinstance(modules, dict) or any(not isinstance(module, dict) for module in modules.values()):
        faults.add("/modules", "want a mapping of modules, each with slices or models")
        return common

    taken_modules = {}  # module -> the only model that it is taken from
    merged = {}
    for name, module in modules.items():
        faults.unknown(f"/modules/{name}", module, ("slices", "models", "parameters"))
        models = module.get("models")
        is_whole = isinstance(models, list) and len(models) == 1 and isinstance(models[0], dict)
        if is_whole and models[0].keys() == {"model"}:
            taken_modules[name] = models[0]["model"]
        else:
            merged[name] = module
    if len(merged) != 1 or "slices" not in next(iter(merged.values())):
        listed_modules = ", ".join(merged) or "none"
        faults.add(
            "/modules",
            f"modules: one of them may have slices, the others one model each; here {listed_modules} have more",
        )
        return {**common, "models": [{"model": next(iter(taken_modules.values()), "")}]}
    ((name, module),) = merged.items()
    slices = module["slices"]
    taken_first = slices[0]["sources"][0].get("model") if _is_slice(slices) else None
    second_module = next((each for each in taken_modules.items() if each[1] != taken_first), None)
    if second_module is not None:
        faults.add(
            f"/modules/{second_module[0]}",
            f"{second_module[0]} is to come from {second_module[1]}, the first layers of {name} from {taken_first}: "
            "this build takes both from one model",
        )
    return {**common, **module}


def _is_slice(slices: Any) -> bool:
    """Is the first of the slices one with a source?"""
    first_slice = slices[0] if isinstance(slices, list) and slices else None
    sources = first_slice.get("sources") if isinstance(first_slice, dict) else None
    return isinstance(sources, list) and bool(sources) and isinstance(sources[0], dict)


def _without_idle(
    slices: tuple[LayerSlice, ...], base: str | None, method: Method
) -> tuple[tuple[LayerSlice, ...], list[str]]:
    """The slices without what configs like to say of the base and mergekit passes over, and a line for each."""
    notes = dict[str, None]()
    cleaned = []
    for slice_ in slices:
        parts = []
        for part in slice_.parts:
            settings = dict(part.settings)
            if part.model == (slice_.base or base):
                for name in [each for each in settings if method.parameters[each].scope == "task"]:
                    del settings[name]
                    notes[
                        f"{name} of the base {part.model}: has no effect, {method.name} takes what others differ by"
                    ] = None
            parts.append(replace(part, settings=settings))
        cleaned.append(replace(slice_, parts=tuple(parts)))
    return tuple(cleaned), list(notes)


def _try_make(make: Callable[[], T], faults: _Faults) -> T | None:
    try:
        return make()
    except UsageError as e:
        faults.add("/merge_method", f"{e.message}; {e.hint}")
        return None


def _notes(data: Mapping[str, Any], settings: Mapping[str, Setting]) -> tuple[str, ...]:
    notes = []
    if data.get("dtype") is not None and data.get("dtype") != "float32":
        notes.append(
            f"dtype: {data['dtype']}: computed in fp32 and rounded once, where mergekit computes in {data['dtype']}"
        )
    if data.get("tokenizer_source") or data.get("tokenizer"):
        notes.append(
            "the tokenizer's files are copied and embeddings keep their rows, where mergekit sets them up by token"
        )
    if "int8_mask" in settings:
        notes.append("int8_mask: has no effect here, masks are bits")
    return tuple(notes)


# -- models and slices -------------------------------------------------------------------------------------------------


def _slices(
    data: Mapping[str, Any], base: str | None, method: Method | None, faults: _Faults
) -> tuple[tuple[LayerSlice, ...], bool]:
    models = data.get("models")
    slices = data.get("slices")
    if bool(models) == bool(slices):
        if "modules" not in data:
            faults.add("/models", "want one of models and slices, with at least one entry")
        return (), False
    if models:
        parts = [
            _part(entry, f"/models/{k}", method, faults, layers=False)
            for k, entry in _read_list(models, "/models", faults)
        ]
        found = [part for part in parts if part is not None]
        if base is not None and base not in [part.model for part in found]:
            found.append(LayersOfModel(base))
        return (LayerSlice(tuple(found)),), False
    listed_slices = [
        _slice(entry, f"/slices/{k}", method, faults) for k, entry in _read_list(slices, "/slices", faults)
    ]
    return tuple(entry for entry in listed_slices if entry is not None), True


def _read_list(value: Any, place: str, faults: _Faults) -> list[tuple[int, Any]]:
    if not isinstance(value, list):
        faults.add(place, f"found {value!r}, want a list")
        return []
    return list(enumerate(value))


def _slice(data: Any, place: str, method: Method | None, faults: _Faults) -> LayerSlice | None:
    if not isinstance(data, dict) or not data.get("sources"):
        faults.add(place, "want a mapping with sources")
        return None
    faults.unknown(place, data, ("sources", "base_model", "parameters"))
    base = _model(data["base_model"], f"{place}/base_model", faults) if data.get("base_model") is not None else None
    sources = _read_list(data["sources"], f"{place}/sources", faults)
    parts = [_part(entry, f"{place}/sources/{k}", method, faults, layers=True) for k, entry in sources]
    return LayerSlice(
        tuple(part for part in parts if part is not None),
        _settings(data.get("parameters"), f"{place}/parameters", method, faults),
        base,
    )


def _part(data: Any, place: str, method: Method | None, faults: _Faults, *, layers: bool) -> LayersOfModel | None:
    if not isinstance(data, dict) or "model" not in data:
        faults.add(place, "want a mapping with model")
        return None
    faults.unknown(place, data, ("model", "layer_range", "parameters") if layers else ("model", "parameters"))
    model = _model(data["model"], f"{place}/model", faults)
    settings = _settings(data.get("parameters"), f"{place}/parameters", method, faults)
    layer_range = None
    if layers:
        layer_range = data.get("layer_range")
        if (
            not isinstance(layer_range, list)
            or len(layer_range) != 2
            or not all(type(layer) is int for layer in layer_range)
            or not 0 <= layer_range[0] < layer_range[1]
        ):
            faults.add(
                f"{place}/layer_range", f"layer_range: found {layer_range!r}, want [first, end] with first < end"
            )
            return None
    return LayersOfModel(model, settings, tuple(layer_range) if layer_range else None) if model else None


def _model(data: Any, place: str, faults: _Faults) -> str | None:
    if not isinstance(data, str) or not data:
        faults.add(place, f"found {data!r}, want a path")
        return None
    from pathlib import Path

    if Path(data).exists() or "://" in data:
        return hide_in_argument(data)
    if "+" in data:
        faults.add(place, f"{data}: a LoRA is folded first: ckpt merge MODEL LORA OUT --method lora")
    elif "@" in data:
        faults.add(
            place,
            f"{data}: no such path, and revisions of a hub are not read by this name; write hf://OWNER/NAME@REVISION",
        )
    else:
        hub = f"; for the Hugging Face hub write hf://{data}" if data.count("/") == 1 and data[0] not in "./" else ""
        faults.add(place, f"{data}: no such path, seen from the working directory{hub}")
    return None


# -- parameters --------------------------------------------------------------------------------------------------------


def _settings(data: Any, place: str, method: Method | None, faults: _Faults) -> dict[str, Setting]:
    if data is None:
        return {}
    if not isinstance(data, dict):
        faults.add(place, f"found {data!r}, want a mapping")
        return {}
    settings = {}
    for name, value in data.items():
        if method is None:
            continue
        if name not in method.parameters:
            parameters = tuple(method.parameters)
            near = near_misses(name, parameters) or f"its parameters are {', '.join(parameters) or 'none'}"
            faults.add(f"{place}/{name}", f"{name}: no parameter of {method.name}; {near}")
            continue
        kind = method.parameters[name].kind
        cases = value if isinstance(value, list) and any(isinstance(entry, dict) for entry in value) else [value]
        read_cases = (_case(entry, f"{place}/{name}", kind, faults) for entry in cases)
        settings[name] = tuple(case for case in read_cases if case is not None)
    return settings


def _case(data: Any, place: str, kind: str, faults: _Faults) -> CaseValue | None:
    filter_ = ""
    if isinstance(data, dict):
        faults.unknown(place, data, ("filter", "value"))
        filter_ = data.get("filter") or ""
        if not isinstance(filter_, str) or "value" not in data:
            faults.add(place, "a case is {filter: PART OF A NAME, value: ...}")
            return None
        data = data["value"]
    values = [_value(entry, kind) for entry in (data if isinstance(data, list) else [data])]
    if not values or any(value is None for value in values):
        faults.add(place, f"found {data!r}, want a {kind} or a list of them")
        return None
    return CaseValue(tuple(value for value in values if value is not None), filter_)


def _value(data: Any, kind: str) -> Value | None:
    """A number or a flag. YAML reads 1e-5 as a text."""
    if kind == "flag":
        return data if isinstance(data, bool) else None
    if isinstance(data, bool) or not isinstance(data, int | float | str):
        return None
    try:
        number = float(data)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


# -- dtypes and tokenizers ---------------------------------------------------------------------------------------------


def _dtype(data: Mapping[str, Any], faults: _Faults) -> str | None:
    name = None
    for key in ("dtype", "out_dtype"):
        if data.get(key) is None:
            continue
        dtype = from_name(data[key]) if isinstance(data[key], str) else None
        if dtype is None or dtype.name not in _DTYPES:
            faults.add(f"/{key}", f"{key}: found {data[key]!r}, want float32, bfloat16 or float16")
        else:
            name = dtype.name
    return name


def _check_tokenizer(
    data: Mapping[str, Any], base: str | None, slices: tuple[LayerSlice, ...], faults: _Faults
) -> None:
    """The tokenizer must be the one that is copied anyway, the base's or the first model's."""
    place = "/tokenizer_source"
    source = data.get("tokenizer_source")
    if isinstance(data.get("tokenizer"), dict):
        if source is not None:
            faults.add("/tokenizer", "tokenizer_source and tokenizer say the same thing: give one")
        place = "/tokenizer"
        inside = data["tokenizer"]
        for key in inside:
            if key != "source":
                faults.add(f"/tokenizer/{key}", f"tokenizer.{key}: this build moves no rows of embeddings")
        source = inside.get("source", "union")
    elif data.get("tokenizer") is not None:
        faults.add("/tokenizer", f"found {data['tokenizer']!r}, want a mapping")
    first_model = base or next((part.model for slice_ in slices for part in slice_.parts), None)
    if source is not None and source not in ("base", first_model):
        kept = first_model or "the base"
        faults.add(place, f"{place[1:]}: {source!r} asks for another tokenizer than {kept}'s, which this build keeps")


# -- YAML --------------------------------------------------------------------------------------------------------------


LIMIT = 256 << 10  # bytes; those of real merges have some hundred
CODE = "E1443"


def read_yaml(path: str) -> Any:
    """The one document of the file. Raises UsageError E1443 with the line, StorageError."""
    try:
        if Path(path).stat().st_size > LIMIT:
            raise UsageError(f"a config of more than {LIMIT >> 10} KiB", code=CODE, path=path)
        data = Path(path).read_bytes()
    except OSError as e:
        raise wrap_os_error(e, path, "reading the config") from e
    try:
        return strict_yaml.parse(data)
    except strict_yaml.NotPlain as e:
        raise UsageError(
            f"the config is {e.what}",
            code=CODE,
            path=path,
            place=e.place,
            offset=e.offset,
            hint="see mergekit's examples",
        ) from e
