"""Low-rank adapters on disk, as PEFT writes them: adapter_config.json, adapter_model.safetensors.

- read_adapter: the configuration and the tensors' headers, checked; no weight is read.
- identify: an adapter's name and folder with the digest of its files, by which caches distinguish
  adapters.
- parse_lora_modules, read_lora_modules: NAME=PATH of a command line, and the adapters there.

Features of an adapter beyond low-rank pairs of linear layers are refused by name. Files may be
hostile: patterns of the configuration are bounded before they are matched. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isfinite, sqrt
from pathlib import Path

from pipeinfer.checkpoint.files import Fields, StoredTensor, read_header, read_json
from pipeinfer.params import Adapter, JsonValue
from pipeinfer.settings import ConfigurationError, Settings

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # prefix of the names in WEIGHTS
PAIR_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
DTYPES = ("F32", "F16", "BF16")
DIGEST_BYTES = 16
MAX_CONFIG_BYTES = 2**20
MAX_NAMED_CHARS = 200  # characters of a path in an error
# Fields of the configuration that ask for more than pairs, unless they are empty; and their names
# in a refusal.
UNSUPPORTED = {
    "use_dora": "DoRA (use_dora)",
    "modules_to_save": "modules_to_save (whole embeddings, heads or other modules)",
    "trainable_token_indices": "trainable_token_indices (embeddings)",
    "target_parameters": "target_parameters (experts)",
    "layer_replication": "layer_replication",
    "lora_bias": "lora_bias",
    "fan_in_fan_out": "fan_in_fan_out",
    "use_qalora": "QA-LoRA (use_qalora)",
    "use_bdlora": "block-diagonal LoRA (use_bdlora)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "arrow_config": "arrow_config",
    "monteclora_config": "monteclora_config",
    "velora_config": "velora_config",
    "kasa_config": "kasa_config",
}
# Initializations that leave the base model's weights as they are.
INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
# A pattern that names modules: no groups, few repetitions, so that matching takes no time.
PATTERN = re.compile(r"[\w.\\^$*+\[\]-]{1,200}")
MAX_PATTERNS, MAX_REPETITIONS = 4096, 3
MAX_RANK, MAX_ALPHA = 4096, 1e6


@dataclass(frozen=True)
class AdapterPair:
    """The two matrices of one module: scale * B (A x) is added to its product of x.

    Attributes:
    - a: [rank, in_features]
    - b: [out_features, rank]
    - scale: of the product
    """

    a: StoredTensor
    b: StoredTensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A, columns of B."""
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter whose files fit together.

    Attributes:
    - folder: of the files
    - pairs: by the module's name, such as model.layers.0.mlp.up_proj
    """

    folder: Path
    pairs: Mapping[str, AdapterPair]

    @property
    def rank(self) -> int:
        """The greatest of its pairs."""
        return max(pair.rank for pair in self.pairs.values())


def read_adapter(folder: Path, max_rank: int) -> AdapterFiles:
    """Reads the adapter in `folder`, whose ranks must not exceed `max_rank`.

    Raises ConfigurationError for files that are missing, broken or do not fit together, and for
    features that are not served.
    """
    try:
        config = read_adapter_config(folder)
        return AdapterFiles(folder, _pairs(folder, config, max_rank))
    except OSError as error:  # a path that is too long, or must not be read
        message = f"{str(folder)[:MAX_NAMED_CHARS]} cannot be read: {error.strerror}"
        raise ConfigurationError(message) from None


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales of adapter_config.json.

    Attributes:
    - rank, alpha: of modules that no pattern names
    - by_root: scales are alpha / sqrt(rank) (rsLoRA, https://arxiv.org/abs/2312.03732), else alpha
      / rank
    - ranks, alphas: of modules that a pattern names
    """

    rank: int
    alpha: float
    by_root: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict[str, int])
    alphas: Mapping[str, float] = field(default_factory=dict[str, float])

    def rank_of(self, module: str) -> int:
        """Returns the rank of the module's pair."""
        return self.ranks.get(_pattern_of(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the scale of the module's product."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(_pattern_of(self.alphas, module), self.alpha)
        return alpha / (sqrt(rank) if self.by_root else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads adapter_config.json. Raises ConfigurationError for a folder without an adapter, and for
    an adapter that is not served.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder of an adapter on this host")
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no {CONFIG}")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    fields = read_json(folder, CONFIG)
    _check_served(fields)
    return AdapterConfig(
        rank=_bounded(fields, "r", fields.raw.get("r", 8)),
        alpha=_alpha(fields, "lora_alpha", fields.raw.get("lora_alpha", 8)),
        by_root=fields.boolean("use_rslora", False),
        ranks={
            name: _bounded(fields, "rank_pattern", value)
            for name, value in _patterns(fields, "rank_pattern").items()
        },
        alphas={
            name: _alpha(fields, "alpha_pattern", value)
            for name, value in _patterns(fields, "alpha_pattern").items()
        },
    )


def _check_served(fields: Fields) -> None:
    kind = fields.raw.get("peft_type")
    if kind != "LORA":
        raise fields.error(f"peft_type {kind!r} is not served; LORA is")
    for name, words in UNSUPPORTED.items():
        if fields.raw.get(name):
            raise fields.error(f"{words} is not served")
    bias = fields.raw.get("bias", "none")
    if bias not in (None, "none"):
        raise fields.error(f"bias {bias!r} is not served; 'none' is")
    how = fields.raw.get("init_lora_weights")
    if not any(how is known or how == known for known in INITIALIZATIONS):
        raise fields.error(
            f"init_lora_weights {how!r} changes the base model's weights, which is not served; "
            "convert the adapter to plain LoRA when it is saved"
        )


def _bounded(fields: Fields, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise fields.error(f"{name} must be ranks from 1 to {MAX_RANK}, not {value!r:.40}")
    return value


def _alpha(fields: Fields, name: str, value: object) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not isfinite(float(str(value))) or abs(float(str(value))) > MAX_ALPHA:
        raise fields.error(f"{name} must be numbers up to {MAX_ALPHA:g}, not {value!r:.40}")
    return float(str(value))


def _patterns(fields: Fields, name: str) -> dict[str, JsonValue]:
    """Returns {pattern: value}, with patterns that take no time to match."""
    given = fields.raw.get(name) or {}
    if not isinstance(given, dict) or len(given) > MAX_PATTERNS:
        raise fields.error(f"{name} must be an object of at most {MAX_PATTERNS} patterns")
    for pattern in given:
        repeated = pattern.count("*") + pattern.count("+")
        if not PATTERN.fullmatch(pattern) or repeated > MAX_REPETITIONS:
            raise fields.error(f"{name}: the pattern {pattern[:100]!r} is not served")
        try:
            re.compile(pattern)
        except re.error as error:
            raise fields.error(f"{name}: {pattern[:100]!r} is no pattern: {error}") from None
    return given


def _pattern_of(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that is the end of the module's name, as PEFT matches them."""
    found = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(found, "")


def _pairs(folder: Path, config: AdapterConfig, max_rank: int) -> dict[str, AdapterPair]:
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in _headers(folder).items():
        found = PAIR_NAME.fullmatch(name.removeprefix(PREFIX))
        if found is None:
            raise ConfigurationError(f"{tensor.file}: {_unserved(name)}")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    if not parts:
        raise ConfigurationError(f"{folder / WEIGHTS} has no tensors")
    return {name: _pair(name, found, config, max_rank) for name, found in parts.items()}


def _headers(folder: Path) -> dict[str, StoredTensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").exists()
        instead = "; adapter_model.bin is not read: it is a pickle" if pickled else ""
        raise ConfigurationError(f"{folder} has no {WEIGHTS}{instead}")
    return read_header(path)


def _unserved(name: str) -> str:
    """Returns the error text for a tensor that belongs to no pair."""
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return f"{name[:200]} changes embeddings or the head, which is not served"
    if "magnitude" in name:
        return f"{name[:200]} is DoRA's, which is not served"
    return f"{name[:200]} belongs to no low-rank pair of a linear layer, which alone are served"


def _pair(
    name: str, found: Mapping[str, StoredTensor], config: AdapterConfig, max_rank: int
) -> AdapterPair:
    file = next(iter(found.values())).file
    if len(found) < 2:
        missing = "B" if "A" in found else "A"
        raise ConfigurationError(f"{file}: {name[:200]} lacks its lora_{missing}")
    a, b = found["A"], found["B"]
    for tensor in (a, b):
        if len(tensor.shape) != 2 or tensor.dtype not in DTYPES:
            raise ConfigurationError(
                f"{file}: {tensor.slice.name[:200]} is {tensor.dtype} of shape "
                f"{list(tensor.shape)}; matrices of {', '.join(DTYPES)} are served"
            )
    rank = config.rank_of(name)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise ConfigurationError(
            f"{file}: {name[:200]} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, where "
            f"{CONFIG} says rank {rank}"
        )
    if rank > max_rank:
        raise ConfigurationError(
            f"{file}: {name[:200]} has rank {rank}, --max-lora-rank is {max_rank}"
        )
    return AdapterPair(a, b, config.scale_of(name))


def files_digest(folder: Path) -> str:
    """Returns the digest of both files, as hexadecimal text. Raises ConfigurationError if one
    cannot be read.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for name in (CONFIG, WEIGHTS):
        try:
            with (folder / name).open("rb") as stream:
                digest.update((folder / name).stat().st_size.to_bytes(8, "little"))
                while block := stream.read(2**20):
                    digest.update(block)
        except OSError as error:
            raise ConfigurationError(f"{folder / name} cannot be read: {error}") from None
    return digest.hexdigest()


def identify(name: str, path: str, max_rank: int) -> Adapter:
    """The adapter in the folder `path`, called `name`. Raises ConfigurationError as read_adapter
    does."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 (a Path raises for an unknown user)
    folder = Path(expanded).absolute()
    read_adapter(folder, max_rank)
    return Adapter(name=name, path=str(folder), digest=files_digest(folder))


def parse_lora_modules(settings: Settings) -> dict[str, str]:
    """Returns folders by name, of --lora-modules. Raises ConfigurationError if it is no list of
    NAME=PATH, if a name is taken, or if adapters do not go with another setting.
    """
    if settings.enable_lora and settings.exact:
        raise ConfigurationError("--exact: not with --enable-lora, whose products are not exact")
    if settings.enable_lora and settings.task in ("embed", "score"):
        raise ConfigurationError(f"--enable-lora: not with --task {settings.task}")
    if not settings.lora_modules:
        return {}
    if not settings.enable_lora:
        raise ConfigurationError("--lora-modules needs --enable-lora")
    found: dict[str, str] = {}
    for word in _words(settings.lora_modules):
        name, path = _name_and_path(word)
        if name in found or name == settings.model_name:
            raise ConfigurationError(f"--lora-modules: the name {name!r} is taken")
        found[name] = path
    return found


def read_lora_modules(settings: Settings) -> dict[str, AdapterFiles]:
    """The adapters of --lora-modules by name. Raises ConfigurationError as parse_lora_modules and
    read_adapter do."""
    found: dict[str, AdapterFiles] = {}
    for name, path in parse_lora_modules(settings).items():
        try:
            found[name] = read_adapter(Path(path).expanduser().absolute(), settings.max_lora_rank)
        except ConfigurationError as error:
            raise ConfigurationError(f"--lora-modules {name}: {error}") from None
    return found


def _words(text: str) -> Sequence[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--lora-modules: {error}") from None


def _name_and_path(word: str) -> tuple[str, str]:
    """Parses NAME=PATH, or vLLM's object with "name" and "path"."""
    name, _, path = word.partition("=")
    if word.startswith("{"):
        try:
            given = json.loads(word)
            name, path = str(given["name"]), str(given["path"])
        except (ValueError, KeyError, TypeError, RecursionError):
            name = path = ""
    if not name or not path:
        raise ConfigurationError(f"--lora-modules: {word[:100]!r} is not NAME=PATH")
    return name, path
