"""The command line of `peagle-client`."""

import argparse
import contextlib
import json

_EPILOG = """\
The text streams to stdout. What the server says about it goes to stderr: tokens per second, the acceptance
length (AL, tokens per round) and the share of rounds in which each drafted position was accepted.

  peagle-client "def quicksort(xs):"
  peagle-client --chat                                     several turns; Ctrl-D ends
  git diff | peagle-client --chat --system "Write a commit message."
  peagle-client --address host:50051 --tls-ca ca.pem --token-file token "def main():"

exit codes: 0 done, 1 the server failed, 2 bad input, 3 no server or one that is busy (try again),
  4 the time was up, 130 interrupted"""


class ClientError(Exception):
    """What ends the command: a message for a person and an exit code."""

    def __init__(self, message: str, code: int = 2):
        super().__init__(message)
        self.code = code


class _Parser(argparse.ArgumentParser):
    """Mistakes are one line."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(
        prog="peagle-client",
        description="Asks a peagle-serve for text and shows it as it comes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("prompt", nargs="?", metavar="PROMPT", help="text to continue (default: stdin)")
    add("--chat", action="store_true", help="through the model's chat template; PROMPT is a turn")
    add("--system", metavar="TEXT", help="with --chat: what stands before the conversation")
    add(
        "--chat-option", type=_named_value, action="append", default=[], metavar="NAME=VALUE",
        help="with --chat: set what the template takes, as enable_thinking=false; repeatable",
    )  # fmt: skip
    add("--json", action="store_true", help="one JSON object with everything, instead of text")
    add("--info", action="store_true", help="tell of model and load as JSON, and ask nothing")
    add("--health", action="store_true", help="exit with 0 if the server serves, else 3")

    add = made.add_argument_group("server").add_argument
    add("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="(default: %(default)s)")
    add("--tls", action="store_true", help="use TLS, with the authorities of this system")
    add("--tls-ca", metavar="FILE", help="use TLS, with the authorities of this PEM file")
    add("--tls-cert", metavar="FILE", help="this client's certificate chain, PEM")
    add("--tls-key", metavar="FILE", help="its private key, PEM")
    add("--token-file", metavar="FILE", help="bearer token, the file's first line")
    add("--timeout", type=float, metavar="S", help="give up after S seconds (default: never)")
    add(
        "--request-id",
        default="",
        metavar="ID",
        help="for the server's log (default: it makes one)",
    )

    add = made.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=256, metavar="N", help="new tokens (default: 256)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="N")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    add("--n", type=int, default=1, metavar="N", help="sequences; above 1 set a temperature")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    add("--ignore-eos", action="store_true", help="go on after the model's own end of text")
    add("--logprobs", type=int, metavar="N", help="with --json: of each token and the N likeliest")
    add(
        "--num-speculative-tokens", "-K", type=int, metavar="K",
        help="drafts per round; 0 decodes plainly (default: as the server was started)",
    )  # fmt: skip
    return made


def _named_value(text: str) -> tuple[str, object]:
    """`NAME=VALUE`; the value is JSON, or else text as it is."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def check(args: argparse.Namespace) -> None:
    """What argparse cannot see.

    Raises:
      ClientError: options that do not go together, or a value out of range.
    """
    rules = (
        ((args.system is not None or args.chat_option) and not args.chat, "--system and --chat-option need --chat"),
        (args.info and args.health, "give one of --info and --health"),
        ((args.info or args.health) and args.prompt is not None, "--info and --health take no PROMPT"),
        (args.logprobs is not None and not args.json, "--logprobs needs --json"),
        ((args.tls_cert is None) != (args.tls_key is None), "--tls-cert and --tls-key belong together"),
        (args.tls_cert and not (args.tls or args.tls_ca), "--tls-cert needs --tls or --tls-ca"),
        (args.timeout is not None and not args.timeout > 0, "--timeout must be above 0"),
        (args.max_tokens < 1, "--max-tokens must be at least 1"),
        (args.n < 1, "--n must be at least 1"),
        (not 0 < args.top_p <= 1, "--top-p must lie above 0 and not above 1"),
    )  # fmt: skip
    for broken, rule in rules:
        if broken:
            raise ClientError(rule)
