"""A layer's pages are touched by nobody before that layer is loaded, and a load that fails is an error where it is waited for."""

import threading

import pytest

from forebay.runtime.copy_engine import LoadGate
from tests.pace import paced

DEADLINE_S = paced(30.0)


def test_a_reader_of_a_late_layer_waits_for_that_layer() -> None:
    gate = LoadGate(layers=3)
    order: list[str] = []

    def read() -> None:
        for layer in range(3):
            gate.wait(layer)
            order.append(f"read {layer}")
            went_on[layer].set()

    went_on = [threading.Event() for _ in range(3)]
    reader = threading.Thread(target=read)
    reader.start()
    for layer in range(3):
        assert not gate.is_open(layer)
        order.append(f"loaded {layer}")
        gate.open_next()
        assert went_on[layer].wait(DEADLINE_S)
    reader.join(DEADLINE_S)
    assert order == ["loaded 0", "read 0", "loaded 1", "read 1", "loaded 2", "read 2"]


def test_a_failed_load_is_raised_to_its_reader_and_never_counts_as_done() -> None:
    gate = LoadGate(layers=2)
    gate.open_next()
    gate.fail(OSError("a bad page"))
    gate.wait(0)
    assert not gate.is_open(1)
    with pytest.raises(RuntimeError, match="loading layer 1 failed: a bad page"):
        gate.wait(1)
