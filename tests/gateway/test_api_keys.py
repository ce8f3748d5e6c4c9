"""Keys: what a file of them may say, who is let in, and that no key's text is ever repeated."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cli.main import main
from pipeinfer.gateway import api_keys
from pipeinfer.gateway.api_keys import KeyLimits
from pipeinfer.settings import ConfigurationError

DEFAULTS = KeyLimits(3, 30, 300)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_file_gives_named_keys_each_with_its_own_limits_over_the_defaults() -> None:
    found = api_keys.parse_keys(
        f"# who may ask\n\nalice sha256:{digest('a')}\n"
        f"bob\tsha256:{digest('b')} concurrent=2 admin tokens=0 # he has paid\n",
        DEFAULTS,
    )
    limits = {key.name: key.limits for key in found}
    assert limits == {"alice": DEFAULTS, "bob": KeyLimits(2, 30, 0)}
    for text, name in (("a", "alice"), ("b", "bob")):
        key = found.find(text.encode())
        assert key is not None and (key.name, key.admin) == (name, name == "bob")
    assert found.find(b"c") is None and found.find(b"") is None
    assert found.find(digest("a").encode()) is None, "the hash is not the key"


def test_one_bare_word_is_a_plain_key() -> None:
    found = api_keys.parse_keys("s3cret\n", DEFAULTS)
    key = found.find(b"s3cret")
    assert key is not None and (key.name, key.limits) == ("default", DEFAULTS)
    assert found.find(b"s3cret\n") is None
    assert not api_keys.parse_keys(" \n", DEFAULTS), "an empty file is no key"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("# nothing\n", None, "only comments"),
        ("SECRET SECRET", 1, "64 hexadecimal digits"),
        (f"a sha256:{digest('a')}\nSECRET\n", 2, "NAME sha256:HEX"),
        (f"a sha256:{digest('a').upper()}", 1, "lower case"),
        (f"\n\na/b sha256:{digest('a')}", 3, "NAME sha256:HEX"),
        (f"a sha256:{digest('a')} tokens=SECRET", 1, "word 3"),
        (f"a sha256:{digest('a')} tokens=1 tokens=2", 1, "twice"),
        (f"a sha256:{digest('a')} tokens=-1", 1, "word 3"),
        (f"a sha256:{digest('a')} tokens=1 admin=1", 1, "word 4"),
        (f"a sha256:{digest('a')} admin admin", 1, "twice"),
        (f"a sha256:{digest('a')} speed=1", 1, "word 3"),
        (f"a sha256:{digest('a')}\na sha256:{digest('b')}", 2, "stands above"),
        (f"a sha256:{digest('a')}\nb sha256:{digest('a')}", 2, "key of a line above"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line_and_quotes_no_key(
    tmp_path: Path, text: str, line: int | None, why: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=why) as caught:
        api_keys.read_key_file(str(file), DEFAULTS)
    message = str(caught.value)
    assert str(file) in message and (line is None or f"line {line}:" in message)
    assert "SECRET" not in message and digest("a") not in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (api_keys.MAX_FILE_BYTES + 1)])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="--api-key-file"):
        api_keys.read_key_file(str(file), DEFAULTS)


def test_more_keys_than_are_compared_at_each_request_are_refused() -> None:
    lines = [f"k{i} sha256:{digest(str(i))}" for i in range(api_keys.MAX_KEYS + 1)]
    assert len(api_keys.parse_keys("\n".join(lines[:-1]), DEFAULTS)) == api_keys.MAX_KEYS
    with pytest.raises(ConfigurationError, match=f"line {api_keys.MAX_KEYS + 1}: more than"):
        api_keys.parse_keys("\n".join(lines), DEFAULTS)


def test_every_entry_is_compared_whichever_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    real = api_keys.hmac.compare_digest

    def counted(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return real(a, b)

    found = api_keys.parse_keys(
        "\n".join(f"k{i} sha256:{digest(str(i))}" for i in range(5)), DEFAULTS
    )
    monkeypatch.setattr(api_keys.hmac, "compare_digest", counted)
    for text in (b"0", b"4", b"none"):
        compared.clear()
        found.find(text)
        assert compared == [key.digest for key in found]


@given(st.text(max_size=200))
def test_no_text_makes_the_parser_fail_otherwise(text: str) -> None:
    try:
        api_keys.parse_keys(text, DEFAULTS)
    except ConfigurationError as error:
        assert "\n" not in str(error)


def test_the_command_makes_a_key_that_its_line_lets_in(capsys: pytest.CaptureFixture[str]) -> None:
    made = set()
    for _ in range(2):
        assert main(["api-key", "alice", "--requests", "60", "--concurrent", "0"]) == 0
        out, err = capsys.readouterr()
        [key] = [word for word in err.split() if word.startswith("pik-")]
        assert key not in out and len(key) >= 4 + 43
        found = api_keys.parse_keys(out, DEFAULTS).find(key.encode())
        assert found is not None and (found.name, found.limits) == ("alice", KeyLimits(0, 60, 300))
        made.add(key)
    assert len(made) == 2 and not found.admin
    assert main(["api-key", "root", "--admin", "--tokens", "9"]) == 0
    out, err = capsys.readouterr()
    [root] = api_keys.parse_keys(out, DEFAULTS)
    assert root.admin and root.limits == KeyLimits(3, 30, 9)
    assert main(["api-key", "a b"]) == 2
    assert api_keys.parse_keys(out, DEFAULTS) and str(found.digest) not in repr(found)
