"""A GGUF file's weights as float16, in another GGUF file: the same model without its quantization.

Names, metadata and tokenizer are kept; vectors stay float32, as llama.cpp's own converter has them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize

FILE_TYPE = Keys.General.FILE_TYPE
WRITTEN_BY_GGUF = "GGUF."  # such fields describe the file, and its writer makes them


def write(source: Path, target: Path) -> Path:
    """Writes `target`, which is returned, from the GGUF file `source` of any quantization."""
    reader = GGUFReader(source)
    architecture = reader.fields[Keys.General.ARCHITECTURE].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name != Keys.General.ARCHITECTURE and not field.name.startswith(WRITTEN_BY_GGUF):
            kind = field.types[0]
            inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
            value = field.contents() if field.name != FILE_TYPE else LlamaFileType.MOSTLY_F16.value
            writer.add_key_value(field.name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float16 if weights.ndim > 1 else "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
