"""Runs one Python program without network, files or other processes, and writes how it ended.

`lab.sandbox` starts this file by its path in an isolated interpreter, so it imports the standard
library only. Arguments: the file descriptor of the verdict, processor seconds, bytes of memory.
"""

import ctypes
import io
import json
import os
import platform
import resource
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's numbers
_REFUSED = {
    # sockets
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    # processes and signals
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # files and folders; writing is limited to 0 bytes
    "truncate": (76, 45),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "creat": (85, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    # namespaces, mounts, rings
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
}
"""System calls that end in EPERM, with their numbers on x86-64 and aarch64."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # classic BPF
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_FIRST_X32 = 0x40000000  # further numbers for the same calls on x86-64
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # prctl


def refuse_system_calls() -> None:
    """Makes the calls in `_REFUSED` fail with EPERM in this process, for good.

    Raises:
      OSError: the kernel does not take the filter.
      ValueError: no number is known for this machine.
    """
    machine = platform.machine()
    place = list(ARCHITECTURES).index(machine)
    refused = [numbers[place] for numbers in _REFUSED.values() if numbers[place] is not None]
    # An instruction: code, instructions to skip if true, if false, operand.
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL)]
    steps += [(_LOAD, 0, 0, 0), (_AT_LEAST, len(refused) + 1, 0, _FIRST_X32)]
    steps += [(_EQUAL, len(refused) - i, 0, number) for i, number in enumerate(refused)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in steps))
    table = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for given in ((_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SET_SECCOMP, _FILTER, table, 0, 0)):
        if libc.prctl(*given):
            raise OSError(ctypes.get_errno(), "prctl")


def limit(seconds: int, memory: int) -> None:
    """Limits processor seconds and bytes of memory; no byte can be written to a file."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def verdict(program: str) -> tuple[str, str]:
    """How the program ends: "passed" or "failed", and the last line of its error."""
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    sys.setrecursionlimit(2000)
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
    except BaseException as error:  # SystemExit is no success either
        return "failed", f"{type(error).__name__}: {error}"[:200]
    return "passed", ""


def main() -> None:
    out, seconds, memory = map(int, sys.argv[1:])
    program = sys.stdin.read()
    limit(seconds, memory)
    refuse_system_calls()
    os.write(out, json.dumps(verdict(program)).encode())
    os._exit(0)  # whatever the program left behind does not run


if __name__ == "__main__":
    main()
