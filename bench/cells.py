"""Cells of `peagle-bench decode-step`: methods, numbers of drafts, and rules of acceptance."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench import rows
from bench.command import METHODS, check_num_drafts
from bench.commands.decode_step import Options
from bench.synthetic import accepted_by_text, drawn_acceptance, synthetic_acceptance
from peagle_jax.config import ConfigError, EngineConfig
from peagle_jax.draft_schedule import adaptive_of
from peagle_jax.method.step import AcceptRule
from peagle_jax.method.verify import verify

_DEFAULT_K = 7


class Variant(NamedTuple):
    """One method with its settings; measured at each concurrency."""

    method: str
    num_draft: int  # most drafts per round
    adaptive: str = "off"  # what the engine chooses, as in `EngineConfig`

    @property
    def name(self) -> str:
        chosen = "" if self.adaptive == "off" else f" by {self.adaptive}"
        return f"{self.method} K={self.num_draft}{chosen}"

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class CellsConfig(EngineConfig):
    """Engine sizes with one batch bucket per measured concurrency; prompts are computed anew."""

    concurrencies: tuple[int, ...]
    prefix_caching: bool = False
    only_greedy: bool = False
    """Whether all requests are greedy; other rounds are then not compiled."""

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        return tuple(sorted(self.concurrencies))


def texts_of(options: Options, num_draft: int) -> list[list[int]] | None:
    """Accepted drafts of each round, by text, from which acceptance is drawn; None: it is not."""
    if options.synthetic_acceptance_rows is None:
        return None
    measured = rows.read([options.synthetic_acceptance_rows])
    return accepted_by_text(measured, num_draft, options.synthetic_acceptance_set)


def accept_rule(options: Options, num_draft: int) -> AcceptRule:
    """The acceptance rule of the options.

    Raises:
      ConfigError: no rule over `num_draft` drafts can be as asked.
    """
    if (texts := texts_of(options, num_draft)) is not None:
        return drawn_acceptance(texts, num_draft)
    if options.synthetic_acceptance_length is not None:
        return synthetic_acceptance(options.synthetic_acceptance_length, num_draft)
    return verify


def variants(options: Options) -> list[Variant]:
    """The variants to measure, plain decoding first.

    Raises:
      ConfigError: K or an acceptance length without a drafter, or one that the other excludes.
    """
    if options.variants:
        return [_variant(text, options) for text in dict.fromkeys(options.variants)]
    length = options.synthetic_acceptance_length
    methods = [method for method in dict.fromkeys(options.method) if method != "none"]
    if not methods:
        for name, is_given in (
            ("-K", bool(options.k)),
            ("--synthetic-acceptance-length", length is not None),
            ("--synthetic-acceptance-rows", options.synthetic_acceptance_rows is not None),
            ("--adaptive", set(options.adaptive) != {"off"}),
        ):
            if is_given:
                raise ConfigError(f"{name} needs a method that drafts: --method eagle3 or peagle")
    drafts = sorted(set(options.k or [_DEFAULT_K]))
    drafting = []
    for method, k in itertools.product(methods, drafts):
        accept_rule(options, k)
        drafting += [Variant(method, k, adaptive) for adaptive in options.adaptive]
    return ([Variant("none", 0)] if "none" in options.method else []) + drafting


def _variant(text: str, options: Options) -> Variant:
    """A variant as it is written, `peagle:7:load`.

    Raises:
      ConfigError: there is none such.
    """
    method, _, rest = text.partition(":")
    drafts, _, adaptive = rest.partition(":")
    if text == "none":
        return Variant("none", 0)
    is_known = method in METHODS and method != "none"
    if not is_known or not drafts.isdecimal() or not int(drafts):
        raise ConfigError(f"--variants {text}: must be none, METHOD:K or METHOD:K:ADAPTIVE")
    check_num_drafts((int(drafts),))
    accept_rule(options, int(drafts))
    try:
        return Variant(method, int(drafts), adaptive_of(adaptive or "off"))
    except ConfigError as error:
        raise ConfigError(f"--variants {text}: {error.rule}") from error


def most_drafts(options: Options, variant: Variant) -> int:
    """J, the most drafts per round, of the variant's engine.

    A variant with a fixed K gets the J of a variant of its method that chooses K, so that both have equal
    programs, which compile once.
    """
    if variant.adaptive != "off":
        return variant.num_draft
    beside = [v for v in variants(options) if v.method == variant.method and v.adaptive != "off"]
    return max([variant.num_draft, *(other.num_draft for other in beside)])


def methods_of(chosen: Sequence[Variant]) -> list[str]:
    """The methods of variants, each once."""
    return list(dict.fromkeys(variant.method for variant in chosen))
