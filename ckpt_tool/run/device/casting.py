"""Casts of windows on the device."""

from __future__ import annotations

from ckpt_tool.core.dtype import DType
from ckpt_tool.errors import InternalError
from ckpt_tool.run.device.loading import Window
from ckpt_tool.run.device.station import Station


def can_cast_there(source: DType, target: DType) -> bool:
    """Do the kernels know this cast?"""
    return False


def cast_there(station: Station, window: Window) -> int:
    """Cast a window from the first line to the second. Returns how many values were beyond the target's range."""
    raise InternalError(f"{window.move.key}: no kernel casts {window.move.dtype.name} to {window.move.dtype_out.name}")
