"""Options of XLA for the programs of an engine on a GPU."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.device import H200
from peagle_jax.config import EngineConfig
from peagle_jax.engine.calls import RoundShape
from peagle_jax.engine.compiler_options import captures_collectives, compiler_options
from peagle_jax.engine.device_calls import CONTROLS, PREFILL, GreedyRound

SHAPE = RoundShape(8, 7)
GRAPHS = "xla_gpu_enable_command_buffer"


def test_only_greedy_rounds_capture_collectives():
    """Other rounds and prefill contain an all-to-all, whose capture ends the process."""
    config = EngineConfig(tensor_parallel=2)
    launched = EngineConfig(tensor_parallel=2, collectives="launched")
    with dispatch.assume(H200):
        found = {
            key: GRAPHS in compiler_options(key, config)
            for key in (GreedyRound(SHAPE), SHAPE, PREFILL, CONTROLS)
        }
        assert "COLLECTIVES" in compiler_options(GreedyRound(SHAPE), config)[GRAPHS].split(",")
        assert GRAPHS not in compiler_options(GreedyRound(SHAPE), launched)
        assert GRAPHS not in compiler_options(GreedyRound(SHAPE), EngineConfig())
    assert found == {GreedyRound(SHAPE): True, SHAPE: False, PREFILL: False, CONTROLS: False}


def test_several_hosts_launch_their_collectives_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not captures_collectives(EngineConfig(tensor_parallel=2))
    assert captures_collectives(EngineConfig(tensor_parallel=2, collectives="captured"))
