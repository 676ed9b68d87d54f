"""Writes a GGUF file anew with another type of weights; every weight goes through float32.

python -m bench.gguf_convert SOURCE.gguf TARGET.gguf BF16|Q8_0|Q4_0
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_FILE_TYPES = {
    Kind.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Kind.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Kind.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}


def convert(source: Path, target: Path, kind: Kind) -> None:
    """Matrices take the new type, vectors stay as they are, and so does everything else in the file."""
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, _text(reader, "general.architecture"))
    for field in reader.fields.values():
        is_written_anyway = field.name.startswith("GGUF.") or field.name == "general.architecture"
        if not is_written_anyway and field.name != "general.file_type":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _text(reader: gguf.GGUFReader, name: str) -> str:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the file has no {name}")
    return str(field.contents())


def main() -> None:
    source, target, kind = sys.argv[1:]
    convert(Path(source), Path(target), Kind[kind])


if __name__ == "__main__":
    main()
