"""Runs on a CPU what the threads of a cluster's blocks send each other."""

from types import SimpleNamespace

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cluster_send


class Threads:
    """Runs what the threads of a warpgroup emit, with whole numbers in place of MLIR's.

    Attributes:
      memory: (barrier, block, address) -> the word that was sent there.
    """

    def __init__(self, monkeypatch, *modules):
        """Takes the place of MLIR's operations in `cluster_send` and in modules that use it."""
        self.memory: dict[tuple[int, int, int], object] = {}
        self.thread = 0

        def inline_mgpu(arg_types, return_type=None):
            def run(function):
                def each_thread(*args):
                    for self.thread in range(128):
                        function(None, *map(self.argument, args))

                return each_thread

            return run

        fakes = dict(
            plus=lambda x, *others: x + sum(others),
            times=lambda x, factor: x * factor,
            constant=lambda value: value,
            mlir=SimpleNamespace(
                arith=SimpleNamespace(xori=lambda x, y: x ^ y),
                bitcast=lambda words, _: words,
                ir=SimpleNamespace(VectorType=SimpleNamespace(get=lambda *_: None)),
                i32=lambda: None,
            ),
            divided=divmod,
            thread=lambda: self.thread,
            shared_address=lambda ref: 0,
            barrier=lambda barriers, number: number,
            element=lambda vector, i: vector[i],
            bits=lambda number: number,
            send=self.send,
        )
        for module in (cluster_send, *modules):
            for name, fake in fakes.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        monkeypatch.setattr(plgpu, "inline_mgpu", inline_mgpu)

    def argument(self, arg):
        """Registers of this thread: of a function of the thread, or a number."""
        if isinstance(arg, np.ndarray) or arg is None:
            return arg
        if not callable(arg):
            return SimpleNamespace(registers=SimpleNamespace(item=lambda: arg))
        vectors = arg(self.thread)
        flat = np.empty(len(vectors), dtype=object)
        flat[:] = vectors
        return SimpleNamespace(
            registers=SimpleNamespace(flat=iter(flat), reshape=lambda *shape: flat.reshape(shape))
        )

    def send(self, address, number, block, words) -> None:
        assert address % (4 * len(words)) == 0
        for i, word in enumerate(words):
            place = number, block, address + 4 * i
            assert place not in self.memory
            self.memory[place] = word
