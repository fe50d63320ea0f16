"""Each row of the READMEs' table "I have, I want" leads to a heading of the guide whose command it shows, and every
link to a heading leads to one that is there."""

from __future__ import annotations

import re

import pytest
from recipe_pages import PAGES, commands_of, read_recipes, slug_of
from sources import ROOT

from ckpt_tool import guide

READMES = {"en": "README.md", "zh": "README_zh.md"}
ROW = re.compile(r"^\| [^|]+ \| \[[^|]+\]\(ckpt_tool/guide/(\w+)/(\w+)\.md#([^)]+)\) \| `([^`]+)` \|$", re.M)
LINK = re.compile(r"\(ckpt_tool/guide/(\w+)/([\w-]+)\.md#([^)]+)\)")
SYSTEMS = ("FSDP2", "Megatron", "torch_dist", "DeepSpeed", "Paddle", "Hugging Face", "GGUF", "Orbax", "MaxText", "Meta")
SYSTEMS += ("PEFT", "Lightning", "accelerate", "Trainer", "NeMo")


@pytest.mark.parametrize("language", READMES)
def test_each_row_shows_the_command_of_its_heading(language):
    text = (ROOT / READMES[language]).read_text(encoding="utf-8")
    answers = {slug_of(recipe.heading): recipe for recipe in read_recipes("recipes", language)}
    rows = ROW.findall(text)
    assert len(rows) >= 30
    for own, page, anchor, command in rows:
        assert (own, page) == (language, "recipes")
        assert command == commands_of(answers[anchor].command)[0]


@pytest.mark.parametrize("language", READMES)
def test_each_link_to_a_heading_leads_to_one(language):
    text = (ROOT / READMES[language]).read_text(encoding="utf-8")
    for own, page, anchor in LINK.findall(text):
        headings = re.findall(r"^#+ (.+)$", guide.text_of(page, own), re.M)
        assert anchor in {slug_of(heading) for heading in headings}


@pytest.mark.parametrize("language", READMES)
def test_each_system_has_a_row(language):
    text = (ROOT / READMES[language]).read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if ROW.match(line))
    assert not [name for name in SYSTEMS if name not in table]


def test_both_readmes_have_the_same_rows():
    """In the same order: the n-th recipe of one language is that of the other."""
    orders = []
    for language, name in READMES.items():
        slugs = [slug_of(recipe.heading) for recipe in read_recipes("recipes", language)]
        rows = ROW.findall((ROOT / name).read_text(encoding="utf-8"))
        orders.append([(slugs.index(anchor), command) for _, _, anchor, command in rows])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("language", READMES)
@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_a_page_are_unique(page, language):
    headings = re.findall(r"^#+ (.+)$", guide.text_of(page, language), re.M)
    assert len(headings) == len(set(map(slug_of, headings)))
