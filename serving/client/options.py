"""The command line of `peagle-client`."""

import argparse
from collections.abc import Callable

from peagle_jax.cli.command_line import (
    Parser,
    add_chat,
    add_constraints,
    add_options,
    add_removed,
    given,
)
from peagle_jax.errors import ConfigError
from peagle_jax.options import options_of
from peagle_jax.sampling_params import SamplingParams

_EPILOG = """\
The text streams to stdout. Statistics go to stderr: tokens per second, the acceptance length (AL,
tokens per round) and the share of rounds in which each drafted position was accepted.

  peagle-client "def quicksort(xs):"
  peagle-client --chat                                     several turns; Ctrl-D ends
  git diff | peagle-client --chat --system "Write a commit message."
  peagle-client --address host:50051 --tls-ca ca.pem --token-file token "def main():"

exit codes: 0 success, 1 the server failed, 2 bad input, 3 no server or a busy one (try again),
  4 timeout, 130 interrupted"""

_OF_SERVER = ("include_stop_str_in_output", "skip_special_tokens")
_OF_CODE = "a program sends it, by gRPC or an OpenAI client (docs/serving.md)"
SAMPLED = tuple(name for name in options_of(SamplingParams) if name not in _OF_SERVER)
"""Options of `SamplingParams`, which checks their values as the server does."""


class ClientError(Exception):
    """Ends the command with a message for the user and an exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = Parser(
        prog="peagle-client",
        description="Sends a request to peagle-serve and writes the text while it is generated.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = command_line.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: stdin)")
    add_chat(add)
    add("--json", action="store_true", help="write one JSON object with all fields instead of text")
    add(
        "--info",
        action="store_true",
        help="write the model's description and the load as JSON, without a request",
    )
    add("--health", action="store_true", help="exit with 0 if the server serves, else 3")

    _add_server(command_line.add_argument_group("server").add_argument)
    _add_sampling(command_line.add_argument_group("sampling").add_argument)
    add_constraints(command_line.add_argument_group("structured output").add_argument)
    add_removed(command_line, dict.fromkeys(("tools", "cache_salt", "request_id"), _OF_CODE))
    return command_line


def _add_server(add: Callable) -> None:
    add(
        "--address",
        default="127.0.0.1:50051",
        metavar="HOST:PORT",
        help="of the server's gRPC port (default: %(default)s)",
    )
    add("--tls", action="store_true", help="use TLS with this system's certificate authorities")
    add(
        "--tls-ca", metavar="FILE", help="use TLS with the certificate authorities in this PEM file"
    )
    add("--tls-cert", metavar="FILE", help="this client's certificate chain, PEM")
    add("--tls-key", metavar="FILE", help="private key of the certificate, PEM")
    add("--token-file", metavar="FILE", help="file whose first line is the bearer token")
    add("--timeout", type=float, metavar="S", help="time limit in seconds (default: none)")
    add(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="requests with a lower number leave the queue first (default: 0)",
    )


def _add_sampling(add: Callable) -> None:
    add("--n", type=int, default=1, metavar="N", help="sequences; above 1 set a temperature")
    add_options(add, SamplingParams, *SAMPLED)


def check(args: argparse.Namespace) -> None:
    """Checks combinations of options, and values, which argparse does not check.

    Raises:
      ClientError: options that contradict each other, or a value out of range.
    """
    constraints = (
        args.json_object or None,
        args.json_schema,
        args.regex,
        args.choice,
        args.grammar,
    )
    rules = (
        (
            (args.system is not None or args.chat_option) and not args.chat,
            "--system and --chat-option need --chat",
        ),
        (args.info and args.health, "give one of --info and --health"),
        (
            (args.info or args.health) and args.prompt is not None,
            "--info and --health take no PROMPT",
        ),
        (args.logprobs is not None and not args.json, "--logprobs needs --json"),
        (args.prompt_logprobs is not None and not args.json, "--prompt-logprobs needs --json"),
        (
            (args.tls_cert is None) != (args.tls_key is None),
            "--tls-cert and --tls-key belong together",
        ),
        (args.tls_cert and not (args.tls or args.tls_ca), "--tls-cert needs --tls or --tls-ca"),
        (args.n < 1, "--n must be at least 1"),
        (args.timeout is not None and not args.timeout > 0, "--timeout must be above 0"),
        (
            sum(one is not None for one in constraints) > 1,
            "a text has one constraint: give one of --json-object, --json-schema, --regex, "
            "--choice and --grammar",
        ),
    )
    for broken, rule in rules:
        if broken:
            raise ClientError(rule)
    sampling(args)


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The sampling parameters.

    Raises:
      ClientError: a value out of range.
    """
    try:
        return SamplingParams(**given(args, *SAMPLED))
    except ConfigError as error:
        flag = options_of(SamplingParams)[error.field].flag
        raise ClientError(f"--{flag}: {error.rule}") from error
