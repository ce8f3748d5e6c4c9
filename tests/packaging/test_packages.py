"""What is built for others, an archive of sources and of it a wheel, holds all that a server needs.

Without a network: the packages that pipeinfer needs are those of the environment that runs the
tests, pipeinfer itself comes from the wheel alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import trove_classifiers

from pipeinfer.demo import ABOUT
from pipeinfer.version import __version__
from servers import Server, environment

ROOT = Path(__file__).parents[2]
MOST_MIB = 8  # of either; the demo model takes 3.2
JUNK = (".pitrace", ".pyc", ".stamp", ".gguf")


def run(*words: object, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out, cwd=source)
    [made] = out.iterdir()
    return made


def files(folder: Path) -> set[str]:
    """Below `folder`, without what Python writes there."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)) for p in found if "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"pipeinfer-{__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory) -> Path:
    """Built of the archive, not of the checkout."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """The Python of an environment with the wheel, and the dependencies of ours."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index",
        "--no-deps", "--disable-pip-version-check", wheel)  # fmt: skip
    [packages] = folder.glob("lib/python3*/site-packages")
    # Files .pth of a folder that is added so are not read: the editable pipeinfer stays unseen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_archive_of_sources_holds_the_checkout_and_nothing_else(sdist, unpacked):
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    named = {name.strip("/") for name in built["targets"]["sdist"]["include"]}
    added = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert {path.name for path in unpacked.iterdir()} == named | added
    assert [name for name in files(unpacked) if name.endswith(JUNK)] == []
    for folder in ("src", "stages"):
        assert files(unpacked / folder) == files(ROOT / folder)
    assert sdist.stat().st_size < MOST_MIB * 2**20


def test_the_wheel_holds_the_whole_package_with_the_demo_model(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == {f"pipeinfer/{name}" for name in files(ROOT / "src/pipeinfer")}
    assert "pipeinfer/demo/model.safetensors" in held
    assert wheel.stat().st_size < MOST_MIB * 2**20


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode())


def test_the_package_says_whose_it_is_and_where_to_read_on(metadata):
    assert metadata["Author"] == "The pipeinfer authors"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog", "Issues"} == set(urls)
    assert all(url.startswith(urls["Source"]) for url in urls.values())
    assert "inference-server" in metadata["Keywords"].split(",")
    classifiers = metadata.get_all("Classifier")
    assert set(classifiers) <= trove_classifiers.classifiers
    assert {name for name in classifiers if name.startswith("Programming")} > {
        "Programming Language :: Python :: 3.11"
    }


def test_links_of_the_description_lead_out_of_the_package(metadata):
    """To what there is in the repository, or to other projects' pages."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text.startswith("# pipeinfer")
    source = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Source"]
    every = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith("https://") for link in every)
    links = [link for link in every if link.startswith(source)]
    assert len(links) > 20
    ours = [re.fullmatch(rf"{source}/(?:blob|raw)/HEAD/([^#]+)(?:#.*)?", link) for link in links]
    assert [link for link, found in zip(links, ours, strict=True) if found is None] == []
    assert [found[1] for found in ours if found and not (ROOT / found[1]).exists()] == []
    assert re.search(r"!\[[^]]*\]\(\S+/raw/HEAD/docs/images/\S+\.png\)", text)


def test_a_server_of_the_wheel_answers_and_its_recording_is_replayed(bare, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    where = run(bare, "-c", "import pipeinfer, torch; print(pipeinfer.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bare.parents[1])
    script = bare.with_name("pipeinfer")
    assert run(script, "--version", cwd=tmp_path) == f"pipeinfer {__version__}\n"
    traces = tmp_path / "traces"
    with Server("--threads", "1", "--record", str(traces), python=str(bare)) as server:
        body = {"messages": [{"role": "user", "content": "What is pipeinfer?"}]}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == ABOUT["What is pipeinfer?"]
        commands = Path(f"/proc/{server.pid('engine')}/cmdline").read_bytes().split(b"\0")
        assert commands[0].decode() == str(bare), "its stages are of the wheel, too"
        assert server.stop() == 0
    [trace] = traces.glob("tokenizer-*.pitrace")
    said = run(script, "replay", "run", "tokenizer", trace, cwd=tmp_path)
    assert "equal to the end" in said, "what it recorded is replayed without a checkout"
