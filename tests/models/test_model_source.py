"""A model's name becomes a folder, or one line that says what was tried."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from pipeinfer.checkpoint.source import resolve_model
from pipeinfer.demo import demo_path
from pipeinfer.settings import ConfigurationError, Settings


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The hub's client is offline, with an empty cache of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["", "pipeinfer-demo"])
def test_no_name_is_the_bundled_demo(name: str) -> None:
    assert resolve_model(name) == demo_path()
    assert (demo_path() / "config.json").exists()


def test_existing_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/model", "~/nowhere-model", "a/b/c"])
def test_missing_folder_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no such folder or file$"):
        resolve_model(name)


def test_a_name_that_no_file_may_have_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigurationError, match=r"^model 'a{200}': File name too long$"):
        resolve_model("a" * 300)


def test_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigurationError, match=r"is a file; give the folder"):
        resolve_model(str(file))


def test_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(file)) == file.resolve()
    with pytest.raises(ConfigurationError, match=r"no such folder or file"):
        resolve_model(str(tmp_path / "other.gguf"))


def test_a_folder_with_one_gguf_file_alone_is_that_file(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "0123abcd"  # as in the hub's cache
    blob.parent.mkdir()
    blob.touch()
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "README.md").touch()
    (folder / "model.Q4_1.gguf").symlink_to(blob)
    assert resolve_model(str(folder)) == folder.resolve() / "model.Q4_1.gguf"
    assert resolve_model(str(folder / "model.Q4_1.gguf")).suffix == ".gguf"
    (folder / "model.Q8_0.GGUF").touch()
    with pytest.raises(ConfigurationError, match=r"several GGUF files, .*Q4_1.gguf, .*Q8_0.GGUF:"):
        resolve_model(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)) == folder.resolve(), "that is a model of its own"


@pytest.mark.parametrize(
    ("model", "named", "expected"),
    [
        ("/models/SmolLM2.Q4_1.gguf", "", "SmolLM2.Q4_1"),
        ("a.GGUF", "", "a"),
        ("a.gguf", "small", "small"),
        ("Qwen/Qwen3-0.6B", "", "Qwen/Qwen3-0.6B"),
        ("/models/tiny/", "", "/models/tiny/"),
        ("", "", "pipeinfer-demo"),
    ],
)
def test_a_gguf_file_is_served_under_its_name_without_folder_and_ending(model, named, expected):
    assert Settings(model=model, served_model_name=named).model_name == expected


def test_unreachable_hub_says_what_was_tried(no_network: Path) -> None:
    told: list[str] = []
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("someone/some-model", "v2", told.append)
    message = str(caught.value)
    assert "someone/some-model" in message and "no such folder" in message and "'v2'" in message
    assert "\n" not in message
    assert told == []  # nothing is downloaded


def test_snapshot_in_the_cache_is_found_without_the_hub(no_network: Path) -> None:
    repository = no_network / "models--someone--some-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert resolve_model("someone/some-model").samefile(snapshot)
