"""Reads and writes tensors of the Open Inference Protocol, raw and typed. Inputs have
one element.
"""

import struct
from collections.abc import Sequence

from serving.errors import invalid
from serving.protos import open_inference_pb2 as pb

KINDS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
}
"""Inputs of the model, by name."""
OUTPUT = "text_output"
_MAX_DIMENSIONS = 8


def read_inputs(request: pb.ModelInferRequest) -> dict[str, bytes | bool]:
    """Reads the single element of every input, by name.

    Raises:
      ServiceError: INVALID_ARGUMENT that names the input.
    """
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(
            "raw_input_contents",
            f"{len(raw)} entries for {len(request.inputs)} inputs; give one each, or none",
        )
    inputs: dict[str, bytes | bool] = {}
    for index, tensor in enumerate(request.inputs):
        field = f"inputs[{tensor.name!r}]"
        _check_form(tensor, field, is_twice=tensor.name in inputs)
        if raw and tensor.HasField("contents"):
            raise invalid(field, "has contents beside raw_input_contents; give one of the two")
        read = _READERS[tensor.datatype]
        inputs[tensor.name] = read(raw[index] if raw else tensor.contents, field)
    return inputs


def text_output(
    response: pb.ModelInferResponse, texts: Sequence[str], *, is_raw: bool
) -> pb.ModelInferResponse:
    """Adds the output tensor to the response, with one element per text."""
    elements = [text.encode() for text in texts]
    tensor = response.outputs.add(name=OUTPUT, datatype="BYTES", shape=[len(elements)])
    if is_raw:
        packed = b"".join(struct.pack("<I", len(one)) + one for one in elements)
        response.raw_output_contents.append(packed)
    else:
        tensor.contents.bytes_contents.extend(elements)
    return response


def _check_form(tensor: pb.ModelInferRequest.InferInputTensor, field: str, *, is_twice: bool):
    kind = KINDS.get(tensor.name)
    if kind is None:
        raise invalid(field, f"is not an input of this model; it has {', '.join(KINDS)}")
    if is_twice:
        raise invalid(field, "is given twice")
    if tensor.parameters:
        names = ", ".join(sorted(tensor.parameters))
        raise invalid(field, f"parameters are not supported ({names}); send the data itself")
    if tensor.datatype != kind:
        raise invalid(field, f"is of type {tensor.datatype!r}; it must be {kind}")
    # Batching clients write [1, 1].
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise invalid(field, f"has {len(tensor.shape)} dimensions; it must be one element, [1]")
    if any(size != 1 for size in tensor.shape):
        raise invalid(field, f"has the shape {list(tensor.shape)}; it must be one element, [1]")


def _read_bytes(given: bytes | pb.InferTensorContents, field: str) -> bytes:
    if isinstance(given, bytes):
        if len(given) < 4 or struct.unpack("<I", given[:4])[0] != len(given) - 4:
            raise invalid(field, "is not one string with its length in front (4 bytes, little)")
        return given[4:]
    if len(given.bytes_contents) != 1:
        raise invalid(field, "needs one element in bytes_contents")
    return given.bytes_contents[0]


def _read_bool(given: bytes | pb.InferTensorContents, field: str) -> bool:
    if isinstance(given, bytes):
        if given not in (b"\0", b"\1"):
            raise invalid(field, "is not one byte, 0 or 1")
        return given == b"\1"
    if len(given.bool_contents) != 1:
        raise invalid(field, "needs one element in bool_contents")
    return given.bool_contents[0]


_READERS = {"BYTES": _read_bytes, "BOOL": _read_bool}
