from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Report(_message.Message):
    __slots__ = ("hello", "devices", "alive", "stop", "end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    devices: Devices
    alive: Alive
    stop: Stop
    end: End
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., devices: _Optional[_Union[Devices, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("welcome", "start", "call", "alive", "end")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    start: Start
    call: Call
    alive: Alive
    end: End
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("host", "identity")
    class IdentityEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HOST_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    host: int
    identity: _containers.ScalarMap[str, str]
    def __init__(self, host: _Optional[int] = ..., identity: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("jax_address",)
    JAX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    jax_address: str
    def __init__(self, jax_address: _Optional[str] = ...) -> None: ...

class Devices(_message.Message):
    __slots__ = ("kind", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    count: int
    def __init__(self, kind: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ("num_calls",)
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    num_calls: int
    def __init__(self, num_calls: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class End(_message.Message):
    __slots__ = ("exit_code", "reason")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    reason: str
    def __init__(self, exit_code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("number", "run", "write_controls", "copy_rings", "compile")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    WRITE_CONTROLS_FIELD_NUMBER: _ClassVar[int]
    COPY_RINGS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    number: int
    run: Run
    write_controls: WriteControls
    copy_rings: CopyRings
    compile: Compile
    def __init__(self, number: _Optional[int] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., write_controls: _Optional[_Union[WriteControls, _Mapping]] = ..., copy_rings: _Optional[_Union[CopyRings, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("name", "round")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    name: str
    round: Round
    def __init__(self, name: _Optional[str] = ..., round: _Optional[_Union[Round, _Mapping]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("size", "num_draft", "is_greedy")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FIELD_NUMBER: _ClassVar[int]
    IS_GREEDY_FIELD_NUMBER: _ClassVar[int]
    size: int
    num_draft: int
    is_greedy: bool
    def __init__(self, size: _Optional[int] = ..., num_draft: _Optional[int] = ..., is_greedy: _Optional[bool] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("program", "plan", "mask")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    program: Program
    plan: bytes
    mask: bytes
    def __init__(self, program: _Optional[_Union[Program, _Mapping]] = ..., plan: _Optional[bytes] = ..., mask: _Optional[bytes] = ...) -> None: ...

class WriteControls(_message.Message):
    __slots__ = ("controls",)
    CONTROLS_FIELD_NUMBER: _ClassVar[int]
    controls: bytes
    def __init__(self, controls: _Optional[bytes] = ...) -> None: ...

class CopyRings(_message.Message):
    __slots__ = ("source", "target")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    source: int
    target: int
    def __init__(self, source: _Optional[int] = ..., target: _Optional[int] = ...) -> None: ...

class Compile(_message.Message):
    __slots__ = ("programs",)
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    programs: _containers.RepeatedCompositeFieldContainer[Program]
    def __init__(self, programs: _Optional[_Iterable[_Union[Program, _Mapping]]] = ...) -> None: ...
