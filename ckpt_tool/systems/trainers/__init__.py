"""Trainers with models of their own (torchtune, OLMo-core): their names and recipe states."""

from __future__ import annotations

from ckpt_tool.formats.entry import Dialect, System

SYSTEM = System(
    dialects=(
        Dialect("torchtune", order=60),
        Dialect("olmo-core", order=70),
        Dialect("torchtune-0.6", order=120, variant_of="torchtune"),
    ),
    run_state="torchtune_recipe:with_recipe",
    newest_step="torchtune_recipe:newest_with_recipe",
)
