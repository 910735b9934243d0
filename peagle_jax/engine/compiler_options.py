"""Options of XLA for the programs of an engine."""

from pallas_kernels import dispatch
from peagle_jax.config import EngineConfig
from peagle_jax.engine.device_calls import GreedyRound, Key

CAPTURED = (
    "COLLECTIVES", "CONDITIONAL", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION",
    "FUSION",
)  # fmt: skip
"""What a CUDA graph holds where collectives are captured: XLA's own choice of jaxlib 0.11.2, and COLLECTIVES. As an
option of one program, unlike as a flag, XLA takes the whole list only."""


def compiler_options(key: Key, config: EngineConfig) -> dict[str, bool | str]:
    """The options that the program of `key` compiles with; none on other platforms than GPUs."""
    if dispatch.platform() != "cuda":
        return {}
    # A CUDA graph cannot contain CUB's sort. Top-k and top-p sort inside a conditional, so with CUB the
    # host would synchronise with the device every round to pick the branch.
    options: dict[str, bool | str] = {"xla_gpu_enable_cub_radix_sort": False}
    # The all-to-all of other rounds and of prefill cannot be captured: NCCL ends the process.
    if config.collectives == "captured" and isinstance(key, GreedyRound):
        options["xla_gpu_enable_command_buffer"] = ",".join(CAPTURED)
    return options
