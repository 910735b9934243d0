"""Options, and values of options, that the version before had, and why they are no more.

Commands and servers refuse them by name with the reason, and `EngineConfig` refuses the values.
"""

from collections.abc import Sequence

from peagle_jax.errors import ConfigError

VALUES: dict[tuple[str, str], str] = {
    ("adaptive", "survival"): "it had 87 to 102 % of the tokens per second of the best fixed K, "
    "which load reaches too; use load",
    ("activations", "mxfp8"): "no GPU had run it, and 11 of 24 greedy texts differed; use fp8, "
    "which B200 multiplies natively",
}
"""Reasons by option and value."""


OPTIONS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("num_hosts", "host_index", "coordinator", "hosts_token_file", "hosts_tls_cert"),
            *("hosts_tls_key", "hosts_tls_ca", "hosts_seconds", "hosts_start_seconds"),
        ),
        "a model on several hosts had run on CPUs only; run a server on each host, behind a "
        "gateway",
    ),
    "num_speculative_tokens_per_batch_size": "adaptive load finds the drafts of each batch size "
    "by itself",
    "ngram": "it had run on CPUs only, where AL grew by 1 % on HumanEval, and not beside adaptive "
    "load",
    "prefill_calls": "nothing was measured with a number other than the default, one call between "
    "two rounds and four if nothing decodes; use prefill_chunk or prefill_rows",
    "otlp_endpoint": "no client asked for spans; log lines have the latencies and the traceparent "
    "of each request",
    "api_processes": "four had 0.95 to 0.99 of the tokens per second of one; run a server for each "
    "device, behind a gateway",
}
"""Reasons by the option's name, as fields spell it."""


def check_choice(option: str, value: str, choices: Sequence[str]) -> str:
    """The value; raises `ConfigError` if it is none of the choices, with the reason if it was
    one."""
    if value not in choices:
        names = " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
        rule = why_not(option, value) or f"must be {names}"
        raise ConfigError.of(option, f"{value!r} {rule}")
    return value


def why_not(option: str, value: object) -> str | None:
    """Why an option has a value no more; None: it never had it."""
    reason = VALUES.get((option, value)) if isinstance(value, str) else None
    return reason and f"is removed: {reason}"
