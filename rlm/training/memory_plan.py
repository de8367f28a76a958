"""Estimate the memory of a run, and choose the size of the micro-batches.

A forward pass of a few tokens measures the memory for saved activations. All other amounts are
computed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlm.cli import UsageError, terminal
from rlm.model import available_memory, set_gradient_checkpointing
from rlm.ops import attention_bytes, score_bytes
from rlm.sampling import common_prefix_length
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.logprobs import LOGITS_CHUNK, token_logprobs

if TYPE_CHECKING:
    from peft import PeftModel

    from rlm.sampling import RolloutSampler
    from rlm.training.config import GRPOConfig
    from rlm.training.state import Learner

PROBE_TOKENS = 64  # number of tokens in the forward pass that measures the memory
# Upper bounds for the tokens of a micro-batch, because larger micro-batches are hardly faster. The
# matmuls of a CPU are saturated by a few hundred tokens in fp32 and by about a thousand tokens in
# bf16; the matmuls of a GPU are saturated by several thousand tokens.
CPU_MICRO_BATCH = {torch.float32: 512, torch.bfloat16: 1152}
GPU_MICRO_BATCH = 8192
SMALLEST_MICRO_BATCH = 64  # tokens
HEADROOM = 0.9  # share of the available memory that the plan may use
# Memory that is not counted elsewhere: the code that oneDNN generates for each matmul shape, and
# heap fragmentation between saved activations, which glibc hardly reuses (docs/log.md).
LIBRARY_BYTES = {"cpu": 3 * 2**26, "cuda": 0}
FRAGMENTATION = {"cpu": 1 / 3, "cuda": 0}  # as a share of the memory of the learning pass


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a run needs: GPU memory if the model is on a GPU, otherwise CPU memory."""

    loaded: int  # memory that is already allocated, for weights and libraries
    sampling: int  # the sampler's copy of the weights, and its KV cache
    optimizer: int  # gradients, the two moments of Adam, and a copy of the best adapter
    learning: int  # activations saved by a micro-batch, and its logits
    kept: int  # memory that libraries and the allocator do not return to the system
    available: int  # free memory, after loading the model
    train_batch_tokens: int  # tokens in a micro-batch, including padding
    checkpointing: bool = False  # whether the backward pass recomputes the activations
    halved: bool = False  # whether the micro-batch size was halved after an out-of-memory error

    def halve(self, largest: int) -> MemoryPlan:
        """Return the plan after an out-of-memory error: half the micro-batch, with checkpointing.

        Args:
            largest: the tokens in the largest micro-batch that was computed, which may be fewer
                than the plan allows.
        """
        tokens = max(min(self.train_batch_tokens, largest) // 2, SMALLEST_MICRO_BATCH)
        return replace(self, train_batch_tokens=tokens, checkpointing=True, halved=True)

    @property
    def peak(self) -> int:
        """The bytes at the peak.

        Sampling and learning alternate, and each frees its memory before the other one starts.
        """
        return self.loaded + self.optimizer + max(self.sampling, self.learning) + self.kept

    def __str__(self) -> str:
        gb = {name: f"{value / 2**30:.1f}" for name, value in vars(self).items()}
        how = ", with gradient checkpointing" if self.checkpointing else ""
        return (
            f"about {self.peak / 2**30:.1f} GB at the peak (loaded {gb['loaded']}, sampling "
            f"{gb['sampling']}, optimizer {gb['optimizer']}, learning {gb['learning']}, kept by "
            f"libraries {gb['kept']}); {gb['available']} GB are free; micro-batches of "
            f"{self.train_batch_tokens} tokens{how}"
        )


def plan_memory(
    config: GRPOConfig,
    weights: Learner,
    sampler: RolloutSampler,
    prompts: Sequence[Sequence[int]],
    evaluated: int,
) -> MemoryPlan:
    """Plan the memory of a GRPO run, choose the micro-batch size, and print the plan.

    If the sampler has servers of its own, this function starts them.

    Args:
        prompts: the longest prompts of the run, as token ids.
        evaluated: the number of validation problems.
    """
    policy = weights.policy
    sampler.start()  # a server uses memory, so it starts before the measurement
    longest = max(map(len, prompts))
    served = getattr(sampler, "max_model_len", None)  # maximum sequence length of a vLLM server
    if served and longest + config.max_new_tokens > served:
        raise UsageError(
            f"a prompt of {longest} tokens and --max-new-tokens {config.max_new_tokens} exceed the "
            f"server's limit of {served} tokens; leave out this problem, or serve with a larger "
            "--max-model-len"
        )
    if policy.device.type == "meta":  # a server has the weights
        return MemoryPlan(0, 0, 0, 0, 0, 0, train_batch_tokens=sys.maxsize)
    beyond_prefix = longest - common_prefix_length(prompts)
    sampling = max(
        sampler.bytes_for([n] * count, beyond_prefix, config.max_new_tokens)
        for count, n in (
            (config.batch_size, config.group_size),
            (evaluated, config.eval_group_size_for(evaluated)),
        )
        if count
    )
    device = policy.device.type
    available = available_memory(device)
    optimizer = 4 * sum(t.nbytes for t in weights.master_weights.values())
    code, holes = LIBRARY_BYTES.get(device, 0), FRAGMENTATION.get(device, 0)
    room = int((HEADROOM * available - optimizer - code) / (1 + holes))
    length = longest + config.max_new_tokens
    tokens, checkpointing, learning = fit_micro_batch(policy, length, room)
    plan = MemoryPlan(
        loaded=allocated(device),
        sampling=sampling,
        optimizer=optimizer,
        learning=learning,
        kept=code + int(holes * learning),
        available=available,
        train_batch_tokens=tokens,
        checkpointing=checkpointing,
    )
    terminal.line(f"memory: {plan}")
    if plan.peak - plan.loaded > (HEADROOM if device == "cuda" else 1) * available:
        terminal.line(
            "warning: this may not fit into memory: lower --max-new-tokens or --max-num-seqs, or "
            "use --quantize 4bit or a smaller --model"
        )
    return plan


def fit_micro_batch(
    policy: PreTrainedModel | PeftModel,
    longest_sequence: int,
    room: int,
    tokens: int | None = None,
) -> tuple[int, bool, int]:
    """Choose the size of a micro-batch, and whether to use gradient checkpointing.

    Gradient checkpointing is used only if no allowed size fits into the memory without it.

    Args:
        longest_sequence: the number of tokens in the longest sequence.
        room: the bytes that are available for a micro-batch.
        tokens: the fixed size of a micro-batch, for SFT. The default is the largest size that fits.

    Returns:
        The number of tokens in a micro-batch, whether to use gradient checkpointing, and the bytes
        that a micro-batch needs.
    """
    set_gradient_checkpointing(policy, False)
    per_token = activation_bytes(policy)
    on_cpu = CPU_MICRO_BATCH.get(policy.dtype, min(CPU_MICRO_BATCH.values()))
    largest = tokens or (GPU_MICRO_BATCH if policy.device.type == "cuda" else on_cpu)
    for checkpointing in (False, True):
        learning = partial(_learning_bytes, policy, per_token, checkpointing, longest_sequence)
        size = largest
        while tokens is None and size > SMALLEST_MICRO_BATCH and learning(size) > room:
            size = max(size // 2, SMALLEST_MICRO_BATCH)
        if learning(size) <= room:
            break
    return size, checkpointing, learning(size)


def _learning_bytes(
    policy: PreTrainedModel | PeftModel,
    per_token: int,
    checkpointing: bool,
    longest_sequence: int,
    tokens: int,
) -> int:
    """Return the bytes that the forward and backward pass of a micro-batch needs.

    The micro-batch has `tokens` tokens, or `longest_sequence` tokens if that is more.

    Args:
        per_token: the bytes that the forward pass saves per token without checkpointing.
    """
    model = policy.config.get_text_config()
    layers = model.num_hidden_layers
    if checkpointing:  # the inputs of all layers, and all activations of one layer
        per_token = per_token // layers + layers * model.hidden_size * policy.dtype.itemsize
    else:  # the activations of all layers, and the gradients of one layer
        per_token += per_token // layers
    tokens, dtype = max(tokens, longest_sequence), policy.dtype
    logits = score_bytes(model.vocab_size, LOGITS_CHUNK, dtype, policy.device.type)
    mask = tokens * longest_sequence * (dtype.itemsize + 1)  # the mask and its copy as booleans
    return tokens * per_token + logits + mask + attention_bytes(model, tokens, dtype)


def activation_bytes(policy: PreTrainedModel | PeftModel) -> int:
    """Measure the bytes per token that the forward pass saves for the backward pass."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    half = PROBE_TOKENS // 2
    probe = [Rollout(0, [0] * half, [0] * (half + 1), advantage=1.0, weight=1.0)]
    (micro,) = make_micro_batches(
        probe, max_rows=1, max_tokens=PROBE_TOKENS, device=policy.device.type
    )
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        logprobs, _ = token_logprobs(policy, micro, 1.0)
    del logprobs  # this frees the saved activations, too
    return sum(seen.values()) // PROBE_TOKENS


def allocated(device_type: str) -> int:
    if device_type == "cuda":
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss
