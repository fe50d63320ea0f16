"""Checks whether a checkpoint has all tensors of the family's model, and no unknown ones in its layers.

    layers 0, 1 and 3 have an o_proj, layer 2 has none          layer 2 lacks it
    the config says 4 layers, tensors name 0, 1 and 3           layer 2 is missing
    256 experts, of layer 5 one lacks its up_proj               that expert lacks it
    a tree of MaxText without decoder.layers.mlp.wo.kernel      its rules say what a model has (`Variant.exact`)
    model.layers.0.self_attn.q_projj.weight                     no rule, and it is in a layer

A table alone is not enough: biases and norms are optional, a model's first layers may be dense. So each module of a
layer is compared with the same module of the other layers: if it has some of the tensors that as many others have, the
rest is missing. Unknown names outside the layers (a vision tower, a value head) are left to the caller. Cost: 3 us a
tensor. What it does not do: check shapes, or find what is missing in the only layer of its kind.
"""

from __future__ import annotations

import re
from collections import ChainMap, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from ckpt_tool.errors import UsageError
from ckpt_tool.families.base import Config, Family
from ckpt_tool.families.config.translation import megatron_args
from ckpt_tool.families.config.words import LAYERS
from ckpt_tool.families.sizes import compute_sizes
from ckpt_tool.families.table import Table, form_of, instances

# The last norms of MaxText, OLMo-core, Gemma and torchtune's Gemma, which are on another level than the layers; no
# tower has such names.
_NORMS_ELSEWHERE = (".decoder_norm.scale", ".lm_head.norm.weight", "final_norm.scale", ".norm.rms_norm.scale")
_LAST_NORMS = (
    ".norm.weight",
    ".ln_f.weight",
    ".norm_f.weight",
    ".final_layernorm.weight",
    ".final_norm.weight",
    ".embedding_norm.weight",
    ".output_norm.weight",
    ".norm.scale",
    *_NORMS_ELSEWHERE,
)
_EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    ".embeddings.weight",
    "tok_embeddings.weight",
    "wte.weight",
    "token_embd.weight",
    "token_embedder.embedding",
    "embedder.input_embedding",
)
_HEADS = ("lm_head.weight", "output_layer.weight", ".output.weight", ".logits_dense.kernel", "lm_head.w_out.weight")
_EXPERTS = ("expert", "_exps.", ".switch_mlp.", ".moe_block.", ".MoeBlock_0.")  # in names of what holds them
_BLOCKS = (".layers.", ".blocks.")  # of a tower: alike, as a decoder's
_NUMBERED = re.compile(r"%d[./]")  # a layer's number in a form
_SPELLED = 512  # numbers of a row that are named one by one
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def strange(family: Family, dialect: str, names: Iterable[str]) -> list[str]:
    """The names that are in a layer of the model and that no rule knows, but for the scales and codes of quantised
    weights."""
    table = family.table(dialect)
    fronts = _fronts_of_layers(table)
    return [name for name in table.names_without_rule(names) if form_of(name)[0].startswith(fronts)]


def outside(family: Family, dialect: str, names: Iterable[str]) -> list[str]:
    """The names that no rule knows and that are in no layer and in no part that the family has: a head of one's own,
    a value head, a projection.

    >>> from ckpt_tool.families.registry import by_name
    >>> outside(by_name("llama"), "hf", ["my_head.weight", "model.norm.weight", "model.rotary_emb.inv_freq"])
    ['my_head.weight']
    """
    table = family.table(dialect)
    elsewhere = (*_fronts_of_layers(table), *family.apart)
    return [name for name in table.names_without_rule(names) if not form_of(name)[0].startswith(elsewhere)]


def is_head(name: str) -> bool:
    """Is it the output layer's weight, under any system's name?

    >>> is_head("lm_head.weight"), is_head("output.weight"), is_head("model.norm.weight")
    (True, True, False)
    """
    return f".{name}".endswith(_HEADS)


def _fronts_of_layers(table: Table) -> tuple[str, ...]:
    """What the forms of names in layers begin with, the number included."""
    numbers = ((form, _NUMBERED.search(form)) for form in table.left)
    return tuple(dict.fromkeys(form[: number.end()] for form, number in numbers if number is not None))


def missing(family: Family, dialect: str, names: Iterable[str], config: Config | None) -> list[str]:
    """The tensors that a complete model would have in addition to `names`, as far as names and config show; [] for a
    complete one."""
    exactly = list_expected_tensors(family, dialect, config)
    table = family.table(dialect)
    config = family.facts(config or {})

    if exactly is not None:
        have = set(names)
        head = _find_missing_ends(family, table, have, config)
        return list(dict.fromkeys((*(name for name in exactly if name not in have), *head)))

    sized = {**config, **compute_sizes(family.axes, config)[0]}
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    experts: dict[tuple[str, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    named, unknown = instances(table.left, names)
    for group in named:
        front, rest = _split_at_layer(group.form)
        if not rest:
            continue
        several = "%d" in rest.replace("experts.%d", "")  # modules of one layer, as many in each
        for numbers in group.values:
            layers[front][numbers[0]].add(
                f"{front}%d.{_fill_module_numbers(rest, numbers[1:])}" if several else group.form
            )
            if len(numbers) == 2 and not several:
                experts[group.form, numbers[0]][0].add(numbers[1])

    for name in unknown if table.towers else ():
        form, row = form_of(name)
        front, rest = _split_at_layer(form)
        if row and f".{front}".endswith(_BLOCKS) and table.in_tower(name) is not None:
            layers[front][row[0]].add(f"{front}%d.{_fill_module_numbers(rest, row[1:])}")

    lost = list(_find_missing_ends(family, table, names, config))
    whole = _count_layers(family, config)
    decoders = _find_decoders(table)
    if whole and decoders and not decoders & layers.keys():
        lost.append(f"{min(decoders)}*")

    for front, found_layers in layers.items():
        decoder = front in decoders
        count = _count_numbers(table, front, whole, sized) if decoder and whole else whole
        if count and decoder:
            lost += [f"{front}{numbers}.*" for numbers in _find_gaps(found_layers, count)]
        lost += _find_thinner_layers(found_layers, count, table, sized)
        lost += (
            _find_layers_without_experts(front, found_layers, config, count or 0) if decoder and count == whole else []
        )

    return lost + list(_find_lone_experts(experts))


def list_expected_tensors(family: Family, dialect: str, config: Config | None) -> list[str] | None:
    """The tensors of a whole model but its head, in a dialect whose rules say all of them; None in another, or where the
    config leaves a size open."""
    if not (config and family.exact(dialect)):
        return None
    facts = family.facts(config)
    sizes = compute_sizes(family.axes, facts)[0]
    expected = dict[str, None]()
    for rule in family.table(dialect).rules:
        try:
            shapes = rule.left_shapes(sizes, facts)
        except UsageError:
            return None
        expected |= dict.fromkeys(name for name, n in shapes.items() if 0 not in n and not is_head(name))
    return list(expected)


def _split_at_layer(form: str) -> tuple[str, str]:
    """The parts of a form before and after the layer's number; ("", "") if it has none.

    >>> _split_at_layer("model.layers.%d.mlp.w"), _split_at_layer("transformer/layer_%d/mlp.w"), _split_at_layer("model.norm.weight")
    (('model.layers.', 'mlp.w'), ('transformer/layer_', 'mlp.w'), ('', ''))
    """
    number = _NUMBERED.search(form)
    return (form[: number.start()], form[number.end() :]) if number else ("", "")


def _fill_module_numbers(form: str, numbers: Iterable[int]) -> str:
    """The form with all numbers but an expert's.

    >>> _fill_module_numbers("layers.%d.mlp.experts.%d.w1", (1, 7))
    'layers.1.mlp.experts.%d.w1'
    """
    head, *others = form.split("%d")
    filled = head
    for text, number in zip(others, numbers, strict=True):
        filled += ("%d" if filled.endswith("experts.") else str(number)) + text
    return filled


def _count_layers(family: Family, config: Config) -> int | None:
    """By the class's own word first: LongCat-Flash counts its two modules of attention a layer in another."""
    class_keys = [model_class.keys.get(_LAYERS[0], _LAYERS[0]) for model_class in family.classes]
    return next((int(config[key]) for key in (*class_keys, *_LAYERS) if type(config.get(key)) is int), None)


def _count_numbers(table: Table, front: str, count: int, config: Config) -> int:
    """How many numbers a dialect has for so many layers: two for each where a layer is two there."""
    indices = {
        spot.shifted[0]
        for form, spots in table.left.items()
        if form.startswith(f"{front}%d.")
        for spot in spots
        if spot.shifted
    }
    last_layer = {**config, "i": count - 1}
    return max([count, *(1 + int(index.value(last_layer)) for index in indices if "i" in index.names)])


def _find_decoders(table: Table) -> set[str]:
    """What precedes the number of a decoder's layer, `{i}` in the rules; layers of MTP and of towers are left out."""
    fronts: set[str] = set()
    for form, spots in table.left.items():
        front, inside = _split_at_layer(form)
        if inside and any(spot.axes[:1] == ("i",) for spot in spots):
            fronts.add(front)
    ends = (".layers.", ".layers_", ".layer_", "/layer_", ".h.", ".blocks.", ".blk.")
    return {front for front in fronts if f".{front}".endswith(ends) and "mtp" not in front.split(".")}


def _find_thinner_layers(
    layers: Mapping[int, set[str]], count: int | None, table: Table, config: Config
) -> Iterator[str]:
    """What modules of a layer lack that are like the same modules of others but for it, and that a layer of that number
    has by the table's conditions."""
    modules: dict[str, dict[frozenset[str], list[int]]] = defaultdict(lambda: defaultdict(list))
    split = {form: re.split("[./]", _split_at_layer(form)[1]) for forms in layers.values() for form in forms}
    # `mamba.A_log` belongs to the module that has `mamba.norm`.
    deep = {words[0] for words in split.values() if len(words) > 2}

    for number, forms in layers.items():
        parts: dict[str, set[str]] = {"": set()}  # "": what is in the layer itself, its norms
        for form in forms:
            first_word = split[form][0]
            module = first_word if first_word in deep else _name_module(first_word)
            parts.setdefault(module, set()).add(form)
        for module, own in parts.items():
            modules[module][frozenset(own)].append(number)

    for kinds in modules.values():
        for kind, numbers in kinds.items():
            fuller = sorted(
                (sorted(other - kind), len(rows))
                for other, rows in kinds.items()
                if kind < other and (count is None or min(rows) < count)
            )
            left = set(numbers)
            for lost, as_many in sorted(fuller, key=lambda row: len(row[0])):
                lacking: dict[int, list[str]] = {}
                for number in sorted(left):
                    gone = [form for form in lost if _may_have(table, form, number, config)]
                    if gone:
                        lacking[number] = gone
                if 0 < len(lacking) <= as_many:
                    for number, gone in lacking.items():
                        yield from (form.replace("%d", str(number), 1).replace("%d", "*") for form in gone)
                    left -= lacking.keys()


def _name_module(word: str) -> str:
    """The module of a tensor that is directly in the layer, if its name shows it, as llama.cpp's do; else "".

    >>> _name_module("attn_q"), _name_module("ffn_gate_exps"), _name_module("exp_probs_b"), _name_module("ffn_norm")
    ('attn', 'ffn', 'ffn', '')
    """
    if word.endswith("norm") or not word.startswith(("attn_", "ffn_", "exp_")):
        return ""
    return "attn" if word.startswith("attn_") else "ffn"


def _may_have(table: Table, form: str, number: int, config: Config) -> bool:
    """May a layer with that number have a tensor of the form? False if all rules for it apply to other layers, by their
    numbers or conditions."""
    spots = table.left.get(form)
    for spot in spots or ():
        condition = table.rules[spot.rule].condition
        if condition is None and not spot.shifted:
            return True
        try:
            row = spot.reader(config)((number, *(0 for _ in range(form.count("%d") - 1))))
            index_of = None if row is None else ChainMap(dict(zip(spot.axes, row, strict=True)), dict(config))
            if index_of is not None and (condition is None or condition.value(index_of)):
                return True
        except UsageError:  # the condition reads a key that the config lacks, so it can't be decided
            continue
    return spots is None  # a tower's names have no rules


def _find_layers_without_experts(
    front: str, layers: Mapping[int, set[str]], config: Config, count: int
) -> Iterator[str]:
    """The layers that have no experts although they are sparse by the config."""
    arguments = megatron_args(config).config if config else {}
    pattern = arguments.get("moe_layer_freq")
    sparse = (
        pattern if isinstance(pattern, list) else [arguments.get("num_experts") and pattern == 1] * min(count, LAYERS)
    )
    for number in sorted(layers):
        if (
            number < len(sparse)
            and sparse[number]
            and not any(word in form for word in _EXPERTS for form in layers[number])
        ):
            yield f"{front}{number}.*experts*"


def _find_lone_experts(experts: Mapping[tuple[str, int], Mapping[int, set[int]]]) -> Iterator[str]:
    """Experts that have some of their tensors, or whose number is left out."""
    by_layer: dict[tuple[str, int], dict[str, set[int]]] = defaultdict(dict)
    for (form, layer), by_module in experts.items():
        front = form[: form.rindex("%d") + 2]
        by_layer[front, layer][form] = by_module[0]
    for (_, layer), forms in by_layer.items():
        count = max(max(numbers) for numbers in forms.values()) + 1
        for form, numbers in forms.items():
            yield from (form.replace("%d", str(layer), 1).replace("%d", gone, 1) for gone in _find_gaps(numbers, count))


def _find_gaps(have: Collection[int], count: int) -> Iterator[str]:
    """The numbers below `count` that are not there: one by one, long rows as `FIRST-LAST`, so that no number of a name
    or a config is ever counted out.

    >>> list(_gaps({0, 2}, 5)), list(_gaps({0}, 10**9))
    (['1', '3', '4'], ['1-999999999'])
    """
    start = 0
    for stop in sorted({number for number in have if number < count} | {count}):
        yield from map(str, range(start, stop)) if stop - start <= _SPELLED else (f"{start}-{stop - 1}",)
        start = stop + 1


def _find_missing_ends(family: Family, table: Table, names: Iterable[str], config: Config) -> Iterator[str]:
    """The embedding, the last norm and an output layer that is not tied, where there is any layer at all."""
    have = set(names)
    beside = {_find_parent(front) for front in _find_decoders(table)}
    kinds = config.get("architectures")
    causal = isinstance(kinds, list) and any(str(kind).endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    tied = config.get("tie_word_embeddings")
    for ends, is_required in (
        (_EMBEDDINGS, True),
        (_LAST_NORMS, True),
        (_HEADS, causal and tied is False),
    ):
        forms = [form for form in table.left if f".{form}".endswith(ends) and "%d" not in form]
        if ends == _LAST_NORMS:  # of the decoder: a tower has norms too
            forms = [form for form in forms if _find_parent(form) in beside or f".{form}".endswith(_NORMS_ELSEWHERE)]
        if is_required and forms and not have & set(forms):
            yield forms[0]


def _find_parent(name: str) -> str:
    """The module that holds what `name` is a part of.

    >>> _find_parent("model.norm.weight"), _find_parent("model.layers.")
    ('model', 'model')
    """
    return ".".join(name.split(".")[:-2])
