"""The scripts on simulated GPUs of several sizes and generations (`tests/pretended_cards.py`)."""

import atexit
import json
import shutil
from pathlib import Path

import faults
import pytest
import torch
import torch.distributed as dist
from conftest import PACKABLE, byte_tokenizer, tiny_model
from live_server import live
from pretended_cards import CONTEXT, card_of, pretended_cards
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

import eval as evaluate
import inference
import server
import train_grpo
import train_sft
from rlm.cli import UsageError
from rlm.data import longest_prompts
from rlm.model.adapters import load_adapter, set_gradient_checkpointing
from rlm.model.base import load_base
from rlm.model.hardware import Device, pick_device
from rlm.ops import TorchOps
from rlm.sampling.draw import sample_rows
from rlm.sampling.kv_cache import CacheConfig
from rlm.sampling.requests import SamplingParams
from rlm.sampling.weights import copy_bytes
from rlm.serving import models as serving_models
from rlm.serving.models import find_models, load_samplers
from rlm.training.batches import Rollout, make_micro_batches
from rlm.training.config import GRPOConfig
from rlm.training.distributed import Distributed
from rlm.training.logprobs import token_logprobs
from rlm.training.memory_plan import MemoryPlan, plan_memory
from tests.test_scripts import DATA, no_hub, run  # noqa: F401  a fixture for all
from tests.test_train_grpo import PROBLEMS, a_config, force_checkpointing, likes_letters

REWARD = """
def letters(completions, **_):
    return [float(bool(set("etaoinshrdlu") & set(text))) for text in completions]
"""
T4, GB8, GB24, GB80 = (16, (7, 5)), (8, (8, 6)), (24, (8, 9)), (80, (9, 0))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Save a base model whose rows are whole blocks of 64 weights, as 4-bit quantization needs.

    The model has a single layer, because a simulated GPU slows down each operation.
    """
    path = tmp_path_factory.mktemp("gpu_base")
    shape = PACKABLE | {"intermediate_size": 128, "vocab_size": 264}
    tiny_model("qwen2", **shape, num_hidden_layers=1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    (path / "reward.py").write_text(REWARD)
    return path


def sft(base, path, *options) -> int:
    return run(
        train_sft, "--model", base, *DATA, "--max-samples", 8, "--batch-size", 4, "--micro-batch",
        4, "--eval-samples", 2, "--output", path / "sft", "--run-dir", path / "run_sft", *options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    """Train an adapter with SFT on a GPU of 24 GB."""
    path = tmp_path_factory.mktemp("adapter")
    with pretended_cards(*GB24):
        assert sft(base, path) == 0
    return path / "sft"


def grpo(base, path, *options) -> int:
    return run(
        train_grpo, "--model", base, *DATA, "--sft-adapter", path / "sft", "--output",
        path / "grpo", "--run-dir", path / "run_grpo", "--steps", 1, "--batch-size", 2,
        "--group-size", 4, "--max-new-tokens", 8, "--max-samples", 40, "--eval-samples", 2,
        "--kl-weight", 0.1, "--updates-per-batch", 2, "--reward",
        f"{base / 'reward.py'}:letters", *options,
    )  # fmt: skip


def trained(base, path, *options) -> Path:
    assert sft(base, path, *options) == 0
    assert grpo(base, path, *options) == 0
    return path


@pytest.mark.parametrize(
    ("card", "options"),
    [
        pytest.param(T4, [], id="T4"),
        pytest.param(GB8, ["--quantize=4bit"], id="8GB-4bit", marks=pytest.mark.slow),
        pytest.param(GB80, [], id="80GB", marks=pytest.mark.slow),  # bf16, as on the GPU of 8 GB
    ],
)
def test_every_script_runs(base, tmp_path, card, options):
    with pretended_cards(*card) as cards:
        trained(base, tmp_path, *options)
        assert grpo(base, tmp_path, *options, "--plan") == 0
        assert run(
            evaluate, *DATA, "--model", base, "--adapter", tmp_path / "grpo", "--sft-adapter",
            tmp_path / "sft", "--max-samples", 2, "--max-new-tokens", 8, "--few-shot", 0,
            "--output", tmp_path / "e",
        ) == 0  # fmt: skip
        assert run(inference, "1 + 1?", "--adapter", tmp_path / "grpo", "--max-new-tokens", 8) == 0
        service = server._service(server.ServerConfig(adapter=tmp_path / "grpo"), ())
        with live(service) as running:
            answer = running.post({"prompt": "1 + 1?", "max_new_tokens": 8})
            assert answer.status_code == 200, answer.text
    assert cards.peak[0] > 0


def test_sft_computes_the_cpu_s_loss(base, tmp_path, capsys, monkeypatch):
    """The custom loss, which computes only the logits of completion tokens, equals the CPU's."""
    losses, bf16 = [], Device("cpu", torch.bfloat16, "test")
    refuse = classmethod(lambda *_, **__: pytest.fail("TRL's loss, whose logits are of all tokens"))
    monkeypatch.setattr("trl.SFTTrainer.compute_loss", refuse)
    monkeypatch.setattr(train_sft, "pick_device", lambda _: bf16)
    assert sft(base, tmp_path / "cpu", "--eval-samples=0", "--lora-r=4") == 0
    losses.append(json.loads((tmp_path / "cpu" / "sft" / "run.json").read_text())["loss"])
    monkeypatch.setattr(train_sft, "pick_device", pick_device)
    for name in ("kept", "tight"):
        with pretended_cards(*GB8):
            if name == "tight":
                place = "rlm.training.sft.available_memory"
                monkeypatch.setattr(place, lambda device: 6 * 2**20)
            assert sft(base, tmp_path / name, "--eval-samples=0", "--lora-r=4") == 0
        losses.append(json.loads((tmp_path / name / "sft" / "run.json").read_text())["loss"])
        said = capsys.readouterr().out
        assert ("with gradient checkpointing" in said) == (name == "tight")
    assert losses[1:] == [pytest.approx(losses[0], abs=0.02)] * 2


def test_a_resumed_sft_goes_on_with_the_card_s_random_numbers(base, tmp_path):
    """The random numbers of the GPU determine the dropout."""
    dropout = "--lora-dropout=0.1"
    with pretended_cards(*GB8) as cards:
        cards.random_state = before = torch.Generator().manual_seed(7).get_state()
        assert sft(base, tmp_path, dropout, "--max-minutes=1e-9") == 0
    with pretended_cards(*GB8) as cards:
        assert not torch.equal(cards.random_state, before)
        assert sft(base, tmp_path, dropout, "--resume") == 0
        assert torch.equal(cards.random_state, before)


def two_ranks(base, path) -> list[faults.Ended]:
    """Run two processes on a machine with two GPUs of 24 GB, and return how they ended."""

    def be(rank: int) -> None:
        with pretended_cards(*GB24, count=2) as cards:
            assert grpo(base, path, "--updates-per-batch=1", "--group-size=2") == 0
        atexit._run_exitfuncs()
        assert not dist.is_initialized()
        assert cards.peak[1 - rank] == 0, f"rank {rank} has put bytes on the other's card"
        assert cards.peak[rank] > 0

    return faults.run_two(be, path)


def test_two_processes_keep_to_their_own_cards(base, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "sft")
    ends = two_ranks(base, tmp_path)
    assert [end.code for end in ends] == [0, 0], ends
    assert (tmp_path / "grpo" / "adapter_model.safetensors").exists()


def test_more_processes_than_cards_is_refused(monkeypatch):
    for name, value in {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 2}.items():
        monkeypatch.setenv(name, str(value))
    with (
        pretended_cards(*GB24, count=2),
        pytest.raises(UsageError, match=r"at least 3 processes .* 2 GPUs"),
    ):
        Distributed.from_env()


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_a_base_is_read_straight_onto_the_card(base, monkeypatch, quantize):
    """The weights pass neither through host memory, which may be smaller, nor another GPU."""
    monkeypatch.setattr(PreTrainedModel, "to", lambda *_, **__: pytest.fail("moved as a whole"))
    with pretended_cards(*GB24, count=2) as cards:
        torch.cuda.set_device(1)
        model = load_base(str(base), pick_device(), quantize=quantize)
        assert {str(card_of(tensor)) for tensor in model.parameters()} == {"cuda:1"}
        assert cards.peak[0] == 0


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_what_overflows_in_fp16_is_loaded_in_fp32(base, tmp_path, capsys, quantize):
    """Activations of Qwen2.5 exceed 65,504, the maximum of fp16, on a T4; bf16 can hold them."""
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.embed_tokens.weight.data.mul_(1e6)
    model.lm_head.weight.data.mul_(1e-3)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    for card, dtype in ((T4, torch.float32), (GB8, torch.bfloat16)):
        with pretended_cards(*card):
            loaded = load_base(str(tmp_path), pick_device(), quantize=quantize)
            assert loaded.dtype == loaded.lm_head.weight.dtype == dtype
            assert (
                load_base(str(base), pick_device(), quantize=quantize).dtype == pick_device().dtype
            )
    assert capsys.readouterr().out.count("overflows in fp16") == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_noticed_in_the_one_transfer(bad, temperature):
    """The batch waits for each transfer from the GPU, so there is only one per token."""
    logits, uniform = torch.zeros(3, 50), torch.full((3,), 0.5, dtype=torch.float64)
    params, reads = [SamplingParams(1, temperature)] * 3, []

    class Reads(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ in ("tolist", "item", "__bool__") and args[0].is_cuda:
                reads.append(func)
            return func(*args, **(kwargs or {}))

    with pretended_cards(*T4):
        on_card = logits.to("cuda")
        with Reads():
            drawn = sample_rows(on_card, uniform, params, TorchOps())
        assert drawn == sample_rows(logits, uniform, params, TorchOps())
        assert len(reads) == 1
        on_card[1, 7] = bad
        with pytest.raises(UsageError, match="not finite"):
            sample_rows(on_card, uniform, params, TorchOps())


@pytest.mark.parametrize("quantize", ["none", "4bit"])
def test_an_adapter_computes_in_the_base_s_type(base, adapter, quantize):
    with pretended_cards(*GB8):
        model = load_base(str(base), pick_device(), quantize=quantize)
        policy = load_adapter(model, adapter, trainable=False)
        lora = {tensor.dtype for name, tensor in policy.named_parameters() if "lora_" in name}
        assert lora == {torch.bfloat16}


def test_masks_need_no_copy_on_a_gpu():
    """Attention on a GPU copies the mask in every layer unless its width is a multiple of 8."""
    rollouts = [Rollout(0, [1] * 5, [1] * 7, 1.0, 1.0, [0.0] * 7)]
    widths = {"cpu": 11, "cuda": 16}
    with pretended_cards(*T4):
        for device, width in widths.items():
            (micro,) = make_micro_batches(rollouts, 8, 512, device)
            assert micro.input_ids.shape == (1, width)
        # A group of eight is split into two rows, so fewer masked positions are computed.
        (micro,) = make_micro_batches(rollouts * 8, 8, 512, "cuda")
        assert micro.input_ids.shape == (2, 32)


def test_adapters_share_a_card_s_memory(adapter, tmp_path, monkeypatch):
    """If each adapter used half of the free memory, the last ones would have too little."""

    def leaving_little(model):
        cards.total = cards.allocated[0] + CONTEXT + int(2.2 * copy_bytes(model, model.dtype))
        return switch(model)

    switch = serving_models._adapter_switch
    monkeypatch.setattr(serving_models, "_adapter_switch", leaving_little)
    config = CacheConfig(max_num_seqs=16, prompt_slots=16, prompt_tokens=64, new_tokens=64)
    with pretended_cards(*GB24) as cards:
        for name in ("first", "second", "third"):
            shutil.copytree(adapter, tmp_path / name)
        models = find_models(tmp_path / "first", tmp_path, None)
        samplers = load_samplers(models, byte_tokenizer(), 16)
        assert len(samplers) == 4
        for served in samplers.values():
            served.activate()
            served.sampler.allocate_cache(config, served.prefix[:8])


@pytest.fixture(scope="module")
def larger_base(tmp_path_factory) -> Path:
    """Save a base model so large that the activations of a micro-batch dominate the memory."""
    path = tmp_path_factory.mktemp("larger_base")
    shape = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "vocab_size": 320}
    tiny_model("qwen2", **shape, num_hidden_layers=6).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def planned(base, path, **options) -> tuple[train_grpo.GRPOTrainer, MemoryPlan]:
    config = GRPOConfig(
        sft_adapter=None, max_new_tokens=64, batch_size=4, group_size=4, run_dir=path / "run",
        output=path / "adapter", **options,
    )  # fmt: skip
    trainer = train_grpo.GRPOTrainer(str(base), config)
    prompts = longest_prompts(trainer.render, PROBLEMS[:4])
    return trainer, plan_memory(trainer.config, trainer.weights, trainer.sampler, prompts, 0)


@pytest.mark.parametrize("quantize", ["none", "4bit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plan_counts_what_a_micro_batch_takes(
    larger_base, tmp_path, quantize, checkpointing, monkeypatch
):
    monkeypatch.setattr("rlm.training.memory_plan.GPU_MICRO_BATCH", 512)
    if checkpointing:
        force_checkpointing(monkeypatch)
    with pretended_cards(*GB24) as cards:
        trainer, plan = planned(larger_base, tmp_path, quantize=quantize)
        assert plan.checkpointing == checkpointing
        assert plan.loaded == cards.allocated[0]
        set_gradient_checkpointing(trainer.policy, plan.checkpointing)
        row = {"prompt": [1] * 97, "completion": [1] * 32, "weight": 1.0, "advantage": 1.0}
        rollouts = [Rollout(i, **row, sampler_logprobs=[0.0] * 32) for i in range(4)]
        (micro,) = make_micro_batches(rollouts, 8, 512, "cuda")
        before = cards.allocated[0]
        cards.peak[0] = before
        logprobs, _ = token_logprobs(trainer.policy, micro, 1.0)
        trainer.weights.backward(logprobs.sum())
        counted = cards.peak[0] - before
    assert plan.learning == pytest.approx(counted, rel=0.15)


def test_where_the_longest_completion_does_not_fit_activations_are_computed_twice(
    larger_base, tmp_path, capsys, monkeypatch
):
    def plan():
        return planned(larger_base, tmp_path)[1]

    with pretended_cards(*GB8):
        assert not plan().checkpointing
        with monkeypatch.context() as smallest:
            smallest.setattr("rlm.training.memory_plan.GPU_MICRO_BATCH", 64)
            kept = plan()
        free = kept.optimizer + kept.learning
        monkeypatch.setattr("rlm.training.memory_plan.available_memory", lambda device: free)
        assert "with gradient checkpointing" not in capsys.readouterr().out
        tight = plan()
        said = capsys.readouterr().out
        assert tight.checkpointing
        assert tight.learning < kept.learning
        assert "with gradient checkpointing" in said
        assert "may not fit" not in said


@pytest.mark.parametrize(
    ("calls", "options"),
    [
        (2, {"updates_per_batch": 2}),  # in the first update, after one micro-batch
        (-2, {"mini_batch_size": 2}),  # in the last update; old_logprobs are those of the sampler
        (-2, {"mini_batch_size": 2, "updates_per_batch": 2, "kl_weight": 0.1}),
    ],
)
def test_where_memory_runs_out_the_update_is_repeated_in_halves(
    base, tmp_path, capsys, monkeypatch, calls, options
):
    """The repeated update gives the same adapter; a second lack of memory ends the run."""
    calls_left, made = [], []  # the calls before memory runs out; one 1 for each call
    device = Device(
        "cuda", torch.float32, "test"
    )  # in 16 bits, the order of a sum changes the result

    def fails(*arguments):
        made.append(1)
        if calls_left:
            calls_left[0] -= 1
            if calls_left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return token_logprobs(*arguments)

    monkeypatch.setattr("rlm.training.state.token_logprobs", fails)
    monkeypatch.setattr("rlm.training.memory_plan.GPU_MICRO_BATCH", 256)
    adapters = []
    with pretended_cards(*GB8):
        for name in ("whole", "halves"):
            config = a_config(tmp_path, name, steps=1, **options)
            trainer = train_grpo.GRPOTrainer(str(base), config, likes_letters, device=device)
            last = len(made) + calls + 1 if calls < 0 else calls  # one micro-batch is trained on
            calls_left[:] = [last] if name == "halves" else []
            trainer.train(PROBLEMS)
            adapters.append({k: t.cpu() for k, t in trainer.adapter.items()})
        assert trainer.run.memory_plan.train_batch_tokens <= 128
        assert capsys.readouterr().out.count("out of GPU memory") == 1
        calls_left[:] = [1]
        assert trainer.run.memory_plan.halved
        with pytest.raises(torch.OutOfMemoryError):
            trainer.run.repeat_if_out_of_memory(fails)
    for name, tensor in adapters[0].items():
        assert torch.allclose(tensor, adapters[1][name], atol=1e-3), name
