"""`--deterministic`: one adapter, bit for bit, by any threads, batches, processes and resumes."""

import hashlib
import shutil
import time
from pathlib import Path

import faults
import pytest
import torch
from conftest import kernels, tiny_model

from rlm.cli import UsageError
from rlm.data import Problem
from rlm.model.hardware import Device
from rlm.training import deterministic
from rlm.training.deterministic import OrderedGradients
from rlm.training.distributed import Distributed
from tests.test_train_grpo import a_config, a_trainer

# Prompts of many lengths, some of which begin alike.
PROBLEMS = [Problem(f"p{i}", f"{'What is ' * (i % 4)}{i} + {i}?", str(2 * i)) for i in range(12)]
STEPS = 2


@pytest.fixture(scope="module")
def wide_model_dir(tmp_path_factory, tokenizer) -> Path:
    """A model whose products torch divides among threads."""
    path = tmp_path_factory.mktemp("wide")
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny_model(num_hidden_layers=1, **shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def train(model_dir: Path, folder: Path, name: str, threads: int = 1, **options: object) -> None:
    usual = {
        "deterministic": True, "steps": STEPS, "batch_size": 5, "group_size": 4,
        "updates_per_batch": 2, "mini_batch_size": 3, "kl_weight": 0.01, "kl_target": 5.0,
        "keep_checkpoints": STEPS + 1,
        "lora_r": 300,  # matrices whose norms torch divides among threads
    }  # fmt: skip
    torch.set_num_threads(threads)
    try:
        a_trainer(model_dir, a_config(folder, name, **usual | options)).train(PROBLEMS)
    finally:
        torch.set_num_threads(1)


def test_gradients_are_added_in_order_whichever_is_first():
    """In fp32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1."""
    parameter, threads = torch.nn.Parameter(torch.zeros(())), []

    def forward(micro):
        factor, seconds = micro
        time.sleep(seconds)
        threads.append(torch.get_num_threads())
        return micro, parameter * factor, factor

    torch.set_num_threads(3)
    try:
        ordered = OrderedGradients([parameter], Distributed())
        assert (ordered.threads, torch.get_num_threads()) == (3, 1)
        micro_batches = [(1e8, 0.2), (1.0, 0.1), (-1e8, 0.0)]
        seen = []
        for micro, loss, factor in ordered.losses(forward, micro_batches):
            loss.backward()
            seen.append((micro[0], factor, parameter.grad.item()))
    finally:
        torch.set_num_threads(1)
    assert seen == [(1e8, 1e8, 1e8), (1.0, 1.0, 1e8), (-1e8, -1e8, 0.0)]
    assert threads == [1, 1, 1]


@pytest.mark.parametrize(
    ("device", "compiled", "why"),
    [
        (Device("cpu", torch.bfloat16, "a test"), True, "the model computes in bfloat16"),
        (Device("cpu", torch.float32, "a test"), False, r"needs compiled products \(no cc\)"),
    ],
)
def test_what_would_not_hold_is_refused(model_dir, tmp_path, monkeypatch, device, compiled, why):
    if not compiled:
        monkeypatch.setattr(deterministic, "kernels_for", lambda _: (None, "no cc"))
    with pytest.raises(UsageError, match=f"--deterministic: .*{why}"):
        a_trainer(model_dir, a_config(tmp_path, deterministic=True), device=device)


def adapter_hash(folder: Path, name: str) -> str:
    file = folder / f"{name}_adapter" / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def runs(wide_model_dir, tmp_path_factory) -> Path:
    """The folder of a run with one thread."""
    if not kernels(torch.float32, 2, 32).has_linear:
        pytest.skip("products of fp32 are not compiled for this CPU")
    folder = tmp_path_factory.mktemp("runs")
    train(wide_model_dir, folder, "usual")
    return folder


@pytest.mark.parametrize(
    ("threads", "options"),
    [
        (1, {"train_batch_size": 1, "max_num_seqs": 3}),
        (2, {"train_batch_tokens": 64, "max_num_seqs": 7}),
    ],
)
def test_threads_and_batches_change_no_bit(wide_model_dir, runs, threads, options):
    train(wide_model_dir, runs, "other", threads, **options)
    assert adapter_hash(runs, "other") == adapter_hash(runs, "usual")


@pytest.mark.parametrize("step", range(STEPS))
def test_a_resume_changes_no_bit(wide_model_dir, runs, step):
    name = f"resumed{step}"
    shutil.copytree(runs / "usual", runs / name)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(runs / name / "checkpoints" / f"step_{later:06d}")
    train(wide_model_dir, runs, name, resume=True, max_num_seqs=5)
    assert adapter_hash(runs, name) == adapter_hash(runs, "usual")


def test_processes_change_no_bit(wide_model_dir, runs):
    ends = faults.run_two(lambda rank: train(wide_model_dir, runs, "two"), runs)
    assert [end.code for end in ends] == [0, 0], ends
    assert adapter_hash(runs, "two") == adapter_hash(runs, "usual")
