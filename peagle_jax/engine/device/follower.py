"""Repeats the device calls of a leader: an engine in another process, of which this one holds a
share."""

from concurrent.futures import Future, ThreadPoolExecutor

from peagle_jax.engine.device.device_calls import (
    CONTROLS,
    RINGS,
    Compile,
    CopyRings,
    DeviceCall,
    Key,
    WriteControls,
)
from peagle_jax.engine.device.programs import AT_ONCE, Programs
from peagle_jax.method import step


class Follower:
    """Performs calls in the order in which `Programs.on_call` of the leader reported them.

    Programs compile in threads of their own, because rounds go on meanwhile. No result is read.

    Args:
      programs: equal to those of the leader.
      state: equal to the leader's before its first call.

    Attributes:
      state: after the last call.
    """

    def __init__(self, programs: Programs, state: step.State):
        self._programs, self.state = programs, state
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="compiler")
        self._compiling: dict[Key, Future] = {}

    def perform(self, call: DeviceCall) -> None:
        """Dispatches one call. It waits for the program of the call, and never for the device.

        Raises:
          Exception: the program of this call cannot be compiled or run.
        """
        if isinstance(call, Compile):
            for key in call.keys:
                compile_one = Compile((key,))
                job = self._pool.submit(self._programs.perform, self.state, compile_one)
                self._compiling[key] = job
            return
        if compiling := self._compiling.pop(_key(call), None):
            compiling.result()
        self.state, _ = self._programs.perform(self.state, call)


def _key(call: DeviceCall) -> Key:
    match call:
        case WriteControls():
            return CONTROLS
        case CopyRings():
            return RINGS
        case _:
            return call.key
