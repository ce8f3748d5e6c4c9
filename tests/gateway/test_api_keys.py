"""API keys: files of them, their limits, and that neither keys nor addresses are ever repeated."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import httpx
import pytest
from gateway_pipeline import Gateway, StartGateway
from hypothesis import given
from hypothesis import strategies as st

from pipeinfer.cli.main import main
from pipeinfer.gateway import api_keys
from pipeinfer.gateway.api_keys import KeyLimits, KeyUsage, TokenBucket
from pipeinfer.gateway.auth import ClientHashes, host_bytes
from pipeinfer.settings import ConfigurationError

DEFAULTS = KeyLimits(3, 30, 300)


def remaining(account: KeyUsage, now: float) -> tuple[int | None, ...]:
    """(requests, tokens) that are left of the minute's, whole ones; None without a limit."""
    kinds = ("requests", "tokens")
    return tuple(max(account.free(k, now), 0) if account.whole(k) else None for k in kinds)


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


steps = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(1, 12)), max_size=60
)  # (milliseconds since the last, amount)


class ExactBucket:
    """The same in fractions, refilled millisecond by millisecond."""

    def __init__(self, a_minute: int) -> None:
        self.size, self.level = Fraction(a_minute), Fraction(a_minute)

    def pass_time(self, ms: int) -> None:
        self.level = min(self.size, self.level + self.size * ms / 60_000)


@given(st.integers(1, 100), steps)
def test_a_bucket_is_what_its_definition_says(a_minute: int, taken: list[tuple[int, int]]) -> None:
    now, bucket, exact = 1000.0, TokenBucket(a_minute, 1000.0), ExactBucket(a_minute)
    for ms, amount in taken:
        now += ms / 1000
        exact.pass_time(ms)
        assert abs(bucket.level(now) - exact.level) < 1e-6
        bucket.take(amount, now)
        exact.level -= amount
    wait = bucket.missing(1, now) * 60 / a_minute
    assert bucket.level(now + wait) >= 1 - 1e-5, "after that wait there is one"
    assert wait == 0 or bucket.level(now + wait * 0.9) < 1


@given(st.integers(1, 20), st.integers(0, 5), steps)
def test_no_minute_has_more_requests_than_two_buckets_and_no_moment_more_than_may_run(
    a_minute: int, concurrent: int, asked: list[tuple[int, int]]
) -> None:
    """Each request asks for some prompts and ends when the next comes."""
    now, account = 0.0, KeyUsage(KeyLimits(concurrent, a_minute, 0), 0.0)
    let_in: list[tuple[float, int]] = []
    for ms, prompts in asked:
        now += ms / 1000
        before = remaining(account, now)[0]
        excess = account.start_request(now)
        if excess is not None:
            prompts = 1  # no more is known of it yet
        elif prompts > 1:
            excess = account.admit_choices(prompts, prompts, now)
            if excess is not None:
                account.release()
        if excess is None:
            let_in.append((now, prompts))
            assert account.running == prompts
            assert not concurrent or prompts <= concurrent
            account.release(prompts)
        else:
            assert remaining(account, now)[0] == before, "what was refused cost nothing"
            if excess.wait:
                later = now + excess.wait + 1e-6
                again = KeyUsage(KeyLimits(0, a_minute, 0), 0.0)
                for at, count in let_in:
                    again.start_request(at)
                    again.admit_choices(count, count, at)
                assert again.start_request(later) is None
                assert prompts == 1 or again.admit_choices(prompts, prompts, later) is None
            else:
                assert prompts > a_minute or (concurrent and prompts > concurrent)
        assert account.running == 0
        last_minute = sum(count for at, count in let_in if now - at < 60)
        assert last_minute <= 2 * a_minute, "a full bucket, and what refilled meanwhile"


@given(st.integers(1, 500), steps)
def test_tokens_are_taken_as_they_come_and_later_requests_wait(
    tokens: int, used: list[tuple[int, int]]
) -> None:
    now, account, exact = 0.0, KeyUsage(KeyLimits(0, 0, tokens), 0.0), ExactBucket(tokens)
    for ms, amount in used:
        now += ms / 1000
        exact.pass_time(ms)
        excess = account.start_request(now)
        if exact.level > Fraction(1, 10**6):
            assert excess is None
            account.release()
        elif exact.level < -Fraction(1, 10**6):
            assert excess is not None and excess.wait > 0
            assert remaining(account, now) == (None, 0)
        account.use_tokens(50 * amount, now)  # of requests that run: also below zero
        exact.level -= 50 * amount
    excess = account.start_request(now)
    if excess is not None:
        assert account.start_request(now + excess.wait) is None


def test_concurrent_requests_make_room_when_they_end() -> None:
    account = KeyUsage(KeyLimits(concurrent=2), 0.0)
    assert account.start_request(0.0) is None and account.start_request(0.0) is None
    excess = account.start_request(0.0)
    assert excess is not None and excess.wait == 1.0
    account.release()
    assert account.start_request(0.0) is None
    excess = account.admit_choices(2, 2, 0.0)
    assert excess is not None and excess.wait == 1.0, "it could run later"
    excess = account.admit_choices(3, 3, 0.0)
    assert excess is not None and excess.wait == 0, "three prompts never can"
    assert account.running == 2


@given(st.integers(1, 50), st.integers(0, 60), st.integers(1, 50))
def test_other_limits_keep_what_was_used(before: int, used: int, after: int) -> None:
    account = KeyUsage(KeyLimits(tokens=before), 0.0)
    account.use_tokens(used, 0.0)
    account.set_limits(KeyLimits(tokens=after, requests=5), 0.0)
    assert remaining(account, 0.0) == (5, max(0, after - used))
    account.set_limits(KeyLimits(), 0.0)
    assert remaining(account, 0.0) == (None, None) and account.start_request(0.0) is None


def test_further_prompts_wait_until_there_is_room_for_the_whole_request() -> None:
    """Ten a minute: one in six seconds. With eight used, three find two; then one is missing."""
    account = KeyUsage(KeyLimits(requests=10), 0.0)
    for _ in range(8):
        assert account.start_request(0.0) is None
    assert account.start_request(0.0) is None
    excess = account.admit_choices(3, 3, 0.0)
    assert excess is not None and excess.wait == pytest.approx(6.0)
    account.release()
    assert remaining(account, 0.0) == (2, None), "its first has its request back"
    assert account.start_request(6.0) is None and account.admit_choices(3, 3, 6.0) is None
    assert account.running == 8 + 3 and remaining(account, 6.0) == (0, None)


def test_more_prompts_than_a_minute_allows_never_come() -> None:
    account = KeyUsage(KeyLimits(requests=3), 0.0)
    assert account.start_request(0.0) is None
    excess = account.admit_choices(4, 4, 0.0)
    assert excess is not None and excess.wait == 0 and "4 prompts" in excess.reason
    assert account.start_request(0.0) is None and account.admit_choices(3, 3, 0.0) is None


def test_a_key_whose_tokens_are_used_up_waits_for_one() -> None:
    account = KeyUsage(KeyLimits(tokens=60), 0.0)
    account.use_tokens(60, 0.0)
    excess = account.start_request(0.0)
    assert excess is not None and excess.wait == pytest.approx(1.0)
    account.use_tokens(-1, 0.0)
    assert account.start_request(0.0) is None
    assert account.running == 1


def test_choices_run_beside_each_other_and_cost_one_request_of_the_minutes() -> None:
    account = KeyUsage(KeyLimits(concurrent=5, requests=3), 0.0)
    assert account.start_request(0.0) is None and account.admit_choices(1, 4, 0.0) is None
    assert (account.running, remaining(account, 0.0)) == (4, (2, None))
    assert account.start_request(0.0) is None
    excess = account.admit_choices(1, 2, 0.0)
    assert excess is not None and excess.wait == 1.0 and "5 answers" in excess.reason
    assert remaining(account, 0.0) == (2, None), "what was refused cost nothing"
    account.release()
    account.release(4)
    assert account.start_request(0.0) is None
    excess = account.admit_choices(1, 6, 0.0)
    assert excess is not None and excess.wait == 0 and "6 choices" in excess.reason
    account.release()
    assert account.running == 0


async def names(gateway: Gateway, *keys: str) -> list[str]:
    """Of two requests on one connection for each of `keys`, each by another endpoint."""
    for key in keys:
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            await http.post("/v1/completions", json={"prompt": "a b"})
            chat = [{"role": "user", "content": "a"}]
            await http.post("/v1/chat/completions", json={"messages": chat})
    return [submit.client for submit in gateway.pipeline.submits]


async def test_without_keys_a_client_is_a_connection_of_its_host(gateway: Gateway) -> None:
    first, again, second, third = await names(gateway, "none", "none")
    assert first == again != second == third
    assert first.partition("/")[0] == second.partition("/")[0]
    assert all(part for part in first.split("/")) and "127.0" not in first


async def test_with_keys_a_client_is_a_key_on_whatever_connection_and_gateway(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    lines = [f"{n} sha256:{hashlib.sha256(n.encode()).hexdigest()}\n" for n in ("alice", "bob")]
    file.write_text("".join(lines))
    gateway, other = [await start_gateway(api_key_file=str(file)) for _ in range(2)]
    alice, _, bob, _, again, _ = await names(gateway, "alice", "bob", "alice")
    assert alice == again != bob and "alice" not in alice and "/" not in alice
    assert (await names(other, "alice"))[0] == alice


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8:1:2::3", "2001:db8:1:2:ffff::4", True),
        ("2001:db8:1:2::3", "2001:db8:1:3::3", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "no address", False),
    ],
)
def test_a_host_is_an_address_or_what_a_user_has_of_ipv6(one: str, other: str, same: bool) -> None:
    assert (host_bytes(one) == host_bytes(other)) == same


def test_an_address_is_not_found_by_trying_hashes() -> None:
    assert ClientHashes().of_key("a") == ClientHashes().of_key("a")
    assert ClientHashes().of_peer("10.0.0.1", None) != ClientHashes().of_peer("10.0.0.1", None)
