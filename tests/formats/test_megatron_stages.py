"""Stages against tables by hand, and against themselves through arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import UsageError
from ckpt_tool.systems.megatron.stages import args_of, from_args, from_counts, from_layout, from_wish, parse_layout


def layers(stages):
    return {(c.pp, c.vpp): list(range(c.first, c.first + c.layers)) for c in stages.chunks}


def test_interleaved_chunks_take_turns():
    assert layers(from_args({}, 2, 2, 8)) == {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6, 7]}


def test_uneven_first_and_last():
    args = {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2}
    assert layers(from_args(args, 4, 1, 9)) == {(0, 0): [0], (1, 0): [1, 2, 3], (2, 0): [4, 5, 6], (3, 0): [7, 8]}
    assert from_args(args, 4, 1, 10) is None


def test_embedding_and_loss_count_as_layers():
    args = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert from_args(args, 4, 1, 10).counts == (2, 3, 3, 2)


def test_layout_string_with_mtp_ahead_of_the_loss():
    stages = from_layout("Et*2|(t|)*2mL", 2)
    assert stages.counts == (2, 1, 1, 0) and stages.vpp == 2
    assert [c.mtp for c in stages.chunks] == [0, 0, 0, 1] and stages.chunks[-1].head and stages.chunks[0].embedding


@pytest.mark.parametrize("text", ["Exyz|L", "t*99999999999", "(t)*9999999*9999999"])
def test_a_text_that_is_no_layout(text):
    assert parse_layout(text) is None


def test_a_wish_that_does_not_sum():
    with pytest.raises(UsageError, match="does not distribute 4 layers") as e:
        from_wish((2, 1), 2, 1, 4)
    assert e.value.code == "E0272" and "2 numbers" in e.value.hint


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.integers(1, 3))
def test_arguments_make_the_same_split_again(counts, vpp):
    pp = len(counts)
    counts = [n for n in counts for _ in range(1)] * vpp
    stages = from_counts(counts, pp, vpp)
    again = from_args(args_of(stages), pp, vpp, sum(counts))
    assert again is not None and again.counts == stages.counts
