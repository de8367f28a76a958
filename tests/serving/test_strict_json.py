"""JSON that makes other servers fail or that they accept wrongly is rejected with status 400.

The message repeats no part of the request.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from rlm.serving.errors import HTTPProblem
from rlm.serving.strict_json import parse, require_json

REFUSED = {
    "empty": b"",
    "NaN": b'{"a": NaN}',
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "1e999": b"[1e999]",
    "-1e999": b"[-1e999]",
    "2**63": b"[9223372036854775808]",
    "-2**63 - 1": b"[-9223372036854775809]",
    "5000 digits": b"[" + b"9" * 5000 + b"]",
    "lone surrogate in a value": b'["\\ud800"]',
    "lone surrogate in a name": b'{"\\udfff": 1}',
    "lone surrogate deep inside": b'{"stop": ["a", {"b": ["\\udc00\\ud800"]}]}',
    "NUL in a value": b'["a\\u0000"]',
    "NUL in a name": b'{"\\u0000": 1}',
    "a raw NUL": b'["\x00"]',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"a": 1}'.encode("utf-16-le"),
    "UTF-32": '{"a": 1}'.encode("utf-32"),
    "bad UTF-8": b'["\xff"]',
    "an encoded surrogate": b'["\xed\xa0\x80"]',
    "overlong UTF-8": b'["\xc0\x80"]',
    "33 deep": b"[" * 33 + b"]" * 33,
    "20,000 deep": b"[" * 20_000,
    "20,000 objects deep": b'{"a":' * 20_000,
    "a name twice": b'{"prompt": "a", "prompt": "b"}',
    "a name twice, once escaped": b'{"a": {"n": 1, "\\u006e": 2}}',
    "two values": b"{}{}",
    "cut off": b'{"a": "secret',
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_refused(body):
    with pytest.raises(HTTPProblem) as info:
        parse(body)
    assert (info.value.status, info.value.code) == (400, "malformed_json")
    assert "secret" not in info.value.detail


def test_a_file_of_windows_is_named():
    with pytest.raises(HTTPProblem) as info:
        parse(b'\xef\xbb\xbf{"prompt": "a"}')
    assert info.value.detail == "the body begins with a byte order mark: send UTF-8 without one"


def test_accepted():
    body = (
        '{"a": [1, -2.5e3, true, null, "é\\ud83d\\ude00\\n", {"é": {}}], "b": 9223372036854775807}'
    )
    value = {"a": [1, -2500.0, True, None, "é😀\n", {"é": {}}], "b": 2**63 - 1}
    assert parse(body.encode()) == value
    assert [parse(b) for b in (b"[]", b'"a"', b"null", b" 1 ")] == [[], "a", None, 1]
    assert parse(b"1e-999") == 0.0
    assert parse(b"[" * 32 + b"]" * 32)
    assert parse(b'["' + b"[" * 40 + b'\\"]]{{"]')  # brackets in a string


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


@given(values, st.booleans())
def test_what_json_writes_comes_back(value, ascii_only):
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary() | st.text('[]{}",:0e-\\ud8n').map(str.encode))
def test_any_bytes_are_a_value_or_a_problem(body):
    try:
        value = parse(body)
    except HTTPProblem:
        return
    assert value == json.loads(body)


def content_type(*values: bytes) -> Headers:
    return Headers(raw=[(b"accept", b"text/html"), *((b"content-type", v) for v in values)])


def test_json_media_types():
    quoted = b'application/json; charset="UTF-8"'
    for value in (b"application/json", b"APPLICATION/JSON", b"application/json;", quoted):
        require_json(content_type(value))


@pytest.mark.parametrize(
    "headers",
    [
        content_type(),
        content_type(b""),
        content_type(b"text/plain"),
        content_type(b"application/x-www-form-urlencoded"),
        content_type(b"application/jsonp"),
        content_type(b"text/plain; application/json"),
        content_type(b"application/json; charset=utf-16"),
        content_type(b"application/json", b"application/json"),
        content_type(b"application/json\xff"),
    ],
)
def test_other_media_types(headers):
    with pytest.raises(HTTPProblem) as info:
        require_json(headers)
    assert (info.value.status, info.value.code) == (415, "unsupported_media_type")
