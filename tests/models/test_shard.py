"""Cutting a model into stages and head ranges."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.models.config import load_config
from forebay.models.errors import ModelError
from forebay.models.shard import Shard, shards, split_layers, whole


@given(st.integers(1, 200), st.data())
def test_stages_cover_all_layers_once_and_evenly(layers, data):
    pp = data.draw(st.integers(1, layers))
    parts = split_layers(layers, pp)
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert len(parts) == pp
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("pp", [0, -1, 5])
def test_stage_counts_that_do_not_fit(pp):
    with pytest.raises(ModelError, match="allowed: 1 to 4"):
        split_layers(4, pp)


def test_first_and_last(make_model):
    config = load_config(make_model())
    first, middle, last = (stage[0] for stage in shards(config, 3, 1))
    assert (first.is_first, first.is_last) == (True, False)
    assert (middle.is_first, middle.is_last) == (False, False)
    assert (last.is_first, last.is_last) == (False, True)
    assert whole(config).is_first and whole(config).is_last


def test_heads_of_each_rank(make_model):
    config = load_config(make_model())
    ranks = [Shard(0, 4, 4, rank, 2) for rank in range(2)]
    assert [rank.heads(config) for rank in ranks] == [range(3), range(3, 6)]
    assert [rank.kv_heads(config) for rank in ranks] == [range(1), range(1, 2)]


@pytest.mark.parametrize("tp", [3, 4, 0])
def test_tp_that_does_not_divide_the_heads(make_model, tp):
    config = load_config(make_model())
    with pytest.raises(ModelError, match="allowed: 1, 2; choose --tp from these"):
        shards(config, 1, tp)


def test_demo_shape_allows_tp_3(make_model):
    config = dataclasses.replace(
        load_config(make_model()), heads=9, kv_heads=3, intermediate_size=1536
    )
    assert len(shards(config, 1, 3)[0]) == 3
