"""The interpreter's collector of cyclic garbage, in processes that serve.

A full collection walks all objects, and holds the lock of the interpreter meanwhile: hundreds of thousands of them, and
seconds, once programs have been traced or loaded. Those objects stay for good, so the collector leaves them out. What
requests make is freed by counting references; little is left to collect.
"""

import gc

from serving.memory import c_library_trim

_THRESHOLDS = (5_000, 20, 20)
"""Objects made since the last collection of the youngest, and collections of one generation for one of the next."""


def pause_collector() -> None:
    """Collects nothing until `settle_heap`: while a process starts, nearly all that is made stays."""
    gc.disable()


def settle_heap(*, collects: bool = True) -> None:
    """Leaves all objects that exist out of later collections.

    Args:
      collects: whether to collect once before, and to return free memory to the system: a second, before requests come.
    """
    if collects:
        gc.collect()
        c_library_trim()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
