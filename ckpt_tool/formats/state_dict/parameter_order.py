"""Derives the order in which a trainer's model yields its parameters, which safetensors files lose by sorting names.

An optimizer numbers parameters as `model.parameters()` yields them: a module's own before those of its submodules, and
these in the order in which its class creates them. That order is known from two things:

1. The class: `config.json` names it, and the classes of `MODEL_TYPES` create their modules in the order of `_SIBLINGS`.
2. The tree of modules and the optimizer's shapes. Modules of a list follow its numbers, those of one list are alike,
   `weight` comes before `bias`; which of other siblings comes first is tried. One order that fits is an answer, two
   are none: in most decoders two norms of a layer are alike.

    model: embed (33, 10), layers.0.w1 (23, 10), layers.1.w1 (23, 10), head (33, 8)
    moments: 0 (33, 10), 1 (23, 10), 2 (23, 10), 3 (33, 8)        embed, layers, head: no other order fits

Sources: torch 2.13 `nn/modules/module.py` (`_named_members`, `named_modules`), `nn/modules/{linear,normalization,
sparse}.py` (weight before bias); transformers 5.23, the classes' own `named_parameters()`, against which
`tests/families/test_parameter_order.py` holds the table. Cost: some us a tensor; a search that takes more than `STEPS`
counts as "two".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tool.core.bounds import numeral

STEPS = 200_000
MODEL_TYPES = frozenset(
    """
    cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon
    falcon_h1 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_oss granite
    granitemoe granitemoeshared kimi_k2 lfm2 lfm2_moe llama mimo mimo_v2_flash minimax_m2 ministral3 mistral
    mistral4 mixtral nemotron olmo2 olmo3 olmoe phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe seed_oss smollm3
    starcoder2
    """.split()
)
# Parts of names in the order in which classes create them, among siblings of one module; `!` marks classes that create
# a part early.
_SIBLINGS = """
    c_attn c_fc c_proj dense_h_to_4h dense_4h_to_h dt_bias A_log D conv1d embed_tokens gate_up_proj
    gate_up_proj_bias layers final_layernorm ln_1 model norm1 norm2 attn ln_2 patch_embed pos_embed blocks
    merger deepstack_merger_list qkv proj gate_proj query_key_value dense router self_attention sinks q_proj
    k_proj transformer lm_head up_proj down_proj down_proj_bias v_proj visual language_model weight bias
    word_embeddings wte wpe h ln_f conv in_proj e_score_correction_bias embedding_norm experts! fc1 fc2 gate
    experts in_proj_qkvz in_proj_ba norm linear_fc1 linear_fc2 out_proj in_proj_qkv in_proj_z in_proj_b
    in_proj_a input_linear linear_attn ln_q moe_statics output_linear q_a_proj q_a_layernorm q_b_proj
    kv_a_proj_with_mqa kv_a_layernorm kv_b_proj o_proj q_norm qkv_proj indexer q_layernorm k_layernorm
    self_attn! feed_forward mamba self_attn mlp input_layernorm ln_attn ln_mlp post_attention_layernorm
    post_self_attn_layernorm post_mlp_layernorm pre_feedforward_layernorm post_feedforward_layernorm
    pre_ff_layernorm block_sparse_moe operator_norm ffn_norm shared_expert shared_expert_gate shared_experts
    shared_mlp w1 w3 w2 wq_b wk k_norm weights_proj expert_bias
""".split()
_RANKS = {word: rank for rank, word in enumerate(_SIBLINGS)}
# Classes that make a module before others which it comes after elsewhere: experts before their router, attention before
# what follows it
_EARLY: Mapping[str, frozenset[str]] = {
    "experts": frozenset(
        """
        deepseek_v2 deepseek_v3 deepseek_v32 dots1 exaone_moe glm4_moe glm4_moe_lite glm_moe_dsa kimi_k2
        lfm2_moe mimo_v2_flash mistral4 qwen3_moe qwen3_vl_moe
        """.split()
    ),
    "self_attn": frozenset(("lfm2", "lfm2_moe")),
}

Shape = tuple[int, ...]
_Orders = Mapping[tuple[str, ...], tuple[str, ...]]  # of the siblings in modules that are alike, as far as is settled


def class_order(names: Iterable[str], model_type: object) -> list[str] | None:
    """The names as the class of that model type yields them; None where that is not known of it, or of a name.

    >>> class_order(["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"], "llama")
    ['model.layers.0.mlp.up_proj.weight', 'model.norm.weight', 'lm_head.weight']
    """
    if model_type not in MODEL_TYPES:
        return None
    early = {word: f"{word}!" for word, types in _EARLY.items() if model_type in types}
    keys: dict[str, list[int]] = {}
    for name in names:
        parts = name.split(".")
        keys[name] = [int(part) if numeral(part) else _RANKS.get(early.get(part, part), -1) for part in parts]
    if any(-1 in key for key in keys.values()):
        return None
    return sorted(keys, key=lambda name: keys[name])


def tree_order(shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]) -> list[str] | None:
    """The one order of parameters in which each group's shapes follow each other; None where there is none, or more.

    Args:
        shapes: of the model's tensors.
        groups: the shapes of each group's parameters in the order of their numbers, None for an unknown shape. Tensors
            in no group (buffers, frozen weights) are skipped.
    """
    search = _Search(shapes, groups)
    found: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for taken in search.orders():
        by_group: list[list[str]] = [[] for _ in groups]
        for group, name in taken:
            by_group[group].append(name)
        found.setdefault(tuple(map(tuple, by_group)), [name for _, name in taken])
        if len(found) > 1:
            return None
    return next(iter(found.values()), None) if search.left > 0 else None


class _ModulePlace(NamedTuple):
    """What is left of a module: its name, its leaves and modules that were not visited."""

    prefix: str
    rest: tuple[str, ...]
    below: _ModulePlace | None  # what remains of the modules that contain it


class _TakenLeaf(NamedTuple):
    """A parameter and the group that has it, and those that were taken before."""

    group: int
    name: str
    before: _TakenLeaf | None


class _At(NamedTuple):
    """How far an order has come."""

    place: _ModulePlace | None
    at: tuple[int, ...]  # how many each group has taken
    spare: int  # tensors that may still be passed over
    chosen: _Orders  # the orders of siblings that are settled
    taken: _TakenLeaf | None = None


class _Search:
    """All orders of the tree that the shapes allow."""

    def __init__(self, shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]) -> None:
        self.shapes = shapes
        self.groups = [list(group) for group in groups]
        self.children: dict[str, list[str]] = {}
        inside: set[tuple[str, str]] = set()
        for name in shapes:
            parts = name.split(".")
            for depth, part in enumerate(parts):
                place = (".".join(parts[:depth]), part)
                if place not in inside:
                    inside.add(place)
                    self.children.setdefault(place[0], []).append(part)
        self.spare = len(shapes) - sum(map(len, self.groups))
        self.left = STEPS

    def orders(self) -> Iterator[list[tuple[int, str]]]:
        """(group, parameter) in turn, of every order that fits; the same deal may come several times, with modules that
        hold no parameters in other places."""
        start = _ModulePlace("", tuple(self.children.get("", ())), None)
        waiting = [_At(start, (0,) * len(self.groups), self.spare, {})] if self.spare >= 0 else []
        while waiting and self.left > 0:
            self.left -= 1
            here = waiting.pop()
            place = here.place
            while place is not None and not place.rest:
                place = place.below
            if place is None:
                yield _listed(here.taken)
            else:
                waiting += self._after(here, place)

    def _after(self, here: _At, place: _ModulePlace) -> Iterator[_At]:
        """Each way on from a place."""
        for child, order in self._next(place, here.chosen):
            name = f"{place.prefix}.{child}" if place.prefix else child
            rest = place._replace(rest=tuple(each for each in place.rest if each != child))
            if name not in self.shapes:
                yield here._replace(place=_ModulePlace(name, tuple(self.children[name]), rest), chosen=order)
                continue
            if here.spare:
                yield here._replace(place=rest, spare=here.spare - 1, chosen=order)
            for g, group in enumerate(self.groups):
                taken = here.at[g]
                if taken < len(group) and group[taken] in (None, self.shapes[name]):
                    at = (*here.at[:g], taken + 1, *here.at[g + 1 :])
                    yield _At(rest, at, here.spare, order, _TakenLeaf(g, name, here.taken))

    def _next(self, place: _ModulePlace, chosen: _Orders) -> Iterator[tuple[str, _Orders]]:
        """The siblings that may come next, each with the orders that are settled then."""
        if all(map(numeral, place.rest)):
            yield min(place.rest, key=int), chosen
            return
        whole = tuple(sorted(self.children[place.prefix]))
        kind = (*("#" if numeral(part) else part for part in place.prefix.split(".")), "/", *whole)
        known = chosen.get(kind, ())
        done = len(whole) - len(place.rest)
        if done < len(known):
            yield known[done], chosen
            return
        leaves = [child for child in place.rest if self._is_leaf(place, child)]
        if {"weight", "bias"} <= set(leaves):
            leaves.remove("bias")
        for child in leaves or place.rest:  # a module's own come first
            yield child, {**chosen, kind: (*known, child)}

    def _is_leaf(self, place: _ModulePlace, child: str) -> bool:
        return (f"{place.prefix}.{child}" if place.prefix else child) in self.shapes


def _listed(taken: _TakenLeaf | None) -> list[tuple[int, str]]:
    found = []
    while taken is not None:
        found.append((taken.group, taken.name))
        taken = taken.before
    return found[::-1]
