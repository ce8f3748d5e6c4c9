"""The topology of this process: its file, and what environment variables say beside it or instead.

Containers get the same from an orchestrator that others write into a file. Reads no key; see
docs/topology.md for the variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from pipeinfer.close_names import none_of
from pipeinfer.settings import ConfigurationError
from pipeinfer.topology import topology as topologies
from pipeinfer.topology.topology import NAMES, Entry, Topology

# What is no setting. SECRET is the only one that no file can say.
STAGES, KEYS, SECRET, BIND = (
    f"PIPEINFER_{name}" for name in ("STAGES", "KEYS", "CURVE_KEY", "BIND")
)
FIELDS = ("host", "device", "key", "bind")  # of a stage, beside its name and address


def deployed(path: str | None, environ: Mapping[str, str]) -> Topology:
    """The topology of file `path`, changed by `environ`. Without a file the variables say it all.

    Raises ConfigurationError.
    """
    said = {name: environ.get(name, "") for name in (STAGES, KEYS, SECRET, BIND)}
    if not path and not said[STAGES]:
        raise ConfigurationError(f"no topology: name its file, or its stages in {STAGES}")
    # A file whose stages, or missing keys, are replaced need not hold for itself.
    found = topologies.read(path) if path else Topology(())
    entries = stages(said[STAGES]) if said[STAGES] else found.entries
    if said[BIND]:
        entries = tuple(msgspec.structs.replace(e, bind=e.bind or said[BIND]) for e in entries)
    changed = replace(
        found, entries=entries, keys=said[KEYS] or found.keys, secret=said[SECRET] or found.secret
    )
    try:
        return topologies.checked(changed)
    except ConfigurationError as error:
        source = STAGES if said[STAGES] or not path else f"topology {path}"
        raise ConfigurationError(f"{source}: {error}") from None


def stages(text: str) -> tuple[Entry, ...]:
    """The stages of PIPEINFER_STAGES: `ID=ADDRESS[,FIELD=VALUE...]`, separated by white space.

    Raises ConfigurationError, which quotes the word that is wrong.
    """
    return tuple(_stage(word) for word in text.split())


def _stage(word: str) -> Entry:
    stage, _, rest = word.partition("=")
    address, *more = rest.split(",")
    fields = {name: value for name, _, value in (pair.partition("=") for pair in more)}
    name, *numbers = stage.split("-")
    wrong = next((field for field in fields if field not in FIELDS), None)
    if wrong is not None:
        raise ConfigurationError(f"{STAGES}: {word}: {none_of(wrong, FIELDS)}")
    counts = [int(number) for number in numbers if number.isdigit()]
    wanted = 2 if name == "engine" else 1
    if name not in NAMES or not address or len(counts) != len(numbers) or len(counts) != wanted:
        raise ConfigurationError(
            f"{STAGES}: {word}: must be ID=ADDRESS, as gateway-0=tcp://front:7000 or "
            "engine-0-1=ipc:///run/pipeinfer/engine-0-1"
        )
    if name in ("engine", "scheduler"):
        entry = Entry(name, address, counts[0], counts[-1] if name == "engine" else 0)
    else:
        entry = Entry(name, address, index=counts[0])
    return msgspec.structs.replace(entry, **fields)
