"""Quantization of a checkpoint's matrices, as `quantization_config` in config.json describes it.

A format says what is on disk for each matrix; layers decide how to compute with it. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pipeinfer.checkpoint.files import Fields
from pipeinfer.gguf.header import INT4_GROUP, INT4_TYPES
from pipeinfer.settings import ConfigurationError

GROUPS = (32, 64, 128)  # supported group sizes of INT4, in columns, besides whole rows
REPEATS = re.compile(r"[*+?{]")
REPEATED_GROUP = re.compile(r"\)[*+?{]")  # a repeated group can take exponential time to match
MAX_REPEATS = 3
EXPERTS = (re.compile(r"\.experts"),)  # not quantized by --quantization int8: no kernel for them


@dataclass(frozen=True)
class Fp8:
    """FP8 weights, e4m3, with float32 scales.

    Attributes:
    - scale: the suffix of the scales' names on disk
    - scale_scope: the values that share one scale: a row, a matrix as it is on disk, or a `block`
    - block: rows and columns of a block; (1, 1) for other scopes
    - quantize_at_load: weights on disk are unquantized, and are quantized by row as they are loaded
    - bits: of a weight
    """

    scale: str = "weight_scale"
    scale_scope: Literal["row", "tensor", "block"] = "row"
    block: tuple[int, int] = (1, 1)
    quantize_at_load: bool = False
    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4:
    """INT4 weights: (n - zero) * scale, with whole numbers n from 0 to 15. An int32 on disk holds
    eight of them.

    Attributes:
    - packing: layout of the files
    - group: columns that share a scale and a zero point; 0: whole rows
    - zeros: whether zero points are on disk; otherwise each is 8
    - zero_shift: to be added to the zero points on disk
    - bits: of a weight
    """

    packing: Literal["awq", "gptq", "compressed-tensors"]
    group: int
    zeros: bool = True
    zero_shift: int = 0
    bits: ClassVar[int] = 4


@dataclass(frozen=True)
class Int8:
    """INT8 weights with a scale for each row, quantized as they are loaded from unquantized weights
    or from a GGUF file.

    Attributes:
    - bits: of a weight
    """

    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4Blocks:
    """INT4 weights of a GGUF file: (n - 8) * scale + zero, where n is a whole number from 0 to 15,
    and 32 columns of a row share a scale and a zero.

    Attributes:
    - bits: of a weight
    - group: columns that share a scale and a zero
    - types: of the file that have such weights
    """

    bits: ClassVar[int] = 4
    group: ClassVar[int] = INT4_GROUP
    types: ClassVar[tuple[str, ...]] = INT4_TYPES


@dataclass(frozen=True)
class Mxfp4:
    """MXFP4 weights of experts: e2m1, with one exponent for each 32 values of a row. Source: OCP
    Microscaling Formats, version 1.0.

    Attributes:
    - bits: of a weight
    """

    bits: ClassVar[int] = 4


Format = Fp8 | Int4 | Int4Blocks | Int8 | Mxfp4


@dataclass(frozen=True)
class Quantization:
    """The quantization of a model's matrices.

    Attributes:
    - method: `quant_method` of config.json, or the value of --quantization
    - format: of the quantized matrices
    - unquantized_modules: patterns of modules that are not quantized, to be searched in their names
    - dequantize_at_load: weights are dequantized as they are loaded, for devices without a kernel
      for the format
    - int4_modules: modules whose matrices stay in Int4Blocks, if all modules that are computed
      together with them do
    """

    method: str
    format: Format
    unquantized_modules: tuple[re.Pattern[str], ...] = ()
    dequantize_at_load: bool = False
    int4_modules: frozenset[str] = frozenset()

    def of(self, modules: Iterable[str]) -> Format | None:
        """The format of the matrix that `modules` are computed as, together; None: unquantized.

        Raises ConfigurationError if some of them are quantized and others are not.
        """
        plain = {
            name: any(one.search(name) for one in self.unquantized_modules) for name in modules
        }
        if len(set(plain.values())) > 1:
            kept = next(name for name, one in plain.items() if one)
            others = next(name for name, one in plain.items() if not one)
            raise ConfigurationError(
                f"quantization_config: {kept} is left out and {others} is not, but both are "
                "computed as one matrix"
            )
        if all(plain.values()):
            return None
        return Int4Blocks() if self.int4_modules.issuperset(plain) else self.format


def read_quantization(fields: Fields) -> Quantization | None:
    """The quantization in a config.json; None: weights are unquantized. Raises ConfigurationError,
    which names the field, for anything that would be computed wrongly.
    """
    given = fields.raw.get("quantization_config", fields.raw.get("compression_config"))
    if not given:
        return None
    if not isinstance(given, dict):
        raise fields.error("quantization_config is not an object")
    how = Fields(fields.path, given)
    method = given.get("quant_method")
    keyed = method == "compressed-tensors" and given.get("kv_cache_scheme")
    if keyed and not given.get("config_groups"):
        return None  # only the KV cache is quantized; see models/loading.py
    reader = METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise fields.error(
            f"quantization_config: quant_method {method!r} is not supported, only "
            f"{', '.join(METHODS)}"
        )
    return Quantization(str(method), reader(how), _unquantized_modules(how))


def choose_quantization(stored: Quantization | None, requested: str) -> Quantization | None:
    """The quantization that a model runs with.

    - stored: of the checkpoint
    - requested: value of --quantization: "auto", "none", "fp8", "int8" or the checkpoint's method

    Raises ConfigurationError if the checkpoint cannot be run so.
    """
    if requested == "auto" or (stored is not None and requested == stored.method):
        return stored
    if requested == "none":
        return None if stored is None else replace(stored, dequantize_at_load=True)
    if requested == "fp8" and stored is None:
        return Quantization("fp8", Fp8(quantize_at_load=True))
    if requested == "int8" and stored is None:
        return Quantization("int8", Int8(), EXPERTS)
    if requested == "fp8" and stored is not None and stored.format.bits == 8:
        return stored
    what = "plain" if stored is None else stored.method
    raise ConfigurationError(f"--quantization {requested}: the checkpoint's weights are {what}")


def _fine_grained(how: Fields) -> Fp8:
    """Reads quant_method "fp8": scales by block in files of DeepSeek and Qwen, one scale a matrix
    in others.
    """
    _only(how, "activation_scheme", ("dynamic", "static"), "dynamic")
    _only(how, "fmt", ("e4m3",), "e4m3")
    _only(how, "scale_fmt", ("float",), "float")
    _only(how, "expert_dtype", ("fp8",), "fp8")
    if how.raw.get("modules_to_convert"):
        raise how.error("quantization_config: modules_to_convert is not supported")
    block = how.raw.get("weight_block_size")
    if block is None:
        return Fp8(scale_scope="tensor")
    return Fp8("weight_scale_inv", "block", _block(how, "weight_block_size", block))


def _compressed(how: Fields) -> Fp8 | Int4:
    """Reads quant_method "compressed-tensors": FP8, or INT4 for weights alone."""
    kind = how.raw.get("format")
    groups = how.raw.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if not groups or any(group != groups[0] for group in groups):
        raise how.error("quantization_config: config_groups must have one scheme for all layers")
    if how.raw.get("sparsity_config") or how.raw.get("transform_config"):
        raise how.error("quantization_config: sparsity_config, transform_config are not supported")
    group = _object(how, "config_groups", groups[0])
    _only(group, "targets", (["Linear"],), ["Linear"])
    weights = _object(how, "weights", group.raw.get("weights"))
    if kind == "pack-quantized":
        return _packed(how, group, weights)
    if kind not in ("float-quantized", "naive-quantized"):
        raise how.error(f"quantization_config: format {kind!r} is not supported")
    _only(weights, "type", ("float",), None)
    _only(weights, "num_bits", (8,), None)
    _only(weights, "symmetric", (True,), True)
    strategy = _only(weights, "strategy", ("tensor", "channel", "block"), "tensor")
    if strategy != "block":
        return Fp8(scale_scope="row" if strategy == "channel" else "tensor")
    block = weights.raw.get("block_structure")
    return Fp8("weight_scale", "block", _block(how, "block_structure", block))


def _packed(how: Fields, group: Fields, weights: Fields) -> Int4:
    if group.raw.get("input_activations") is not None:
        raise how.error("quantization_config: input_activations beside 4 bits are not supported")
    _only(weights, "type", ("int",), None)
    _only(weights, "num_bits", (4,), None)
    _only(weights, "actorder", (None, "weight", "static"), None)
    strategy = _only(weights, "strategy", ("channel", "group"), None)
    size = _group_size(weights, weights.raw.get("group_size")) if strategy == "group" else 0
    return Int4("compressed-tensors", size, zeros=not weights.boolean("symmetric", True))


def _awq(how: Fields) -> Int4:
    _only(how, "bits", (4,), None)
    _only(how, "zero_point", (True,), True)
    _only(how, "version", ("gemm", "GEMM"), "gemm")
    return Int4("awq", _group_size(how, how.raw.get("group_size")))


def _gptq(how: Fields) -> Int4:
    _only(how, "bits", (4,), None)
    _only(how, "desc_act", (False,), False)  # with it, the columns of groups are permuted
    _only(how, "lm_head", (False,), False)
    _only(how, "pack_dtype", ("int32",), "int32")
    form = _only(how, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if how.raw.get("dynamic"):
        raise how.error("quantization_config: dynamic, layers of their own, is not supported")
    shift = 1 if form == "gptq" else 0
    return Int4("gptq", _group_size(how, how.raw.get("group_size")), zero_shift=shift)


def _mxfp4(how: Fields) -> Mxfp4:
    return Mxfp4()


METHODS: dict[str, Callable[[Fields], Format]] = {
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fine_grained,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


def _only(fields: Fields, name: str, values: tuple[Any, ...], missing: object) -> Any:
    """The value of a field, which must be one of `values`; `missing` stands for null and a missing
    field. Raises ConfigurationError.
    """
    given = fields.raw.get(name)
    given = missing if given is None else given
    if given not in values or isinstance(given, bool) != isinstance(values[0], bool):
        shown = " or ".join(map(repr, values))
        raise fields.error(f"quantization_config: {name} {given!r} is not supported, only {shown}")
    return given


def _object(fields: Fields, name: str, value: object) -> Fields:
    if not isinstance(value, dict):
        raise fields.error(f"quantization_config: {name} is not an object")
    return Fields(fields.path, value)


def _block(fields: Fields, name: str, value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and rows > 0 and columns > 0:
            return rows, columns
    raise fields.error(f"quantization_config: {name} must be two whole numbers, not {value!r}")


def _group_size(fields: Fields, value: object) -> int:
    if type(value) is int and (value == -1 or value in GROUPS):
        return max(value, 0)
    shown = ", ".join(map(str, GROUPS))
    raise fields.error(f"quantization_config: group_size {value!r} is not supported, only {shown}")


def _unquantized_modules(how: Fields) -> tuple[re.Pattern[str], ...]:
    """Patterns of the modules that the file leaves unquantized; methods have different names for
    the list.
    """
    modules: list[str] = []
    for name in ("ignore", "modules_to_not_convert", "ignored_layers"):
        given = how.raw.get(name) or []
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise how.error(f"quantization_config: {name} must be a list of names")
        modules += given
    return tuple(_pattern(how, one) for one in modules)


def _pattern(how: Fields, name: str) -> re.Pattern[str]:
    """The pattern for a name in the list of unquantized modules: it matches the module, modules
    within it, and modules whose path ends with the name; "*" stands for any text. Behind "re:"
    stands a regular expression. Raises ConfigurationError if it is wrong, or too complex for
    thousands of names.
    """
    if not name.startswith("re:"):
        inner = ".*".join(re.escape(part) for part in name.split("*"))
        return re.compile(rf"(?:^|\.){inner}(?:\.|$)")
    if len(REPEATS.findall(name)) > MAX_REPEATS or REPEATED_GROUP.search(name):
        raise how.error(f"quantization_config: {name!r} may take too long to match")
    try:
        return re.compile(rf"^(?:{name[3:]})")
    except (re.error, RecursionError, OverflowError) as error:
        raise how.error(f"quantization_config: {name!r} cannot be read: {error}") from None
