"""Writes GGUF files for llama.cpp with our weights: float32, 8 bits, or as in the model's file.

Our own float32 weights are the same file's, dequantised, so both engines multiply with the same
numbers. Each file is written once, under a temporary name, and then renamed.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLOAT, EIGHT_BITS, AS_IT_IS = "f32", "q8_0", "as it is"
KINDS = {"none": FLOAT, "int8": EIGHT_BITS, "int4": AS_IT_IS}  # keys: our setting `quantization`
_FILE_TYPES = {FLOAT: 0, EIGHT_BITS: 7}  # general.file_type in llama.cpp's numbering
_BLOCK = 32  # weights per block of q8_0


def weights_for(model: str, kind: str, folder: Path, waiting: Callable[[str], None]) -> Path:
    """Return the path of the GGUF file, writing it first if it is missing.

    Raises ValueError if the model is not one GGUF file.
    """
    source = _source(model)
    if kind == AS_IT_IS:
        return source
    target = folder / f"{source.stem}-{kind}-{source.stat().st_size:x}.gguf"
    if not target.exists():
        waiting(f"writing {target.name} (once)")
        folder.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _convert(source, beside, kind)
            beside.rename(target)
        finally:
            beside.unlink(missing_ok=True)
    return target


def _source(model: str) -> Path:
    from tokenmill_worker.engine.model.model_files import BUILT_IN

    path = Path(model).expanduser()
    files = (
        BUILT_IN[model].files() if model in BUILT_IN else [path] if path.suffix == ".gguf" else []
    )
    if len(files) != 1 or not files[0].is_file():
        raise ValueError(
            f"llama.cpp reads GGUF files, and {model} does not come as one file of that kind"
        )
    return files[0]


def _convert(source: Path, target: Path, kind: str) -> None:
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":  # the writer's own
            continue
        value_type = field.types[0]
        inner = field.types[-1] if value_type == GGUFValueType.ARRAY else None
        value = _FILE_TYPES[kind] if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, value_type, sub_type=inner)
    shapes: list[tuple[Any, bool]] = []
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # numpy's order of dimensions
        is_packed = kind == EIGHT_BITS and len(shape) == 2 and shape[-1] % _BLOCK == 0
        shapes.append((tensor, is_packed))
        _announce(writer, tensor.name, shape, is_packed=is_packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, is_packed in shapes:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(_packed(values) if is_packed else values)
    writer.close()


def _announce(writer: Any, name: str, shape: list[int], *, is_packed: bool) -> None:
    import numpy
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

    if is_packed:
        bytes_ = quant_shape_to_byte_shape(shape, GGMLQuantizationType.Q8_0)
        size = int(numpy.prod(bytes_))
        writer.add_tensor_info(
            name, bytes_, numpy.dtype(numpy.uint8), size, GGMLQuantizationType.Q8_0
        )
    else:
        size = 4 * int(numpy.prod(shape))
        writer.add_tensor_info(
            name, shape, numpy.dtype(numpy.float32), size, GGMLQuantizationType.F32
        )


def _packed(values: Any) -> Any:
    from gguf import GGMLQuantizationType, quantize

    return quantize(values, GGMLQuantizationType.Q8_0)
