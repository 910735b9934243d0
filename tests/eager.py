"""Operations outside of `jax.jit` that only move or widen numbers, done by numpy.

Jax compiles a program for each operation and each shape, which takes 10 to 20 ms. Tests, references
of kernels and readers of checkpoints ask for thousands. The results here have the same bits, dtypes
and devices.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import jax
import ml_dtypes
import numpy as np
import pytest
from jax._src import core
from jax.extend.core import Primitive
from jax.extend.core import primitives as prims
from jax.sharding import SingleDeviceSharding

_MOST_BYTES = 2**20
_Array = type(jax.device_put(np.zeros(1)))
_WIDENED = {
    (np.dtype(old), np.dtype(new))
    for old, names in {
        "bool": ("float32", "int32", "uint32", "uint8", "int8", ml_dtypes.bfloat16),
        "int32": ("float32", "uint32", "uint8", "int8"),
        "uint32": ("float32", "int32", "uint8"),
        "uint8": ("float32", "int32", "uint32"),
        "int8": ("float32", "int32"),
        "float32": (ml_dtypes.bfloat16,),
        ml_dtypes.bfloat16: ("float32",),
        ml_dtypes.float8_e4m3fn: ("float32", ml_dtypes.bfloat16),
    }.items()
    for new in names
}
"""Conversions of which numpy and XLA agree in every bit: none from a float to a whole number or to
fp8.
"""


def _stage(x):
    return x


def _convert(x, *, new_dtype, weak_type, sharding):
    if weak_type or sharding is not None or (x.dtype, np.dtype(new_dtype)) not in _WIDENED:
        return None
    return x.astype(new_dtype)


def _broadcast(x, *, shape, broadcast_dimensions, sharding):
    if sharding is not None:
        return None
    ones = [1] * len(shape)
    for place, size in zip(broadcast_dimensions, x.shape, strict=True):
        ones[place] = size
    return np.broadcast_to(x.reshape(ones), shape)


def _reshape(x, *, new_sizes, dimensions, sharding):
    return None if dimensions is not None or sharding is not None else x.reshape(new_sizes)


def _squeeze(x, *, dimensions):
    return x.squeeze(tuple(dimensions))


def _transpose(x, *, permutation):
    return x.transpose(permutation)


def _slice(x, *, start_indices, limit_indices, strides):
    strides = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _dynamic_slice(x, *starts, slice_sizes):
    first = [
        min(max(int(start), 0), whole - size)
        for start, whole, size in zip(starts, x.shape, slice_sizes, strict=True)
    ]
    return x[
        tuple(slice(start, start + size) for start, size in zip(first, slice_sizes, strict=True))
    ]


def _concatenate(*parts, dimension):
    return np.concatenate(parts, axis=dimension)


def _iota(*, dtype, shape, dimension, sharding):
    if sharding is not None:
        return None
    column = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension]).reshape(column), shape).astype(dtype)


_RULES: dict[Primitive, Callable] = {
    core.stage_p: _stage,
    prims.convert_element_type_p: _convert,
    prims.broadcast_in_dim_p: _broadcast,
    prims.reshape_p: _reshape,
    prims.squeeze_p: _squeeze,
    prims.transpose_p: _transpose,
    prims.slice_p: _slice,
    prims.dynamic_slice_p: _dynamic_slice,
    prims.concatenate_p: _concatenate,
    prims.iota_p: _iota,
}


def _in_numpy(x) -> np.ndarray | None:
    """An operand as numpy sees it, unless jax would treat it in another way than a plain array."""
    if isinstance(x, np.ndarray | np.generic):
        plain = x.dtype.itemsize < 8 and x.dtype.kind in "biufV" and x.dtype.names is None
        return np.asarray(x) if plain else None
    if type(x) is not _Array or x.nbytes > _MOST_BYTES or x.weak_type or x.committed:
        return None
    return np.asarray(x) if isinstance(x.sharding, SingleDeviceSharding) else None


_is_paused = False


def _moved(operation: Primitive, rule: Callable) -> Callable:
    compiled = operation.impl

    def run(*operands, **params):
        if _is_paused:
            return compiled(*operands, **params)
        arrays = [_in_numpy(x) for x in operands]
        if any(x is None for x in arrays) or math.prod(params.get("shape", ())) > _MOST_BYTES:
            return compiled(*operands, **params)
        made = rule(*arrays, **params)
        if made is None:
            return compiled(*operands, **params)
        return jax.device_put(np.array(made))  # a copy, as jax may keep the memory that it gets

    return run


@contextlib.contextmanager
def moved_by_numpy() -> Iterator[None]:
    """Within the block small arrays of no chosen device are moved by numpy. Nothing changes under
    `jax.jit`.
    """
    with pytest.MonkeyPatch.context() as patch:
        for operation, rule in _RULES.items():
            patch.setattr(operation, "impl", _moved(operation, rule))
        yield


@contextlib.contextmanager
def moved_by_jax() -> Iterator[None]:
    """Within the block, which may lie in one of `moved_by_numpy`, jax compiles every operation, as
    for users.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.eager._is_paused", True)
        yield
