"""A trap of Mosaic that neither its interpreter nor a numeric test on random rows shows."""

import ast
from pathlib import Path

import pallas_kernels
from pallas_kernels.weight_tiles.warpgroups import launch_options

_ROOT = Path(pallas_kernels.__file__).parent
_REDUCE_ALIKE = {
    "rms_norm/mosaic_gpu.py",
    "moe/mosaic_norm.py",
}
"""Kernels whose warpgroups all reduce the same numbers, so that those of one reduction need no
order.

Two norms of a row, or two rows of a block, are two reductions. `stored_barrier` orders them: a
warpgroup begins the second after all have arrived there, and each arrives after it ends the first.
"""


def launches() -> list[tuple[str, dict[str, str]]]:
    """(file, keywords) of every kernel that runs several warpgroups."""
    found = []
    for path in sorted(_ROOT.rglob("mosaic*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "plgpu.kernel":
                keywords = {one.arg: ast.unparse(one.value) for one in node.keywords}
                if "num_threads" in keywords:
                    found.append((str(path.relative_to(_ROOT)), keywords))
    return found


def test_warpgroups_do_not_share_scratch_memory_of_reductions():
    """Mosaic reduces over warps in scratch memory of the block, and orders one warpgroup only:
    without scratch such a reduction does not compile."""
    files = {file for file, _ in launches()}
    assert files > _REDUCE_ALIKE
    for file, keywords in launches():
        if file not in _REDUCE_ALIKE:
            assert "reduction_scratch_bytes=0" in keywords.get("compiler_params", ""), file


def test_nor_do_those_that_share_activations():
    assert launch_options(1) == {}
    options = launch_options(2)
    assert options["num_threads"] == 2
    assert options["compiler_params"].reduction_scratch_bytes == 0
