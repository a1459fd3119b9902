import hashlib
import struct

from hypothesis import given
from hypothesis import strategies as st

from forebay.core.messages import pack_tokens
from forebay.pages.hashing import hash_chain, page_hash, root_hash

FIELDS = st.tuples(
    st.binary(max_size=6),
    st.text(max_size=4),
    st.integers(1, 300),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.text(max_size=4),
)


def test_the_chain_is_the_documented_formula() -> None:
    root = root_hash(b"f", "bfloat16", 2)
    first = hashlib.sha256(root + struct.pack("<II", 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<II", 9, 10)).digest()
    assert hash_chain(root, pack_tokens([7, 8, 9, 10, 11]), 2) == [first, second]
    assert page_hash(first, pack_tokens([9, 10])) == second


@given(FIELDS, FIELDS)
def test_different_namespaces_never_share_a_root(one: tuple, other: tuple) -> None:  # type: ignore[type-arg]
    """Salt, dtype, page size, tenant are framed, so no two namespaces encode alike."""
    assert (root_hash(*one) == root_hash(*other)) == (one == other)


def test_moving_a_byte_between_fields_changes_the_root() -> None:
    assert root_hash(b"ab", "c", 1) != root_hash(b"a", "bc", 1)
