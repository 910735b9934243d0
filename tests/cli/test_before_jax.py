"""Mistakes in options show before jax is imported: one process tries all of a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT

ROOT = Path(__file__).parents[2]
_TRY_ALL = """
import contextlib, importlib, io, json, sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib"):
            raise RuntimeError("jax is imported")

sys.meta_path.insert(0, NoJax())
module, cases = json.loads(sys.argv[1])
main, found = importlib.import_module(module).main, []
for argv in cases:
    sys.argv = ["command", *argv]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    found.append((code, errors.getvalue()))
print(json.dumps(found))
"""

MODEL = "--model {target}"
OF_ALL = {
    "peagle_jax.__main__": [
        ("x --unknown", "--unknown"),
        ("x -K many", "'many'"),
        ("x --lora {target}", "no adapter_config.json"),
        ("--batch /no/such x", "/no/such: cannot be used"),
        ("x --batch a b", "has no effect"),
        ("x --prompt-logprobs", "it is for --batch"),
        ("x -K 100", "num_draft=100 (num_speculative_tokens) must lie between 0 and 32"),
        (
            "x --num-speculative-tokens-per-batch-size [[1,8,3]]",
            "batch-size is removed: adaptive load",
        ),
        ("x --ngram 6", "--ngram is removed: it had run on CPUs only"),
        ("x --adaptive fast", "'fast' must be off or load"),
        ("x --adaptive survival", "'survival' is removed: it had"),
        ("x --activations mxfp8", "'mxfp8' is removed: no GPU had run it"),
        ("x --activations fp4", "'fp4' must be bf16 or fp8"),
        ("x --temperature -1", "temperature=-1.0"),
        ("x --max-model-len 1000000000", "above the 2048 positions of the model; at most 2048"),
        ("x --model /no/such --method none", "/no/such: no such folder"),
        ("x --model /no/such", "/no/such: no such folder"),
        ("x --method dflash", "the embedded model has no dflash head: give --drafter DIR"),
        (f"x {MODEL}", "give --drafter DIR, or use --method none"),
        (f"x {MODEL} --drafter /no/such", "/no/such: no such folder"),
        (f"x --model {__file__}", f"{__file__}: a file, and no GGUF file"),
        (f"x {MODEL} --method none --max-model-len 300000", "at most 256 is possible"),
        (f"x {MODEL} --method none --drafter {{head}}", "--method none takes no --drafter"),
        ("x --drafter {head} --drafter {head}", "--drafter is given more than once"),
        ("--compare x --temperature 0.5", "--compare is greedy"),
        (f"--compare x {MODEL}", "drafting needs a head"),
    ],
    "serving.__main__": [
        ("--unknown 1", "--unknown"),
        ("--port x", "'x'"),
        ("--method none --drafter x", "takes no drafter"),
        ("--max-num-seqs 0", "max_num_seqs=0"),
        ("--num-speculative-tokens 100", "=100 (num_speculative_tokens) must lie between 0 and 32"),
        ("--num-speculative-tokens-per-batch-size 7", "batch-size is removed: adaptive load"),
        ("--adaptive fast", "'fast' must be off or load"),
        ("--adaptive survival", "'survival' is removed: it had"),
        ("--activations mxfp8", "'mxfp8' is removed: no GPU had run it"),
        ("--num-hosts 2", "--num-hosts is removed: a model on several hosts"),
        ("--max-model-len 1000000000", "at most 2048 is possible"),
        ("--model /no/such --method none", "/no/such: no such folder"),
        ("--model ./such", "./such: no such folder"),
        ("--method dflash", "the embedded model has no dflash head: give --drafter DIR"),
        (MODEL, "give --drafter DIR, or use --method none"),
        (f"{MODEL} --drafter /no/such", "/no/such: no such folder"),
        ("--auth-token-file /no/such", "/no/such: cannot read"),
        ("--tls-cert /no/such --tls-key /no/such", "TLS: /no/such"),
        ("--port 70000", "port=70000 must be a port"),
        ("--config /no/such", "/no/such: cannot be read"),
        ("--otlp-endpoint nowhere", "--otlp-endpoint is removed: "),
    ],
    "convert.__main__": [
        ("magic", "magic"),
        ("plan", "SRC"),
        ("plan /no/such", "/no/such: no such folder"),
        ("plan {head} --target /no/such", "/no/such: no such folder"),
        ("plan {target} --tensor-parallel 0", "0 is not positive"),
        ("convert /no/such x", "/no/such: no such folder"),
        ("verify {target} /no/such", "/no/such: no such folder"),
        ("export /no/such x", "/no/such: no such folder"),
        ("convert {target} x --restart", "--restart is removed"),
    ],
    "peagle_jax.training.__main__": [
        ("magic", "magic"),
        ("head --target /no/such --prompts {target} --out x", "--target /no/such: no such folder"),
        ("head --target {target} --prompts /no/such --out x", "--prompts /no/such: no such file"),
        ("head --target {target} --prompts {target} --out x --epochs 0", "--epochs 0.0"),
        ("plan --out x", "--target --preset"),
        ("target --data {target} --out x", "peagle_jax/assets/README.md"),
        ("drafter --method peagle", "peagle-train head"),
    ],
    "serving.client": [
        ("x --unknown", "--unknown"),
        ("x --timeout 0", "--timeout must be above 0"),
        ("x --token-file /no/such", "/no/such"),
        ("x --tls-ca /no/such", "/no/such"),
        ("x --logprobs 2", "--logprobs needs --json"),
    ],
}


@pytest.mark.parametrize("module", OF_ALL)
def test_mistakes_show_before_jax_is_imported(module, folders):
    cases = [
        (text.format(target=folders.target, head=folders.peagle).split(), part)
        for text, part in OF_ALL[module]
    ]
    argument = json.dumps([module, [argv for argv, _ in cases]])
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PEAGLE")}
    done = subprocess.run(
        [sys.executable, "-c", _TRY_ALL, argument],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong = []
    for (argv, part), (code, error) in zip(cases, json.loads(done.stdout), strict=True):
        if code != 2 or part not in error or error.count("\n") != 1:
            wrong.append(f"{' '.join(argv)}: {code} {error}")
    assert not wrong, "\n".join(wrong)
