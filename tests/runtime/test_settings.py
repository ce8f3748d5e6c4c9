"""Settings from flags, environment and files: precedence, conversion, errors that name the flag."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

import pytest

from pipeinfer import settings as config
from pipeinfer import topology as topologies
from pipeinfer.other_servers import flag
from pipeinfer.runtime.entry import stage_settings
from pipeinfer.runtime.supervisor import prepare_settings
from pipeinfer.settings import ConfigurationError, Settings
from pipeinfer.topology import Topology


def test_flags_beat_environment_beats_file():
    topology = Topology((), {"kv_pages": 1, "page_size": 1, "seed": 1})
    environ = {"PIPEINFER_KV_PAGES": "2", "PIPEINFER_PAGE_SIZE": "2", "PIPEINFER_TP": ""}
    settings = stage_settings(topology, config.parse_flags(["--kv-pages", "3"]), environ)
    assert (settings.kv_pages, settings.page_size, settings.seed, settings.tp) == (3, 2, 1, 1)


@pytest.mark.parametrize("named", ["", "mine"])
def test_a_stage_alone_serves_a_folder_with_one_gguf_file_under_the_name_of_the_whole_server(
    tmp_path, named
):
    (tmp_path / "small.Q4_1.gguf").touch()
    given = {"model": str(tmp_path), "served_model_name": named}
    alone = stage_settings(Topology((), {}), given, {})
    whole = prepare_settings(given, lambda text: None)
    assert alone.model == whole.model == str(tmp_path / "small.Q4_1.gguf")
    assert alone.model_name == whole.model_name == (named or "small.Q4_1")


def test_environment_of_a_child_carries_every_setting():
    changed = Settings(
        model="m", port=1, dtype="float16", no_cuda_graph=True, memory_fraction=0.5, watchdog=3.0,
        api_key="secret", chat_template="t", in_process=True,
    )  # fmt: skip
    assert config.build(config.from_environment(config.to_environment(changed))) == changed
    assert config.to_environment(Settings()) == {}


def test_every_setting_is_a_flag():
    flags = []
    for name, setting in config.settings_help().items():
        if name == "model":
            continue
        flags.append("--" + name.replace("_", "-"))
        if setting.kind is not bool:
            other = "a.module:Policy" if name == "policy" else "1"
            flags.append(setting.choices[0] if setting.choices else other)
    given = config.parse_flags(["some/model", *flags])
    assert set(given) == set(Settings.__struct_fields__)
    config.build(given)


def test_help_says_of_every_flag_what_it_does():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    of_others = argparse.SUPPRESS  # flags that are refused
    said = {a.dest: a for a in parser._actions if a.dest != of_others}
    assert set(said) - {"help"} == set(Settings.__struct_fields__) - {"model"}
    assert all(action.help and action.metavar != "" for action in said.values())
    words = " ".join(parser.format_help().split())
    assert "--max-running N requests that run at a time (default: 256)" in words
    assert "--kv-pages N pages for keys and values; default: from free memory --" in words


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kv_pages": "many"}, "--kv-pages"),
        ({"overlap_depth": "3"}, "--overlap-depth"),
        ({"memory_fraction": "1.5"}, "--memory-fraction"),
        ({"dtype": "int8"}, "--dtype"),
        ({"port": "70000"}, "--port"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_value_names_its_flag(values, named):
    with pytest.raises(ConfigurationError, match=named):
        config.build(values)


def test_serve_takes_the_settings_of_a_topology_file(tmp_path, short_path, monkeypatch):
    monkeypatch.delenv("PIPEINFER_KV_PAGES", raising=False)
    file = tmp_path / "pipeinfer.toml"
    local = topologies.local(Settings(), f"ipc://{short_path}/")
    given = {"served_model_name": "named", "kv_pages": 5, "drain_timeout": 2.0}
    file.write_text(Topology(local.entries, given).to_toml())
    settings = prepare_settings({"topology": str(file), "kv_pages": 6}, lambda _: None)
    assert (settings.served_model_name, settings.kv_pages) == ("named", 6)
    assert settings.drain_timeout == 2.0


def test_paths_do_not_depend_on_the_folder_of_a_stage(tmp_path, monkeypatch):
    """A stage that is swapped may run in another one."""
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text("{{ messages }}")
    settings = prepare_settings({"record": "traces", "chat_template": "chat.jinja"}, lambda _: None)
    assert settings.record == str(tmp_path / "traces")
    assert settings.chat_template == str(tmp_path / "chat.jinja")
    assert Path(settings.model).is_absolute()


@pytest.mark.parametrize(
    "name", [name for name, one in config.settings_help().items() if one.kind in (int, float)]
)
def test_every_number_has_a_least_and_a_most(name):
    """What no process could allocate or wait for is refused before any is started."""
    infinite = 10**25 if config.settings_help()[name].kind is int else inf
    for value, said in ((infinite, "at most"), (-infinite, "(at least|more than)")):
        with pytest.raises(ConfigurationError, match=f"^{flag(name)}: must be {said} "):
            config.build({name: str(value)})
