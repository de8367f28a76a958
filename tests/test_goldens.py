"""Goldens of training: sampled groups, and the adapters of short runs and of a resumed run."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from golden import check, run
from safetensors.torch import load_file

# --- sampling -------------------------------------------------------------------------------------


def compute_groups(tokenizer, merged: bool) -> list:
    """Sample twelve completions in a batch of five rows, and one request with other parameters."""
    from rlm.sampling import Request, Sampler, SamplingParams

    policy, rng = a_policy(), random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (3, 17, 8, 24)]
    sampler = Sampler(policy, tokenizer, max_num_seqs=5, merged=merged)
    groups = sampler.sample(prompts, 3, SamplingParams(16, temperature=0.8), [1, 2, 3, 4])
    greedy = Request(prompts[0], SamplingParams(12, temperature=0), seed=0, n=1)
    nucleus = Request(prompts[1], SamplingParams(12, temperature=1.3, top_p=0.7), seed=5, n=2)
    groups += sampler.complete([greedy, nucleus])
    return [
        [[c.token_ids, [round(p, 6) for p in c.logprobs], c.finish_reason] for c in group]
        for group in groups
    ]


def a_policy():
    from rlm.model.adapters import adapter_tensors, new_adapter

    policy = new_adapter(tiny_model(), r=4, alpha=8).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in adapter_tensors(policy).values():
            tensor.normal_(0, 0.2)
    return policy


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "unmerged"])
def test_sampled_groups(tokenizer, merged):
    check("groups", compute_groups(tokenizer, merged), abs=2e-5)


# --- training, through the command lines ----------------------------------------------------------

REWARD = """
import os, pathlib, signal
LETTERS = set("etaoinshrdlu")

def likes_letters(completions, **_):
    stop = os.environ.get("GOLDENS_STOP", "")  # a run's metrics.jsonl: a signal in its second step
    if stop and pathlib.Path(stop).exists():
        del os.environ["GOLDENS_STOP"]
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(bool(LETTERS & set(text))) + len(text) % 3 / 4 for text in completions]
"""
SFT = (
    "--max-samples 24 --epochs 1 --batch-size 8 --micro-batch 4 --learning-rate 1e-2 --lora-r 4 "
    "--seed 3"
)
GRPO = (
    "--max-samples 40 --batch-size 4 --group-size 4 --max-new-tokens 12 --steps 3 --seed 3 "
    "--learning-rate 1e-2 --eval-every 0 --save-every 1 --eval-samples 4"
)
RUNS = {
    "grpo": f"{GRPO} --algorithm grpo --lora-r 4 --sft-adapter none",
    "kl": f"{GRPO} --sft-adapter SFT --algorithm drgrpo --kl-weight 0.1 --sampler unmerged",
    "dapo": f"{GRPO} --sft-adapter SFT --algorithm dapo --updates-per-batch 2 --temperature 0.8",
    # The default algorithm: two updates a step, and some completions of a group are equal.
    "topr": f"{GRPO.replace(' 12 ', ' 2 ')} --sft-adapter SFT --warmup-steps 3 --temperature 0.3",
}
# Logged values that depend only on the algorithm, the schedule and the mini-batches.
LOGGED = ("loss/policy", "optim/lr", "optim/grad_norm")


class Training:
    """Runs both stages with the tiny model; `start` returns the adapter's tensors by name."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder, self.base = folder, model_dir
        (folder / "reward.py").write_text(REWARD)
        numbers = [(i, i + 2, 2 * i + 2) for i in range(60)]
        rows = [
            {"question": f"{a} + {b}?", "answer": str(c), "solution": f"{a} + {b} = {c}"}
            for a, b, c in numbers
        ]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(self, script: str, name: str, flags: str, code: int = 0) -> dict[str, torch.Tensor]:
        listed = [self.folder / "sft" if flag == "SFT" else flag for flag in flags.split()]
        if script == "train_grpo.py":
            listed += ["--reward", self.folder / "reward.py:likes_letters"]
        files = ["--model", self.base, "--dataset", self.folder / "data.jsonl"]
        files += ["--output", self.folder / name, "--run-dir", self.folder / f"{name}_run"]
        found, said = run(script, *files, *listed)
        assert found == code, said
        file = self.folder / name / "adapter_model.safetensors"
        return load_file(file) if file.exists() else {}


def numbers_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """Return the norm, the sum of absolute values and five values of each tensor."""
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    return {
        name: [t.norm().item(), t.abs().sum().item(), *t.flatten()[:: t.numel() // 4 - 1].tolist()]
        for name, t in tensors.items()
    }


@pytest.fixture(scope="module")
def training(model_dir, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # fp32 on every machine
        made = Training(tmp_path_factory.mktemp("training"), model_dir)
        made.sft = made.start("train_sft.py", "sft", f"{SFT} --eval-samples 4")
        yield made


def test_the_adapter_of_sft(training):
    check("sft", numbers_of(training.sft), rel=1e-4, abs=1e-6)


def logged_steps(run_dir: Path) -> list[dict]:
    """Return the advantages of the logged groups and the metrics in LOGGED, for each step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [
        {name: row[name] for name in LOGGED}
        | {"advantages": [s["advantages"] for s in samples if s["step"] == row["step"]]}
        for row in rows
    ]


@pytest.mark.parametrize("name", RUNS)
def test_the_adapter_of_grpo_and_of_its_resume(training, monkeypatch, name):
    """A run that is stopped by a signal in its second step and resumed has the same result."""
    whole = training.start("train_grpo.py", name, RUNS[name])
    check(f"adapter_{name}", numbers_of(whole), rel=1e-4, abs=1e-6)
    if name == "topr":
        check("steps_topr", logged_steps(training.folder / "topr_run"), rel=1e-4, abs=1e-6)
    if name != "kl":  # test_train_grpo.py and test_faults.py resume the other algorithms
        return
    metrics = training.folder / f"{name}_parts_run" / "metrics.jsonl"
    monkeypatch.setenv("GOLDENS_STOP", str(metrics))
    training.start("train_grpo.py", f"{name}_parts", RUNS[name], code=143)
    assert len(metrics.read_text().splitlines()) == 2
    assert "GOLDENS_STOP" not in os.environ
    parts = training.start("train_grpo.py", f"{name}_parts", f"{RUNS[name]} --resume")
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[tensor], whole[tensor]) for tensor in whole)
