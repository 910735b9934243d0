"""Small tokenizers in the shape of each family's released files, with short chat templates.

Their ids are easy to read: in a byte-level vocabulary id 0x41 is the byte 0x41; in Gemma's the
token `<0x41>` is FIRST_BYTE + 0x41. Special tokens stand at the end, or, for Gemma, at the front.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

ROLES = ("user", "assistant", "system", "model")
FIRST_BYTE = 4
GEMMA_LETTERS = "▁\n" + "".join(map(chr, range(0x21, 0x7F))) + "é€中"

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GPT_OSS_SPECIAL = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
GEMMA_SPECIAL = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")

QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")
GPT_OSS_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GPT_OSS_TEMPLATE = """\
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\nReasoning: ' + reasoning_effort | default('medium') + '<|end|>' }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start|>' + message.role + ('<|channel|>final' if message.role == 'assistant' else '') }}
    {{- '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""

LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- if enable_thinking is defined and enable_thinking %}
    {{- '<|turn>system\\n<|think|>' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content | trim }}
        {%- set messages = messages[1:] %}
    {%- endif %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and not loop.first and loop.previtem.role == 'user' %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<|turn>' + role + '\\n' + message.content | trim + '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\\n' }}
{%- endif %}
"""


def _alphabet() -> list[str]:
    """The character that stands for each byte: its own where it has a visible one."""
    letters = pre.ByteLevel.alphabet()
    shifted = iter(sorted(letter for letter in letters if ord(letter) > 0xFF))
    return [chr(byte) if chr(byte) in letters else next(shifted) for byte in range(256)]


def _bpe(tokens: list[str], **options) -> models.BPE:
    """BPE over the tokens given, which merges the letters of the roles: us, use, user, as, ..."""
    merges = [(role[:i], role[i]) for role in ROLES for i in range(1, len(role))]
    vocab = {token: number for number, token in enumerate(tokens)}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    return models.BPE(vocab, merges, **options)


def _byte_level(words: str) -> Tokenizer:
    backend = Tokenizer(_bpe(_alphabet()))
    backend.pre_tokenizer = pre.Sequence(
        [
            pre.Split(Regex(words), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _add(backend: Tokenizer, special: tuple[str, ...], plain: tuple[str, ...] = ()) -> Tokenizer:
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    backend.add_tokens([AddedToken(t, normalized=False) for t in plain])
    return backend


def _starts_with(backend: Tokenizer, token: str) -> processors.TemplateProcessing:
    number = backend.token_to_id(token)
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )


def qwen() -> Tokenizer:
    backend = _add(_byte_level(QWEN_WORDS), QWEN_SPECIAL, ("<think>", "</think>"))
    backend.normalizer = normalizers.NFC()
    return backend


def gpt_oss() -> Tokenizer:
    return _add(_byte_level(GPT_OSS_WORDS), GPT_OSS_SPECIAL)


def llama() -> Tokenizer:
    backend = _add(_byte_level(LLAMA_WORDS), LLAMA_SPECIAL)
    start = _starts_with(backend, "<|begin_of_text|>")
    backend.post_processor = processors.Sequence([backend.post_processor, start])
    return backend


def gemma() -> Tokenizer:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = _bpe([*tokens, *GEMMA_LETTERS], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = _add(Tokenizer(model), (*tokens[:4], *GEMMA_SPECIAL))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.post_processor = _starts_with(backend, "<bos>")
    return backend


QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}
GPT_OSS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|startoftext|>",
    "eos_token": "<|return|>",
}
LLAMA = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|eot_id|>",
}
GEMMA = {
    "tokenizer_class": "GemmaTokenizer",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
FAMILIES = {
    "qwen": (qwen, QWEN | {"chat_template": QWEN_TEMPLATE}, None),
    "gpt_oss": (gpt_oss, GPT_OSS, GPT_OSS_TEMPLATE),
    "llama": (llama, LLAMA | {"chat_template": LLAMA_TEMPLATE}, None),
    "gemma": (gemma, GEMMA, GEMMA_TEMPLATE),
}
"""What builds the tokenizer, tokenizer_config.json, and chat_template.jinja."""
MODEL_TYPES = {"qwen": "qwen3_moe", "gpt_oss": "gpt_oss", "llama": "llama", "gemma": "gemma4"}


def write(family: str, folder: Path) -> Path:
    """A model folder without weights."""
    build, settings, template = FAMILIES[family]
    build().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[family]}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder
