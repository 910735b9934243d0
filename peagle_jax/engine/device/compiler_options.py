"""Options of XLA for the programs of an engine."""

from pallas_kernels import dispatch


def compiler_options() -> dict[str, bool | str]:
    """Compiler options of a program; none on other platforms than GPUs.

    Collectives are launched between CUDA graphs, which is XLA's default. XLA can capture them, but
    runs such a program without its graph the first time, and that run computes wrong numbers
    (lab/log.md, "Several GPUs").
    """
    if dispatch.platform() != "cuda":
        return {}
    # A CUDA graph cannot contain CUB's sort. Log-probabilities are sorted inside a conditional, so
    # with CUB the host would synchronise with the device every round to pick the branch.
    return {"xla_gpu_enable_cub_radix_sort": False}
