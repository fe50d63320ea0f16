"""What each system calls the sizes and kinds of a model. Here: how a config shows whose it is, without loading any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSIONS = ("paddleformers_version", "paddlenlp_version")


def is_paddle(config: Mapping[str, Any]) -> bool:
    """Does the config say that Paddle wrote it?"""
    return any(version in config for version in VERSIONS)
