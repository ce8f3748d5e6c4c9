"""Sources of a model's files by its name: a folder, a GGUF file, the bundled demo, or a download
from the hub.

`find_model`, `resolve_model` and `local_model` choose; `fetch` downloads; Transfer shows bytes,
rate and time left: on a terminal one line is rewritten, elsewhere a line is logged now and then.
Imports no torch and does not interpret the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from tqdm import tqdm

from pipeinfer.checkpoint.files import read_object
from pipeinfer.command_line import counted
from pipeinfer.demo import demo_path
from pipeinfer.gguf.header import absolute, is_gguf, only_gguf
from pipeinfer.settings import DEMO, ConfigurationError, Settings, without_password

log = logging.getLogger(__name__)

DUMMY_WEIGHTS = "dummy"  # a value of --load-format


def find_model(settings: Settings, say: Callable[[str], object]) -> Path:
    """`resolve_model` with the model, revision and load format of `settings`.

    - say: as in `resolve_model`
    """
    return resolve_model(
        settings.model, settings.revision, say, settings.load_format != DUMMY_WEIGHTS
    )


def resolve_model(
    name: str,
    revision: str = "",
    say: Callable[[str], object] = log.info,
    weights: bool = True,
) -> Path:
    """Returns the folder or the GGUF file of a model; downloads a model of the hub.

    - name: a path, an id of the hub, or DEMO; "" is the demo, too. A folder without config.json
      that has one GGUF file means that file
    - revision: branch, tag or commit on the hub; "": the main branch
    - say: gets messages about steps that take time
    - weights: whether a model of the hub must have weights

    Raises ConfigurationError, with the list of attempts.
    """
    return local_model(name) or fetch(name, revision, say, weights)


def local_model(name: str) -> Path | None:
    """Returns the folder or the GGUF file of a model on this host; None for a name that can only be
    a model of the hub. Raises ConfigurationError as `resolve_model` does.
    """
    if name in ("", DEMO):
        return demo_path()
    folder = Path(os.path.expanduser(name))  # noqa: PTH111 (a Path raises for an unknown user)
    try:
        exists, is_folder = folder.exists(), folder.is_dir()
    except OSError as error:  # a path that is too long, or must not be read
        raise ConfigurationError(f"model {name[:200]!r}: {error.strerror}") from None
    if is_folder:
        _check_complete(folder)
        return only_gguf(folder) or folder.resolve()
    if exists and is_gguf(folder):
        return absolute(folder)
    if exists:
        raise ConfigurationError(
            f"model {name!r} is a file; give the folder with config.json, or a .gguf file"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or is_gguf(folder):
        raise ConfigurationError(f"model {name!r}: there is no such folder or file")
    return None


def _check_complete(folder: Path) -> None:
    """Raises ConfigurationError for a folder that has only an adapter, without its base model."""
    adapter = read_object(folder, "adapter_config.json")
    if adapter is not None and not (folder / "config.json").exists():
        base = adapter.get("base_model_name_or_path") or "its base model"
        raise ConfigurationError(
            f"model {str(folder)!r} is an adapter of {base}, not a model: merge it into that first"
        )


if TYPE_CHECKING:
    from huggingface_hub import HfApi

FILES_TO_FETCH = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
UNWANTED = ["original/*", "consolidated*", "onnx/*", "adapter_*"]
WEIGHTS = ".safetensors"
OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack")

TOKEN = "HF_TOKEN"  # an environment variable of the hub's client
AT_ONCE = 8  # files that are downloaded at a time
TRIES = 5  # tries in a row without a new byte, before a download fails
PAUSE, LONGEST_PAUSE = 1.0, 16.0  # seconds before the second try; doubled from try to try
TRANSIENT = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which a retry may succeed
PARTIAL = 206  # the HTTP status of an answer to a Range request
ANSWER = 20.0  # timeout in seconds of requests for metadata of a model or a file
LOOK = 1.0  # seconds between two looks at `halt` while waiting for a lock
SHA256 = re.compile("[0-9a-f]{64}")  # the ETag of a large file is its SHA-256


@dataclass(frozen=True)
class Snapshot:
    """A commit of a model on the hub.

    Attributes:
    - name: id of the model
    - revision: the commit
    - sizes: bytes of the commit's files, by name; 0: the hub does not say
    """

    name: str
    revision: str
    sizes: Mapping[str, int]


def fetch(name: str, revision: str, say: Say, weights: bool = True) -> Path:
    """Returns the local folder of a model of the hub, with all files that match FILES_TO_FETCH;
    downloads missing files.

    - name: id of the model
    - revision: branch, tag or commit; "": the main branch
    - say: gets messages about steps that take time, and about progress
    - weights: whether the model must have weights

    If the hub cannot be reached, a complete copy in the cache is used. Raises ConfigurationError,
    with the missing files.
    """
    with _no_line_for_each_request():
        return _fetch(name, revision, say, weights)


def _fetch(name: str, revision: str, say: Say, weights: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download  # slow to import, and rarely needed

    wanted: dict[str, Any] = {"allow_patterns": FILES_TO_FETCH, "ignore_patterns": UNWANTED}
    try:
        snapshot = _repository_snapshot(HfApi(), name, revision)
    except Exception as error:  # hub, network and disk raise exceptions without a common base
        try:
            wanted |= {"revision": revision or None, "local_files_only": True}
            return Path(snapshot_download(name, **wanted))
        except Exception as local:
            raise _refusal(name, revision, error, local) from error
    if weights:
        _check_weights(snapshot)
    try:
        if _missing(snapshot):
            with _download_lock(name, say):
                _download(snapshot, say)
        # Makes the cache's links and its reference from the revision to the commit. All large files
        # are there already.
        wanted |= {"revision": revision or None, "tqdm_class": _NoBar}
        return Path(snapshot_download(name, **wanted))
    except ConfigurationError:
        raise
    except Exception as error:
        raise _refusal(name, revision, error) from error


@contextmanager
def _no_line_for_each_request() -> Iterator[None]:
    """Silences the client's HTTP libraries, which log each request at level INFO, unless DEBUG is
    enabled.
    """
    loggers = [logging.getLogger(name) for name in ("httpx", "httpx2")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        if not logger.isEnabledFor(logging.DEBUG):
            logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _repository_snapshot(api: HfApi, name: str, revision: str) -> Snapshot:
    """Asks the hub for the commit of a revision and its files."""
    info = api.model_info(name, revision=revision or None, files_metadata=True, timeout=ANSWER)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Snapshot(name, info.sha or revision, sizes)


def _is_needed(snapshot: Snapshot) -> list[str]:
    from huggingface_hub.utils import filter_repo_objects

    found = filter_repo_objects(
        list(snapshot.sizes), allow_patterns=FILES_TO_FETCH, ignore_patterns=UNWANTED
    )
    return sorted(found)


def _missing(snapshot: Snapshot) -> list[str]:
    """Wanted files that the cache lacks, or has with another size; the largest first."""
    from huggingface_hub import try_to_load_from_cache

    def there(file: str) -> bool:
        found = try_to_load_from_cache(snapshot.name, file, revision=snapshot.revision)
        size = snapshot.sizes[file]  # 0: unknown
        return isinstance(found, str) and size in (0, Path(found).stat().st_size)

    lacking = [file for file in _is_needed(snapshot) if not there(file)]
    return sorted(lacking, key=lambda file: -snapshot.sizes[file])


def _check_weights(snapshot: Snapshot) -> None:
    if any(file.endswith(WEIGHTS) for file in _is_needed(snapshot)):
        return
    others = sorted(file for file in snapshot.sizes if file.endswith(OTHER_WEIGHTS))
    shown = ", ".join(others[:3]) + (" ..." if len(others) > 3 else "")
    there = f"it has {shown}" if others else "it has none in any other form either"
    if any(file.endswith(".gguf") for file in others):
        there += "; download the .gguf file that you want, and give its path"
    raise ConfigurationError(
        f"model {snapshot.name!r} of the hub has no weights as *.safetensors: {there}"
    )


# -------------------------------------------------------------------------------------- one process


@contextmanager
def _download_lock(name: str, say: Say) -> Iterator[None]:
    """Holds the lock for downloading model `name` to this cache, so that one process downloads and
    the others wait. Raises ConfigurationError if the cache cannot be written.
    """
    folder = _cache() / ".locks" / _folder_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "download.lock").open("a")
    except OSError as error:
        raise ConfigurationError(
            f"model {name!r} cannot be downloaded to {_cache()}: {error}; HF_HUB_CACHE names "
            "another folder"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{name}: another process downloads it, waiting for that")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _folder_name(name: str) -> str:
    """The name of a model's folder in the cache."""
    return f"models--{name.replace('/', '--')}"


def _blobs(name: str) -> Path:
    """The folder in which the cache keeps a model's files, each named by its ETag."""
    return _cache() / _folder_name(name) / "blobs"


# ----------------------------------------------------------------------------------------- download


def _download(snapshot: Snapshot, say: Say) -> None:
    """Downloads the files that are still missing. Raises ConfigurationError and the client's
    exceptions.
    """
    files = _missing(snapshot)
    if not files:
        return  # another process has downloaded them
    sizes = {file: snapshot.sizes[file] for file in files}
    total = sum(sizes.values())
    _check_disk_space(snapshot.name, total)
    say(f"{snapshot.name}: downloading {counted(len(files), 'file')}, {size(total)}, to {_cache()}")
    halt = threading.Event()
    with (
        Transfer(snapshot.name, sizes, say) as transfer,
        ThreadPoolExecutor(AT_ONCE, "download") as workers,
    ):
        jobs = [_File(snapshot, file, transfer, halt) for file in files]
        made = [workers.submit(job.fetch) for job in jobs]
        try:
            wait(made, return_when=FIRST_EXCEPTION)
        finally:  # also at Ctrl-C
            halt.set()
            workers.shutdown(wait=False, cancel_futures=True)
        ended = (one.exception() for one in made if one.done() and not one.cancelled())
        failed = [error for error in ended if error is not None]
        for error in sorted(failed, key=lambda one: isinstance(one, _Halted)):
            raise error


def _check_disk_space(name: str, total: int) -> None:
    kept = sum(part.stat().st_size for part in _blobs(name).glob("*.incomplete"))
    free, needed = shutil.disk_usage(_cache()).free, max(total - kept, 0)
    if free < needed:
        more = " more" if kept else ""
        raise ConfigurationError(
            f"model {name!r} needs {size(needed)}{more} in {_cache()}, where {size(free)} are "
            "free; HF_HUB_CACHE names another folder"
        )


def _hub() -> str:
    """The hub's address, without user and password."""
    from huggingface_hub import constants

    return without_password(constants.ENDPOINT)


def _takes_chunks() -> bool:
    """Whether the client can download files in chunks, by Xet."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None


class _NoBar(tqdm):
    """A tqdm bar that never shows anything."""

    def __init__(self, *given: Any, **more: Any) -> None:
        more.pop("name", None)
        super().__init__(*given, **{**more, "disable": True})


class _Halted(Exception):
    """The download of this file was stopped: another file failed, or the user pressed Ctrl-C."""


class _File:
    """The download of one file, until `halt` is set.

    Attributes:
    - snapshot: the commit that has the file
    - file: its name
    - transfer: counts the file's bytes
    - halt: set to stop all downloads of the model
    """

    def __init__(
        self, snapshot: Snapshot, file: str, transfer: Transfer, halt: threading.Event
    ) -> None:
        self._snapshot, self._file = snapshot, file
        self._transfer, self._halt = transfer, halt
        self._size = snapshot.sizes[file]
        self._persistent = False  # whether the bytes received so far remain when this process ends

    def fetch(self) -> None:
        """Downloads the file to the cache, with retries. Raises ConfigurationError after TRIES
        tries in a row without a new byte, _Halted once `halt` is set, and errors that a retry
        cannot mend.
        """
        tries, most = 0, 0
        while True:
            try:
                self._try()
                self._transfer.set(self._file, self._size)
                return
            except Exception as error:
                if not _may_pass(error):
                    raise
                here = self._transfer.of(self._file)
                tries, most = (1, here) if here > most else (tries + 1, most)
                if tries == TRIES:
                    raise self._gave_up(error) from error
                self._transfer.log(
                    f"{self._file}: {_reason(error)} at {size(here)}; going on from there"
                )
                self._halt.wait(min(PAUSE * 2 ** (tries - 1), LONGEST_PAUSE))

    def _try(self) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        name, revision = self._snapshot.name, self._snapshot.revision
        url = hf_hub_url(name, self._file, revision=revision)
        about = get_hf_file_metadata(url, timeout=ANSWER)
        if about.size is not None:
            self._size = about.size
            self._transfer.expect(self._file, about.size)
        by_chunks = about.xet_file_data is not None and _takes_chunks()
        if about.etag is not None and about.size is not None:
            blob = _blobs(name) / about.etag
            with self._locked(about.etag):
                if blob.exists() and blob.stat().st_size != about.size:
                    blob.unlink()  # truncated on disk; the client would take it for complete
                if not by_chunks and not blob.exists():
                    self._persistent = True
                    self._by_range(url, blob)
        hf_hub_download(name, self._file, revision=revision, tqdm_class=self._counter())

    @contextmanager
    def _locked(self, etag: str) -> Iterator[None]:
        """Holds the lock under which the hub's client, in any program, writes the file. Raises
        _Halted.
        """
        from huggingface_hub.utils import WeakFileLock

        path = _cache() / ".locks" / _folder_name(self._snapshot.name) / f"{etag}.lock"
        with ExitStack() as held:
            waits = False
            while True:
                try:
                    held.enter_context(WeakFileLock(path, timeout=LOOK))
                    break
                except TimeoutError:
                    if self._halt.is_set():
                        raise _Halted from None
                if not waits:
                    said = "another program downloads it, waiting for that"
                    self._transfer.log(f"{self._file}: {said}")
                    waits = True
            yield

    def _by_range(self, url: str, blob: Path) -> None:
        """Downloads the missing rest of `blob`, the file's final path. Until it is complete, its
        name ends with ".incomplete".
        """
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

        blob.parent.mkdir(parents=True, exist_ok=True)
        part = blob.with_name(f"{blob.name}.incomplete")
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        with part.open("ab") as target:
            if target.tell() > self._size:
                target.truncate(0)
            here = target.tell()
            if here:
                headers["Range"] = f"bytes={here}-"
            self._transfer.set(self._file, here)
            if here < self._size:
                limit = constants.HF_HUB_DOWNLOAD_TIMEOUT
                with get_session().stream("GET", url, headers=headers, timeout=limit) as response:
                    hf_raise_for_status(response)
                    if here and response.status_code != PARTIAL:  # the server sends the whole file
                        target.truncate(0)
                        self._transfer.set(self._file, 0)
                    self._copy(response.iter_bytes(), target)
        if part.stat().st_size != self._size:
            raise ConnectionError("the file ended too early")
        self._check_hash(part, blob.name, here > 0)
        part.replace(blob)

    def _check_hash(self, part: Path, etag: str, resumed: bool) -> None:
        """Checks the SHA-256 of a large file. A mismatch deletes the file.

        - part: the downloaded file
        - etag: its ETag; nothing is checked if that is not a SHA-256
        - resumed: whether part of the file is from an earlier try, and may have been damaged on
          disk. Then ConnectionError is raised, and the whole file is downloaded again; otherwise
          ConfigurationError
        """
        if not SHA256.fullmatch(etag):
            return
        with part.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == etag:
                return
        part.unlink()
        self._transfer.set(self._file, 0)
        if resumed:
            raise ConnectionError("what came has another SHA-256 than the hub names")
        raise ConfigurationError(
            f"model {self._snapshot.name!r}: what {_hub()} sends as {self._file} has another "
            "SHA-256 than it names"
        )

    def _copy(self, pieces: Iterator[bytes], target: BinaryIO) -> None:
        for piece in pieces:
            if self._halt.is_set():
                raise _Halted
            target.write(piece)
            self._transfer.add(self._file, len(piece))

    def _counter(self) -> Any:
        """A class in place of the hub client's progress bars, which counts for `transfer`. It has
        the methods that the client calls.
        """
        transfer, file, halt = self._transfer, self._file, self._halt

        class Counter:
            def __init__(self, *_: object, **given: Any) -> None:
                self.total, self.n = given.get("total"), given.get("initial", 0)
                transfer.set(file, self.n)

            def __enter__(self) -> Counter:
                return self

            def __exit__(self, *_: object) -> None:
                return

            def update(self, n: float | None = 1) -> None:
                if halt.is_set():
                    raise _Halted
                transfer.add(file, int(n or 0))

            def _nothing(self, *_: object, **__: object) -> None:
                return

            close = refresh = update_transfer = _nothing
            set_postfix_str = set_transfer_postfix_str = _nothing

        return Counter

    def _gave_up(self, error: Exception) -> ConfigurationError:
        here = self._transfer.of(self._file)
        kept = "it" if self._persistent else "what is complete of the model"
        return ConfigurationError(
            f"model {self._snapshot.name!r}: {size(here)} of {size(self._size)} of {self._file} "
            f"came, then nothing in {TRIES} tries: {_reason(error)}. The same command goes on from "
            f"there: {kept} is kept"
        )


# ---------------------------------------------------------------------------------------- errors


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: connections break, and hubs are busy."""
    response = getattr(error, "response", None)
    if response is not None:
        return response.status_code in TRANSIENT
    if isinstance(error, OSError):  # errors of the disk have an errno, a short file's has none
        return isinstance(error, (ConnectionError, TimeoutError)) or error.errno is None
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "hf_xet")


def _reason(error: Exception) -> str:
    """The error in one line."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the hub answered {response.status_code} {response.reason_phrase}".rstrip()
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__


def _refusal(
    name: str, revision: str, error: Exception, local: Exception | None = None
) -> ConfigurationError:
    """Returns the ConfigurationError for an exception of the hub's client.

    - name, revision: of the model
    - error: the client's exception when it asked the hub
    - local: the client's exception when it looked into its cache after that; None: it did not look
    """
    from huggingface_hub import errors, get_token

    at = f" at revision {revision!r}" if revision else ""
    given = f"the token of {TOKEN}" if get_token() else f"no token is given as {TOKEN}"
    status = getattr(getattr(error, "response", None), "status_code", 0)
    not_found = f"model {name!r}: there is no such folder, and "
    match error:
        case errors.OfflineModeIsEnabled():
            return ConfigurationError(_offline(name, at, not_found, local))
        case errors.GatedRepoError():
            why = f"{given} has no access" if get_token() else given
            return ConfigurationError(
                f"model {name!r} is gated: {why}. Ask for access at {_hub()}/{name}, "
                f"and set {TOKEN} to a token of the account that has it"
            )
        case errors.RevisionNotFoundError():
            return ConfigurationError(f"model {name!r} of the hub has no revision {revision!r}")
        case errors.RepositoryNotFoundError():
            return ConfigurationError(
                f"{not_found}the hub at {_hub()} has no model of that name, or a private one: "
                f"{given}"
            )
        case errors.HFValidationError():
            return ConfigurationError(f"{not_found}no model of the hub is called so")
        case _ if status in (401, 403):
            why = f"does not accept {given}" if get_token() else f"wants a token: {given}"
            return ConfigurationError(f"model {name!r}: the hub at {_hub()} {why}")
        case _ if local is not None:
            return ConfigurationError(
                f"{not_found}the hub at {_hub()} cannot be asked for it{at}: "
                f"{_reason(error)}; in {_cache()} {_lacking(name, local)}"
            )
        case _:
            return ConfigurationError(f"model {name!r}{at}: {_reason(error)}")


def _offline(name: str, at: str, not_found: str, local: Exception | None) -> str:
    assert local is not None
    return f"{not_found}HF_HUB_OFFLINE is set, and in {_cache()}{at} {_lacking(name, local)}"


def _lacking(name: str, local: Exception) -> str:
    """Returns text about the files of model `name` that the cache lacks. local: the client's
    exception about its cache.
    """
    folder = getattr(local, "snapshot_path", None)
    if folder is None:
        return "is no copy of it"
    import huggingface_hub

    # Only versions of the client that raise this error have this function.
    tree = huggingface_hub.get_cached_repo_tree(name, revision=Path(folder).name)
    files = _is_needed(Snapshot(name, "", {one.path: one.size for one in tree}))
    missing = [file for file in files if not Path(folder, file).exists()]
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return f"its copy lacks {shown}"


Say = Callable[[str], object]

GIB, MIB = 2**30, 2**20
# A line is due after LINE_SECONDS, or after LINE_FRACTION more of all bytes.
LINE_SECONDS, LINE_FRACTION = 10.0, 0.05
LINE_PAUSE = 1.0  # the least seconds between two lines
WINDOW = 30.0  # seconds over which a line's rate is averaged
REFRESH_SECONDS = 0.2  # seconds between two updates


class Transfer:
    """The progress of several files.

    Attributes:
    - name: shown in front of each line
    - sizes: bytes of the files, by name
    - say: gets the lines if `stream` is not a terminal, and a last line unless the context ends by
      an exception
    - stream: where the bar is shown if that is a terminal; None: stderr

    A context manager: shows the progress while it is entered. Bytes are counted by `set` and `add`,
    from any thread.
    """

    def __init__(
        self,
        name: str,
        sizes: Mapping[str, int],
        say: Say,
        stream: TextIO | None = None,
    ) -> None:
        self._sizes = dict(sizes)
        self._name, self._say = name, say
        self._stream = sys.stderr if stream is None else stream
        self._done: dict[str, int] = {}
        self._resumed = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._show, name="transfer", daemon=True)

    @property
    def total(self) -> int:
        """Bytes of all files together."""
        with self._lock:
            return sum(self._sizes.values())

    @property
    def done(self) -> int:
        """Bytes that are on disk, of all files together."""
        with self._lock:
            return sum(self._done.values())

    @property
    def received(self) -> int:
        """Bytes of `done` that came in this transfer, and not in an earlier one."""
        with self._lock:
            return sum(self._done.values()) - self._resumed

    def of(self, file: str) -> int:
        """Bytes of `file` that are on disk."""
        return self._done.get(file, 0)

    def expect(self, file: str, count: int) -> None:
        """Corrects the size of `file` to `count` bytes."""
        with self._lock:
            self._sizes[file] = count

    def set(self, file: str, count: int) -> None:
        """`count` bytes of `file` are on disk, and the change does not count as received."""
        with self._lock:
            self._resumed += count - self.of(file)
            self._done[file] = count

    def add(self, file: str, count: int) -> None:
        """`count` more bytes of `file` were received."""
        with self._lock:
            self._done[file] = self.of(file) + count

    def log(self, text: str) -> None:
        """Shows `text`, above the bar or as a line."""
        if self._stream.isatty():
            tqdm.write(text, file=self._stream)
        else:
            self._say(text)

    def __enter__(self) -> Transfer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        if kind is None:
            seconds = max(time.monotonic() - self._began, 1e-3)
            came = self.received
            said = f"{size(came)} came in {duration(seconds)}, {size(came / seconds)}/s"
            self._say(f"{self._name}: {said}")

    def _show(self) -> None:
        if self._stream.isatty():
            self._bar()
            return
        lines = ProgressLines(self._began)
        while not self._over.wait(REFRESH_SECONDS):
            line = lines.due(self.done, self.total, self.received, time.monotonic())
            if line:
                self._say(f"{self._name}: {line}")

    def _bar(self) -> None:
        """Runs the bar. tqdm takes the rate from the bytes given to `update`, so bytes that were on
        disk before are `initial` instead.
        """
        columns, rows = os.get_terminal_size(self._stream.fileno())  # 0 on some terminals
        with tqdm(
            desc=self._name,
            total=self.total,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            ncols=columns or 80,
            nrows=rows or 24,
            mininterval=0,
            leave=False,
            file=self._stream,
        ) as bar:
            while not self._over.wait(REFRESH_SECONDS):
                bar.initial, bar.total = self.done - self.received, self.total
                bar.update(suffix) if (suffix := self.done - bar.n) else bar.refresh()


class ProgressLines:
    """Decides when a line is due, and writes it. Reads no clock.

    Attributes:
    - began: seconds of the clock that `due` gets its `now` from
    """

    def __init__(self, began: float) -> None:
        self._logged_at, self._logged = began, 0
        self._seen: deque[tuple[float, int]] = deque([(began, 0)])

    def due(self, done: int, total: int, received: int, now: float) -> str:
        """The line to be logged now; "": none is due.

        - done: bytes that are on disk
        - total: bytes of all files
        - received: bytes of `done` that came in this transfer
        - now: seconds
        """
        self._seen.append((now, received))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        passed, grown = now - self._logged_at, done - self._logged
        if passed < LINE_PAUSE or (passed < LINE_SECONDS and grown < LINE_FRACTION * total):
            return ""
        self._logged_at, self._logged = now, done
        then, before = self._seen[0]
        return progress(done, total, (received - before) / max(now - then, 1e-3))


def progress(done: int, total: int, rate: float) -> str:
    """The text of a line.

    - done, total: bytes
    - rate: bytes a second
    """
    share = 100 * done / total if total else 100
    said = f"{size(done)} of {size(total)} ({share:.0f} %)"
    if rate <= 0:
        return f"{said}, nothing comes at the moment"
    return f"{said}, {size(rate)}/s, {duration((total - done) / rate)} left"


def size(count: float) -> str:
    """`count` bytes as a text for people, such as "1.50 GiB"."""
    if count >= GIB:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB / 10 else f"{count / 1024:.1f} KiB"


def duration(seconds: float) -> str:
    """`seconds` as a text for people, such as "5 min"."""
    if seconds < 60:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds // 3600:.0f} h {seconds % 3600 / 60:.0f} min"
