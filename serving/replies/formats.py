"""The formats of replies that are text with markers, as data. GPT-OSS has `serving.harmony`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from serving.replies.forced import CallGrammars, json_calls, xml_calls
from serving.replies.lexer import SPACE
from serving.replies.readers import GemmaReader, JsonReader, Reader, XmlReader


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a family of models writes its replies.

    Args:
      name: value of the option --reply-format.
      signs: texts that a chat template of the family contains, all of them.
      reasoning: markers before and after the reasoning.
      readers: for each marker that opens a region with calls, a function that makes its reader.
      at_start: markers in `readers` that count at the start of a reply only.
      markers: what the lexer finds beside the markers above.
      grammars: of replies with calls; None: calls can be neither forced nor strict.
      special: markers that are special tokens, which text otherwise leaves out.
    """

    name: str
    signs: tuple[str, ...]
    reasoning: tuple[str, str] | None = None
    readers: Mapping[str, Callable[[], Reader]] = field(default_factory=dict)
    at_start: frozenset[str] = frozenset()
    markers: tuple[str, ...] = ()
    grammars: CallGrammars | None = None
    special: tuple[str, ...] = ()

    @property
    def all_markers(self) -> frozenset[str]:
        """All markers that the lexer looks for."""
        return frozenset((*(self.reasoning or ()), *self.readers, *self.markers))


_THINK = ("<think>", "</think>")

FORMATS = (
    Format(
        name="gemma4",
        signs=("<|tool_call>", "<|channel>"),
        reasoning=("<|channel>thought\n", "<channel|>"),
        readers={GemmaReader.OPENING: GemmaReader},
        markers=GemmaReader.MARKERS,
        special=(*GemmaReader.MARKERS, "<|channel>", "<channel|>"),
    ),
    Format(
        name="qwen3-coder",
        signs=("<tool_call>", "<function="),
        reasoning=_THINK,
        readers={"<tool_call>": XmlReader, "<function=": XmlReader},
        markers=XmlReader.MARKERS,
        grammars=xml_calls,
    ),
    Format(
        name="qwen3",
        signs=("<tool_call>",),
        reasoning=_THINK,
        readers={"<tool_call>": partial(JsonReader, "<tool_call>", "</tool_call>")},
        markers=("</tool_call>", *JsonReader.MARKERS),
        grammars=json_calls("arguments", "<tool_call>\n", "\n</tool_call>"),
    ),
    Format(
        name="llama3",
        signs=("<|start_header_id|>", '"parameters"'),
        readers={
            marker: partial(JsonReader, opening, None, between=SPACE + ";", needs_arguments=True)
            for marker, opening in (("{", None), ("<|python_tag|>", "<|python_tag|>"))
        },
        at_start=frozenset("{"),
        markers=JsonReader.MARKERS,
        grammars=json_calls("parameters", marker="<|python_tag|>"),
        special=("<|python_tag|>",),
    ),
    Format(name="think", signs=_THINK, reasoning=_THINK),
)
"""In the order in which their signs are looked for."""

NAMES = (*(one.name for one in FORMATS), "harmony", "none")
"""Values of --reply-format beside "auto"."""


def detected(template: str) -> Format | None:
    """The format of a model, by the source of its chat template; None: replies are plain text."""
    fits = (one for one in FORMATS if all(sign in template for sign in one.signs))
    return next(fits, None)
