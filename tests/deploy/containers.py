"""Processes in place of containers: each gets what Compose would give it, and nothing else.

Paths of the image stand for files of this checkout, those of volumes and secrets for folders that
the containers of a host share. Images without torch get none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compose import ROOT, Compose

DOCKERFILE = (ROOT / "stages/Dockerfile").read_text()
TOPOLOGY, SOCKETS, SECRETS = "/etc/pipeinfer/pipeinfer.toml", "/run/pipeinfer", "/run/secrets"
Inside = Callable[..., list[str]]  # (service, words)
MEMORY = "memory"  # the service of memory holders
HEAVY = ("torch", "transformers", "safetensors")


def image_files() -> dict[str, str]:
    """{path in the image: path in the checkout} of single files that the Dockerfile copies."""
    copies = re.findall(r"^COPY (stages/\S+) (/\S+)$", DOCKERFILE, re.MULTILINE)
    return {target: source for source, target in copies}


class ContainerHost:
    """A host with its volumes in `folder`. `inside(service, *words)` puts words onto it."""

    def __init__(
        self, folder: Path, compose: Compose, inside=lambda _service, words: words
    ) -> None:
        self.folder, self.compose, self._inside = folder, compose, inside
        for name in ("run", "slim"):
            (folder / name).mkdir(parents=True, mode=0o700)
        topology = (ROOT / image_files()[TOPOLOGY]).read_text()
        (folder / "pipeinfer.toml").write_text(topology.replace(SOCKETS, f"{folder}/run"))
        for module in HEAVY:
            text = f"raise ImportError('{module} is not in this image')\n"
            (folder / "slim" / f"{module}.py").write_text(text)
        self.processes: dict[str, subprocess.Popen] = {}

    def start(self, service: str, copy: int = 1) -> None:
        """Container `copy` of the service; more than one is what --scale does."""
        name = f"{service}-{copy}"
        self._home(name).mkdir(exist_ok=True)
        words = self.command(self.compose.services[service]["command"])
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self._inside(service, *words),
                cwd=self._home(name),
                env=self._environment(service, name),
                stdout=log,
                stderr=log,
            )

    def said(self, name: str, what: str) -> int:
        """How many times the log of container `name` says it."""
        return self._log(name).read_text().count(what)

    def health(self, name: str) -> int:
        """The exit code of the health check of container `name`."""
        service = name.rpartition("-")[0]
        test = self.compose.services[service]["healthcheck"]["test"]
        assert test[0] == "CMD"
        words = self._inside(service, *self.command(test[1:]))
        return subprocess.run(
            words, cwd=self._home(name), env=self._environment(service, name), timeout=60,
            check=False, capture_output=True,
        ).returncode  # fmt: skip

    def stop(self, name: str) -> int:
        """As `docker compose stop` does it; the exit code."""
        service = self.compose.services[name.rpartition("-")[0]]
        number = signal.Signals[service.get("stop_signal", "SIGTERM")]
        os.kill(_first_process(self.processes[name].pid), number)
        return self.processes[name].wait(int(service["stop_grace_period"].removesuffix("s")))

    def kill_one(self, name: str) -> None:
        """Ends container `name` with SIGKILL."""
        self.processes[name].kill()
        self.processes[name].wait()

    def kill(self) -> None:
        """Ends all, and prints what they have said."""
        for name in self.processes:
            self.kill_one(name)
            print(f"## {name}\n{self._log(name).read_text()}")

    def command(self, words: list[str]) -> list[str]:
        assert words[0] == "python"
        there = {t: str(ROOT / source) for t, source in image_files().items()}
        there |= {TOPOLOGY: f"{self.folder}/pipeinfer.toml", SOCKETS: f"{self.folder}/run"}
        return [sys.executable, *(there.get(word, word) for word in words[1:])]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _home(self, name: str) -> Path:
        return self.folder / name

    def _environment(self, service: str, name: str) -> dict[str, str]:
        described = self.compose.services[service]
        secrets = self._secrets(described, self._home(name) / "secrets")
        sockets = f"{self.folder}/run"
        given = {
            key: str(value).replace(SECRETS, secrets).replace(SOCKETS, sockets)
            for key, value in described["environment"].items()
        }
        home = str(self._home(name))  # a container has a folder for temporary files of its own
        slim = [f"{self.folder}/slim"] if described["image"].endswith("slim") else []
        path = {"PYTHONPATH": os.pathsep.join([*slim, str(ROOT / "src")])}
        # Two cores for everybody; an image has no such limit.
        return {"PATH": os.defpath, "HOME": home, "TMPDIR": home, "OMP_NUM_THREADS": "1", **path,
                **given}  # fmt: skip

    def _secrets(self, described: dict[str, Any], folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        for secret in described.get("secrets", []):
            source = secret if isinstance(secret, str) else secret["source"]
            target = secret if isinstance(secret, str) else secret["target"]
            file = Path(self.compose.secret_file(source))
            if file.is_char_device():  # is mounted as what it is
                (folder / target).unlink(missing_ok=True)
                (folder / target).symlink_to(file)
            elif not (folder / target).exists():
                shutil.copy(file, folder / target)
        return str(folder)


def _first_process(pid: int) -> int:
    """The process that a container's stop signal is for: `unshare` passes none on to its child."""
    if Path(f"/proc/{pid}/comm").read_text() != "unshare\n":
        return pid
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def stage_of(service: dict[str, Any]) -> str:
    """The stage that a service runs, or MEMORY."""
    module, stage = service["command"][2:4]
    return MEMORY if module == "pipeinfer.runtime.memory_holder" else stage


def body(text: str, tokens: int) -> bytes:
    return json.dumps({"prompt": text, "max_tokens": tokens, "temperature": 0}).encode()
