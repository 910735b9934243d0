"""Generates the `_pb2` files from the `.proto` files (needs the `test` extra's grpcio-tools)."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def main() -> int:
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(_ROOT)) for path in Path(__file__).parent.glob("*.proto"))
    outputs = ["--python_out=.", "--pyi_out=.", "--grpc_python_out=."]
    return protoc.main(["protoc", f"--proto_path={_ROOT}", *outputs, *protos])


if __name__ == "__main__":
    import os

    os.chdir(_ROOT)
    sys.exit(main())
