"""`ckpt kernels check`: every kernel passes, and every trial can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt_tool.device.library import Device, Library
from ckpt_tool.device.trial import check as trial
from ckpt_tool.errors import StorageError


@pytest.mark.parametrize("name", trial.TRIALS)
def test_the_kernels_do_what_the_cpu_does(device: Device, name: str) -> None:
    (outcome,) = trial.trials(device, cases=40, seed=7, only=[name])
    assert outcome.findings == () and outcome.cases == 40 and outcome.nbytes > 100_000


@pytest.mark.parametrize("name", trial.TRIALS)
def test_one_wrong_bit_of_the_output_is_seen(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Device.download

    def flipped(self: Device, address: int, nbytes: int, stream: int = 0) -> Any:
        out = real(self, address, nbytes, stream)
        if nbytes:
            out[0] ^= 1
        return out

    monkeypatch.setattr(Device, "download", flipped)
    (outcome,) = trial.trials(device, cases=40, seed=7, only=[name])
    assert len(outcome.findings) == trial.MOST_FINDINGS and "of seed 7" in outcome.findings[0]


@pytest.mark.parametrize("name", trial.TRIALS)
def test_a_kernel_that_does_nothing_is_seen(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Library.call
    monkeypatch.setattr(Library, "call", lambda self, call, *given: None if call == name else real(self, call, *given))
    (outcome,) = trial.trials(device, cases=40, seed=7, only=[name])
    assert len(outcome.findings) == trial.MOST_FINDINGS


def test_a_call_that_fails_is_a_finding(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Library, call: str, *given: object) -> None:
        raise StorageError("cudaErrorIllegalAddress", code="E1551")

    monkeypatch.setattr(Library, "call", lost)
    (outcome,) = trial.trials(device, cases=40, seed=7, only=["box_copy"])
    assert outcome.cases == 1 and outcome.findings == ("case 0 of seed 7: cudaErrorIllegalAddress",)


def test_a_seed_is_the_same_work(device: Device) -> None:
    first, second, other = (trial.trials(device, cases=20, seed=seed, only=["box_copy"])[0] for seed in (1, 1, 2))
    assert first.nbytes == second.nbytes != other.nbytes


def test_every_kernel_that_is_called_has_a_trial() -> None:
    from ckpt_tool.device.library import FUNCTIONS

    listed = {name.removeprefix("ck_") for name, types in FUNCTIONS.items() if len(types) >= 6}
    assert listed <= set(trial.TRIALS), "a new kernel: give it a trial"


def test_a_difference_says_where() -> None:
    a = np.zeros(9, np.uint8)
    b = a.copy()
    b[[4, 7]] = 3, 1
    assert trial.difference(a, a) == ""
    assert trial.difference(b, a) == "2 of 9 bytes are wrong, the first at 4: 0x03, want 0x00"
