"""The collector of cyclic garbage in the processes of a server."""

import os
from pathlib import Path

import grpc
import pytest

from bench.served import Served
from serving.protos import peagle_v1_pb2 as pb
from serving.protos.peagle_v1_pb2_grpc import GenerationStub
from tests.waiting import LIMIT, eventually

MOST_SECONDS = 0.02
WATCH = """
import gc, os, pathlib, sys, threading, time

folder = pathlib.Path(os.environ["COLLECTIONS"])

def watch():
    # Hundreds are frozen at the start.
    while not (folder / "collect").exists() or gc.get_freeze_count() < 10_000:
        time.sleep(0.01)
    start = time.thread_time()
    gc.collect()
    seconds, name = time.thread_time() - start, f"{os.getpid()}.seconds"
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part" / name).write_text(f"{seconds} {gc.isenabled()} {len(sys.modules)}")
    os.replace(folder / "part" / name, folder / name)

if any("serving" in argument for argument in sys.orig_argv):
    threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.slow
def test_a_full_collection_is_short_in_every_process_while_requests_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    paths = [str(tmp_path), str(Path(__file__).parents[2])]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PEAGLE_")}
    mine |= {"COLLECTIONS": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    options = ["--max-num-seqs", "4", "--max-model-len", "512"]
    with Served(options, log=tmp_path / "log", environment=mine) as server:
        server.wait()
        with grpc.insecure_channel(server.address) as channel:
            stub = GenerationStub(channel)
            endless = pb.Stopping(max_tokens=400, ignore_eos=True)
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[5, 6, 7]), stopping=endless)
            calls = [stub.Generate(request, timeout=LIMIT) for _ in range(4)]
            for call in calls:
                next(call)
            (tmp_path / "collect").touch()
            eventually(lambda: len([*tmp_path.glob("*.seconds")]) == 2, "both processes collected")
            for call in calls:
                assert sum(1 for _ in call) > 0
    found = [file.read_text().split() for file in tmp_path.glob("*.seconds")]
    for seconds, is_enabled, modules in found:
        assert is_enabled == "True"
        assert int(modules) > 100
        assert float(seconds) < MOST_SECONDS, found
