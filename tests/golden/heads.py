"""Random heads of every method on the Qwen3 target, run with speculators.

speculators trains heads and has no inference code, but its training forward with one anchor is
inference: the elements (anchor a, depth 0..K-1) are the row of the sampled token and the mask rows
of one drafting round. So its logits are the reference for both.

Its conventions, as found in version 0.9.0. Let x_p be the token at position p, g_p the taps there
and y_p the target's last residual stream, before the final norm. A sequence of N tokens becomes
N-1 slots (`shift_batch`); slot p holds

    token x_{p+1}   hidden g_p   label softmax(lm_head(norm(y_{p+1}))), i.e. of x_{p+2}
    loss mask l_{p+1}, the mask of the slot's input token, not that of its label

* P-EAGLE element (a, d) stands at slot p = a + d, has RoPE position p, label and loss mask of slot
  p, and for d > 0 the mask token and `mask_hidden` as inputs.
* EAGLE-3 gives slot p RoPE position p + 1 and step s of it p + 1 + s. Rotary attention sees only
  differences, so this equals starting at 0.
* The label distribution is over the draft vocabulary: target head rows of draft tokens, softmaxed.
* The loss is forward KL(target || draft), a mean over masked elements of all depths with 1e-5
  added to their number (P-EAGLE), or the sum over steps of such means (EAGLE-3, decay 1.0).
* DFlash shifts nothing: the block of anchor a has token x_a and masks at RoPE positions a, a+1, ..
  and sees g_p of p < a, in a layer with a window W of p >= a - W. Row j predicts x_{a+j}, in DSpark
  x_{a+j+1}. Labels and loss mask are those of the predicted token's row, the weight of the i-th
  draft is exp(-i / 4).
"""

from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import targets
import torch
from loguru import logger
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash import core as dflash_core
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import AutoConfig

NUM_TOKENS = 30
VOCAB = targets.COMMON["vocab_size"]
MASK_TOKEN = 255
CHAIN_ANCHORS = (0, 9, 20)
COD_RATIO, COD_RATIO_MIN = 0.7, 0.2  # speculators' defaults
PRUNED_VOCAB = 96
VERIFIER = "tests/golden/qwen3"


@dataclass(frozen=True, kw_only=True)
class Head:
    """One head to make: `num_draft` is K_train of P-EAGLE, the TTT steps of EAGLE-3, or the drafts
    of a block.

    `layer` overrides the decoder config, `flags` are speculators' own switches, `keep` names the
    weights that stay copies of the target's (speculators trains neither lm_head nor, for EAGLE-3,
    the embedding); with `shares` the file lacks them. `bfloat16` heads are stored so, and rounded
    before anything is computed.
    """

    seed: int
    num_draft: int
    algorithm: str = "peagle"
    num_layers: int = 1
    draft_vocab: int = VOCAB
    model_type: str = "llama"
    layer: dict = field(default_factory=dict)
    flags: dict = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    shares: bool = False
    bfloat16: bool = False


NARROW = dict(num_attention_heads=2, num_key_value_heads=1, intermediate_size=8)

HEADS = {
    "peagle-1": Head(seed=21, num_draft=4, bfloat16=True),
    "peagle-4": Head(  # like the released heads: llama3 rope, queries wider than the model
        seed=22, num_layers=4, num_draft=8, bfloat16=True,
        layer=dict(head_dim=32, rope_parameters=targets.LLAMA3_ROPE),
    ),
    "peagle-pruned": Head(seed=23, num_draft=6, draft_vocab=PRUNED_VOCAB, keep=("lm_head",)),
    "peagle-norms": Head(
        seed=24, num_layers=2, num_draft=5, draft_vocab=PRUNED_VOCAB, bfloat16=True,
        flags=dict(norm_before_residual=True, norm_before_fc=True),
    ),
    "peagle-qwen3": Head(  # q/k norms; the second layer slides
        seed=25, num_layers=2, num_draft=5, model_type="qwen3", draft_vocab=PRUNED_VOCAB,
        bfloat16=True,
        layer=dict(
            use_sliding_window=True, sliding_window=6, max_window_layers=1,
            rope_parameters=targets.QWEN3_ROPE,
        ),
    ),
    "peagle-bias": Head(  # biases of q, k, v and o in both kinds of layer; a norm for each tap
        seed=28, num_layers=2, num_draft=4, draft_vocab=PRUNED_VOCAB, bfloat16=True,
        layer=dict(attention_bias=True, intermediate_size=24),
        # norm_output does nothing where no state is fed back
        flags=dict(fc_norm=True, norm_output=True),
    ),
    "peagle-shared": Head(  # takes embedding, mask row included, and lm_head from the target
        seed=29, num_draft=3, layer=dict(intermediate_size=24), keep=("embed_tokens", "lm_head"),
        shares=True, bfloat16=True,
    ),
    "eagle3": Head(
        seed=26, num_draft=3, algorithm="eagle3", draft_vocab=PRUNED_VOCAB, keep=("embed_tokens",)
    ),
    "eagle31": Head(  # the switches of EAGLE 3.1
        seed=27, num_draft=3, algorithm="eagle3", draft_vocab=PRUNED_VOCAB,
        flags=dict(norm_before_residual=True, fc_norm=True, norm_output=True),
        keep=("embed_tokens", "lm_head"),
    ),
    "dflash": Head(  # the second layer slides, over all of the text, and is causal in the block
        seed=31, num_layers=2, num_draft=4, algorithm="dflash", draft_vocab=PRUNED_VOCAB,
        model_type="qwen3", keep=("embed_tokens",), bfloat16=True,
        layer=NARROW | dict(use_sliding_window=True, sliding_window=64, max_window_layers=1),
    ),
    "dflash2": Head(  # shares the target's tables; windows that are narrower than the text
        seed=32, num_draft=3, algorithm="dflash2", model_type="qwen3",
        keep=("embed_tokens", "lm_head"), shares=True, bfloat16=True,
        layer=NARROW | dict(use_sliding_window=True, sliding_window=6, max_window_layers=0),
        flags=dict(conv_kernel_size=2, conv_group_size=16, selector_rank=8),
    ),
    "dspark": Head(
        seed=33, num_draft=3, algorithm="dspark", model_type="qwen3", draft_vocab=PRUNED_VOCAB,
        keep=("embed_tokens",), bfloat16=True, layer=NARROW, flags=dict(markov_rank=8),
    ),
}  # fmt: skip

BLOCKS = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
}
"""Models and configs of block drafters."""


def build(head: Head, target_folder: Path) -> SpeculatorModel:
    """The random head, with the frozen target head and norm that speculators' labels need."""
    layer = dict(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=48,
        num_hidden_layers=head.num_layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-6, max_position_embeddings=512,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    ) | head.layer  # fmt: skip
    decoder = AutoConfig.for_model(head.model_type, **layer)
    decoder._attn_implementation = "eager"
    fields = dict(
        transformer_layer_config=decoder, draft_vocab_size=head.draft_vocab, **head.flags,
        speculators_config=SpeculatorsConfig(
            algorithm=head.algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=head.num_draft)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target_folder)),
        ),
    )  # fmt: skip
    taps = list(targets.TAPS)
    if head.algorithm in BLOCKS:
        make, config = BLOCKS[head.algorithm]
        block_size = head.num_draft + (head.algorithm != "dspark")
        fields |= dict(mask_token_id=MASK_TOKEN, block_size=block_size)
        model = make(config(aux_hidden_state_layer_ids=taps, **fields))
    else:
        fields["eagle_aux_hidden_state_layer_ids"] = taps
    if head.algorithm == "peagle":
        model = PEagleDraftModel(PEagleSpeculatorConfig(mask_token_id=MASK_TOKEN, **fields))
    elif head.algorithm == "eagle3":
        model = Eagle3DraftModel(Eagle3SpeculatorConfig(**fields))
    if head.draft_vocab != VOCAB:
        d2t, t2d = vocab_mapping(head)
        model.load_vocab_mappings(t2d, d2t)
    logger.disable("speculators")
    model.load_verifier_weights()
    frozen = ("verifier_", *head.keep)
    targets.randomise(model, head.seed, keep=frozen)
    if head.bfloat16:
        for name, param in model.named_parameters():
            if not name.startswith(frozen):
                param.data = param.data.bfloat16().float()
    return model.float().eval()


def vocab_mapping(head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t (offsets) and t2d of a draft vocabulary of made-up frequent tokens."""
    order = torch.from_numpy(np.random.default_rng(head.seed).permutation(VOCAB))
    counts = {token: 1000 - rank for rank, token in enumerate(order.tolist())}
    return build_vocab_mappings_from_distribution(counts, head.draft_vocab, VOCAB)


def write_sequence(out: Path) -> dict[str, torch.Tensor]:
    """The sequence that every head is run on, as the Qwen3 target sees it, by position p.

    Returns what it writes to expected/sequence.safetensors, N = 30 tokens:

    tokens         int64 [N]       x_p
    taps           float [N, 192]  g_p: taps 2, 4 and 5 side by side
    last           float [N, 64]   y_p: the last residual stream, before the final norm
    target_logits  float [N, 256]  the target's own logits at p, which predict x_{p+1}
    loss_mask      int64 [N]       l_p: zero on a prompt of 6 tokens and on positions 17 and 18
    """
    tokens = targets.random_tokens(6, 1, NUM_TOKENS)
    seen = targets.forward(targets.build("qwen3"), tokens)
    loss_mask = torch.ones(NUM_TOKENS, dtype=torch.int64)
    loss_mask[:6] = 0
    loss_mask[17:19] = 0
    recorded = {
        "tokens": tokens[0],
        "taps": seen["taps"][0].flatten(1),
        "last": seen["last"][0],
        "target_logits": seen["logits"][0],
        "loss_mask": loss_mask,
    }
    targets.save_expected(recorded, "sequence", out)
    return recorded


def slots(recorded: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arguments of speculators' forward: its own shift, then a batch dimension."""
    shifted = shift_batch(
        {
            "input_ids": recorded["tokens"],
            "hidden_states": recorded["taps"],
            "verifier_last_hidden_states": recorded["last"],
            "loss_mask": recorded["loss_mask"],
            "lengths": torch.tensor([NUM_TOKENS]),
            "position_ids": torch.arange(NUM_TOKENS),
        }
    )
    shifted.pop("lengths")
    batch = {name: array[None] for name, array in shifted.items()}
    return batch | {"document_ids": torch.zeros_like(batch["input_ids"])}


def run(model: SpeculatorModel, batch: dict, **kwargs) -> dict[str, torch.Tensor | list]:
    """One training forward and backward; `logits` has one [rows, Vd] per call of the head.

    The default loss is a Triton kernel; the same formula is asked for in plain PyTorch.
    """
    logits, labels = [], []
    hooks = [
        model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0].detach())),
        model.verifier_lm_head.register_forward_hook(lambda *call: labels.append(call[2][0])),
    ]
    model.zero_grad()
    _, loss, metrics = model(**batch, loss_config=resolve_loss_config("kl_div", "eager"), **kwargs)
    loss.backward()
    for hook in hooks:
        hook.remove()
    return {"logits": logits, "labels": labels[0], "loss": loss.detach(), "metrics": metrics}


def run_elements(model, batch: dict, anchor: torch.Tensor, depth: torch.Tensor) -> dict:
    """P-EAGLE's forward on the elements (anchor, depth) [E] in place of a random sample."""
    with mock.patch.object(
        peagle_core, "generate_cod_sample_indices", return_value=(anchor, depth)
    ):
        return run(model, batch, num_depths=int(depth.max()) + 1)


def record_peagle(model, head: Head, batch: dict) -> dict[str, torch.Tensor]:
    """The P-EAGLE arrays of `write`."""
    n = batch["input_ids"].shape[1]
    chain = torch.tensor(CHAIN_ANCHORS)
    masks = torch.arange(1, head.num_draft)
    anchor = torch.cat([torch.arange(n), chain.repeat_interleave(len(masks))])
    depth = torch.cat([torch.zeros(n, dtype=torch.int64), masks.repeat(len(chain))])
    logits = run_elements(model, batch, anchor, depth)["logits"][0]
    first, rest = logits[:n][chain][:, None], logits[n:].unflatten(0, (len(chain), len(masks)))

    torch.manual_seed(head.seed)
    anchor, depth = generate_cod_sample_indices(
        n, batch["loss_mask"], head.num_draft, COD_RATIO, COD_RATIO_MIN
    )
    cod = run_elements(model, batch, anchor, depth)
    return {
        "slot_labels": cod["labels"],
        "chain_anchor": chain,
        "chain_logits": torch.cat([first, rest], dim=1),
        "cod_anchor": anchor,
        "cod_depth": depth,
        "cod_logits": cod["logits"][0],
        "cod_loss": cod["loss"],
        "grad_hidden_norm": model.layers[0].hidden_norm.weight.grad,
        "grad_mask_hidden": model.mask_hidden.grad.flatten(),
        "grad_mask_embedding": model.embed_tokens.weight.grad[MASK_TOKEN],
    }


def record_eagle3(model, head: Head, batch: dict) -> dict[str, torch.Tensor]:
    """The EAGLE-3 arrays of `write`."""
    out = run(model, batch, ttt_steps=head.num_draft, ttt_step_loss_decay=1.0)
    logits = torch.stack(out["logits"])
    for step in range(1, head.num_draft):
        logits[step, -step:] = 0  # these slots ran out of true tokens and were fed token 0
    losses = [out["metrics"][f"loss_{step}_sum"] for step in range(head.num_draft)]
    return {
        "slot_labels": out["labels"],
        "ttt_logits": logits,
        "ttt_losses": torch.stack(losses),
        "ttt_loss": out["loss"],
        "grad_hidden_norm": model.layers[0].hidden_norm.weight.grad,
    }


def record_block(model, head: Head, recorded: dict) -> dict[str, torch.Tensor]:
    """The arrays of a block drafter, see `write`."""
    names = dict(taps="hidden_states", last="verifier_last_hidden_states", tokens="input_ids")
    batch = {names.get(name, name): array[None] for name, array in recorded.items()}
    batch["document_ids"] = torch.zeros_like(batch["input_ids"])
    del batch["target_logits"]
    chain = torch.tensor(CHAIN_ANCHORS)
    picked = (chain + 1, torch.ones(len(chain), dtype=torch.bool))
    core, seen = {"dspark": dspark_core}.get(head.algorithm, dflash_core), []
    norm = model.norm.register_forward_hook(lambda *call: seen.append(call[2][0].detach()))
    eager = {}
    if head.algorithm != "dflash":
        eager["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    metrics = mock.Mock(wraps=core.compute_metrics)
    with (
        mock.patch.object(dflash_core, "select_anchors", return_value=picked),
        mock.patch.object(core, "compute_metrics", metrics),
    ):
        out = run(model, batch, max_anchors=len(chain), **eager)
    norm.remove()
    final = metrics.call_args.args[0] if metrics.called else out["logits"][0]
    blocks = lambda x: x.detach().reshape(len(chain), -1, x.shape[-1])[:, -head.num_draft :]
    arrays = {"chain_anchor": chain, "chain_logits": blocks(final)}
    if head.algorithm == "dflash2":
        arrays["walk"] = walk(model, recorded["tokens"][chain + 1], arrays["chain_logits"], seen[0])
    if head.algorithm == "dflash":
        arrays |= {"block_loss": out["loss"], "grad_context_norm": model.hidden_norm.weight.grad}
    return arrays


def walk(model, newest: torch.Tensor, unary: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The drafts [anchors, K] of DFlash2's selector, each the best after the one before."""
    states, before, taken = hidden.reshape(len(newest), -1, hidden.shape[-1]), newest, []
    for i in range(unary.shape[1]):
        h = states[:, i - unary.shape[1]]
        ids, scores = model.candidate_selector.select(unary[:, i], h, before)
        before = ids.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
        taken.append(before)
    return torch.stack(taken, dim=1)


def write(name: str, recorded: dict[str, torch.Tensor], out: Path) -> None:
    """The checkpoint of head `name`, and expected/NAME.safetensors with, over n = N - 1 = 29 slots,

    slot_labels          float [n, Vd]    logits of the label distribution of slot p, that is
                                          target_logits[p + 1] at the draft vocabulary's ids
    grad_hidden_norm     float [64]       gradient of cod_loss or ttt_loss by hidden_norm

    of P-EAGLE heads, K = num_draft = speculative_tokens of the config,

    chain_anchor         int64 [3]        anchors a, each a drafting round of its own: the sequence
                                          so far is x_0..x_{a+1}, the last of them just sampled
    chain_logits         float [3, K, Vd] drafter logits of x_{a+2}, .., x_{a+1+K} in that round
    cod_anchor/cod_depth int64 [E]        a COD sample with r = 0.7, r_min = 0.2, no anchor limit
    cod_logits           float [E, Vd]    drafter logits of these elements
    cod_loss             float []         loss of that sample
    grad_mask_hidden     float [192]      its gradient by mask_hidden
    grad_mask_embedding  float [64]       and by the embedding row of the mask token, though it be
                                          the target's

    and of EAGLE-3 heads, whose step s in slot p takes token x_{p+1+s}, the hidden state that step
    s-1 left in slot p (before the final norm, or after it with norm_output), and attends to
    step 0 of slots 0..p and to slot p of steps 1..s: draft s+1 of the round at anchor p, with
    true tokens for drafts. The gradient flows back through the steps.

    ttt_logits           float [3, n, Vd] logits of x_{p+2+s}; zero where p + s >= n
    ttt_losses/ttt_loss  float [3], []    KL of step s over slots p < n - s with mask l_{p+1+s},
                                          against slot_labels[p + s]; and the sum of the three

    and of block drafters chain_anchor and chain_logits as of P-EAGLE heads, of DSpark given the
    true tokens before each draft, of DFlash2 before its selector, whose drafts are walk, int64
    [3, K]; of DFlash

    block_loss           float []         KL over the three blocks, a mean over rows with mask
    grad_context_norm    float [64]       its gradient by hidden_norm
    """
    head = HEADS[name]
    model = build(head, out / "qwen3")
    if head.algorithm in BLOCKS:
        arrays = record_block(model, head, recorded)
    else:
        record = record_peagle if head.algorithm == "peagle" else record_eagle3
        arrays = record(model, head, slots(recorded))
    targets.save_expected(arrays, name, out)
    model.config.speculators_config.verifier.name_or_path = VERIFIER
    if head.bfloat16:
        model.bfloat16()  # the gradients too, so after they are saved
    own = {
        n: x for n, x in model.state_dict().items() if not (head.shares and n.startswith(head.keep))
    }
    model.save_pretrained(out / name, state_dict=own)
    (out / name / "config.py").unlink()  # speculators' own source, which it saves beside its files
