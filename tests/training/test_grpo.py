"""The mathematics, against hand-computed values, TRL's own numbers, and invariants."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import kernels, tiny_model

from rlm.data.problem import Problem
from rlm.kernels import Kernels
from rlm.model import attention
from rlm.model.adapters import adapter_tensors, new_adapter
from rlm.model.base import kernels_for
from rlm.sampling import Completion, prompt_seed
from rlm.training.algorithms import ALGORITHMS, soft_overlong
from rlm.training.fused_layers import use_fused_layers
from rlm.training.grpo import (
    Group,
    Rollout,
    draw_problems,
    group_advantages,
    has_signal,
    importance_weights,
    kl_estimate,
    make_rollouts,
    overlong_penalties,
    policy_loss,
    problems_for_step,
    rollout_seeds,
    row_weights,
)
from rlm.training.logprobs import attention_mask, score_tokens, split, token_logprobs
from rlm.training.state import TrainedAdapter

NAN = math.nan

# --- advantages: goldens measured on TRL 1.16 ---------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "scale_by_std", "expected"),
    [
        ([1, 0, 0, 0], True, [1.499700, -0.499900, -0.499900, -0.499900]),
        ([1, 1, 0, 0], True, [0.865875, 0.865875, -0.865875, -0.865875]),
        ([1, 0], True, [0.707007, -0.707007]),
        ([1] + [0] * 7, True, [2.474174] + [-0.353453] * 7),
        ([1] + [0] * 7, False, [0.875] + [-0.125] * 7),
        ([1, 0, NAN, 0], True, [1.154501, -0.577250, 0, -0.577250]),
        ([0, 1, 1, 1], False, [-0.75, 0.25, 0.25, 0.25]),
    ],
)
def test_advantages_are_trls(rewards, scale_by_std, expected):
    got = group_advantages(torch.tensor([rewards], dtype=torch.float32), scale_by_std=scale_by_std)
    assert got[0].tolist() == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("row", [[1.0] * 4, [0.0] * 4, [0.3] * 4, [NAN] * 4, [NAN, 1, NAN, NAN]])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_a_group_without_a_difference_gets_exactly_zero(row, scale_by_std):
    rewards = torch.tensor([row])
    assert group_advantages(rewards, scale_by_std=scale_by_std).tolist() == [[0.0] * 4]
    assert has_signal(rewards).tolist() == [False]


def test_groups_do_not_mix_and_rewards_are_not_written():
    rewards = torch.tensor([[1.0, 0.0], [5.0, 3.0]])
    before = rewards.clone()
    got = group_advantages(rewards, scale_by_std=False)
    assert got.tolist() == [[0.5, -0.5], [1.0, -1.0]]
    assert torch.equal(rewards, before)


# --- loss: goldens of TRL 1.16's own `_compute_loss` on these tensors ---------------------------

NEW = torch.tensor(
    [
        [-0.10, -0.90, -2.00, -0.30],
        [-0.50, -1.20, -0.05, -3.00],
        [-0.70, -0.20, -1.00, -0.40],
    ]
)
OLD = torch.tensor(
    [
        [-0.20, -0.60, -2.50, -0.30],
        [-0.40, -1.70, -0.05, -2.00],
        [-0.70, -0.50, -0.60, -0.40],
    ]
)
REF = torch.tensor(
    [
        [-0.15, -0.80, -1.50, -0.50],
        [-0.60, -1.00, -0.10, -2.50],
        [-0.90, -0.30, -1.10, -0.20],
    ]
)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.0, -0.5, -0.5])


def golden_loss(aggregation, *, low=0.2, high=0.2, kl_weight=0.0, importance=None, **choices):
    logprobs = NEW.clone().requires_grad_(True)
    loss, sums = policy_loss(
        logprobs,
        OLD,
        ADVANTAGES,
        torch.tensor(row_weights([4, 2, 3], aggregation, 8)),
        MASK,
        clip_eps_low=low,
        clip_eps_high=high,
        importance=importance,
        ref_logprobs=REF if kl_weight else None,
        kl_weight=kl_weight,
        **choices,
    )
    loss.backward()
    return loss.item(), logprobs.grad, sums


@pytest.mark.parametrize(
    ("aggregation", "options", "loss", "row_0", "row_1"),
    [
        ("sequence", {}, 0.050623, [-0.09210, -0.06173, 0, -0.08333], [0.07540, 0.13739]),
        ("constant", {}, -0.049762, [-0.04605, -0.03087, 0, -0.04167], [0.01885, 0.03435]),
        ("token", {"high": 0.28}, -0.141587, [-0.12280, -0.08231, 0, -0.11111], [0.05027, 0.09160]),
        (
            "sequence",
            {"kl_weight": 0.04},  # classic k3; TRL's default multiplies it by the ratio
            0.051504,
            [-0.09194, -0.06209, -0.00216, -0.08273],
            [0.07604, 0.13592],
        ),
    ],
)
def test_loss_and_gradient_are_trls(aggregation, options, loss, row_0, row_1):
    value, gradient, sums = golden_loss(aggregation, **options)
    assert value == pytest.approx(loss, abs=2e-6)
    assert gradient[0].tolist() == pytest.approx(row_0, abs=1e-5)
    assert gradient[1, :2].tolist() == pytest.approx(row_1, abs=1e-5)
    assert gradient[~MASK].abs().max() == 0
    assert sums.tokens == 9
    assert sums.clipped_low / 9 == pytest.approx(0.111111, abs=1e-6)
    assert sums.clipped_high / 9 == pytest.approx(0.111111, abs=1e-6)


GSPO = {"ratio": "sequence"}
CISPO = {"objective": "weighted", "low": 1.0}  # TRL's bound is the ratio itself: 1 + ours


@pytest.mark.parametrize(
    ("aggregation", "options", "loss", "row_0", "row_1"),
    [
        ("sequence", GSPO | {"low": 3e-4, "high": 4e-4}, 0.036717, [0.0] * 4, [0.10178, 0.10178]),
        ("sequence", GSPO, 0.005475, [-0.08982] * 4, [0.10178, 0.10178]),
        (
            "token",
            CISPO | {"high": 4.0},
            0.259901,
            [-0.12280, -0.08231, -0.18319, -0.11111],
            [0.05027, 0.09160],
        ),
        (
            "token",
            CISPO,
            0.191765,
            [-0.12280, -0.08231, -0.13333, -0.11111],
            [0.05027, 0.06667],
        ),
        (
            "sequence",
            {"importance": torch.full((3, 4), 0.5)},
            0.025311,
            [-0.04605, -0.03087, 0, -0.04167],
            [0.03770, 0.06870],
        ),
    ],
)
def test_the_other_members_of_the_family_are_trls(aggregation, options, loss, row_0, row_1):
    value, gradient, _ = golden_loss(aggregation, **options)
    assert value == pytest.approx(loss, abs=2e-6)
    assert gradient[0].tolist() == pytest.approx(row_0, abs=1e-5)
    assert gradient[1, :2].tolist() == pytest.approx(row_1, abs=1e-5)
    assert gradient[~MASK].abs().max() == 0


def test_every_algorithm_is_its_papers_choices():
    """A row of the table that changes must be meant."""
    table = {
        name: (a.scale_by_std, a.aggregation, a.clip_eps_low, a.clip_eps_high, a.ratio, a.objective)
        for name, a in ALGORITHMS.items()
    }
    assert table == {
        "grpo": (True, "sequence", 0.2, 0.2, "token", "ppo"),
        "drgrpo": (False, "constant", 0.2, 0.2, "token", "ppo"),
        "dapo": (True, "token", 0.2, 0.28, "token", "ppo"),
        "gspo": (True, "sequence", 3e-4, 4e-4, "sequence", "ppo"),
        "cispo": (True, "token", 1.0, 4.0, "token", "weighted"),
    }
    only_dapo = [a.dynamic_sampling and a.overlong_share == 0.2 for a in ALGORITHMS.values()]
    assert only_dapo == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [0.2, -0.5, 0.0]),
        ("k2", [0.02, 0.125, 0.0]),
        ("k3", [0.0187308, 0.1487212, 0.0]),
    ],
)
def test_kl_estimators(estimator, values):
    logprobs, ref = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.2, -1.5, -0.5]])
    assert kl_estimate(logprobs, ref, estimator)[0].tolist() == pytest.approx(values, abs=1e-6)


def test_kl_gradients_are_what_the_docs_say():
    """Over all tokens of a distribution: k1 pulls nowhere, k2 as KL(policy, reference) does."""
    logits = torch.tensor([0.3, -1.0, 0.8], requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.2]).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - ref)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)

    def expectation(estimator):
        estimate = kl_estimate(policy[None], ref[None], estimator)[0]
        (found,) = torch.autograd.grad((policy.detach().exp() * estimate).sum(), logits,
                                       retain_graph=True)  # fmt: skip
        return found

    assert expectation("k1").abs().max() < 1e-6
    assert torch.allclose(expectation("k2"), expected, atol=1e-6)
    value = (policy.exp() * kl_estimate(policy[None], ref[None], "k3")[0]).sum()
    assert value.item() == pytest.approx(exact.item(), abs=1e-6)  # unbiased


def test_soft_overlong_penalty_is_dapos():
    lengths = {15: 0, 16: -0.2, 17: -0.4, 18: -0.6, 19: -0.8, 20: -1, 21: -1}
    options = {"max_new_tokens": 20, "buffer": 5}
    got = {n: soft_overlong(n, False, **options) for n in lengths}
    assert got == pytest.approx(lengths)
    assert soft_overlong(3, True, **options) == -1  # no end token, whatever its length
    assert soft_overlong(20, True, max_new_tokens=20, buffer=0) == 0
    ended, cut = Completion([1] * 18, [], "stop"), Completion([1] * 20, [], "length")
    assert overlong_penalties([[ended, cut]], 20, 5, -2.0).tolist() == [pytest.approx([-1.2, -2.0])]


def test_masked_completions_leave_the_loss_but_stay_samples():
    """As in TRL: N counts them, the token denominator does not."""
    group = [Completion([1, 2], [], "stop"), Completion([3, 4, 5, 6], [], "length")]
    advantages = torch.tensor([[0.5, -0.5]])
    weights = {}
    for aggregation in ("sequence", "constant", "token"):
        (kept,) = make_rollouts(
            [[9]], [group], advantages, aggregation=aggregation, constant=8, mask_truncated=True,
            keep_all=True,
        )  # fmt: skip
        assert list(kept.completion) == [1, 2]
        weights[aggregation] = kept.weight
    assert weights == {"sequence": 1 / 4, "constant": 1 / 16, "token": 1 / 2}


def test_replaced_groups_count_nowhere():
    groups = [[Completion([1, 2], []), Completion([3], [])]] * 2
    rollouts = make_rollouts(
        [[8], [9]],
        groups,
        torch.tensor([[0.0, 0.0], [1.0, -1.0]]),
        aggregation="token",
        constant=None,
        kept=[False, True],
    )
    assert [(r.problem, list(r.prompt), r.weight) for r in rollouts] == [(0, [9], 1 / 3)] * 2


@pytest.mark.parametrize("aggregation", ["sequence", "constant", "token"])
def test_a_step_whose_groups_were_all_replaced_has_nothing_to_learn(aggregation):
    group = [Completion([1, 2], []), Completion([3], [])]
    options = {"aggregation": aggregation, "constant": 8, "kept": [False]}
    assert make_rollouts([[9]], [group], torch.zeros(1, 2), **options) == []


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
    tried = [group(p, *r) for p, r in zip(first, rewards, strict=True)]
    more = draw_problems(problems, tried, 1, 4, 0)
    assert len(more) == 2  # the second and third taught nothing
    assert not set(more) & set(first)
    assert more == draw_problems(problems, tried, 1, 4, 0)  # a pure function
    assert {tuple(draw_problems(problems, tried, step, 4, 0)) for step in range(9)} > {tuple(more)}
    all_tried = tried + [group(p, 0.0, 0.0) for p in problems if p not in first]
    assert draw_problems(problems, all_tried, 1, 4, 0) == []  # the data are exhausted
    assert draw_problems(problems, tried[:1] * 4, 1, 4, 0) == []  # every place is filled


def test_kl_metric_is_trls():
    assert golden_loss("sequence", kl_weight=0.04)[2].kl_total / 9 == pytest.approx(
        0.025389, abs=1e-6
    )


def test_kl_pulls_toward_the_reference():
    logprobs = NEW.clone().requires_grad_(True)
    loss, _ = policy_loss(
        logprobs,
        NEW,
        torch.zeros(3),
        torch.full((3,), 1 / 9),
        MASK,
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        ref_logprobs=REF,
        kl_weight=1.0,
    )
    loss.backward()
    moved = NEW - 0.1 * logprobs.grad
    apart = (NEW - REF)[MASK].abs() > 1e-6
    assert ((moved - REF)[MASK].abs() < (NEW - REF)[MASK].abs())[apart].all()


def test_on_policy_value_is_minus_advantage_and_gradient_is_not_zero():
    """Why "loss is 0" is no cause for alarm: the value says nothing, the gradient does."""
    logprobs = NEW.clone().requires_grad_(True)
    weights = torch.tensor(row_weights([4, 4, 4], "sequence", 4))
    mask = torch.ones_like(MASK)
    advantages = torch.tensor([1.0, -0.5, -0.5])
    loss, _ = policy_loss(
        logprobs, logprobs.detach(), advantages, weights, mask, clip_eps_low=0.2, clip_eps_high=0.2
    )
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-7)
    assert logprobs.grad.tolist() == [pytest.approx([-a / 12] * 4) for a in advantages.tolist()]


# --- batches ------------------------------------------------------------------------------------


def some_rollouts(problems=3, group=4, seed=0):
    rng = random.Random(seed)
    rollouts = []
    for problem in range(problems):
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 9))]
        for _ in range(group):
            completion = [rng.randrange(256) for _ in range(rng.randint(0, 6))] + [257]
            rollouts.append(
                Rollout(
                    problem, prompt, completion, rng.uniform(-1, 1), 0.1, [-1.0] * len(completion)
                )
            )
    return rollouts


def plain_logprobs(model, prompt, completion, temperature):
    """One row, no padding, no packing: what the packed computation must equal."""
    ids = torch.tensor([list(prompt) + list(completion)])
    scores = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
    return [scores[len(prompt) + t - 1, token] for t, token in enumerate(completion)]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 1), (4, 1), (3, 10_000), (99, 10_000)])
def test_packed_logprobs_equal_plain_ones(family, max_rows, max_tokens):
    model, rollouts = tiny_model(family), some_rollouts()
    seen = []
    with torch.no_grad():
        for micro in split(rollouts, max_rows=max_rows, max_tokens=max_tokens, device="cpu"):
            assert len(micro.rows) <= max_rows
            logprobs, entropy = token_logprobs(model, micro, temperature=0.7)
            assert (entropy[micro.completion_mask] > 0).all()
            for i, row in enumerate(micro.rows):
                expected = plain_logprobs(
                    model, rollouts[row].prompt, rollouts[row].completion, 0.7
                )
                assert logprobs[i, : len(expected)].tolist() == pytest.approx(
                    [float(e) for e in expected], abs=1e-5
                )
                assert logprobs[i, len(expected) :].abs().sum() == 0
            seen += micro.rows
    assert sorted(seen) == list(range(len(rollouts)))


def test_entropy_by_hand():
    model = tiny_model()
    rollout = Rollout(0, [1, 2], [3], 1.0, 1.0, [-1.0])
    (micro,) = split([rollout], max_rows=1, max_tokens=1, device="cpu")
    _, entropy = token_logprobs(model, micro, temperature=1.0)
    p = model(input_ids=torch.tensor([[1, 2]])).logits[0, -1].softmax(-1)
    assert entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-5)


def gradients(policy, rollouts, max_rows, max_tokens=10_000, algorithm="grpo", drift=0.0):
    """The adapter's, of one update; `drift` moves the old policy away, to both sides."""
    policy.zero_grad()
    for micro in split(rollouts, max_rows=max_rows, max_tokens=max_tokens, device="cpu"):
        logprobs, _ = token_logprobs(policy, micro, 1.0)
        sides = torch.tensor([(-1) ** length for length in micro.lengths])
        loss, _ = policy_loss(
            logprobs,
            logprobs.detach() + (drift * sides * micro.advantages)[:, None],
            micro.advantages,
            micro.weights,
            micro.completion_mask,
            **ALGORITHMS[algorithm].of_loss,
        )
        loss.backward()
    return torch.cat([t.grad.flatten() for t in adapter_tensors(policy).values()])


@pytest.fixture
def policy():
    policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
    with torch.no_grad():
        for name, tensor in adapter_tensors(policy).items():
            if "lora_B" in name:
                tensor.normal_(0, 0.1)
    return policy


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_does_not_depend_on_micro_batches_or_order(policy, algorithm):
    rollouts = some_rollouts()
    lengths = [len(rollout.completion) for rollout in rollouts]
    weights = row_weights(lengths, ALGORITHMS[algorithm].aggregation, 8)
    rollouts = [replace(r, weight=w) for r, w in zip(rollouts, weights, strict=True)]
    options = {"algorithm": algorithm, "drift": 0.4}
    expected = gradients(policy, rollouts, 99, **options)
    assert expected.abs().max() > 1e-4
    assert not torch.allclose(gradients(policy, rollouts, 99, algorithm=algorithm), expected)
    for rows in (1, 2, 4, 8):
        assert torch.allclose(gradients(policy, rollouts, rows, **options), expected, atol=1e-6)
    shuffled = random.Random(1).sample(rollouts, len(rollouts))
    assert torch.allclose(gradients(policy, shuffled, 4, **options), expected, atol=1e-6)


def test_chunks_of_logits_do_not_change_anything(policy, monkeypatch):
    expected = gradients(policy, some_rollouts(), 99)
    monkeypatch.setattr("rlm.training.logprobs.LOGITS_CHUNK", 3)
    assert torch.allclose(gradients(policy, some_rollouts(), 99), expected, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence", "constant", "token"])
def test_leaving_out_groups_without_signal_keeps_the_gradient(policy, aggregation):
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(5)] for _ in range(4)]
    groups = [
        [Completion([rng.randrange(256) for _ in range(rng.randint(1, 6))], []) for _ in range(3)]
        for _ in range(4)
    ]
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]])
    advantages = group_advantages(rewards, scale_by_std=True)
    options = {"aggregation": aggregation, "constant": 8}
    full = make_rollouts(prompts, groups, advantages, **options, keep_all=True)
    fewer = make_rollouts(prompts, groups, advantages, **options)
    assert (len(full), len(fewer)) == (12, 6)
    assert {rollout.problem for rollout in fewer} == {0, 3}
    assert torch.allclose(gradients(policy, fewer, 99), gradients(policy, full, 99), atol=1e-7)


def test_all_equal_rewards_leave_nothing_to_compute():
    advantages = group_advantages(torch.ones(1, 2), scale_by_std=True)
    group = [Completion([1, 2], []), Completion([3], [])]
    assert make_rollouts([[5]], [group], advantages, aggregation="token", constant=4) == []


def test_prompt_tokens_are_no_targets_and_the_end_token_is():
    """Also where pad == eos == 257 stands inside the prompt: masks come from lengths."""
    rollouts = [
        Rollout(0, [10, 257, 11], [20, 21, 257], 1.0, 1.0, [0.0] * 3),
        Rollout(0, [10, 257, 11], [30, 257], 1.0, 1.0, [0.0] * 2),
    ]
    (micro,) = split(rollouts, max_rows=9, max_tokens=99, device="cpu")
    assert micro.input_ids.tolist() == [[10, 257, 11, 20, 21, 30]]
    assert micro.position_ids.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert micro.sources.tolist() == [2, 3, 4, 2, 5]
    assert micro.targets.tolist() == [20, 21, 257, 30, 257]
    assert micro.completion_mask.tolist() == [[True] * 3, [True, True, False]]


def test_a_completion_sees_its_prompt_and_itself_alone():
    mask = attention_mask(torch.tensor([[0, 0, 1, 2, 2, -1]]), torch.float32)[0, 0] == 0
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],  # padding looks at itself: a row of nothing would be NaN
    ]


def test_prompt_tokens_receive_exactly_zero_gradient(policy):
    """Only hidden states that predict a completion token carry any."""
    (micro,) = split(some_rollouts(problems=1), max_rows=9, max_tokens=99, device="cpu")
    kept = []
    decoder = policy.get_base_model().get_decoder()

    def keep(module, inputs, output):
        output.last_hidden_state.retain_grad()
        kept.append(output.last_hidden_state)

    hook = decoder.register_forward_hook(keep)
    logprobs, _ = token_logprobs(policy, micro, 1.0)
    hook.remove()
    logprobs.sum().backward()
    touched = kept[0].grad.flatten(0, 1).abs().sum(-1) > 0
    expected = torch.zeros_like(touched)
    expected[micro.sources] = True
    assert torch.equal(touched, expected)
    assert not touched[: int((micro.segments == 0).sum()) - 1].any()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_lean_layers_equal_those_of_transformers_and_peft(family, monkeypatch):
    """Values and gradients, with an active adapter, another one, and none."""
    calls, call = Counter(), Kernels._pass
    monkeypatch.setattr(Kernels, "_pass", lambda *args: (calls.update([args[1]]), call(*args))[1])
    model = tiny_model(family)
    model.set_attn_implementation(attention.ATTN_IMPLEMENTATION)
    policy = new_adapter(model, r=4, alpha=8).eval()
    policy.add_adapter("reference", policy.peft_config["default"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    (micro,) = split(some_rollouts(), max_rows=99, max_tokens=9999, device="cpu")

    def outcome():
        found = []
        for adapter in ("default", "reference", None):
            policy.set_adapter(adapter or "default")
            if adapter is None:
                with policy.disable_adapter():
                    found.append(token_logprobs(policy, micro, 0.8)[0].detach())
                continue
            logprobs, _ = token_logprobs(policy, micro, 0.8)
            logprobs.square().sum().backward()
            found.append(logprobs.detach())
            found += [p.grad.clone() for p in policy.parameters() if p.grad is not None]
            policy.zero_grad()
        return found

    expected = outcome()
    assert not calls
    use_fused_layers(policy)
    got = outcome()
    if kernels_for(policy)[0]:  # every one in 2 layers, 3 passes forward and 2 backward
        norms = 2 * (4 if family == "qwen3" else 2) + 1
        first = 2  # nothing before the first norm is trained
        assert (calls["norm"], calls["norm_back"]) == (3 * norms, 2 * norms - first)
        assert (calls["gating"], calls["gating_back"]) == (3 * 2, 2 * 2)
        assert calls["masked_softmax"] == (3 + 2) * 2 * len(
            micro.input_ids
        )  # made again to go back
    assert len(expected) == len(got) == 2 * (1 + 2 * 7 * 2) + 1
    for left, right in zip(expected, got, strict=True):
        assert (left - right).abs().max() < 1e-5 * max(1, left.abs().max())


@pytest.mark.parametrize("with_native", [False, True])
def test_a_confident_token_keeps_its_gradient_in_bf16(with_native):
    """1 - p is made before rounding: with p = 0.998 in bf16 it would come out twice as large."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    targets = torch.tensor([5])
    direction = weight[5].float() / weight[5].float().square().sum()
    hidden = (direction * 13).bfloat16()[None]

    def slope(hidden, weight):
        head = torch.nn.Linear(32, 64, bias=False)
        head.weight = torch.nn.Parameter(weight, requires_grad=False)
        hidden = hidden.clone().requires_grad_()
        made = kernels(weight.dtype) if with_native else None
        logprobs, _ = score_tokens(hidden, head, targets, 1.0, made)
        logprobs.sum().backward()
        return logprobs.exp().item(), hidden.grad.float()

    p, expected = slope(hidden.float(), weight.float())
    assert 0.99 < p < 0.9995
    _, got = slope(hidden, weight)
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_gradients_too_small_for_fp16_are_not_lost():
    """The loss of one of ten thousand tokens is scaled before the backward pass."""
    rollouts = [replace(r, weight=r.weight * 1e-5) for r in some_rollouts()]
    (micro,) = split(rollouts, max_rows=99, max_tokens=9999, device="cpu")

    def gradient(dtype):
        policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for tensor in adapter_tensors(policy).values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        trained = TrainedAdapter(policy.to(dtype))
        logprobs, _ = token_logprobs(policy, micro, 1.0)
        loss = (logprobs * micro.weights[:, None] * micro.completion_mask).sum()
        (loss * trained.loss_scale).backward()
        trained.accumulate()
        return torch.cat([master.grad.flatten() for master in trained.master_weights.values()])

    expected, got = gradient(torch.float32), gradient(torch.float16)
    assert got.dtype == torch.float32
    assert (got - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("with_native", [False, True])
def test_log_probabilities_and_gradients_equal_those_of_the_full_logits(
    policy, temperature, with_native, monkeypatch
):
    if with_native:
        kernels(policy.dtype)
        assert kernels_for(policy)[0]
    else:
        monkeypatch.setattr("rlm.training.logprobs.kernels_for", lambda model: (None, "a test"))
    rollouts = some_rollouts()
    factors = torch.randn(64, generator=torch.Generator().manual_seed(1))
    expected = []
    for rollout in rollouts:
        text = torch.tensor([[*rollout.prompt, *rollout.completion]])
        logits = policy(text).logits[0, len(rollout.prompt) - 1 : -1].float() / temperature
        every = logits.log_softmax(-1)
        drawn = every.gather(-1, text[0, len(rollout.prompt) :, None]).squeeze(-1)
        (drawn * factors[: len(drawn)]).sum().backward()
        expected.append((drawn.detach(), -(every.exp() * every).sum(-1).detach()))
    gradient = torch.cat([t.grad.flatten() for t in adapter_tensors(policy).values()])
    policy.zero_grad()
    for micro in split(rollouts, max_rows=3, max_tokens=9999, device="cpu"):
        logprobs, entropy = token_logprobs(policy, micro, temperature)
        for row, values, spread in zip(micro.rows, logprobs, entropy, strict=True):
            length = len(rollouts[row].completion)
            assert torch.allclose(values[:length], expected[row][0], atol=1e-5)
            assert torch.allclose(spread[:length], expected[row][1], atol=1e-5)
            assert not values[length:].any()
        (logprobs * factors[: logprobs.shape[1]]).sum().backward()
    got = torch.cat([t.grad.flatten() for t in adapter_tensors(policy).values()])
    assert gradient.abs().max() > 0.1
    assert torch.allclose(got, gradient, atol=1e-5, rtol=1e-4)


def test_truncated_importance_weights():
    old = torch.log(torch.tensor([[0.2, 0.5, 0.9], [0.3, 0.1, 0.5]]))
    sampled = torch.log(torch.tensor([[0.4, 0.5, 0.3], [0.2, 0.1, 0.5]]))
    weights = importance_weights(old, sampled)
    assert torch.allclose(weights, torch.tensor([[0.5, 1.0, 2.0], [1.5, 1.0, 1.0]]))  # 3 is cut
    logprobs = old.clone().requires_grad_()
    loss, _ = policy_loss(
        logprobs,
        old,
        torch.tensor([1.0, -2.0]),
        torch.tensor([0.5, 0.25]),
        torch.tensor([[True, True, True], [True, True, False]]),
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        importance=weights,
    )
    loss.backward()
    # -advantage · weight · importance; the third token of the second row is padding.
    expected = torch.tensor([[-0.25, -0.5, -1.0], [0.75, 0.5, 0.0]])
    assert torch.allclose(logprobs.grad, expected)
