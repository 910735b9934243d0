"""Frozen configurations of models, which `peagle_jax.checkpoint` makes from `config.json` files,
and of engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle_jax.errors import ConfigError
from peagle_jax.exclusions import check_options
from peagle_jax.options import at_least, check_all, is_int, option
from peagle_jax.removed import check_choice
from peagle_jax.rope_config import DynamicScaling, RopeConfig

Method = Literal["none", "eagle3", "peagle", "dflash"]
Family = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma4"]
Running = Literal["keep", "finish", "abort"]
"""What becomes of requests that run while weights are updated, see `Engine.update_weights`."""
FIRST_VERSION = "0"
"""Of the weights that an engine begins with."""
MAX_NUM_DRAFT = 32  # heads are trained for 4 to 16; each draft adds rows to every program


def _check_windows(windows: tuple[int | None, ...] | None, num_layers: int) -> None:
    if windows is not None and len(windows) != num_layers:
        raise ConfigError(f"{windows=} needs one entry for each of {num_layers=}")
    if any(window is not None and window < 1 for window in windows or ()):
        raise ConfigError(f"{windows=} must hold None or positive numbers of tokens")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer; see `TargetConfig.attention` and `DrafterConfig.attention`.

    Args:
      window: sliding window in tokens, including the row's own position; None is full attention.
      scale: factor on the scores; None is head_dim ** -0.5.
      bias, output_bias: whether the q/k/v and the output projection have biases.
      qk_norm: RMSNorm of each query and key head before rope.
      value_norm: RMSNorm without weight on each value head.
      shared_kv: no value projection; V is K's projection before norm weight and rope.
      sinks: attention sinks, one learned logit per head in the softmax's denominator.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    scale: float | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    value_norm: bool = False
    shared_kv: bool = False
    sinks: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads=} must be a multiple of {self.num_kv_heads=}")


@dataclass(frozen=True, kw_only=True)
class GlobalAttention:
    """Settings of Gemma 4's full-attention layers that differ from its sliding-window layers."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    shared_kv: bool


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: `top_k` of `num_experts` per token; `normalize` rescales their weights to
    sum 1.

    `dense_layers` have a dense MLP of width `dense_size` instead of experts (Qwen3-MoE).
    """

    num_experts: int
    top_k: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    dense_size: int | None = None

    def __post_init__(self):
        if self.dense_layers and self.dense_size is None:
            raise ConfigError(f"{self.dense_layers=} need dense_size, the width of their MLP")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target model of one of the families.

    Args:
      intermediate_size: width of the MLP, or of one expert.
      sliding_windows: window per layer, None entries have full attention; None: no sliding windows.
      global_attention: settings of the full-attention layers where they differ (Gemma 4).
      experts: mixture of experts instead of a dense MLP; swiglu_limit: GPT-OSS's clamp in the
        experts.
      attention_bias: biases of q, k, v and the output projection; in Qwen2 of q, k and v only.
      mlp_bias: biases of gate, up and down (Llama).
      logit_softcap: c in `c tanh(logits / c)`.

    Tap ids follow vLLM: id i is the residual stream entering layer i.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    mlp_bias: bool = False
    sliding_windows: tuple[int | None, ...] | None = None
    global_attention: GlobalAttention | None = None
    experts: ExpertsConfig | None = None
    swiglu_limit: float | None = None
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self):
        _check_windows(self.sliding_windows, self.num_layers)
        for layer in range(self.num_layers):
            self.attention(layer)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens; None is full attention."""
        return None if self.sliding_windows is None else self.sliding_windows[layer]

    def is_sparse(self, layer: int) -> bool:
        """Whether layer `layer` has a mixture of experts instead of a dense MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def mlp_size(self, layer: int) -> int:
        """Width of the MLP of layer `layer`, or of one of its experts."""
        dense = self.experts is not None and not self.is_sparse(layer)
        return self.experts.dense_size if dense else self.intermediate_size

    def attention(self, layer: int) -> AttentionConfig:
        """Attention of layer `layer`."""
        window = self.window(layer)
        wide = self.global_attention if window is None else None
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=wide.num_kv_heads if wide else self.num_kv_heads,
            head_dim=wide.head_dim if wide else self.head_dim,
            rope=wide.rope if wide else self.rope,
            window=window,
            scale=1.0 if self.family == "gemma4" else None,
            bias=self.attention_bias,
            output_bias=self.attention_bias and self.family != "qwen2",
            qk_norm=self.qk_norm,
            value_norm=self.family == "gemma4",
            shared_kv=wide.shared_kv if wide else False,
            sinks=self.family == "gpt_oss",
        )

    @property
    def has_dynamic_rope(self) -> bool:
        """Whether some layer has dynamic NTK rope: its frequencies change beyond `max_position`."""
        ropes = (self.attention(i).rope for i in range(self.num_layers))
        return any(isinstance(rope.scaling, DynamicScaling) for rope in ropes)

    @property
    def embedding_scale(self) -> float:
        """Factor on embedding rows; the compute dtype rounds it first (73.32 is 73.5 in
        bfloat16)."""
        return self.hidden_size**0.5 if self.family == "gemma4" else 1.0

    @property
    def default_taps(self) -> tuple[int, ...]:
        """Taps when a head's config names none (vLLM's rule `(2, L/2, L-3)`)."""
        return (2, self.num_layers // 2, self.num_layers - 3)


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a block drafter (DFlash) has besides the layers of every head, see `block_head`.

    Args:
      causal: of each layer, whether a row of the block sees only the rows before it.
      drafts_from_newest: the row of the newest token predicts the first draft; False: the masks
        alone predict.
      conv_taps, conv_group: rows that a convolution reads, and channels that share one of its
        predicted numbers (DFlash2); 0: none.
      markov_rank: inner width of the bias by the draft before (DSpark); 0: none.
      embedding_scale: factor on the embedding.
    """

    causal: tuple[bool, ...]
    drafts_from_newest: bool = False
    conv_taps: int = 0
    conv_group: int = 0
    markov_rank: int = 0
    embedding_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A draft head: EAGLE-3's architecture, with a mask token and `mask_hidden` P-EAGLE's, or with
    a `block` DFlash's.

    `method`: `peagle` and `dflash` draft in parallel (one pass), `eagle3` autoregressively (one
    pass per draft). `taps` None means the target's default taps. `target_hidden_size` is the width
    of one tap.
    """

    method: Literal["eagle3", "peagle", "dflash"]
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig
    num_taps: int = 3
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    own_lm_head: bool = True
    sliding_windows: tuple[int | None, ...] | None = None
    logit_scale: float = 1.0
    trained_num_draft: int | None = None
    """Number of draft positions the head was trained for (K_train); None if the checkpoint omits
    it."""
    trained_length: int | None = None
    """Tokens of the longest row it was trained on; None if the checkpoint omits it."""
    selector_rank: int = 0
    """Inner width of the selector, see `selector`; 0: the head has none."""
    block: BlockConfig | None = None
    """Of a `dflash` head."""

    def __post_init__(self):
        _check_windows(self.sliding_windows, self.num_layers)
        self.attention(0)
        self._check_block()
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("norm_before_fc and fc_norm exclude each other; set one of them")
        if self.selector_rank and self.method == "eagle3":
            raise ConfigError(
                "a selector belongs to a head that drafts in parallel: EAGLE-3 sees its earlier "
                "drafts"
            )
        if self.method != "eagle3" and self.mask_token_id is None:
            raise ConfigError(
                "a head that drafts in parallel needs a mask token id: add mask_token_id, "
                "pard_token or ptd_token_id to its config.json"
            )

    def _check_block(self) -> None:
        block = self.block
        if (self.method == "dflash") != (block is not None):
            raise ConfigError(f"{block=} does not go with {self.method=}")
        if block is None:
            return
        if len(block.causal) != self.num_layers:
            raise ConfigError(f"{block.causal=} needs one entry for each of {self.num_layers=}")
        if block.conv_taps and (block.conv_group < 1 or self.hidden_size % block.conv_group):
            raise ConfigError(f"{block.conv_group=} must divide {self.hidden_size=}")
        if self.selector_rank and (block.markov_rank or self.draft_vocab_size != self.vocab_size):
            raise ConfigError(
                "the selector of a block drafter goes with neither a Markov head nor a pruned "
                "draft vocabulary"
            )

    def block_rows(self, num_draft: int) -> int:
        """T, rows of a block that yields `num_draft` drafts: the newest token and masks. 0: the
        head drafts no blocks.

        Rows that see each other are as many as in training: with fewer, all draft worse.
        """
        if self.block is None:
            return 0
        trained = 0 if all(self.block.causal) else self.trained_num_draft or 0
        return max(num_draft, trained) + (not self.block.drafts_from_newest)

    def window(self, layer: int) -> int | None:
        """Sliding window of draft layer `layer` in tokens; None is full attention."""
        return None if self.sliding_windows is None else self.sliding_windows[layer]

    def attention(self, layer: int) -> AttentionConfig:
        """Attention of draft layer `layer`."""
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            window=self.window(layer),
            bias=self.attention_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm,
        )


@dataclass(frozen=True, kw_only=True)
class OwnDrafterConfig:
    """In place of a `DrafterConfig` for a drafter of the user's own: what the engine must give it.

    `taps`: ids of the target's streams, () for none. `layers`: shapes of the cache, a list of
    `LayerCache`.
    """

    taps: tuple[int, ...] = ()
    layers: tuple[AttentionConfig, ...] = ()
    method: Literal["own"] = "own"

    @property
    def num_layers(self) -> int:
        """Layers of the cache."""
        return len(self.layers)

    def attention(self, layer: int) -> AttentionConfig:
        """As `DrafterConfig.attention`."""
        return self.layers[layer]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Those fields of `EngineConfig` that are options of commands and servers too."""

    max_num_seqs: int = option(8, "most requests decoding at once", at_least(1), metavar="N")
    max_model_len: int = option(
        2048, "most tokens of prompt and output together", at_least(1), metavar="N"
    )
    selector: bool = option(True, "let the head's selector, if it has one, choose the drafts")
    draft_sampling: Literal["argmax", "sample"] = option(
        "argmax", "above temperature 0: draft the head's likeliest tokens, or draw them"
    )
    verify_method: Literal["token", "block"] = option(
        "block", "accept drawn drafts in a block, or one by one: never more"
    )
    tensor_parallel: int = option(
        1, "devices that share the model and run every round together", at_least(1), metavar="N"
    )
    gather: Literal["auto", "library", "peers"] = option(
        "auto",
        "how they exchange small arrays: by kernels that store into the memory of their peers, or "
        "by the library's collectives; auto: peers on Hopper GPUs linked by NVLink",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "dtype of keys and values: that of the weights, or e4m3 with scale 1"
    )
    activations: Literal["bf16", "fp8"] = option(
        "bf16", "how products with fp8 weights read activations; fp8 quantises them"
    )
    prefix_caching: bool = option(
        True, "keep the pages of earlier texts, and prefill only what follows them"
    )
    saved_rings: int | None = option(
        None, "beginnings whose sliding windows are kept (default: 64, in 256 MiB)", metavar="N"
    )
    prompt_logprobs: bool = option(
        False, "compile what prompt_logprobs of requests, and echo with logprobs, need"
    )
    max_logprobs: int = option(20, "most alternatives per token for logprobs", metavar="N")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineOptions):
    """Engine sizes. The programs are compiled for them, so they are fixed for the engine's
    lifetime.

    Args:
      num_draft: J, most draft tokens per round (the papers' K); 0 is plain decoding.
      adaptive: "load" chooses the drafts of each round at run time, see `engine.host.k_by_load`.
      batch_sizes: compiled batch sizes, ascending, the last one `max_num_seqs`; empty: powers of
        two.
      page_size: tokens per KV page.
      num_pages: KV pages including the dummy page 0; None: see `memory.fit_pages`.
      prefill_chunk, prefill_rows: prompt tokens per row and call; prompts per prefill call.
      small_prefills: compile smaller prefill programs too, for calls with few tokens
        (`engine.host.prefill_shapes`).
      long_prefills: and one for a long prompt alone; None: with small_prefills, where no layer has
        a window.
      max_waiting: places of the queue, beside free slots; without a place `add_request` raises
        `QueueFull`.
      check_replicas: compare what all devices hold alike after every call; an engine whose devices
        differ fails.
      greedy_rounds: compile rounds without branches too, for batches of greedy requests; None: see
        `greedy_shapes`.
      block_rows: of a block drafter, rows of a block; the engine sets it.
      rounds_per_call: rounds that one call of such a batch runs; None: see
        `round_shapes.rounds_per_call`.
      dtype: of weights and activations.
      programs_folder: compiled programs are kept here, see `engine.device.stored_programs`; None:
        nowhere.
    """

    num_draft: int = 7
    adaptive: Literal["off", "load"] = "off"
    batch_sizes: tuple[int, ...] = ()
    page_size: int = 16
    num_pages: int | None = None
    prefill_chunk: int = 128
    prefill_rows: int = 1
    small_prefills: bool = False
    long_prefills: bool | None = None
    max_waiting: int = 4096
    check_replicas: bool = False
    greedy_rounds: bool | None = None
    block_rows: int = 0
    rounds_per_call: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    programs_folder: Path | None = None

    def __post_init__(self):
        check_all(self)
        for name in (
            "page_size",
            "num_pages",
            "max_waiting",
            "rounds_per_call",
            "prefill_chunk",
            "prefill_rows",
        ):
            value = getattr(self, name)
            if value is not None and not (is_int(value) and value >= 1):
                raise ConfigError(f"{name}={value!r} must be at least 1")
        if not (is_int(self.num_draft) and 0 <= self.num_draft <= MAX_NUM_DRAFT):
            limits = f"must lie between 0 and {MAX_NUM_DRAFT}"
            raise ConfigError(f"num_draft={self.num_draft!r} (num_speculative_tokens) {limits}")
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        sizes = self.batch_sizes
        is_list = isinstance(sizes, tuple | list) and all(map(is_int, sizes))
        is_ascending = is_list and [*sizes] == sorted({*sizes})
        if not is_ascending or (sizes and (sizes[0] < 1 or sizes[-1] != self.max_num_seqs)):
            raise ConfigError(
                f"batch_sizes={sizes} must ascend, and end with max_num_seqs={self.max_num_seqs}"
            )
        check_options(self)
        if self.num_pages is not None and self.num_pages - 1 < self.pages_per_seq:
            raise ConfigError(
                f"num_pages={self.num_pages} cannot hold one request of "
                f"max_model_len={self.max_model_len} tokens, which needs {self.pages_per_seq} "
                f"pages of {self.page_size} tokens and the dummy page; raise num_pages to "
                f"{self.pages_per_seq + 1} or lower max_model_len"
            )

    @property
    def repeat(self) -> int:
        """`rounds_per_call`; 1 before the engine has chosen."""
        return self.rounds_per_call or 1

    @property
    def lookahead(self) -> int:
        """Number of positions past the committed length that a round may write: the drafter's 2J
        rows, or the J+1 real rows of a block drafter and those of its block."""
        J = self.num_draft
        return J + 1 + self.block_rows if self.block_rows else max(1, 2 * J)

    @property
    def pages_per_seq(self) -> int:
        """W, the width of the page table: pages of `max_model_len` tokens. Writes beyond are
        dropped."""
        return -(-self.max_model_len // self.page_size)

    def ring_pages(self, window: int) -> int:
        """Pages per slot in the ring buffer of a sliding-window layer, independent of the length.

        Window plus the rows of one call: no write overwrites a key that a row of the call still
        reads.
        """
        keys = min(window, self.max_model_len) + self.prefill_chunk + self.lookahead
        return -(-keys // self.page_size)

    @property
    def total_pages(self) -> int:
        """P, number of pages including the dummy page 0."""
        return self.num_pages or self.max_num_seqs * self.pages_per_seq + 1

    @property
    def cache_dtype(self) -> str:
        """dtype of keys and values in the cache."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else self.dtype

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """Compiled batch sizes: `batch_sizes`, or powers of two up to `max_num_seqs` and that
        number."""
        if self.batch_sizes:
            return self.batch_sizes
        powers = (2**n for n in range((self.max_num_seqs - 1).bit_length()))
        return (*powers, self.max_num_seqs)
