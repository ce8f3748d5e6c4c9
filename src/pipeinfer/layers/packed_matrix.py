"""Matrices that oneDNN has packed, as bytes, so that they can lie in memory of ours.

    packed_bytes    a view of a packed matrix' bytes
    layout_of       what oneDNN needs to know to read them
    packed_over     a packed matrix over such bytes
    obstacle        why there can be none here

torch has no public call for the last; that of its compiler's runtime is used, a C function of a
stable name, and tried before it is relied on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from pipeinfer.layers.weight import reordered

OPAQUE = 3  # c10::Layout::Mkldnn
CPU = 0  # c10::DeviceType::CPU
# c10::ScalarType of the dtypes that oneDNN packs.
SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
TRIED_SHAPE, TRIED_ROWS = (48, 40), (2, 17)


def packed_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n], which live as long as `packed`."""
    size = torch.ops.mkldnn._nbytes(packed)
    address = torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def layout_of(packed: torch.Tensor) -> bytes:
    """Of this version of oneDNN, for this CPU."""
    return torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy().tobytes()


def packed_over(
    values: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, layout: bytes
) -> torch.Tensor:
    """A packed matrix of `shape` over `values` uint8 [n], which must outlive it. Raises
    RuntimeError where torch makes none."""
    create, take = _calls()
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    made = ctypes.c_void_p()
    failed = create(
        values.data_ptr(), len(shape), sizes, sizes, 0, SCALAR_TYPES[dtype], CPU, 0,
        ctypes.byref(made), OPAQUE, layout, len(layout),
    )  # fmt: skip
    if failed or not made.value:
        raise RuntimeError("torch makes no packed matrix of bytes")
    return take(made.value)


@lru_cache(maxsize=1)
def _calls() -> tuple[Callable[..., int], Callable[[int], torch.Tensor]]:
    """From bytes to a handle, from that to a tensor."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    create = library.aoti_torch_create_tensor_from_blob_v2
    pointer, number, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    create.restype = kind
    create.argtypes = (
        pointer, number, pointer, pointer, number, kind, kind, kind, pointer, kind,
        ctypes.c_char_p, number,
    )  # fmt: skip
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, (pointer, ctypes.c_char_p, pointer)
    steal = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr  # pyright: ignore
    return create, lambda handle: steal(capsule(handle, None, None))


@lru_cache(maxsize=4)
def obstacle(dtype: torch.dtype) -> str:
    """Why no matrix of `dtype` can be made over bytes here; "" where a small one gives the products
    of the one whose bytes they are."""
    source = torch.Generator().manual_seed(0)
    try:
        packed = reordered(torch.randn(TRIED_SHAPE, generator=source).to(dtype))
        values = packed_bytes(packed).clone()
        over = packed_over(values, tuple(packed.shape), dtype, layout_of(packed))
        for rows in TRIED_ROWS:
            x = torch.randn(rows, TRIED_SHAPE[1], generator=source).to(dtype)
            products = [
                torch.ops.mkldnn._linear_pointwise(x, one, None, "none", [], "")
                for one in (packed, over)
            ]
            if not torch.equal(*products):
                return "its products are others"
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""
