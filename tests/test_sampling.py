"""The sampler: equal to `generate`, equal to scoring, and blind to who shares the batch."""

import math
import random
from collections import Counter

import pytest
import torch
from conftest import FAMILIES, tiny_model

from rlm.grpo import Rollout, split, token_logprobs
from rlm.models import adapter_tensors, new_adapter
from rlm.sampling import Sampler, SamplingParams, prompt_seed
from rlm.sampling.draw import draw, truncate, uniforms


def some_prompts(count, seed=0, longest=24):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def ids(groups):
    return [[completion.token_ids for completion in group] for group in groups]


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, merged, tokenizer):
    model = tiny_model(family)
    prompts = some_prompts(64)
    groups = Sampler(model, tokenizer, seats=5, merged=merged).sample(
        prompts, 1, SamplingParams(20, temperature=0), [0] * 64
    )
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        full = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=258
        )
        assert completion.token_ids == full[0, len(prompt) :].tolist()


def test_a_completion_does_not_depend_on_who_shares_the_batch(tokenizer):
    model, prompts = tiny_model(), some_prompts(12)
    params, seeds = SamplingParams(24, temperature=1.0), [prompt_seed(0, i) for i in range(12)]
    expected = ids(Sampler(model, tokenizer, seats=64).sample(prompts, 4, params, seeds))
    for seats in (1, 7, 48):
        assert (
            ids(Sampler(model, tokenizer, seats=seats).sample(prompts, 4, params, seeds))
            == expected
        )
    order = random.Random(2).sample(range(12), 12)
    shuffled = Sampler(model, tokenizer, seats=9).sample(
        [prompts[i] for i in order], 4, params, [seeds[i] for i in order]
    )
    assert ids(shuffled) == [expected[i] for i in order]
    alone = Sampler(model, tokenizer).sample([prompts[3]], 1, params, [seeds[3] + 2])
    assert ids(alone) == [[expected[3][2]]]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_sampled_logprobs_equal_scored_ones(family, temperature, tokenizer):
    policy = new_adapter(tiny_model(family), r=4, alpha=8).eval()
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.normal_(0, 0.2)
    prompts = some_prompts(6)
    groups = Sampler(policy, tokenizer, seats=5).sample(
        prompts, 3, SamplingParams(16, temperature), list(range(6))
    )
    rollouts = [
        Rollout(p, prompts[p], c.token_ids, 1.0, 1.0, c.logprobs)
        for p, group in enumerate(groups)
        for c in group
    ]
    for micro in split(rollouts, max_rows=7, max_tokens=999, device="cpu"):
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy, micro, temperature)
        gap = (logprobs - micro.sampler_logprobs)[micro.completion_mask].abs()
        assert gap.max() < 1e-4


def test_an_end_token_ends_a_row_and_belongs_to_it(tokenizer):
    model = tiny_model()
    sampler = Sampler(model, tokenizer)
    assert sampler.stop_ids == {257}
    groups = sampler.sample(some_prompts(20), 8, SamplingParams(40), list(range(20)))
    completions = [c for group in groups for c in group]
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert stopped
    assert all(c.token_ids[-1] == 257 and 257 not in c.token_ids[:-1] for c in stopped)
    cut = [c for c in completions if c.truncated]
    assert cut
    assert all(len(c.token_ids) == 40 and 257 not in c.token_ids for c in cut)
    assert len(stopped) + len(cut) == len(completions)
    assert all(len(c.logprobs) == len(c.token_ids) for c in completions)


def test_every_end_token_counts(tokenizer):
    """Tokenizer, generation config and template may each name another one."""
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 9]
    assert Sampler(model, tokenizer).stop_ids == {7, 9, 257}


def test_dropout_on_is_refused(tokenizer):
    model = tiny_model().train()
    with pytest.raises(RuntimeError, match="eval"):
        Sampler(model, tokenizer).sample([[1]], 1, SamplingParams(2), [0])


# --- drawing ------------------------------------------------------------------------------------


def test_uniforms_are_a_pure_function_and_uniform():
    seeds = [prompt_seed("x", i) for i in range(200)]
    many = torch.cat([uniforms(seeds, [t] * 200) for t in range(100)])
    assert torch.equal(uniforms(seeds[:3], [5, 6, 7])[1:2], uniforms([seeds[1]], [6]))
    assert 0 <= many.min() < many.max() < 1
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    assert many.var() == pytest.approx(1 / 12, abs=0.002)
    assert len(many.unique()) == len(many)


def test_neighbouring_seeds_do_not_share_draws():
    """Row i of a prompt has seed + i: its stream must not be its neighbour's, shifted."""
    grid = torch.stack([uniforms([s] * 50, list(range(50))) for s in range(1000, 1020)])
    assert len(grid.unique()) == grid.numel()
    correlation = torch.corrcoef(grid).fill_diagonal_(0)
    assert correlation.abs().max() < 0.6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -torch.inf])
    count = 40_000
    u = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = draw(logits.expand(count, -1), u, SamplingParams(1, temperature))
    p = (logits / temperature).softmax(-1)
    shares = Counter(tokens.tolist())
    for token in range(5):
        assert shares[token] / count == pytest.approx(p[token].item(), abs=1e-3)
    assert logprobs[:50].tolist() == pytest.approx(p[tokens[:50]].log().tolist(), abs=1e-5)


def test_the_edges_of_the_uniform_number_draw_a_possible_token():
    logits = torch.full((2, 50_000), -torch.inf)
    logits[:, 17:400] = 0
    tokens, _ = draw(logits, torch.tensor([0.0, 1 - 2**-53]), SamplingParams(1))
    assert 17 <= tokens.min() <= tokens.max() < 400


def test_top_k_and_top_p_are_exact():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]  # shuffled

    def kept(**options):
        return truncate(logits, SamplingParams(1, **options))[0].isfinite().tolist()

    assert kept() == [True] * 4
    assert kept(top_k=1) == [False, True, False, False]
    assert kept(top_k=2) == [False, True, False, True]
    assert kept(top_p=0.4) == [False, True, False, False]
    assert kept(top_p=0.6) == [False, True, False, True]
    assert kept(top_p=0.81) == [True, True, False, True]
    _, logprob = draw(logits, torch.tensor([0.0]), SamplingParams(1, top_k=1))
    assert logprob.item() == pytest.approx(0)  # under the distribution that was drawn from


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"max_new_tokens": 0}],
)
def test_impossible_parameters_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SamplingParams(**{"max_new_tokens": 1} | options)


def test_greedy_logprob_is_that_of_the_plain_softmax():
    tokens, logprobs = draw(
        torch.tensor([[0.0, math.log(3)]]), torch.tensor([0.5]), SamplingParams(1, 0)
    )
    assert tokens.item() == 1
    assert logprobs.item() == pytest.approx(math.log(0.75))
