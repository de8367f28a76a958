"""What a step draws and learns from: pure functions of seed and step; denominators; packing."""

import random

import pytest
import torch

from rlm.data.problem import Problem
from rlm.sampling import Completion, prompt_seed
from rlm.training.advantages import Group
from rlm.training.batches import (
    Rollout,
    draw_problems,
    make_micro_batches,
    make_rollouts,
    problems_for_step,
    rollout_seeds,
)
from rlm.training.config import GRPOConfig

AGGREGATIONS = {
    "sequence": {"algorithm": "grpo"},
    "constant": {"algorithm": "drgrpo", "fixed_length_normalizer": 8},
    "token": {"algorithm": "dapo"},
}


def a_group(prompt, *completions, truncated=()):
    """Of completions as token ids; `truncated`: the places of those without an end."""
    reasons = ["length" if i in truncated else "stop" for i in range(len(completions))]
    made = [Completion(ids, [], why) for ids, why in zip(completions, reasons, strict=True)]
    return Group(Problem("p", "?", "1"), prompt, made, [], [])


def rollouts_of(groups, advantages, kept=None, **options):
    advantages = torch.tensor(advantages)
    kept = torch.ones(len(groups), dtype=torch.bool) if kept is None else torch.tensor(kept)
    return make_rollouts(groups, advantages, kept, GRPOConfig(**options))


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
    assert problems_for_step(problems, 0, 25, seed=0)[:10] == epoch  # a step may exceed the data


def test_a_problem_that_is_drawn_twice_gets_two_groups():
    """Fewer problems than places: the same seed would make the same completions again."""
    a, b = Problem("a", "?", "1"), Problem("b", "?", "1")
    seeds = rollout_seeds([a, b, a, a], 7, 3, 0)
    assert seeds[:2] == [prompt_seed(7, 3, 0, "a"), prompt_seed(7, 3, 0, "b")]
    assert len(set(seeds)) == 4


def test_what_a_step_draws_next():
    problems = [Problem(str(i), "?", "1") for i in range(7)]

    def group(problem, *rewards):
        return Group(problem, [], [], [], rewards)

    first = draw_problems(problems, [], step=1, count=4, seed=0)
    assert first == problems_for_step(problems, 1, 4, 0)
    rewards = [(1.0, 0.0), (1.0, 1.0), (0.0, None), (0.0, 1.0)]
    sampled = [group(p, *r) for p, r in zip(first, rewards, strict=True)]
    more = draw_problems(problems, sampled, 1, 4, 0)
    assert len(more) == 2  # the second and third taught nothing
    assert not set(more) & set(first)
    assert more == draw_problems(problems, sampled, 1, 4, 0)  # a pure function
    others = {tuple(draw_problems(problems, sampled, step, 4, 0)) for step in range(9)}
    assert others > {tuple(more)}
    every = sampled + [group(p, 0.0, 0.0) for p in problems if p not in first]
    assert draw_problems(problems, every, 1, 4, 0) == []  # the data are exhausted
    assert draw_problems(problems, sampled[:1] * 4, 1, 4, 0) == []  # every place is filled


@pytest.mark.parametrize(
    ("aggregation", "weight"), [("sequence", 1 / 4), ("constant", 1 / 16), ("token", 1 / 2)]
)
def test_masked_completions_leave_the_loss_but_stay_samples(aggregation, weight):
    """As in TRL: N counts them, the token denominator does not."""
    group = a_group([9], [1, 2], [3, 4, 5, 6], truncated=[1])
    options = AGGREGATIONS[aggregation] | {"mask_truncated": True, "kl_weight": 0.1}
    (kept,) = rollouts_of([group], [[0.5, -0.5]], **options)
    assert (list(kept.completion), kept.weight) == ([1, 2], weight)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_replaced_groups_count_nowhere(aggregation):
    groups = [a_group([8], [1, 2], [3]), a_group([9], [1, 2], [3])]
    advantages, options = [[0.0, 0.0], [1.0, -1.0]], AGGREGATIONS[aggregation]
    rollouts = rollouts_of(groups, advantages, [False, True], **options)
    assert [list(r.prompt) for r in rollouts] == [[9]] * 2
    alone = rollouts_of(groups[1:], advantages[1:], **options)
    assert [r.weight for r in rollouts] == [r.weight for r in alone]
    assert rollouts_of(groups, [[0.0, 0.0]] * 2, [False, False], **options) == []


def test_all_equal_rewards_leave_nothing_to_compute_but_a_kl_term():
    group = a_group([5], [1, 2], [3])
    assert rollouts_of([group], [[0.0, 0.0]]) == []
    assert len(rollouts_of([group], [[0.0, 0.0]], kl_weight=0.1)) == 2


def test_prompt_tokens_are_no_targets_and_the_end_token_is():
    """Also where pad == eos == 257 stands inside the prompt: masks come from lengths."""
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
