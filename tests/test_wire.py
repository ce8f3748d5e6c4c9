"""A handful of ids as bytes: the same as by way of an array."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.wire import pack, pack_few, unpack, unpack_few

few = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)


@given(few)
def test_few_ids_are_packed_as_by_way_of_an_array(ids):
    packed = pack_few(ids)
    assert packed == pack(ids)
    assert unpack_few(packed) == unpack(packed).tolist() == ids
    assert all(type(token) is int for token in unpack_few(packed))
