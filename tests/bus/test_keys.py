"""Key files: never overwritten, never readable by others, and each error names its file."""

from __future__ import annotations

import stat

import pytest
import zmq

from pipeinfer.bus import curve
from pipeinfer.bus.curve import keyring
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import StageEntry, Topology


def test_a_secret_key_is_its_owners_alone_and_never_overwritten(tmp_path):
    secret, public = curve.create_key_pair(tmp_path / "new", "front")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    before = secret.read_bytes(), public.read_bytes()
    with pytest.raises(ConfigurationError, match=r"front\.key exists"):
        curve.create_key_pair(tmp_path / "new", "front")
    assert (secret.read_bytes(), public.read_bytes()) == before


def test_a_pair_belongs_together(tmp_path):
    curve.create_key_pair(tmp_path, "front")
    pair = curve.load_key_pair(tmp_path, "front")
    assert curve.load_public(tmp_path, "front") == pair.public == zmq.curve_public(pair.secret)
    assert pair.secret.decode() not in repr(pair)


def test_a_public_key_is_known_from_the_secret_where_its_file_is_missing(tmp_path):
    _, public = curve.create_key_pair(tmp_path, "front")
    known = curve.load_public(tmp_path, "front")
    public.unlink()
    assert curve.load_public(tmp_path, "front") == known


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    secret, _ = curve.create_key_pair(tmp_path, "front")
    secret.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"front\.key: others may read"):
        curve.load_key_pair(tmp_path, "front")


@pytest.mark.parametrize("name", ["", "../front", "a/b", ".hidden", "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    with pytest.raises(ConfigurationError, match="a name has letters"):
        curve.create_key_pair(tmp_path, name)


@pytest.mark.parametrize("text", [b"", b"short", b"x" * 41, b"\x00" * 40, b"\xff" * 40])
def test_what_is_no_key_is_refused_with_its_source(text):
    with pytest.raises(ConfigurationError, match="from here: "):
        curve.key_pair("front", text, "from here")


def topology(folder, **more) -> Topology:
    entries = (
        StageEntry("gateway", "tcp://front:7000", key="front"),
        StageEntry("tokenizer", "tcp://other:7010", key="other"),
    )
    return Topology(entries, keys=str(folder), **more)


def test_a_process_has_its_own_secret_and_the_public_keys_of_all(tmp_path):
    curve.create_key_pair(tmp_path, "front")
    other_secret, _ = curve.create_key_pair(tmp_path, "other")
    other_secret.unlink()  # it lies on the other host
    ring = keyring(topology(tmp_path), "gateway-0")
    assert ring is not None
    assert ring.own == curve.load_key_pair(tmp_path, "front")
    assert ring.stages["tokenizer-0"] == curve.load_public(tmp_path, "other")
    assert ring.allowed == set(ring.stages.values())
    with pytest.raises(ConfigurationError, match=r"no secret key: .*other\.key is not there"):
        keyring(topology(tmp_path), "tokenizer-0")


def test_who_is_no_stage_uses_a_key_that_lies_here(tmp_path):
    curve.create_key_pair(tmp_path, "front")
    curve.create_key_pair(tmp_path, "other")
    (tmp_path / "front.key").unlink()
    ring = keyring(topology(tmp_path))
    assert ring is not None
    assert ring.own == curve.load_key_pair(tmp_path, "other")


def test_a_secret_may_come_without_a_file():
    public, secret = zmq.curve_keypair()
    entries = (StageEntry("gateway", "tcp://front:1"), StageEntry("tokenizer", "tcp://other:1"))
    ring = keyring(Topology(entries, secret=secret.decode()), "gateway-0")
    assert ring is not None
    assert ring.stages == {"gateway-0": public, "tokenizer-0": public}


def test_a_missing_public_key_is_named(tmp_path):
    curve.create_key_pair(tmp_path, "front")
    with pytest.raises(ConfigurationError, match=r"other\.pub"):
        keyring(topology(tmp_path), "gateway-0")


def test_a_public_key_that_is_not_the_secrets_is_refused(tmp_path):
    curve.create_key_pair(tmp_path, "front")
    curve.create_key_pair(tmp_path, "other")
    (tmp_path / "front.pub").write_bytes((tmp_path / "other.pub").read_bytes())
    with pytest.raises(ConfigurationError, match="does not belong to its secret"):
        keyring(topology(tmp_path), "gateway-0")


def test_without_keys_there_is_no_keyring():
    assert keyring(Topology((StageEntry("gateway", "ipc://x"),)), "gateway-0") is None
