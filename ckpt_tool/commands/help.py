"""`ckpt help [TOPIC]`: a page of the guide as a document, or the list of them."""

from __future__ import annotations

import os
from typing import Any

from ckpt_tool import guide
from ckpt_tool.errors import UsageError, near_misses

# topic that people ask for -> the page that has it
_PAGES_MEANT = {
    "lora": "merging",
    "peft": "merging",
    "adapter": "merging",
    "adapters": "merging",
    "average": "merging",
    "layers": "merging",
    "s3": "stores",
    "slurm": "machines",
    "quantizing": "quantising",
    "quantize": "quantising",
    "dequantize": "quantising",
    "latest": "runs",
    "prune": "runs",
    "megatron": "formats",
    "deepspeed": "formats",
    "optimizer": "training-state",
    "convert": "recipes",
    "reshard": "recipes",
    "inspect": "recipes",
    "merge": "merging",
    "diff": "verify",
    "delta": "deltas",
    "patch": "deltas",
    "apply": "machines",
    "status": "machines",
}


def help_on(topic: str | None, language: str | None = None) -> dict[str, Any]:
    """The page `topic`: `text` is its Markdown; without a topic `topics` lists all pages.

    language: `en` or `zh`; None: Chinese where the locale is, else English. Raises UsageError E1660 for no such page.
    """
    language = language or ("zh" if _locale().startswith("zh") else "en")
    listed = [{"topic": each.name, "title": each.title} for each in guide.topics(language)]
    document: dict[str, Any] = {"schema_version": 1, "language": language}
    if topic is None:
        return {**document, "topics": listed}
    try:
        text = guide.text_of(topic, language)
    except KeyError as e:
        names = [each["topic"] for each in listed]
        meant = _PAGES_MEANT.get(topic.lower())
        page = f"ckpt help {meant} has it" if meant else near_misses(topic, names)
        raise UsageError(
            f"the guide has no page {topic!r}",
            code="E1660",
            place="ckpt help",
            hint=f"{page or 'the pages are ' + ', '.join(names)}; ckpt VERB --help has the options",
        ) from e
    return {**document, "topic": topic, "text": text}


def _locale() -> str:
    """What the environment says of the language of messages, by POSIX's order."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANG"):
        if os.environ.get(name):
            return os.environ[name]
    return ""
