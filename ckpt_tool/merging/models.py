"""The models of a merge, opened: each under the hub's names, and what keeps them from being merged, all at once.

A model may be in any format and in any number of shards; where its dialect is known and is not the hub's, the
families' equations name it (`conversion.naming`), so sources of different systems meet. Optimizer states stay behind.

Whether models have the same tokens is read from the files next to the weights; nothing of a tokenizer is run.

Files that are equal byte for byte settle it. `tokenizer.json` and `vocab.json` that differ are compared by what they
say of tokens: the number of each token, the added ones too, and the merges; how they were formatted or by which version
does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_tool.conversion.passes import NAMES, passed, selected
from ckpt_tool.conversion.renaming import refuse_unmatched_in_all
from ckpt_tool.core.tensor import MODEL
from ckpt_tool.errors import CorruptFile, InconsistentCheckpoint, UsageError
from ckpt_tool.formats import registry
from ckpt_tool.formats.adapters.lone import adapter_config
from ckpt_tool.options.reading import Reading
from ckpt_tool.options.writing import Writing
from ckpt_tool.plan.moves import Stored
from ckpt_tool.quantised.dequantize import NOTHING
from ckpt_tool.quantised.keep_together import refuse_codes
from ckpt_tool.sources.chosen import Chosen, Conversion
from ckpt_tool.sources.config import config_of
from ckpt_tool.sources.opening import Opened, open_source
from ckpt_tool.storage.source import Tree
from ckpt_tool.storage.texts.strict_json import parse

ARCHITECTURES = "E1446"
TENSORS = "E1447"
TOKENIZERS = "E1448"
# What makes two models of one kind another architecture; the number of layers is compared where no slices are taken.
_SAME = tuple(
    """
    model_type hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size
    num_experts num_local_experts n_routed_experts moe_intermediate_size n_embd n_head kv_lora_rank q_lora_rank
    qk_rope_head_dim hidden_act num_experts_per_tok
    """.split()
)
# of adapters
_SCALING = tuple("peft_type r lora_alpha rank_pattern alpha_pattern use_rslora use_dora fan_in_fan_out".split())
_LAYERS = "num_hidden_layers"
_TEXT = "text_config"
_TELLING = ("rope_theta", "rope_scaling", "rms_norm_eps", "tie_word_embeddings", "sliding_window")
_BY_NUMBER = tuple(
    """
    first_k_dense_replace mlp_only_layers decoder_sparse_step num_nextn_predict_layers no_rope_layers
    interleave_moe_layer_step moe_layer_start_index
    """.split()
)
_OPTIMIZER = re.compile(r"optim|param_group|scheduler|rng|scaler", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MergedModel:
    """One model."""

    path: str
    opened: Opened
    # its tensors under the hub's names. first: its number in the output's sources is this or above.
    chosen: Chosen
    config: Mapping[str, Any] | None

    @property
    def tensors(self) -> dict[str, Stored]:
        return {row.tensor.key.name: row for row in self.chosen.stored}


def open_models(paths: Sequence[str], reading: Reading, writing: Writing, computes: str) -> list[MergedModel]:
    """Every model, in order. computes: the option that computes with weights, "" for one that moves them.

    Raises UsageError E1465 for quantised weights, E2403 for `--dequantize` where no model has any, and what opening and
    naming raise."""
    bare = replace(
        writing, states=(MODEL, "extras"), drop=(), remove_keys=(), keep_keys=(), dialect=None, aoa=None, dtypes={}
    )
    hub = registry.of_dialect("hf")
    models = list[MergedModel]()
    plain = list[UsageError]()

    for path in paths:
        opened = open_source(path, reading)
        states = (MODEL, "extras") if opened.catalog.extras else (MODEL,)
        requested = replace(bare, states=(*states, bare.state_as_model) if bare.state_as_model else states)
        job = Conversion(reading, requested, hub, of_several=True)
        if computes and not requested.dequantize:  # before the job that names them, which knows nothing of the output
            refuse_codes(
                [tensor for tensor in opened.catalog.tensors.values() if tensor.dtype.coded], computes, opened.path
            )
        part, fault = _floats(opened, job)
        plain += [fault] if fault else []
        if computes:
            refuse_codes([row.tensor for row in part.stored], computes, opened.path)
        named = passed(part, job, NAMES)
        config = named.config or config_of(opened, reading).config
        models.append(MergedModel(path, opened, named, config))

    if plain and len(plain) == len(models):
        raise plain[0]

    refuse_unmatched_in_all(writing.rename, [model.opened for model in models])
    return models


def _floats(opened: Opened, job: Conversion) -> tuple[Chosen, UsageError | None]:
    """What `--dequantize` makes of one model; of one without quantised weights what it holds, and what says so."""
    try:
        return selected(opened, job), None
    except UsageError as fault:
        if fault.code != NOTHING:
            raise
        return selected(opened, job._replace(writing=replace(job.writing, dequantize=False))), fault


def check_models(models: Sequence[MergedModel], *, sliced: bool, any_tokenizer: bool) -> list[str]:
    """What is worth a line in the report. Raises InconsistentCheckpoint E1446 (architectures), E1448 (tokenizers), with
    all faults of both.

    sliced: layers are picked, so their number may differ.
    """
    first_model = models[0]
    faults = list[tuple[str, str]]()
    notes = list[str]()

    for other in models[1:]:
        pair = f"{other.path} and {first_model.path}"
        for key, a, b in _differences(first_model.config, other.config, (*_SAME, *(() if sliced else (_LAYERS,)))):
            faults.append((ARCHITECTURES, f"{pair}: {key} is {b} and {a}"))
        for key, a, b in _differences(first_model.config, other.config, _TELLING):
            notes.append(f"{pair}: {key} is {b} and {a}; the output has that of {first_model.path}")
        one, two = (adapter_config(model.opened.catalog) for model in (first_model, other))
        for key in sorted({*one, *two} & set(_SCALING)):
            if (one.get(key) or None) != (two.get(key) or None):
                faults.append((ARCHITECTURES, f"{pair}: the adapters' {key} is {two.get(key)} and {one.get(key)}"))
        reason = difference(first_model.opened.tree, other.opened.tree)
        if reason and any_tokenizer:
            notes.append(f"{pair}: their tokenizers differ ({reason}); rows of embeddings are merged by their number")
        elif reason:
            faults.append((TOKENIZERS, f"{pair}: {reason}"))

    if faults:
        codes = [code for code, _ in faults]
        tokens_alone = set(codes) == {TOKENIZERS}
        raise InconsistentCheckpoint(
            f"the models are not alike: {faults[0][1]}",
            code=codes[0],
            path=first_model.path,
            faults=[text for _, text in faults[1:]],
            hint="--tokenizer base takes the rows as they are numbered"
            if tokens_alone
            else "merge models of one architecture, grown from one base",
        )

    return notes


def _differences(
    one: Mapping[str, Any] | None, two: Mapping[str, Any] | None, keys: Iterable[str]
) -> Iterable[tuple[str, Any, Any]]:
    if one is None or two is None:
        return
    for key in keys:
        if key in one and key in two and one[key] != two[key]:
            yield key, one[key], two[key]


def without_training(extras: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(extras that still hold for merged weights, the names of those of the optimizer, which don't)."""
    gone = [str(name) for name in extras if _OPTIMIZER.search(str(name))]
    return {name: value for name, value in extras.items() if str(name) not in gone}, gone


def sliced_config(
    models: Sequence[MergedModel], origins: Sequence[tuple[str, int]], notes: list[str]
) -> Mapping[str, Any] | None:
    """The first model's config with the layers of the output: their number, and what a list says of each.

    origins: the model and the layer that each comes from. Raises UsageError E1451 where the config names kinds of
    layers by their number, which they no longer have.
    """
    configs = {model.path: model.config for model in models}
    config = models[0].config
    if config is None:
        return None
    text = config.get(_TEXT)
    if _LAYERS not in config and isinstance(text, Mapping):  # a model that sees: its language model's own config
        inner = [replace(model, config=(model.config or {}).get(_TEXT)) for model in models]
        return {**config, _TEXT: sliced_config(inner, origins, notes)}
    by_number = [key for key in _BY_NUMBER if config.get(key) not in (None, [], 0, 1)]
    if by_number:
        raise UsageError(
            f"slices: the config states kinds of layers by number ({', '.join(by_number)}), and slices renumber them",
            code="E1451",
            path=models[0].path,
            hint="merge whole models; layers of such a model can't be renumbered",
        )
    count = config.get(_LAYERS)
    sliced = {**config, _LAYERS: len(origins)}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count and type(count) is int:
            lists = [(configs[path] or {}).get(key, value) for path, _ in origins]
            sliced[key] = [values[layer] for values, (_, layer) in zip(lists, origins, strict=True)]
    notes.append(f"the output has {len(origins)} layers, and its config.json says so")
    return sliced


# -- tokenizers --------------------------------------------------------------------------------------------------------


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "sentencepiece.bpe.model", "tiktoken.model")
LIMIT = 256 << 20  # bytes; the largest real ones have some 30 MB


def difference(first: Tree, other: Tree) -> str | None:
    """How the tokenizers of two models differ, in words; None where they don't, or where one of them has
    none."""
    first_files = _files(first)
    other_files = _files(other)
    if not first_files or not other_files:
        return None
    shared_files = [name for name in first_files if name in other_files]
    if not shared_files:
        return f"{first_files[0]} here, {other_files[0]} there: they can't be compared"
    name = shared_files[0]
    a, b = (tree.read_whole(name, limit=LIMIT) for tree in (first, other))
    if a == b:
        return None
    if not name.endswith(".json"):
        return f"{name} differs"
    try:
        left, right = (parse(data, path=tree.display(name)) for data, tree in ((a, first), (b, other)))
    except CorruptFile as e:
        return f"{name} differs, and is not read: {e.message}"
    return _compare_vocabularies(name, _numbers(left), _numbers(right)) or _compare_merges(name, left, right)


def _files(tree: Tree) -> list[str]:
    return [name for name in FILES if tree.single is None and tree.exists(name)]


def _numbers(data: Any) -> dict[str, Any]:
    """{token: its number} of a tokenizer.json or a vocab.json."""
    if not isinstance(data, Mapping):
        return {}
    model = data.get("model")
    if not isinstance(model, Mapping):
        return dict(data)
    vocab = model.get("vocab")
    numbers: dict[str, Any] = {}
    if isinstance(vocab, Mapping):
        numbers = dict(vocab)
    elif isinstance(vocab, list):
        numbers = {str(row[0]): number for number, row in enumerate(vocab) if isinstance(row, list) and row}
    added = data.get("added_tokens")
    for row in added if isinstance(added, list) else ():
        if isinstance(row, Mapping):
            numbers[str(row.get("content"))] = row.get("id")
    return numbers


def _compare_vocabularies(name: str, one: Mapping[str, Any], two: Mapping[str, Any]) -> str | None:
    changed_tokens = [token for token, number in one.items() if two.get(token) != number]
    changed_tokens += [token for token in two if token not in one]
    if not changed_tokens:
        return None
    token = changed_tokens[0]
    return (
        f"{name}: {len(changed_tokens)} tokens have another number, or are in one alone:"
        f" {token!r} is {one.get(token)} here, {two.get(token)} there"
    )


def _compare_merges(name: str, one: Any, two: Any) -> str | None:
    merges = [
        data["model"].get("merges") if isinstance(data, Mapping) and isinstance(data.get("model"), Mapping) else None
        for data in (one, two)
    ]
    first, second = (list(map(_spell_merge, of_model or ())) for of_model in merges)
    return f"{name}: the merges of tokens differ" if first != second else None


def _spell_merge(merge: Any) -> str:
    """Older files spell a merge `a b`, newer ones ["a", "b"]."""
    return merge if isinstance(merge, str) else " ".join(map(str, merge))
