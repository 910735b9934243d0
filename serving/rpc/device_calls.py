"""Device calls of an engine as messages, and back."""

import numpy as np

from peagle_jax.engine.device.device_calls import (
    Compile,
    CopyRings,
    DeviceCall,
    GreedyRound,
    Key,
    Run,
    WriteControls,
)
from peagle_jax.engine.host.calls import RoundShape
from serving.protos import hosts_v1_pb2 as pb

_INT = np.dtype("<i4")


def to_message(call: DeviceCall, number: int) -> pb.Call:
    """The message of call `number`."""
    message = pb.Call(number=number)
    match call:
        case Run(key, plan, mask):
            run = pb.Run(program=_program(key), plan=_bytes(plan), mask=_bytes(mask))
            message.run.CopyFrom(run)
        case WriteControls(controls):
            message.write_controls.controls = _bytes(controls)
        case CopyRings(source, target):
            message.copy_rings.CopyFrom(pb.CopyRings(source=source, target=target))
        case Compile(keys):
            message.compile.programs.extend(map(_program, keys))
    return message


def from_message(message: pb.Call) -> DeviceCall:
    """The call of a message that `to_message` made."""
    match message.WhichOneof("kind"):
        case "run":
            run = message.run
            plan = _array(run.plan) if run.HasField("plan") else None
            return Run(_key(run.program), plan, _array(run.mask) if run.HasField("mask") else None)
        case "write_controls":
            return WriteControls(_array(message.write_controls.controls))
        case "copy_rings":
            return CopyRings(message.copy_rings.source, message.copy_rings.target)
        case _:
            return Compile(tuple(map(_key, message.compile.programs)))


def _program(key: Key) -> pb.Program:
    if isinstance(key, str):
        return pb.Program(name=key)
    shape = key.shape if (is_greedy := isinstance(key, GreedyRound)) else key
    return pb.Program(round=pb.Round(**shape._asdict(), is_greedy=is_greedy))


def _key(program: pb.Program) -> Key:
    if program.WhichOneof("kind") == "name":
        return program.name
    one = program.round
    shape = RoundShape(one.size, one.num_draft)
    return GreedyRound(shape) if one.is_greedy else shape


def _bytes(array: np.ndarray | None) -> bytes | None:
    return None if array is None else array.astype(_INT, copy=False).tobytes()


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, _INT).astype(np.int32, copy=False)
