"""Reading what libtpu compiled; that it compiles is tested in lab/tests/test_portability_tpu.py."""

import pytest

from lab import deviceless_tpu

HLO = """\
HloModule jit_round, entry_computation_layout={(bf16[4,8]{1,0:T(8,128)})->bf16[4,8]{1,0}}

%fused_computation.1 (param_0: bf16[512,512]) -> bf16[512,512] {
  %param_0 = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.9 = bf16[512,512]{0,1:T(8,128)(2,1)} copy(%param_0)
}

%body (arg: (s32[], f8e4m3fn[128,64])) -> (s32[], f8e4m3fn[128,64]) {
  %copy.2 = f8e4m3fn[128,64]{0,1:T(32,128)} copy(%w), metadata={op_name="a"}
}

ENTRY %main.5 (p: bf16[512,512]) -> bf16[512,512] {
  %copy.3 = bf16[4,8]{1,0:T(8,128)(2,1)} copy(%p)
  %copy.4 = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} copy(%p)
  %copy-start.1 = (bf16[64,64]{1,0:T(8,128)S(1)}, bf16[64,64]{1,0}, u32[]{:S(2)}) copy-start(%p)
  %copy-start.2 = (s32[160,16]{1,0}, s32[160,16]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%v)
  %copied = f32[1024,1024]{1,0} fusion(%copy.3), kind=kLoop, calls=%fused_computation.1
  ROOT %flag = pred[3]{0} copy(%z)
}
"""


def test_copies_are_those_that_write_to_the_memory_of_the_device():
    assert deviceless_tpu.copies(HLO) == [
        (160 * 16 * 4, "s32[160,16]"),
        (128 * 64, "f8e4m3fn[128,64]"),
        (4 * 8 * 2, "bf16[4,8]"),
        (3, "pred[3]"),
    ]
    assert (
        deviceless_tpu.copies("ENTRY %e (x: f32[8]) -> f32[8] {\n  %x = f32[8]{0} add(%y)\n}") == []
    )


def test_of_weights_and_logits_weights_are_narrow():
    assert deviceless_tpu.largest_narrow(deviceless_tpu.copies(HLO)) == 128 * 64
    assert deviceless_tpu.largest_narrow([(9, "f32[9]"), (8, "u8[8]"), (4, "bf16[2]")]) == 8
    assert deviceless_tpu.largest_narrow([(9, "s32[9]"), (4, "u32[1]"), (3, "pred[3]")]) == 0


def test_every_chip_has_a_host_and_a_name():
    assert deviceless_tpu.CHIPS.keys() == deviceless_tpu.TOPOLOGIES.keys()
    assert {chip.platform for chip in deviceless_tpu.CHIPS.values()} == {"tpu"}


def test_without_libtpu_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(deviceless_tpu, "missing", lambda: "nothing is here")
    assert deviceless_tpu.main(["--chip", "v5e"]) == 2
    assert "nothing is here" in capsys.readouterr().err


def test_an_unknown_chip_is_refused(capsys):
    with pytest.raises(SystemExit):
        deviceless_tpu.main(["--chip", "v1"])
    assert "invalid choice: 'v1'" in capsys.readouterr().err
