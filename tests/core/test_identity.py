"""Every part of a model's identity changes its pages' keys."""

from dataclasses import replace

import pytest

from forebay.core.identity import ModelIdentity, kv_namespace
from forebay.pages.hashing import root_hash

MODEL = ModelIdentity(b"config", b"tokenizer", (b"w" * 32, b"v" * 32))


@pytest.mark.parametrize(
    "other",
    [
        replace(MODEL, config=b"other"),
        replace(MODEL, tokenizer=b"other"),
        replace(MODEL, weights=(b"w" * 32, b"x" * 32)),
        replace(MODEL, weights=(b"v" * 32, b"w" * 32)),
        replace(MODEL, weights=(b"w" * 32,)),
        replace(MODEL, kv_layout=MODEL.kv_layout + 1),
        replace(MODEL, version=MODEL.version - 1),
        replace(MODEL, config=b"configtoken", tokenizer=b"izer"),
    ],
)
def test_every_part_counts(other: ModelIdentity) -> None:
    assert other.fingerprint() != MODEL.fingerprint()


def test_numbers_that_were_computed_otherwise_are_others() -> None:
    names = {
        kv_namespace(kept, computed)
        for kept in ("float32", "bfloat16", "int8")
        for computed in ("float32", "bfloat16")
    }
    assert len({root_hash(MODEL.fingerprint(), name, 64) for name in names}) == 6


def test_keys_are_stable() -> None:
    """What is stored must be found again: change versions when this has to change."""
    assert (
        MODEL.fingerprint().hex()
        == "185b8b1f69186944ea910a65c39ae3a2e95086e3b476f0d4c4d23be17dc9d800"
    )
