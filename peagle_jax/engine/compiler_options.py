"""Options of XLA for the programs of an engine."""

import jax

from pallas_kernels import dispatch
from peagle_jax.config import EngineConfig
from peagle_jax.engine.device_calls import GreedyRound, Key

CAPTURED = (
    "COLLECTIVES", "CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION",
    "FUSION",
)  # fmt: skip
"""Kinds of XLA commands in a CUDA graph that captures collectives: the default of jaxlib 0.11.2, and COLLECTIVES.
XLA_FLAGS can add one kind to the default; the option of a single program must list all kinds."""


def captures_collectives(config: EngineConfig) -> bool:
    """Whether the collectives of greedy rounds are in the CUDA graph.

    Measured with the GPUs of one host; "auto" launches those of several hosts between the graphs.
    """
    if config.collectives == "auto":
        return config.tensor_parallel > 1 and jax.process_count() == 1
    return config.collectives == "captured"


def compiler_options(key: Key, config: EngineConfig) -> dict[str, bool | str]:
    """Compiler options of the program of `key`; none on other platforms than GPUs."""
    if dispatch.platform() != "cuda":
        return {}
    # A CUDA graph cannot contain CUB's sort. Top-k and top-p sort inside a conditional, so with CUB the
    # host would synchronise with the device every round to pick the branch.
    options: dict[str, bool | str] = {"xla_gpu_enable_cub_radix_sort": False}
    # Other rounds and prefill have an all-to-all, which cannot be captured: NCCL aborts the process.
    if captures_collectives(config) and isinstance(key, GreedyRound):
        options["xla_gpu_enable_command_buffer"] = ",".join(CAPTURED)
    return options
