"""What an adapter's config says of the arithmetic, and what of it is no sum with its base.

    {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {"layers.0.self_attn.q_proj": 32}}
    scaling("model.layers.1.self_attn.q_proj", 8)     2.0
    scaling("model.layers.0.self_attn.q_proj", 32)    0.5

Refused by name: other methods than LoRA, variants that are no sum with the base (aLoRA, Arrow, KaSA, ...), initial
values that change the base (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA: their adapters belong to a base of their own),
replicated layers, and settings that this build has never heard of and that are on. Source: PEFT 0.21.2
`tuners/lora/config.py`, `layer.py` update_layer, `model.py` _create_and_replace. What it does not do: open an adapter
(`adapters.adapter`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from ckpt_tool.core.module_patterns import NotUnderstood, first_match
from ckpt_tool.errors import CorruptFile, UsageError

REFUSED = "E1422"
MALFORMED = "E1423"
PATTERN = "E1426"
LARGEST = 3.4028234663852886e38  # of fp32
# settings -> why an adapter that has them is no sum with its base
_VARIANTS = {
    "layer_replication": "its model repeats layers of the base, which has to be built first",
    "megatron_config": "its modules are Megatron's parallel ones",
    "alora_invocation_tokens": "an activated LoRA acts on some tokens only",
    "arrow_config": "Arrow chooses among adapters token by token",
    "monteclora_config": "MonteCLoRA draws its weights",
    "velora_config": "VeLoRA is not known here",
    "kasa_config": "KaSA truncates its base",
    "use_bdlora": "block-diagonal LoRA is not known here",
    "use_qalora": "QALoRA pools its inputs",
}
_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
_OWN_FACTORS = ("gaussian", "eva", "orthogonal")  # initial values of A and B alone
_PARTIAL = (
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
)  # with these not every module of a name is a target
_KNOWN = frozenset(
    (
        *_VARIANTS,
        *"""
        peft_type peft_version auto_mapping base_model_name_or_path revision task_type inference_mode r
        lora_alpha lora_dropout target_modules exclude_modules fan_in_fan_out bias use_rslora use_dora
        modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern
        megatron_core trainable_token_indices loftq_config eva_config corda_config lora_ga_config
        qalora_group_size lora_bias target_parameters ensure_weight_tying runtime_config
        """.split(),
    )
)


@dataclass(frozen=True, slots=True)
class Settings:
    """An adapter's settings as its config states them."""

    path: str
    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]  # module pattern -> value, in the file's order
    alpha_pattern: Mapping[str, float]  # module pattern -> value, in the file's order
    rslora: bool
    dora: bool
    fan_in_fan_out: bool
    tokens: Mapping[str, tuple[int, ...]]  # rows of an embedding, by the module's ending, "" for the model's own
    parameters: tuple[str, ...]  # `target_parameters`
    tied: bool
    base: str
    weight: float = 1.0  # what the user multiplies the adapter by
    targets: tuple[str, ...] = ()  # module endings of which nothing may be absent (`targets.absent`)
    saved: tuple[str, ...] = ()  # module endings of which nothing may be absent (`targets.absent`)

    def rank_of(self, module: str) -> int:
        """The rank r of a module, by `rank_pattern` if that has an entry for it."""
        found = _first(self.rank_pattern, module)
        return self.rank if found is None else self.rank_pattern[found]

    def scaling(self, module: str, rank: int) -> float:
        """weight * alpha / r, in the order of PEFT's `set_scale`."""
        found = _first(self.alpha_pattern, module)
        alpha = self.alpha if found is None else self.alpha_pattern[found]
        return self.weight * alpha / (sqrt(rank) if self.rslora else rank)


def _first(patterns: Iterable[str], module: str) -> str | None:
    """The first pattern that fits the module. Raises UsageError E1426 for one that is not understood."""
    try:
        return first_match(patterns, module)
    except NotUnderstood as e:
        raise UsageError(
            f"the module pattern {e} (in the adapter's config)",
            code=PATTERN,
            hint="write rank_pattern and alpha_pattern with plain module names",
        ) from e


def settings_of(config: Mapping[str, Any], path: str, *, weight: float = 1.0, lenient: bool = False) -> Settings:
    """The settings of a LoRA. path: the config file, for messages. lenient: unknown settings are no error.

    Raises UsageError E1422 (what can't be folded, all at once), CorruptFile E1423 (values that make no sense).
    """
    _refuse(config, path, lenient=lenient)
    take = _TakenKeys(config, path)
    tokens = config.get("trainable_token_indices")
    return Settings(
        path,
        rank=take.whole("r", config.get("r", 8)),
        alpha=take.number("lora_alpha", config.get("lora_alpha", 8)),
        rank_pattern={
            key: take.whole(f"rank_pattern/{key}", value) for key, value in take.table("rank_pattern").items()
        },
        alpha_pattern={key: take.number(f"alpha_pattern/{key}", v) for key, v in take.table("alpha_pattern").items()},
        rslora=take.flag("use_rslora"),
        dora=take.flag("use_dora"),
        fan_in_fan_out=take.flag("fan_in_fan_out"),
        tokens={
            key: take.rows(value) for key, value in (tokens if isinstance(tokens, dict) else {"": tokens or []}).items()
        },
        parameters=take.words("target_parameters"),
        tied=take.flag("ensure_weight_tying"),
        base=str(config.get("base_model_name_or_path") or ""),
        weight=weight,
        targets=() if lenient or any(config.get(name) for name in _PARTIAL) else _endings(config.get("target_modules")),
        saved=() if lenient else _endings(config.get("modules_to_save")),
    )


def _endings(value: Any) -> tuple[str, ...]:
    """A list of module endings; nothing for a pattern, which is not looked into."""
    return tuple(each for each in value if type(each) is str) if isinstance(value, list) else ()


# Settings of PaddleFormers' LoRA -> why an adapter that has them on is no sum of A @ B with its base
_PADDLE_REFUSED = {
    "enable_lora_list": "a merged layer trains parts of its outputs",
    "do_qat": "it was trained against quantised weights",
    "loraga": "it was trained on a base that LoRA-GA changed",
    "pissa": "it was trained on a base that PiSSA changed (W - A B of the start), which is not the base on disk",
    "use_mora": "MoRA has one square matrix in place of A and B",
    "lora_use_mixer": "a third matrix, lora_AB, is between A and B",
}
# Settings that change nothing of the product: of training, of the layers' code, or read below.
# Source: the LoRAConfig of PaddleNLP 2.8.1 and 3.0.0b4, PaddleFormers 0.4.1 and 1.2.0 (`peft/lora/lora_config.py`).
_PADDLE_KNOWN = frozenset(
    (
        *_PADDLE_REFUSED,
        *"""
        r target_modules trainable_modules lora_alpha lora_dropout merge_weights trainable_bias
        tensor_parallel_degree tensor_model_parallel_size pipeline_parallel_degree pipeline_model_parallel_size
        use_intermediate_api dtype
        head_dim rslora lora_plus_scale use_quick_lora lorapro base_model_name_or_path scaling
        """.split(),
    )
)


def paddle_settings_of(config: Mapping[str, Any], path: str, *, weight: float = 1.0, lenient: bool = False) -> Settings:
    """The settings of a `lora_config.json` of PaddleFormers or PaddleNLP. lenient: unknown settings are no error.

    Raises as `settings_of`."""
    faults = [f"{name}: {why}" for name, why in _PADDLE_REFUSED.items() if config.get(name)]
    if not lenient:
        unknown = [name for name, value in config.items() if name not in _PADDLE_KNOWN and value]
        faults += [f"{name}: a setting that this build does not know" for name in unknown]
    if faults:
        hint = "merge it with PaddleFormers itself; settings that change nothing here pass with --lenient"
        raise _cannot_be_folded(faults, path, hint)

    settings = settings_of(
        {
            "peft_type": "LORA",
            "r": config.get("r"),
            "lora_alpha": config.get("lora_alpha"),
            "use_rslora": config.get("rslora"),
            "base_model_name_or_path": config.get("base_model_name_or_path"),
        },
        path,
        weight=weight,
    )

    # The library writes the factor that it multiplies by next to what it is made of.
    stated: Any = config.get("scaling")
    computed = settings.scaling("", settings.rank) / weight if weight else None
    is_number = isinstance(stated, int | float) and not isinstance(stated, bool)
    if is_number and computed is not None and not isclose(float(stated), computed, rel_tol=1e-6):
        fault = f"scaling: {stated} is stated, and lora_alpha and r give {computed:g}"
        raise _cannot_be_folded([fault], path, "merge it with the release of the library that wrote it")
    return settings


def _refuse(config: Mapping[str, Any], path: str, *, lenient: bool) -> None:
    faults = []
    kind = config.get("peft_type")
    if kind != "LORA":
        faults.append(f"peft_type {kind}: only LoRA and its kin (rsLoRA, DoRA) are sums with the base")

    faults += [f"{name}: {why}" for name, why in _VARIANTS.items() if config.get(name)]
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OWN_BASE):
        faults.append(f"init_lora_weights {start}: it was trained on a base that this initialisation changed")
    elif isinstance(start, str) and start.lower() not in _OWN_FACTORS and not lenient:
        faults.append(f"init_lora_weights {start[:80]}: this build does not know whether it changes the base")

    odd = [
        name
        for name in config
        if name not in _KNOWN
        and config[name] not in (None, False, "", 0)
        and (config[name] is True or (isinstance(config[name], dict | list) and config[name]))
    ]
    if not lenient:
        faults += [f"{name}: a setting that this build does not know" for name in odd]
    if config.get("lora_alpha") == 0 and not config.get("alpha_pattern") and not lenient:
        faults.append("lora_alpha 0: nothing of it would be folded; verl's merger writes 0 where it knows no alpha")

    if faults:
        raise _cannot_be_folded(
            faults,
            path,
            "convert it to a plain LoRA with PEFT first (save_pretrained's path_initial_model_for_weight_conversion "
            "does for PiSSA and its kin); settings that change nothing here pass with --lenient"
            if kind == "LORA"
            else "merge it with PEFT itself, where that method can be merged",
        )


class _TakenKeys:
    """Reads values of the config with a check of their types. Raises CorruptFile E1423 with the key."""

    def __init__(self, config: Mapping[str, Any], path: str) -> None:
        self._config = config
        self._path = path

    def whole(self, place: str, value: Any) -> int:
        """A positive integer below 2^20, such as a rank. place: its key."""
        if type(value) is not int or not 0 < value < 1 << 20:
            raise self._malformed(place, value, "a rank")
        return value

    def number(self, place: str, value: Any) -> float:
        """A number of limited size, such as alpha; never NaN. place: its key."""
        if type(value) not in (int, float) or not abs(value) <= LARGEST:
            raise self._malformed(place, value, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """The value of a boolean key; False if it is absent or null."""
        value = self._config.get(name)
        if value is not None and type(value) is not bool:
            raise self._malformed(name, value, "true or false")
        return value is True

    def table(self, name: str) -> dict[str, Any]:
        """The value of a key that is an object; {} if it is absent or null."""
        value = self._config.get(name) or {}
        if not isinstance(value, dict):
            raise self._malformed(name, value, "an object")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """The value of a key that is a list of names; () if it is absent or null."""
        value = self._config.get(name) or []
        if not isinstance(value, list) or any(type(each) is not str for each in value):
            raise self._malformed(name, value, "a list of names")
        return tuple(value)

    def rows(self, value: Any) -> tuple[int, ...]:
        """A list of row numbers >= 0 (`trainable_token_indices`)."""
        if not isinstance(value, list) or any(type(each) is not int or each < 0 for each in value):
            raise self._malformed("trainable_token_indices", value, "row numbers")
        return tuple(value)

    def _malformed(self, place: str, value: Any, wanted: str) -> CorruptFile:
        return CorruptFile(
            f"{place} is {str(value)[:80]}, want {wanted}",
            code=MALFORMED,
            path=self._path,
            place=f"/{place}",
            hint="fetch the adapter's config again",
        )


def _cannot_be_folded(faults: Sequence[str], path: str, hint: str) -> UsageError:
    return UsageError(
        f"this adapter can't be folded: {faults[0]}", code=REFUSED, path=path, faults=faults[1:], hint=hint
    )
