"""No two different contents have one key, and nothing that matters is left out of it."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loraplex.engine.kv.keys import BASE, PUBLIC, BlockKeyScope

FIELDS: dict[str, Any] = {
    "kv_format": "torch.float32",
    "model_revision": "revision-1",
    "quantization": "none",
    "numerics": "kernels-1",
    "parent": b"p" * 32,
    "token_ids": (1, 2, 3, 4),
    "namespace": "tenant-1",
    "adapter": b"digest-1",
}


def key_of(**changed: Any) -> bytes:
    fields = FIELDS | changed
    constants = ("kv_format", "model_revision", "quantization", "numerics")
    scope = BlockKeyScope(*(fields.pop(name) for name in constants))
    return scope.key(**fields)


def test_the_same_content_has_the_same_key() -> None:
    assert key_of() == key_of(token_ids=list(FIELDS["token_ids"]))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("kv_format", "torch.bfloat16"),
        ("model_revision", "revision-2"),
        ("quantization", "int8"),
        ("numerics", "kernels-2"),
        ("parent", None),
        ("parent", b"q" * 32),
        ("token_ids", (1, 2, 3, 5)),
        ("token_ids", (1, 2, 4, 3)),
        ("token_ids", (1, 2, 3)),
        ("namespace", "tenant-2"),
        ("namespace", "public"),
        ("adapter", b"digest-2"),
        ("adapter", BASE),
    ],
)
def test_each_field_matters(field: str, other: object) -> None:
    assert key_of(**{field: other}) != key_of()


@pytest.mark.parametrize("namespace", ["", "public", "None", "<operator>"])
def test_no_namespace_is_the_public_one(namespace: str) -> None:
    assert key_of(namespace=namespace) != key_of(namespace=PUBLIC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"namespace": "org_1", "adapter": b"2345"},
            {"namespace": "org_12345", "adapter": b""},
        ),
        (
            {"namespace": "a", "adapter": b"namespaceb"},
            {"namespace": "anamespace", "adapter": b"b"},
        ),
        (
            {"kv_format": "f", "model_revision": "16r"},
            {"kv_format": "f16", "model_revision": "r"},
        ),
        (
            {"parent": b"\x01\x00\x00\x00", "token_ids": (2,)},
            {"parent": None, "token_ids": (1, 2)},
        ),
    ],
)
def test_moving_the_border_between_two_fields_changes_the_key(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert key_of(**one) != key_of(**other)


contents = st.fixed_dictionaries(
    {
        "kv_format": st.text("ab", max_size=2),
        "model_revision": st.text("ab", max_size=2),
        "quantization": st.text("ab", max_size=2),
        "numerics": st.text("ab", max_size=2),
        "parent": st.one_of(st.none(), st.binary(min_size=32, max_size=32)),
        "token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
        "namespace": st.text("ab\x00", max_size=2),
        "adapter": st.binary(max_size=2),
    }
)


@given(contents, contents)
def test_different_contents_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assume(one != other)

    assert key_of(**one) != key_of(**other)
