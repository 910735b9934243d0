"""Samples of compilers' output are read. tests/kernels/test_compile.py runs the compilers."""

import types

import pytest

from bench import deviceless, deviceless_round
from pallas_kernels.device import GENERATIONS

THUNKS = """\
000: kCommandBuffer [source | sink]
    001: kCustomCall   [source       | next=002 (1)] kCustomCall
    004: kConditional  [prev=001 (1) | sink        ]
      false_branch:
        002: kCustomKernel [source | sink] sort
      true_branch:
        003: kAllGather [source | sink] all-gather
005: kWhile [source | sink]
    006: kCopy [source | sink]
007: kCopy [source | sink]
008: kCommandBuffer [source | sink]
    009: kGemm [source | sink]
    010: kAllGather [source | sink]
"""


def test_launches_are_counted_in_graphs_and_beside_them():
    assert deviceless_round.read_thunks(THUNKS) == {
        "graphs": 2,
        "outside": {"kWhile": 1, "kCopy": 1},
        "collectives": {"kAllGather": 2},
        "kernels": 4,
    }
    alone = {"graphs": 0, "outside": {"kGemm": 1}, "collectives": {}, "kernels": 0}
    assert deviceless_round.read_thunks("000: kGemm [source | sink]\n") == alone


def test_the_largest_copy_is_found_in_a_program():
    hlo = """
    %copy.1 = bf16[4,2048]{1,0} copy(bf16[4,2048]{0,1} %x)
    ROOT %copy.2 = f8e4m3fn[128,64]{0,1:T(8,128)} copy(%y), metadata={op_name="a"}
    %copied = f32[1024,1024]{1,0} fusion(%copy.1)
    %flag = pred[] copy(%z)
    """
    assert deviceless_round.largest_copy(hlo) == 4 * 2048 * 2
    assert deviceless_round.largest_copy("%x = f32[8]{0} add(%y, %z)") == 0


def test_a_log_of_ptxas_is_read(tmp_path):
    log = tmp_path / "add_rms_norm_12.ptxas"
    log.write_text(
        "    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 16 barriers, 1 bytes smem\n"
    )
    assert deviceless.read_log(log) == ("add_rms_norm", 128, 12)


PTX = """\
.visible .entry f(
	.param .u64 p // debug
)
{
	.reg .b32 	%r<3>;
	.loc	1 262 0
$L__tmp1:
	mov.u32 	%r1, %tid.x; // thread
$L__BB0_1:
	@%p1 bra 	$L__BB0_1;
	// begin inline asm
	min.u32 %r2, %r1, 3;
}
"""


def test_code_is_its_instructions_and_branch_targets():
    lines = deviceless.instructions(PTX)
    assert lines == [
        "mov.u32 \t%r1, %tid.x;",
        "$L__BB0_1:",
        "@%p1 bra \t$L__BB0_1;",
        "min.u32 %r2, %r1, 3;",
    ]
    moved = PTX.replace("262", "300").replace("thread", "other").replace("tmp1", "tmp7")
    assert deviceless.instructions(moved) == lines
    assert deviceless.instructions(PTX.replace("3;", "4;")) != lines


def recorded(op: str, spec: str, **changes) -> dict:
    numbers = dict(registers=8, spills=0, smem=0, instructions=5, code="a")
    return dict(op=op, spec=spec, name="f") | numbers | changes


def test_kernels_are_compared_with_their_records(tmp_path):
    file = tmp_path / "records.jsonl"
    old = [recorded("a", "x"), recorded("a", "x"), recorded("a", "y"), recorded("b", "z")]
    deviceless.write_records(file, old)
    assert deviceless.read_records(file) == old
    assert deviceless.differences(old[:3], old) == []
    new = [recorded("a", "x"), recorded("a", "x", registers=9, code="c"), recorded("a", "w")]
    assert deviceless.differences(new, old) == [
        "a w f: not recorded",
        "a x f: registers 8 -> 9, code a -> c",
        "a y f: recorded, and not compiled",
    ]
    deviceless.write_records(file, new)
    assert deviceless.read_records(file) == [*new, old[3]]


def test_a_kernel_that_does_not_compile_is_a_row(monkeypatch, tmp_path):
    def refuse(spec):
        raise NotImplementedError(f"not {spec}")

    specs = types.SimpleNamespace(SPECS={"a": 1, "b": 2}, CHIPS=(90,), MMA={}, build=refuse)
    monkeypatch.setattr(deviceless, "specs_of", lambda op: specs)
    kernels = list(deviceless.compile_op("op", "h200", None, tmp_path))
    assert [one.error for one in kernels] == [f"NotImplementedError: not {i}" for i in (1, 2)]
    assert not list(deviceless.compile_op("op", "b200", None, tmp_path))


@pytest.mark.parametrize(
    ("most", "names"), [(None, "abcde"), (9, "abcde"), (3, "ace"), (2, "ae"), (1, "a")]
)
def test_some_specs_are_spread_over_their_list(most, names):
    specs = dict(zip("abcde", range(5), strict=True))
    assert deviceless.spread(specs, most) == {name: specs[name] for name in names}


@pytest.mark.parametrize("most", [2, 6, 14])
@pytest.mark.parametrize("op", deviceless.ops())
def test_a_spread_has_every_kernel_and_weight_format_of_its_operation(op, most):
    """With the numbers of specs that tests/kernels/test_compile.py compiles."""
    specs = deviceless.specs_of(op).SPECS
    chosen = deviceless.spread(specs, most)
    assert min(most, len(specs)) <= len(chosen) <= most + 14
    for field in ("kernel", "form", "fp8", "activations", "head_dim", "grow"):
        kinds = lambda some, field=field: {getattr(spec, field, None) for spec in some.values()}
        assert kinds(chosen) == kinds(specs), field


@pytest.mark.parametrize("module", [deviceless, deviceless_round])
def test_without_a_compiler_it_says_what_to_install(module, monkeypatch, capsys):
    monkeypatch.setattr(deviceless, "missing", lambda: "nothing is here")
    assert module.main([]) == 2
    assert "nothing is here" in capsys.readouterr().err


@pytest.mark.parametrize("op", deviceless.ops())
def test_specs_say_what_a_compiler_needs(op):
    specs = deviceless.specs_of(op)
    assert specs.SPECS
    assert {*specs.CHIPS} <= GENERATIONS.keys()
    assert specs.MMA.keys() <= {*specs.CHIPS}
