"""The sampler equals `generate` and scoring, and its completions do not depend on the batch."""

import gc
import math
import random
import sys
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch
from conftest import (
    FAMILIES,
    USUAL_HEADS,
    byte_tokenizer,
    kernels,
    tile_kernels,
    tiny_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from rlm.cli.options import UsageError
from rlm.model.adapters import adapter_tensors, new_adapter
from rlm.ops import TorchOps
from rlm.ops.kernels import Kernels
from rlm.sampling import (
    Request,
    Sampler,
    SamplingParams,
    check_architecture,
    engine,
    prompt_seed,
)
from rlm.sampling.draw import apply_top_p, sample_tokens, uniforms
from rlm.sampling.kv_cache import CacheConfig
from rlm.sampling.requests import RequestState, Scheduler
from rlm.sampling.weights import copy_bytes, fused_linear
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.logprobs import token_logprobs

DTYPES = torch.float32, torch.bfloat16
# The configs of gpt_neox and gpt2 name no key-value heads, and gpt2 has learned positions. nemotron
# does not pass extra arguments on to its attention layers.
OTHERS = "phi", "gpt_neox", "gpt2", "nemotron"
# (architecture, whether to merge): only FAMILIES have the fast path.
KINDS = [(kind, merged) for merged in (True, False) for kind in FAMILIES]
KINDS += [(kind, False) for kind in OTHERS]


def a_model(kind):
    if kind in (*FAMILIES, "nemotron"):
        return tiny_model(kind)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=258,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(params=["compiled", "torch"])
def passes(request, monkeypatch):
    """Run the test with the compiled kernels and with torch."""
    if request.param == "torch":
        monkeypatch.setattr(engine, "ops_for", lambda *_: TorchOps())


@pytest.fixture(
    params=[(how, dtype) for how in ("compiled", "torch") for dtype in DTYPES],
    ids=lambda value: f"{value[0]}-{value[1]}",
)
def drawing(request):
    """`sample_tokens` with the compiled kernels and with torch, in each dtype."""
    how, dtype = request.param
    made = kernels(dtype, 1, 8) if how == "compiled" else TorchOps()
    return lambda logits, *rest: sample_tokens(logits.to(dtype), *rest, made)


def some_prompts(count, seed=0, longest=24):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ids(groups):
    return [[completion.token_ids for completion in group] for group in groups]


def generated(model, prompts, tokens):
    """Return the greedy continuation of each prompt by transformers."""
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 258}
    full = [model.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in prompts]
    return [[ids[len(prompt) :]] for ids, prompt in zip(full, prompts, strict=True)]


@cache
def generated_once(kind):
    """Return `generated` for an architecture; the result is shared by all tests."""
    return generated(a_model(kind), some_prompts(16), 20)


@pytest.mark.parametrize(("kind", "merged"), KINDS)
@pytest.mark.usefixtures("passes")
def test_greedy_equals_generate(kind, merged, tokenizer):
    sampler = Sampler(a_model(kind), tokenizer, max_num_seqs=5, merged=merged)
    groups = sampler.sample(some_prompts(16), 1, SamplingParams(20, temperature=0), [0] * 16)
    assert ids(groups) == generated_once(kind)


@pytest.mark.parametrize("merged", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("passes")
def test_a_completion_does_not_depend_on_who_shares_the_batch(merged, tokenizer):
    model, prompts = tiny_model(), some_prompts(7, longest=90)
    model.generation_config.eos_token_id = [*range(6)]  # some end early: others move there
    params, seeds = SamplingParams(72, temperature=1.0), [prompt_seed(0, i) for i in range(7)]

    def sample(prompts, n, seeds, max_num_seqs):
        sampler = Sampler(model, tokenizer, max_num_seqs=max_num_seqs, merged=merged)
        return ids(sampler.sample(prompts, n, params, seeds))

    expected = sample(prompts, 2, seeds, max_num_seqs=64)
    for max_num_seqs in (1, 5, 14):
        assert sample(prompts, 2, seeds, max_num_seqs) == expected
    order = random.Random(2).sample(range(7), 7)
    shuffled = sample([prompts[i] for i in order], 2, [seeds[i] for i in order], 9)
    assert shuffled == [expected[i] for i in order]
    assert sample([prompts[3]], 1, [seeds[3] + 1], 128) == [[expected[3][1]]]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "tiles"])
def test_where_products_are_compiled_no_bit_depends_on_the_batch(kind, tokenizer, monkeypatch):
    """Completions do not depend on the shared prefix or the number of threads either.

    If the matmuls are not compiled, `batch_note` says so.
    """
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    made = tile_kernels() if kind == "tiles" else kernels(dtype)
    monkeypatch.setattr(engine, "ops_for", lambda model, dtype=None: made)
    sizes = USUAL_HEADS | {"hidden_size": 192, "intermediate_size": 256}
    model = tiny_model(**sizes).to(dtype)
    beginning = [[], *[list(range(40))] * 5]
    prompts = [b + p for b, p in zip(beginning, some_prompts(6, longest=90), strict=True)]

    def sample(which, **options):
        sampler = Sampler(model, tokenizer, **{"max_num_seqs": 64, "merged": True} | options)
        chosen, params = [prompts[i] for i in which], SamplingParams(12, temperature=1.0)
        return sampler.sample(chosen, 2, params, [prompt_seed(0, i) for i in which])

    note = Sampler(model, tokenizer).batch_note
    assert bool(note) != made.has_linear
    if note:
        pytest.skip(note)
    together = sample(range(6))
    torch.set_num_threads(5)
    try:
        assert sample(range(6), max_num_seqs=3) == together
    finally:
        torch.set_num_threads(1)
    assert sample([5, 4, 3, 2, 1]) == together[:0:-1]  # these share a prefix
    assert [sample([i])[0] for i in range(6)] == together


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_one_call_for_all_layers_equals_a_call_for_each_operation(
    kind, dtype, tokenizer, monkeypatch
):
    """The cases include the biases of Qwen2, the norms of Qwen3, and rows for several threads."""
    model = tiny_model(kind)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.5)
    model.to(dtype)

    def sample(together):
        sampler = Sampler(model, tokenizer, max_num_seqs=300, merged=True)
        if sampler.batch_note:
            pytest.skip(sampler.batch_note)
        sampler._weights.refresh()
        assert bool(sampler._weights._decode_layers) == together
        return sampler.sample(some_prompts(30), 10, SamplingParams(12), [*range(30)])

    torch.set_num_threads(3)
    try:
        expected = sample(together=True)
        monkeypatch.setattr(Kernels, "decode_layers", lambda *_: None)
        assert sample(together=False) == expected
    finally:
        torch.set_num_threads(1)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it for gpt2
@pytest.mark.parametrize(("kind", "merged"), KINDS)
@pytest.mark.usefixtures("passes")
def test_sampled_logprobs_equal_scored_ones(kind, merged, tokenizer):
    model, temperature = a_model(kind), 0.6
    policy = new_adapter(model, r=4, alpha=8).eval()
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.normal_(0, 0.2)
    prompts = some_prompts(6)
    groups = Sampler(policy, tokenizer, max_num_seqs=5, merged=merged).sample(
        prompts, 3, SamplingParams(16, temperature), list(range(6))
    )
    rollouts = [
        Rollout(p, prompts[p], c.token_ids, 1.0, 1.0, c.logprobs)
        for p, group in enumerate(groups)
        for c in group
    ]
    for micro in make_micro_batches(rollouts, max_rows=7, max_tokens=999, device="cpu"):
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy, micro, temperature)
        gap = (logprobs - micro.sampler_logprobs)[micro.completion_mask].abs()
        assert gap.max() < 1e-4


def test_a_special_token_without_a_row_of_the_model_may_be_one_that_no_prompt_contains():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    assert len(tokenizer) == 260
    Sampler(tiny_model(), tokenizer)  # has 259 embeddings
    tokenizer.chat_template += "<image_soft_token>"
    with pytest.raises(UsageError, match="the tokenizer has 260 tokens"):
        Sampler(tiny_model(), tokenizer)


def test_an_end_token_ends_a_row_and_belongs_to_it(tokenizer):
    sampler = Sampler(tiny_model(), tokenizer)
    assert sampler.stop_ids == {257}
    groups = sampler.sample(some_prompts(20), 8, SamplingParams(40), list(range(20)))
    reasons = Counter()
    for completion in (c for group in groups for c in group):
        *others, last = completion.token_ids
        assert 257 not in others
        assert completion.finish_reason == ("stop" if last == 257 else "length")
        assert completion.truncated == (last != 257)
        assert len(others) == 39 or last == 257
        assert len(completion.logprobs) == len(completion.token_ids)
        reasons[completion.finish_reason] += 1
    assert min(reasons["stop"], reasons["length"]) > 0


def test_the_merged_copy_follows_the_adapter_and_leaves_the_model_alone(tokenizer):
    policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
    before = {name: tensor.clone() for name, tensor in policy.named_parameters()}
    merged, unmerged = (Sampler(policy, tokenizer, merged=value) for value in (True, False))
    prompts, params = some_prompts(8), SamplingParams(16)

    def drawn():
        found = [ids(s.sample(prompts, 2, params, list(range(8)))) for s in (merged, unmerged)]
        assert found[0] == found[1]
        return found[0]

    first = drawn()
    with torch.no_grad():
        for name, tensor in adapter_tensors(policy).items():
            tensor.normal_(0, 0.3)
            before[name] = tensor.clone()
    second = drawn()
    assert second != first
    with policy.disable_adapter():
        assert drawn() == first
    copy = [weakref.ref(layer) for layer in merged._weights._layers]
    merged.release()
    gc.collect()
    assert copy
    assert not any(layer() for layer in copy)  # the trainer needs the memory
    assert drawn() == second
    with torch.no_grad():  # a change of one tensor must be noticed
        tensor.normal_(0, 1)
        before[name] = tensor.clone()
    assert drawn() != second
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.named_parameters())


def test_a_merged_bf16_weight_is_rounded_only_once(monkeypatch):
    """The adapter's update and the norm's factors are applied in fp32."""
    policy = new_adapter(tiny_model(), r=4, alpha=8).to(torch.bfloat16).eval()
    layer = policy.get_base_model().model.layers[0]
    norm, linear = layer.post_attention_layernorm, layer.mlp.up_proj
    with torch.no_grad():
        for tensor in (norm.weight, linear.lora_B["default"].weight):
            tensor.normal_()
    down, up = (side["default"].weight.double() for side in (linear.lora_A, linear.lora_B))
    exact = (linear.weight.double() + 2 * up @ down) * norm.weight.double()
    kept = []
    monkeypatch.setattr(TorchOps, "linear", lambda self, weights, *_: kept.extend(weights))
    fused_linear(linear, ops=TorchOps(), norm=norm, dtype=torch.bfloat16)
    assert torch.equal(kept[0], exact.bfloat16())


def test_the_path_is_chosen_by_architecture_and_memory(tokenizer, monkeypatch):
    model = tiny_model()
    merged, unmerged = Sampler(model, tokenizer), Sampler(model, tokenizer, merged=False)
    assert "merged copy" in merged.description
    assert "as requested" in unmerged.description
    assert "may depend on its batch: unmerged weights use torch's matmuls" in unmerged.description
    # Sampling and training agree only with the same weights in fp32.
    assert (merged.matches_trainer, unmerged.matches_trainer) == (False, True)
    assert not Sampler(tiny_model().bfloat16(), tokenizer, merged=False).matches_trainer
    room = 2 * copy_bytes(model, model.dtype)  # a copy may use half of the memory
    monkeypatch.setattr("rlm.sampling.weights.available_memory", lambda device: room)
    assert "would take" not in Sampler(model, tokenizer).description
    assert "would take" in Sampler(model, tokenizer, share=0.9).description
    with pytest.raises(UsageError, match="not of the Llama family"):
        Sampler(a_model("phi"), tokenizer, merged=True)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("bloom", {}, "bloom models are not supported: transformers cannot replace"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 2}
            | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8},
            "deepseek_v3 models .*: their keys, values or queries do not fit the KV cache .shape",
        ),
        ("gpt_oss", {"num_local_experts": 4}, "attention needs s_aux"),
        ("modernbert-decoder", {"bos_token_id": 1}, "they expose no decoder without the LM head"),
        # Its layers add a bias per head to the mask.
        ("doge", {}, "doge models .*: with the sampler's KV cache, the logits of 5 tokens differ"),
        # One of its layers has more query heads than the kernels are compiled for.
        (
            "laguna",
            {"num_attention_heads_per_layer": [4, 8], "num_experts": 4, "num_experts_per_tok": 2},
            r"laguna models .* not fit the KV cache .*shape .8, 1, 8. .* compiled for .4, 1, 8.",
        ),
    ],
)
def test_an_architecture_that_the_cache_does_not_hold_is_refused(family, options, said):
    if "compiled for" in said:
        kernels(torch.float32)  # skips the test without kernels, as torch has no limit
    model = tiny_model(family, **options)
    for tensor in model.parameters():
        if not tensor.any():  # a bias of zeros would not show the difference
            torch.nn.init.normal_(tensor, std=0.05)
    with pytest.raises(UsageError, match=said):
        check_architecture(model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_do_not_attend_through_the_cache_are_noticed(dtype, monkeypatch):
    """A convolution, for example, bypasses the cache, so a decoded token would see only itself."""
    model = tiny_model().to(dtype)
    check_architecture(model)
    layer = model.model.layers[1].self_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: (hidden_states.cumsum(1), 0))
    with pytest.raises(UsageError, match=r"logits of 5 tokens differ by .* from those of transf"):
        check_architecture(model)


def test_a_model_in_which_rounding_changes_everything_is_not_refused():
    """In 32 layers of random experts, rounding changes the logits by half, also without a cache."""
    model = tiny_model(
        "olmoe", num_hidden_layers=32, num_experts=32, num_experts_per_tok=8,
        hidden_size=128, intermediate_size=128, num_attention_heads=8, head_dim=16,
        initializer_range=0.3,
    )  # fmt: skip
    check_architecture(model.bfloat16())


# --- the core: requests -------------------------------------------------------------------------


def a_running_sampler(tokenizer, prefix=(), **options):
    sampler = Sampler(tiny_model(), tokenizer, **options)
    sampler.stop_ids = frozenset()
    sampler.allocate_cache(
        CacheConfig(max_num_seqs=4, prompt_slots=4, prompt_tokens=64, new_tokens=32), prefix
    )
    return sampler


def run(sampler):
    tokens = []
    while sampler.has_unfinished_requests():
        tokens += sampler.step()
    return tokens


def of(tokens, handle, row=0):
    return [token.id for token in tokens if (token.request, token.row) == (handle, row)]


def answer(sampler, *request, **options):
    """Return the token ids of a request's first completion."""
    handle = sampler.add_request(Request(*request, **options))
    return of(run(sampler), handle)


def test_the_cache_is_not_kept_alive_by_the_last_pass(tokenizer):
    """The training pass needs the memory of the cache."""
    sampler = a_running_sampler(tokenizer, merged=False)
    answer(sampler, [1, 2, 3], SamplingParams(4), 0)
    cache = weakref.ref(sampler._cache)
    sampler.reset()
    gc.collect()
    assert cache() is None
    for _ in sampler.stream([Request([1, 2, 3], SamplingParams(4), 0)]):
        cache = weakref.ref(sampler._cache)
    gc.collect()
    assert cache() is None


def test_a_batch_whose_reader_leaves_does_not_block_the_next_batch(tokenizer):
    sampler = Sampler(tiny_model(), tokenizer)
    tokens = sampler.stream([Request([1, 2, 3], SamplingParams(4), 0)])
    next(tokens)
    assert sampler.has_unfinished_requests()
    tokens.close()
    assert not sampler.has_unfinished_requests()


@pytest.mark.usefixtures("passes")
def test_requests_keep_their_own_parameters_side_by_side(tokenizer):
    choices = [
        SamplingParams(20, temperature=0, top_p=0.9),  # greedy, whatever top_p is
        SamplingParams(7, temperature=1.0),
        SamplingParams(20, temperature=1.3, top_p=0.9),
        SamplingParams(12, temperature=1.3, top_p=0.5),
    ]
    requests = [Request(*each) for each in zip(some_prompts(4), choices, range(4), strict=True)]
    sampler = a_running_sampler(tokenizer)
    handles = [sampler.add_request(request) for request in requests]
    tokens = run(sampler)
    for handle, request in zip(handles, requests, strict=True):
        alone = answer(a_running_sampler(tokenizer), *vars(request).values())
        assert of(tokens, handle) == alone
        assert len(alone) == request.params.max_new_tokens


def test_a_cancelled_request_frees_its_place_and_leaves_the_others_alone(tokenizer):
    prompts, params = some_prompts(3), SamplingParams(20)
    expected = answer(a_running_sampler(tokenizer), prompts[0], params, 1)
    sampler = a_running_sampler(tokenizer)
    kept = sampler.add_request(Request(prompts[0], params, 1))
    running = sampler.add_request(Request(prompts[1], params, 2, n=8))  # more than max_num_seqs
    queued = sampler.add_request(Request(prompts[2], params, 3))
    tokens = sampler.step() + sampler.step()
    assert {token.request for token in tokens} == {kept, running}
    sampler.abort_request(running)
    sampler.abort_request(queued)
    rest = run(sampler)
    assert {token.request for token in rest} == {kept}
    assert of(tokens + rest, kept) == expected
    for _ in range(5):  # leaked slots would run out
        for i in range(4):
            sampler.add_request(Request(prompts[i % 3], params, i, n=5))  # one waits for a row
        assert sampler.step()
        for handle in range(sampler.add_request(Request(prompts[0], params, 9)) + 1):
            sampler.abort_request(handle)
        assert not sampler.has_unfinished_requests()
    assert answer(sampler, prompts[0], params, 1) == expected


def test_running_rows_wait_for_one_prefill_at_most():
    scheduler, prefilled = Scheduler(max_num_seqs=32, prompt_slots=32), []

    def prefills(requests):
        for number in range(requests):
            request = Request([1, 2], SamplingParams(4), 0)
            scheduler.waiting.append(RequestState(number, request, 0))
        prefilled.clear()
        scheduler.fill_batch(lambda chosen: prefilled.append(len(chosen)))
        return prefilled

    assert prefills(10) == [8, 2]  # nothing is running, so the batch is filled
    assert prefills(15) == [8]
    assert len(scheduler.running) == 18
    assert prefills(0) == [7]
    assert len(scheduler.running) == 25


def test_aborting_one_request_does_not_bring_back_another():
    """Both requests are aborted before the rows of either are reused."""
    scheduler = Scheduler(max_num_seqs=4, prompt_slots=4)
    for number in range(3):
        scheduler.waiting.append(RequestState(number, Request([1, 2], SamplingParams(4), 0), 0))
    scheduler.fill_batch(lambda requests: None)
    for number in (0, 2):
        scheduler.abort(number)
    assert [sequence.finished for sequence in scheduler.running] == [True, False, True]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_two_samplers_in_two_threads_draw_what_each_draws_alone(merged, shared, tokenizer):
    """Each thread must use the cache of its own batch, also if both threads share a model."""
    models = [tiny_model()] * 2 if shared else [tiny_model(seed=seed) for seed in (0, 1)]
    samplers = [Sampler(model, tokenizer, merged=merged) for model in models]
    batches = [some_prompts(6)[:3], some_prompts(6)[3:]]

    def draw(i):
        torch.set_num_threads(1)  # the setting belongs to the thread
        return [
            ids(samplers[i].sample(batches[i], 2, SamplingParams(12), [7, 8, 9])) for _ in range(4)
        ]

    alone = [draw(i) for i in range(2)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # otherwise the forward passes might never overlap
    try:
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(draw, range(2)))
    finally:
        sys.setswitchinterval(usual)
    assert together == alone


def test_tokens_can_be_put_in_the_place_of_a_drawn_one(tokenizer):
    """A thinking budget depends on it: forced tokens replace the fourth sampled token."""
    forced = [65, 66, 67]
    asked = []

    def steer(row, before, token):
        asked.append((row, len(before)))
        return forced if len(before) == 3 else None

    sampler = a_running_sampler(tokenizer)
    free = answer(sampler, [1, 2, 3], SamplingParams(8), 5)
    handle = sampler.add_request(Request([1, 2, 3], SamplingParams(8), 5, force_tokens=steer))
    tokens = run(sampler)
    got = of(tokens, handle)
    assert got[:3] == free[:3]
    assert got[3:6] == forced
    assert len(got) == 8
    assert [math.isnan(t.logprob) for t in tokens] == [False] * 3 + [True] * 3 + [False] * 2
    assert asked == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 6), (0, 7)]
    # The next token is sampled as if the model had written the forced tokens itself.
    again = answer(sampler, [1, 2, 3, *got[:6]], SamplingParams(2, temperature=0), 0)
    params, as_before = SamplingParams(8, temperature=0), lambda r, b, t: got[len(b) : 6] or None
    assert answer(sampler, [1, 2, 3], params, 0, force_tokens=as_before)[6:] == again


def test_what_was_not_reserved_is_refused(tokenizer):
    sampler = a_running_sampler(tokenizer)
    for prompt, new in ((66, 3), (1, 33)):
        with pytest.raises(ValueError, match="do not fit into the cache"):
            sampler.add_request(Request([1] * prompt, SamplingParams(new), 0))
    sampler.add_request(Request([1] * 65, SamplingParams(3), 0))
    with pytest.raises(RuntimeError, match="running"):
        sampler.sample([[1]], 1, SamplingParams(2), [0])


@pytest.mark.usefixtures("passes")
def test_little_memory_means_fewer_seats_and_the_same_completions(tokenizer, monkeypatch):
    model, prompts, params = tiny_model(), some_prompts(10), SamplingParams(20)
    seeds = list(range(10))
    expected = ids(Sampler(model, tokenizer).sample(prompts, 3, params, seeds))
    each = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, bytes
    sampler = Sampler(model, tokenizer)
    # The cache may use half of the memory.
    monkeypatch.setattr(engine, "available_memory", lambda device: 2 * each * 120)
    assert ids(sampler.sample(prompts, 3, params, seeds)) == expected
    sampler = Sampler(model, tokenizer, share=0.25)
    with pytest.raises(UsageError, match="max-new-tokens"):
        sampler.sample(prompts, 3, params, seeds)


@pytest.mark.usefixtures("passes")
def test_a_prompt_that_begins_otherwise_is_read_whole(tokenizer):
    prompts = [[9, 8, 7, 1, 2], [9, 8, 7, 4], [5, 5], [9, 8], [9, 8, 7]]
    params, found = SamplingParams(12, 0), []
    for prefix in ([], [9, 8, 7]):
        sampler = a_running_sampler(tokenizer, prefix=prefix)
        handles = [sampler.add_request(Request(prompt, params, 0)) for prompt in prompts]
        tokens = run(sampler)
        found.append([of(tokens, handle) for handle in handles])
    assert found[0] == found[1]


def test_a_sliding_window_is_respected_or_refused(tokenizer):
    model, prompts = tiny_model("mistral", sliding_window=40), some_prompts(4, longest=20)
    groups = Sampler(model, tokenizer).sample(prompts, 1, SamplingParams(15, 0), [0] * 4)
    assert ids(groups) == generated(model, prompts, 15)
    with pytest.raises(
        UsageError, match="local attention layers of this model attend to only 40 tokens"
    ):
        Sampler(model, tokenizer).sample(prompts, 1, SamplingParams(40, 0), [0] * 4)


def test_dropout_on_is_refused(tokenizer):
    model = tiny_model().train()
    with pytest.raises(RuntimeError, match="eval"):
        Sampler(model, tokenizer).sample([[1]], 1, SamplingParams(2), [0])


# --- drawing ------------------------------------------------------------------------------------


def test_uniforms_are_a_pure_function_and_uniform():
    seeds = [prompt_seed("x", i) for i in range(200)]
    many = torch.cat([uniforms(seeds, [t] * 200) for t in range(100)])
    assert torch.equal(uniforms(seeds[:3], [5, 6, 7])[1:2], uniforms([seeds[1]], [6]))
    assert torch.equal(uniforms([-1], [0]), uniforms([2**64 - 1], [0]))
    assert 0 <= many.min() < many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    assert many.var() == pytest.approx(1 / 12, abs=0.002)
    # Row i of a prompt has seed + i. Its stream must not be a shifted copy of a neighbour's.
    grid = torch.stack([uniforms([s] * 50, list(range(50))) for s in range(1000, 1020)])
    assert len(torch.cat([many, grid.flatten()]).unique()) == len(many) + grid.numel()
    assert torch.corrcoef(grid).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.parametrize("vocabulary", [5, 256, 3001])  # less than, exactly and more than a block
@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_a_token_is_drawn_where_the_running_sum_passes_the_uniform_number(
    temperature, vocabulary, drawing, threads
):
    torch.manual_seed(0)
    logits = (3 * torch.randn(vocabulary, 500)).bfloat16().T  # the rows are not contiguous
    logits[::7, ::3] = -torch.inf
    uniform = torch.rand(500, dtype=torch.float64)
    tokens, logprobs = drawing(logits, uniform, SamplingParams(1, temperature))
    p = (logits.double() / (temperature or 1)).softmax(-1)
    chosen = p.gather(-1, tokens[:, None])
    assert chosen.min() > 0
    torch.testing.assert_close(logprobs, chosen.log()[:, 0].float(), atol=1e-5, rtol=1e-5)
    if temperature:
        passed = p.cumsum(-1).gather(-1, tokens[:, None])
        assert (passed > uniform[:, None] - 1e-6).all()
        assert (passed - chosen <= uniform[:, None] + 1e-6).all()
    else:
        assert torch.equal(tokens, logits.double().argmax(-1))


def test_the_edges_of_the_uniform_number_draw_a_possible_token(drawing):
    logits = torch.full((2, 50_000), -torch.inf)
    logits[:, 17:400] = 0
    tokens, _ = drawing(logits, torch.tensor([0.0, 1 - 2**-53]), SamplingParams(1))
    assert 17 <= tokens.min() <= tokens.max() < 400


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_said(value, temperature, drawing):
    """An index beyond the vocabulary would crash a GPU without an explanation."""
    logits = torch.zeros(2, 300)
    logits[1, 7] = value
    with pytest.raises(UsageError, match="not finite"):
        drawing(logits, torch.tensor([0.5, 0.5]), SamplingParams(1, temperature))


def test_top_p_is_exact():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]  # shuffled

    def kept(top_p):
        return apply_top_p(logits, top_p)[0].isfinite().tolist()

    assert kept(0.4) == [False, True, False, False]
    assert kept(0.6) == [False, True, False, True]
    assert kept(0.81) == [True, True, False, True]
    assert kept(1e-300) == [False, True, False, False]  # this top_p is 0 in fp32
    halves = apply_top_p(torch.zeros(1, 4), 0.5)
    assert halves.isfinite().sum() == 2  # two of four equal tokens suffice
    for tied in (logits, torch.zeros(1, 4)):  # as in the check of a vLLM server
        one = SamplingParams(1, top_p=1e-6)
        _, logprob = sample_tokens(tied, torch.tensor([0.0]), one, TorchOps())
        assert logprob.item() == pytest.approx(0)  # under the sampled distribution


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
def test_a_temperature_next_to_zero_takes_the_likeliest_token(temperature, drawing):
    logits = torch.tensor([[-1e6, 1e6, 990_000.0]] * 2)
    tokens, logprobs = drawing(logits, torch.tensor([0.0, 0.99]), SamplingParams(1, temperature))
    assert (tokens.tolist(), logprobs.tolist()) == ([1, 1], [0, 0])


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_new_tokens": 0}],
)
def test_impossible_parameters_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingParams(**{"max_new_tokens": 1} | options)
