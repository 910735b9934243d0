"""`peagle-bench decode-step --cold-start`: time from process start to the first token.

Each measurement is a new process: first with an empty compilation cache, then with the cache of the
first. The parent process does not use the device, because its children need the memory.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict

from tqdm import tqdm

from bench import rows
from bench.commands.decode_step import Options
from bench.presets import preset
from peagle_jax.config import ConfigError

_PARTS = ("imports", "device", "weights", "compile", "first_token")


def cold_start(options: Options, variants: list[tuple[str, int]]) -> list[dict]:
    """Starts a process twice for each (method, K), at the smallest concurrency; appends a row each.

    `seconds` and `warm_seconds` are whole starts; `parts` and `warm_parts` are their breakdown;
    `weights_share` and `warm_weights_share` are the share of generating weights, which a server reads.

    Raises:
      ConfigError: a child failed; the message is its last line.
    """
    chosen = preset(options.preset, options.layers)
    done = []
    for method, num_draft in tqdm(variants, unit="variant", disable=None):
        with tempfile.TemporaryDirectory(prefix="peagle-cold-start-") as cache:
            cold, warm = (_start(options, (method, num_draft), cache) for _ in range(2))
        row = {
            "kind": "cold-start",
            "model": chosen.name,
            "weights": chosen.weights,
            "layers": chosen.target.num_layers,
            "method": method,
            "num_speculative_tokens": num_draft,
            "concurrency": min(options.concurrency),
            "seconds": cold["seconds"],
            "warm_seconds": warm["seconds"],
            "weights_share": cold["parts"]["weights"] / cold["seconds"],
            "warm_weights_share": warm["parts"]["weights"] / warm["seconds"],
            "parts": cold["parts"],
            "warm_parts": warm["parts"],
            **cold["environment"],
            "command": rows.command(),
        }
        done.append(rows.rounded(row))
        rows.append(options.out, done[-1])
    return done


def _start(options: Options, variant: tuple[str, int], cache: str) -> dict:
    """Seconds, parts and environment of one start."""
    values = {name: value for name, value in asdict(options).items() if name != "out"}
    request = {"options": values, "variant": variant, "cache": cache, "started": time.time()}
    command = [sys.executable, "-m", "bench.cold_start"]
    child = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, check=False
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise ConfigError(f"{' '.join(command[1:])}: {lines[-1]}")
    return json.loads(child.stdout.strip().splitlines()[-1])


def first_token(request: dict) -> dict:
    """Measures all phases up to the first token of one request; runs in the child process."""
    times = [request["started"]]
    import jax

    from bench.cells import Variant
    from bench.decode_step import prompts_of
    from bench.random_models import Models
    from peagle_jax.cli import runs
    from peagle_jax.sampling_params import SamplingParams

    options, (method, num_draft) = Options.of(request["options"]), request["variant"]
    runs.keep_compiled_programs(request["cache"])
    times.append(time.time())
    jax.devices()
    dtype = runs.choose_dtype(options.dtype)
    times.append(time.time())
    chosen = preset(options.preset, options.layers)
    models = Models.make(chosen, [method], dtype=dtype, seed=options.seed)
    times.append(time.time())
    variant = Variant(method, num_draft)
    engine = models.engine(options, variant, (min(options.concurrency),))
    engine.warm_up()
    times.append(time.time())
    prompt = prompts_of(options, 1, chosen.target.vocab_size)[0]
    params = SamplingParams(max_tokens=2, temperature=options.temperature, ignore_eos=True)
    running = engine.add_request(prompt, params)
    while not running.output:
        engine.step()
    times.append(time.time())
    while engine.has_work:  # let calls in flight end before the process exits
        engine.step()
    spans = [after - before for before, after in itertools.pairwise(times)]
    return {
        "seconds": times[-1] - times[0],
        "parts": dict(zip(_PARTS, spans, strict=True)),
        "environment": rows.environment(options.commit),
    }


if __name__ == "__main__":
    print(json.dumps(first_token(json.load(sys.stdin))))
