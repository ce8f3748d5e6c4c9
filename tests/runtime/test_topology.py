"""Topology files: what can be read, what is refused, and with which words."""

from __future__ import annotations

import pytest

from pipeinfer import topology as topologies
from pipeinfer.cli.operate import drawing
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Identity

FIVE = "".join(
    f'[[stage]]\nname = "{name}"\naddress = "ipc:///tmp/x/{name}"\n'
    for name in ("gateway", "tokenizer", "scheduler", "engine", "detokenizer")
)

SECOND_RANK = '[[stage]]\nname = "engine"\naddress = "ipc:///tmp/x/2"\nrank = 1\n'


def load(tmp_path, text: str):
    file = tmp_path / "pipeinfer.toml"
    file.write_text(text)
    return topologies.load(file)


def test_a_topology_survives_its_own_file(tmp_path):
    made = topologies.local(Settings(), "ipc:///tmp/a b/")
    assert load(tmp_path, made.to_toml()) == made


def test_settings_of_the_file_are_kept(tmp_path):
    made = load(tmp_path, '[settings]\nkv_pages = 7\nmodel = "a\\"b"\n' + FIVE)
    assert made.settings == {"kv_pages": 7, "model": 'a"b'}
    assert load(tmp_path, made.to_toml()) == made


def test_ids_say_stage_group_and_rank():
    assert Identity("engine", group=2, rank=1).id == "engine-2-1"
    assert Identity("scheduler", group=2).id == "scheduler-2"
    assert Identity("gateway", index=3).id == "gateway-3"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("not toml", "pipeinfer.toml"),
        (FIVE.replace("gateway", "gatewax"), "'gatewax' is none of .*; did you mean 'gateway'"),
        (FIVE.replace("ipc:///tmp/x/engine", "ipc:///tmp/x/gateway"), "both take"),
        (FIVE + 'http = "http://x:1"\n', "detokenizer-0: http = .* of a gateway"),
        *(
            (FIVE.replace('x/gateway"', f'x/gateway"\nhttp = "{url}"'), f"http = {url!r} must be")
            for url in (
                "x:1",
                "ftp://x:1",
                "http://",
                "http://:1",
                "http://x:0",
                "http://x:http",
                "http://x:70000",
                "http://a@x:1",
                "http://x:1/",
                "http://x y:1",
            )
        ),
        (
            FIVE + '[[stage]]\nname = "engine"\naddress = "ipc:///tmp/x/2"\nrank = 2\n',
            r"engines of group 0 must have ranks \[0, 1\], not \[0, 2\]",
        ),
        (
            FIVE + '[[stage]]\nname = "engine"\naddress = "ipc:///tmp/x/2"\ngroup = 1\n',
            "engine-1-0 has no scheduler-1",
        ),
        (
            FIVE + '[[stage]]\nname = "scheduler"\naddress = "ipc:///tmp/x/2"\ngroup = 1\n',
            r"engines of group 1 must have ranks \[0\], not \[\]",
        ),
        (
            FIVE + '[[stage]]\nname = "scheduler"\naddress = "ipc:///tmp/x/2"\ngroup = 2\n',
            r"groups 0, 1, ..., not \[0, 2\]",
        ),
        (
            FIVE + '[[stage]]\nname = "tokenizer"\naddress = "ipc:///tmp/x/2"\nindex = 2\n',
            r"tokenizers must have indices 0, 1, ..., not \[0, 2\]",
        ),
        (
            FIVE.partition('[[stage]]\nname = "detok')[0],
            r"detokenizers must have indices 0, 1, ..., not \[\]",
        ),
        (FIVE.replace("ipc:///tmp/x/engine", "tcp://10.0.0.1:5"), "CURVE"),
        (FIVE + "colour = 1\n", "colour"),
        (FIVE.replace('address = "ipc:///tmp/x/engine"', "address = 5"), "address"),
    ],
)
def test_bad_topologies_are_refused_with_the_reason(tmp_path, text, why):
    with pytest.raises(ConfigurationError, match=why):
        load(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml"):
        topologies.load(tmp_path / "nowhere.toml")


def test_ranks_in_one_process_are_refused():
    with pytest.raises(ConfigurationError, match="one process"):
        topologies.local(Settings(tp=2), "inproc://")


def test_every_group_has_a_scheduler_and_every_rank_is_a_process():
    topology = topologies.local(Settings(tp=2, dp=2), "ipc:///tmp/x/")
    assert topology.ids("scheduler") == ["scheduler-0", "scheduler-1"]
    assert topology.ids("engine") == ["engine-0-0", "engine-0-1", "engine-1-0", "engine-1-1"]
    fronts = {"gateways": 1, "tokenizers": 1, "detokenizers": 1}
    assert topology.defaults() == {"tp": 2, "dp": 2, **fronts}


def test_gateways_tokenizers_and_detokenizers_are_processes_of_an_index():
    settings = Settings(gateways=3, tokenizers=2, detokenizers=2)
    topology = topologies.local(settings, "ipc:///tmp/x/")
    assert topology.ids("gateway") == ["gateway-0", "gateway-1", "gateway-2"]
    assert topology.ids("tokenizer") == ["tokenizer-0", "tokenizer-1"]
    assert topology.ids("detokenizer") == ["detokenizer-0", "detokenizer-1"]
    assert topologies.check_settings(settings, topology) == settings
    with pytest.raises(ConfigurationError, match="--tokenizers 1: the topology has 2 tokenizers"):
        topologies.check_settings(Settings(gateways=3, detokenizers=2), topology)


def test_a_drawing_counts_the_stages_that_no_group_has():
    settings = Settings(gateways=3, dp=2, detokenizers=2)
    *_, first, _ = drawing(topologies.local(settings, "ipc:///tmp/x/"))
    assert first.startswith("gateway-0..2 ─► tokenizer-0 ─┬► scheduler-0 ═► engine-0-0 ─┐")
    assert first.endswith("► detokenizer-0..1 ─► gateway-0..2")


def test_gateways_in_one_process_are_refused():
    with pytest.raises(ConfigurationError, match="--gateways needs one for each"):
        topologies.local(Settings(gateways=2), "inproc://")


def test_another_number_of_ranks_than_the_topology_has_is_refused():
    topology = topologies.local(Settings(tp=2), "ipc:///tmp/x/")
    assert topologies.check_settings(Settings(tp=2), topology).tp == 2
    with pytest.raises(ConfigurationError, match="--tp 4: the topology has 2 engines"):
        topologies.check_settings(Settings(tp=4), topology)
    with pytest.raises(ConfigurationError, match="--dp 3: the topology has 1 group"):
        topologies.check_settings(Settings(tp=2, dp=3), topology)
