"""The problems of a step, its mini-batches, the denominators of the loss, and packing."""

import math
import random
import statistics
from itertools import chain

import pytest
import torch

from rlm.data.problem import Problem
from rlm.sampling import Completion, prompt_seed
from rlm.training.advantages import Group, copies_above_mean, group_advantages, has_signal
from rlm.training.algorithms import ALGORITHMS
from rlm.training.batches import (
    Rollout,
    draw_problems,
    make_micro_batches,
    make_rollouts,
    mini_batches,
    problems_for_step,
    rollout_seeds,
    shard_rollouts,
)
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.loss import policy_loss

AGGREGATIONS = {
    "sequence": {"algorithm": "grpo"},
    "constant": {"algorithm": "drgrpo", "max_new_tokens": 8},
    "token": {"algorithm": "dapo"},
}


def a_group(prompt, *completions, truncated=()):
    """Make a group from completions as token ids; those at the indices `truncated` have no end."""
    reasons = ["length" if i in truncated else "stop" for i in range(len(completions))]
    made = [Completion(ids, [], why) for ids, why in zip(completions, reasons, strict=True)]
    return Group(Problem("p", "?", "1"), prompt, made, [], [])


def rollouts_of(group, advantages, **options):
    return make_rollouts([group], torch.tensor([advantages]), [0], GRPOConfig(**options))


def some_rollouts(problems=3, group=4, seed=0):
    rng = random.Random(seed)
    rollouts = []
    for problem in range(problems):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        for _ in range(group):
            ids = [rng.randrange(256) for _ in range(rng.randint(0, 6))] + [257]
            advantage = rng.uniform(-1, 1)
            rollouts.append(Rollout(problem, prompt, ids, advantage, 0.1, [-1.0] * len(ids)))
    return rollouts


def test_problems_of_a_step_are_a_pure_function():
    problems = list(range(10))
    epoch = [p for step in range(5) for p in problems_for_step(problems, step, 2, seed=0)]
    assert sorted(epoch) == problems
    assert epoch != problems
    assert problems_for_step(problems, 3, 2, seed=0) == epoch[6:8]
    again = [p for step in range(5, 10) for p in problems_for_step(problems, step, 2, seed=0)]
    assert sorted(again) == problems
    assert again != epoch
    assert problems_for_step(problems, 0, 25, seed=0)[:10] == epoch  # more than the data has


def test_a_problem_that_is_drawn_twice_gets_two_groups():
    """With the same seed, the second group would contain the same completions as the first."""
    a, b = Problem("a", "?", "1"), Problem("b", "?", "1")
    seeds = rollout_seeds([a, b, a, a], 7, 3, 0)
    assert seeds[:2] == [prompt_seed(7, 3, 0, "a"), prompt_seed(7, 3, 0, "b")]
    assert len(set(seeds)) == 4


def test_what_a_step_draws_next():
    problems = [Problem(str(i), "?", "1") for i in range(7)]

    def group(problem, *rewards):
        return Group(problem, [], [], [], rewards)

    config = GRPOConfig(batch_size=4, seed=0)
    first = draw_problems(problems, [], step=1, config=config)
    assert first == problems_for_step(problems, 1, 4, 0)
    rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, None), (0.0, 1.0)]
    sampled = [group(p, *r) for p, r in zip(first, rewards, strict=True)]
    more = draw_problems(problems, sampled, 1, config)
    assert len(more) == 2  # two groups have no signal
    assert not set(more) & set(first)
    assert more == draw_problems(problems, sampled, 1, config)
    others = {tuple(draw_problems(problems, sampled, step, config)) for step in range(9)}
    assert others > {tuple(more)}
    every = sampled + [group(p, 0.0, 0.0) for p in problems if p not in first]
    assert draw_problems(problems, every, 1, config) == []  # no unused problem is left
    assert draw_problems(problems, sampled[:1] * 4, 1, config) == []  # every group has signal
    almost = [group(first[0], 0.5, 0.5001)]  # equal for the kind "share" of topr
    for name, places in (("topr", 4), ("grpo", 3)):
        named = GRPOConfig(batch_size=4, seed=0, algorithm=name)
        assert len(draw_problems(problems, almost, 1, named)) == places


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("sequence", 1 / 4), ("constant", 1 / 16), ("token", 1 / 2)]
)
def test_masked_completions_leave_the_loss_but_stay_samples(aggregation, weight):
    """As in TRL, they count in the number of samples, but not in the number of tokens."""
    group = a_group([9], [1, 2], [3, 4, 5, 6], truncated=[1])
    options = AGGREGATIONS[aggregation] | {"mask_truncated": True, "kl_weight": 0.1}
    (kept,) = rollouts_of(group, [0.5, -0.5], **options)
    assert (list(kept.completion), kept.weight) == ([1, 2], weight)


def test_all_equal_rewards_leave_nothing_to_compute_but_a_kl_term():
    group = a_group([5], [1, 2], [3])
    assert rollouts_of(group, [0.0, 0.0]) == []
    assert len(rollouts_of(group, [0.0, 0.0], kl_weight=0.1)) == 2


def test_prompt_tokens_are_no_targets_and_the_end_token_is():
    """Masks are computed from lengths, so an eos or pad token (257) in the prompt is no end."""
    rollouts = [
        Rollout(0, [10, 257, 11], [20, 21, 257], 1.0, 1.0, [0.0] * 3),
        Rollout(0, [10, 257, 11], [30, 257], 1.0, 1.0, [0.0] * 2),
    ]
    (micro,) = make_micro_batches(rollouts, 9, 99, "cpu")
    assert micro.input_ids.tolist() == [[10, 257, 11, 20, 21, 30]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert micro.sources.tolist() == [2, 3, 4, 2, 5]
    assert micro.targets.tolist() == [20, 21, 257, 30, 257]
    assert micro.completion_mask.tolist() == [[True] * 3, [True, True, False]]
    # If a micro-batch may have only five tokens, each completion needs its own copy of the prompt.
    apart = [micro.input_ids.tolist() for micro in make_micro_batches(rollouts, 9, 5, "cpu")]
    assert apart == [[[10, 257, 11, 20, 21]], [[10, 257, 11, 30]]]


# --- mini-batches -------------------------------------------------------------------------------

P, G, T, LIMIT = 5, 4, 3, 8
COPY = (1, 0)  # the first two completions of problem 1 are equal and right
REWARDS = torch.tensor(
    [[1.0, 0, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [0.25, 0.5, math.nan, 1]]
)


def random_step(seed=0):
    """Return groups of completions, and the trainer's log-probabilities (P, G, T)."""
    rng = random.Random(seed)
    groups = []
    for p in range(P):
        drawn = [[g, p, rng.randrange(99)][: rng.randint(1, T)] for g in range(G)]
        if p == COPY[0]:
            drawn[1] = drawn[COPY[1]]
        sampled = [[rng.uniform(-3, -1) for _ in ids] for ids in drawn]
        made = [Completion(i, lp, "stop") for i, lp in zip(drawn, sampled, strict=True)]
        groups.append(Group(Problem(str(p), "?", "1"), [p, p], made, [], REWARDS[p].tolist()))
    generator = torch.Generator().manual_seed(seed)
    return groups, -3 * torch.rand(P, G, T, generator=generator)


def loss_by_hand(name, groups, logprobs, members):
    """Compute the loss of an update on these groups with the formulas of the papers.

    The sums run over problems, rollouts and tokens. The old log-probabilities are the sampler's.
    """
    terms, samples, tokens = [], 0, 0
    for p in members:
        rewards = [None if math.isnan(r) else r for r in REWARDS[p].tolist()]
        if name in ("topr", "dapo") and len({r for r in rewards if r is not None}) < 2:
            continue
        mean = statistics.mean(r for r in rewards if r is not None)
        samples, tokens = samples + G, tokens + sum(len(c.token_ids) for c in groups[p].completions)
        if name == "topr" and p == COPY[0]:
            rewards[1] = None
            mean = statistics.mean(r for r in rewards if r is not None)
        judged = [r for r in rewards if r is not None]
        if len(set(judged)) < 2:
            continue
        above = sum(r - mean for r in judged if r > mean)
        for g, reward in enumerate(rewards):
            if reward is None:
                continue
            ids, sampled = groups[p].completions[g].token_ids, groups[p].completions[g].logprobs
            n, a = len(ids), reward - mean
            if name in ("grpo", "dapo", "gspo", "cispo"):
                a /= statistics.stdev(judged) + 1e-4
            elif name == "maxrl":
                a /= mean
            elif name == "topr":
                a *= G / above * (1 if a > 0 else 0.25)
            new = logprobs[p, g, :n]
            ratio = (new - torch.tensor(sampled)).exp()
            if name == "gspo":
                ratio = (new - torch.tensor(sampled)).mean().exp().expand(n)
            if name == "cispo":
                each = -ratio.detach().clamp(max=5) * a * new
            elif name == "topr":
                each = -a * new * (1 if a > 0 else ratio.detach().clamp(max=1))
            else:
                low, high = {"dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4)}.get(
                    name, (0.8, 1.2)
                )
                each = -torch.min(ratio * a, ratio.clamp(low, high) * a)
            terms.append((each.sum(), each.mean()))
    sums, means = (sum(term[i] for term in terms) for i in (0, 1))
    if name in ("dapo", "cispo", "maxrl"):
        return sums / tokens
    return sums / (samples * LIMIT) if name == "drgrpo" else means / samples


def compared(groups, config):
    algorithm = config.resolved_algorithm
    copies = copies_above_mean(groups, REWARDS) if algorithm.distinct else None
    kept = has_signal(REWARDS) | (not algorithm.dynamic_sampling)
    return group_advantages(REWARDS, algorithm.advantage, algorithm.negative_weight, copies), kept


@pytest.mark.parametrize("max_rows", [1, 3, 99])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_gradient_of_a_mini_batch_is_that_of_sums_by_hand(name, max_rows):
    """The gradient must not depend on the micro-batches, and each group is in one mini-batch."""
    config = GRPOConfig(algorithm=name, mini_batch_size=2, batch_size=P, max_new_tokens=LIMIT)
    groups, values = random_step()
    advantages, kept = compared(groups, config)
    batches = mini_batches(groups, advantages, kept, config, step=3)
    assert batches == mini_batches(groups, advantages, kept, config, step=3)
    counted = has_signal(REWARDS) if name in ("topr", "dapo") else torch.ones(P, dtype=torch.bool)
    order = counted.nonzero().flatten().tolist()
    random.Random("mini-batches 0 3").shuffle(order)
    members = [order[i : i + 2] for i in range(0, len(order), 2)]
    members = [m for m in members if has_signal(REWARDS[m]).any()]
    assert len(batches) == len(members) > 1
    for rollouts, chosen in zip(batches, members, strict=True):
        assert {r.problem for r in rollouts} <= set(chosen)
        by_hand, ours = values.clone().requires_grad_(), values.clone().requires_grad_()
        loss_by_hand(name, groups, by_hand, chosen).backward()
        total = torch.zeros(())
        for micro in make_micro_batches(rollouts, max_rows, 999, "cpu"):
            places = [
                (rollouts[row].problem, place_of(groups, rollouts[row])) for row in micro.rows
            ]
            width = max(micro.lengths)
            micro.old_logprobs = micro.sampler_logprobs
            logprobs = torch.stack([ours[p, g, :width] for p, g in places])
            total = total + policy_loss(logprobs, micro, config.resolved_algorithm)[0]
        total.backward()
        assert torch.allclose(by_hand.grad, ours.grad, atol=1e-6), chosen


def place_of(groups, rollout):
    sampled = [completion.logprobs for completion in groups[rollout.problem].completions]
    return sampled.index(rollout.sampler_logprobs)


def test_equal_completions_are_computed_once():
    """Copies with equal advantages become one row, which has the sum of their weights."""
    group = a_group([9], [1, 2], [1, 2], [1, 2], [3], [1, 2])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0, 1.0]])
    advantages = group_advantages(rewards, "share", 0.25)
    rows = rollouts_of(group, advantages.tolist()[0], algorithm="topr")
    found = sorted((list(row.completion), round(row.advantage, 4), row.weight) for row in rows)
    assert [(ids, a) for ids, a, _ in found] == [([1, 2], -0.4167), ([1, 2], 2.5), ([3], 2.5)]
    assert [weight for *_, weight in found] == pytest.approx([3 / 10, 1 / 10, 1 / 5])
    assert len(rollouts_of(group, advantages.tolist()[0], algorithm="grpo")) == 5


def test_copies_of_a_good_completion_do_not_count():
    groups, _ = random_step()
    assert copies_above_mean(groups, REWARDS).nonzero().tolist() == [[1, 1]]
    bad = torch.tensor([[0.0, 0, 1, 1]])
    assert not copies_above_mean(groups[1:2], bad).any()  # copies of a wrong completion all count


def test_a_completion_is_no_copy_of_one_that_got_no_reward():
    # A judge may fail, or give different rewards to equal completions.
    group, nan = a_group([9], [1], [1], [1], [2]), float("nan")
    for first in (nan, 0.0):
        copies = copies_above_mean([group], torch.tensor([[first, 1.0, 1.0, 0.0]]))
        assert copies.tolist() == [[False, False, True, False]]


def test_more_processes_than_problems_share_the_rollouts_of_a_mini_batch():
    groups, _ = random_step()
    config = GRPOConfig(algorithm="topr", mini_batch_size=2, batch_size=P)
    rollouts = mini_batches(groups, *compared(groups, config), config, step=0)[0]
    size = len({rollout.problem for rollout in rollouts}) + 1
    shares = [shard_rollouts(rollouts, Distributed(rank, size)) for rank in range(size)]
    assert all(shares)
    assert sorted(chain(*shares), key=repr) == sorted(rollouts, key=repr)


def test_copies_do_not_lower_the_mean_that_others_are_compared_with():
    """The mean reward is 4.5 / 8. Without the three copies it would be lower than 0.5."""
    group = a_group([9], [1], [1], [1], [1], [2], [3], [4], [5])
    rewards = torch.tensor([[1.0, 1, 1, 1, 0.5, 0, 0, 0]])
    copies = copies_above_mean([group], rewards)
    assert copies.tolist() == [[False, True, True, True] + [False] * 4]
    found = group_advantages(rewards, "share", 0.25, copies)[0].tolist()
    below = 0.0625 + 3 * 0.5625
    assert found[:5] == pytest.approx([8, 0, 0, 0, -0.25 * 8 * 0.0625 / below])
    assert found[5:] == pytest.approx([-0.25 * 8 * 0.5625 / below] * 3)


def test_without_mini_batches_an_update_has_all_groups():
    groups, _ = random_step()
    whole = GRPOConfig(batch_size=P, algorithm="grpo")
    advantages, kept = compared(groups, whole)
    (batch,) = mini_batches(groups, advantages, kept, whole, 0)
    assert batch == make_rollouts(groups, advantages, range(P), whole)
    assert mini_batches(groups, torch.zeros(P, G), kept, whole, 0) == []
    # The algorithm's mini_batch_size is reduced to the batch size.
    assert GRPOConfig(batch_size=1).mini_batch_size == 1
