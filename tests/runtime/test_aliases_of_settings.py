"""Names that other servers have for settings: as flags, and as keywords of LLM."""

from __future__ import annotations

import pytest

from pipeinfer import AsyncLLM, other_servers
from pipeinfer import settings as config
from pipeinfer.settings import ConfigurationError, Settings

VALUES = {"model": "m", "tls_cert": "c", "tls_key": "k", "memory_fraction": "0.5"}


@pytest.mark.parametrize("name", other_servers.ALIASES)
def test_an_alias_is_its_setting(name):
    setting = other_servers.ALIASES[name]
    value = VALUES.get(setting, "3")
    assert setting in Settings.__struct_fields__ and name not in Settings.__struct_fields__
    wanted = config.build({setting: value})
    assert wanted != Settings()
    assert config.build(other_servers.translated({name: value})) == wanted
    if setting != "model":
        assert config.build(config.parse_flags([other_servers.flag(name), value])) == wanted


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        (["--enforce-eager"], "no_cuda_graph", True),
        (["--disable-cuda-graph"], "no_cuda_graph", True),
        (["--enable-prefix-caching"], "cache", "radix"),
        (["--no-enable-prefix-caching"], "cache", "naive"),
        (["--disable-radix-cache"], "cache", "naive"),
        (["--tp", "2", "--tensor-parallel-size", "4"], "tp", "4"),
    ],
)
def test_a_flag_of_another_server_sets_what_it_sets_there(flags, setting, value):
    assert config.parse_flags(flags) == {setting: value}


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ({"enforce_eager": False}, "no_cuda_graph", False),
        ({"enable_prefix_caching": False}, "cache", "naive"),
        ({"disable_radix_cache": True}, "cache", "naive"),
        ({"tensor_parallel_size": 2}, "tp", 2),
    ],
)
def test_a_keyword_of_another_server_sets_what_it_sets_there(given, setting, value):
    assert other_servers.translated(given) == {setting: value}
    assert getattr(config.build(AsyncLLM(**given)._given), setting) == value


def test_two_names_of_one_setting_are_one_clear_error():
    with pytest.raises(ConfigurationError, match="tp and tensor_parallel_size are the same"):
        AsyncLLM(tp=2, tensor_parallel_size=2)
    with pytest.raises(ConfigurationError, match="tensor_paralel_size"):
        AsyncLLM(tensor_paralel_size=2)
