"""Generates the `_pb2` files from the `.proto` files (needs the `test` extra's grpcio-tools)."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def main(out: Path = _ROOT) -> int:
    """Writes them below `out`, at their places in the package; returns protoc's exit code."""
    from grpc_tools import protoc

    protos = sorted(str(path) for path in Path(__file__).parent.glob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    return protoc.main(["protoc", f"--proto_path={_ROOT}", *outputs, *protos])


if __name__ == "__main__":
    sys.exit(main())
