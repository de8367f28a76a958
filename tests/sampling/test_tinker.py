"""Runs on a server that implements Tinker's protocol.

The tests marked `engine` use SkyRL's own server, which `make test-engine` installs into
.venv-engine. They compare its training of tiny models with training on this machine.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, byte_tokenizer, let_it_speak, tiny_model
from safetensors.torch import load_file, save_file

from rlm.cli import UsageError
from rlm.data import Problem
from rlm.model import (
    adapter_without_base,
    load_adapter,
    load_base,
    load_tokenizer,
    model_directory,
    new_adapter,
    save_adapter,
)
from rlm.sampling import Sampler, SamplingParams
from rlm.sampling import tinker as engine
from rlm.training import (
    GRPOConfig,
    Rollout,
    make_micro_batches,
    rollout_seeds,
    token_logprobs,
)
from rlm.training.doctor import run_doctor
from tests.test_train_grpo import CPU, likes_letters
from train_grpo import GRPOTrainer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-engine/bin/python"
PROBLEMS = [Problem(f"p{i}", f"{i} + {i}?", str(2 * i)) for i in range(12)]
NO_CLIP = 1e9  # SkyRL's server does not clip

ALGORITHMS = {
    "grpo": {"algorithm": "grpo"},
    "topr": {"algorithm": "topr", "mini_batch_size": 2},
    # The default bounds are so narrow that rounding would decide which ratios are clipped.
    "gspo": {
        "algorithm": "gspo", "mini_batch_size": 2, "updates_per_batch": 2,
        "clip_eps_low": 0.2, "clip_eps_high": 0.2,
    },
}  # fmt: skip


def has_an_odd_length(completions, **_):
    return [float(len(text) % 2) for text in completions]


def a_config(tmp_path: Path, url: str | None, **options) -> GRPOConfig:
    defaults = {
        "sft_adapter": None, "steps": 3, "batch_size": 4, "group_size": 4, "max_new_tokens": 6,
        "learning_rate": 1e-2, "warmup_steps": 0, "lr_schedule": "constant", "lora_r": 4,
        "eval_every": 0, "save_every": 1, "max_grad_norm": NO_CLIP,
        "run_dir": tmp_path / "run", "output": tmp_path / "adapter", "backend": "tinker",
        "server": url,
    }  # fmt: skip
    return GRPOConfig(**defaults | options)


def tensors_apart(one: Path, other: Path) -> float:
    first, second = (load_file(path / "adapter_model.safetensors") for path in (one, other))
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


# --- what needs no server -------------------------------------------------------------------------


def test_the_servers_name_of_a_base():
    assert engine.served_name("Qwen/Qwen3-8B", ["a", "/data/Qwen3-8B"], "it") == "/data/Qwen3-8B"
    assert engine.served_name("b/X", ["a/X", "b/X"], "it") == "b/X"
    with pytest.raises(UsageError, match="it does not serve --model me/Qwen3-8B"):
        engine.served_name("me/Qwen3-8B", ["Qwen/Qwen3-8B"], "it")
    with pytest.raises(UsageError, match=r"it does not serve --model tiny: .* its models .a, b."):
        engine.served_name("tiny", ["b", "a"], "it")


def test_sequences_are_taken_back_out_of_a_micro_batch():
    rollouts = [Rollout(0, [1, 2], [3, 4, 5], 1.0, 1.0, [0.0] * 3)]
    rollouts += [
        Rollout(0, [1, 2], [6], 1.0, 1.0, [0.0]),
        Rollout(1, [7], [8, 9], 1.0, 1.0, [0, 0]),
    ]
    (micro,) = make_micro_batches(rollouts, max_rows=9, max_tokens=99, device="cpu")
    expected = [(list(r.prompt), list(r.completion)) for r in rollouts]
    assert micro.sequences() == [expected[row] for row in micro.rows]


@pytest.fixture
def archive(model_dir, tmp_path) -> Path:
    """An adapter in the form in which SkyRL sends it: its config names no modules."""
    torch.manual_seed(1)
    policy = let_it_speak(new_adapter(load_base(str(model_dir), CPU), r=4, alpha=32), 1.0)
    policy.save_pretrained(tmp_path / "sent")
    (tmp_path / "sent/adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with tarfile.open(tmp_path / "sent.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "sent", arcname=".")
    return tmp_path / "sent.tar.gz"


def test_an_adapter_from_the_server_is_exported_whole(archive, model_dir, tmp_path):
    """The base model's weights are not read, and the exported config names all seven layers."""
    policy = adapter_without_base(str(model_dir), r=4, alpha=32)
    assert policy.device.type == "meta"
    read = tmp_path / "read"
    read.mkdir()
    engine.read_archive(archive, read)
    assert [file.name for file in read.iterdir()] == ["adapter_model.safetensors"]
    engine.fill_adapter(policy, read)
    save_adapter(policy, load_tokenizer(str(model_dir)), tmp_path / "out", {})
    sent, out = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("sent", "out"))
    assert sent.keys() == out.keys()
    assert all(torch.equal(tensor, out[name]) for name, tensor in sent.items())
    loaded = load_adapter(load_base(str(model_dir), CPU), tmp_path / "out", trainable=False)
    settings = loaded.peft_config["default"]
    assert len(settings.target_modules) == 7
    assert (settings.r, settings.lora_alpha) == (4, 32)


def test_another_adapter_from_the_server_is_refused(archive, model_dir, tmp_path):
    engine.read_archive(archive, tmp_path)
    with pytest.raises(UsageError, match="tensors have another shape"):
        engine.fill_adapter(adapter_without_base(str(model_dir), r=8, alpha=32), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(dict(list(load_file(file).items())[1:]), file)
    with pytest.raises(UsageError, match="LoRA matrices of the base model are not in the file"):
        engine.fill_adapter(adapter_without_base(str(model_dir), r=4, alpha=32), tmp_path)
    with tarfile.open(tmp_path / "whole.tar", "w") as tar:
        tar.add(model_dir / "config.json", arcname="config.json")
    with pytest.raises(UsageError, match="has no adapter_model"):
        engine.read_archive(tmp_path / "whole.tar", tmp_path)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"backend": "local", "server": "http://x"}, "--server needs --sampler vllm or"),
        ({"kl_weight": 0.1}, "--kl-weight must be 0"),
        ({"temperature": 0.7}, "--temperature must be 1"),
        ({"lora_alpha": 16}, "--lora-alpha must be 32"),
        ({"tool": "calculator"}, "--tool does not work with --backend tinker"),
        ({"plan": True}, "--plan times this machine"),
        ({"server": "vllm serve"}, "--server vllm serve is not a URL"),
        ({"sft_adapter": Path("mine")}, "--sft-adapter mine cannot be sent"),
        ({"quantize": "4bit", "dtype": "bfloat16"}, "--quantize, --dtype: not available"),
        ({"train_batch_size": 9, "sampler": "merged"}, "--sampler, --train-batch-size: not"),
    ],
)
def test_what_the_protocol_cannot_carry_is_refused_in_one_line(options, line):
    with pytest.raises(ValueError, match=line) as caught:
        GRPOConfig(**{"backend": "tinker", **options})
    assert "\n" not in str(caught.value)


def test_the_base_must_be_named(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match="--backend tinker needs --model"):
        GRPOConfig.resolve({"backend": "tinker"})
    monkeypatch.chdir(tmp_path)
    given = {"backend": "tinker", "model": "some/model", "dataset": "gsm8k"}
    assert GRPOConfig.resolve(given)["sft_adapter"] is None  # the default adapter is not used


# --- a run, with an SDK whose server is in this process -------------------------------------------


class Sdk:
    """The part of the `tinker` package that a run uses, with a tiny model as the server.

    The losses are sums, as documented (`sums`), or means, as on SkyRL's server.
    """

    class TinkerError(Exception): ...

    def __init__(self, model: Path, folder: Path, sums: bool) -> None:
        self.model, self.folder, self.sums = model, folder, sums
        self.types = SimpleNamespace(
            ModelInput=SimpleNamespace(from_ints=lambda ids: ids),
            Datum=lambda ids, inputs: (torch.tensor(ids), inputs),
            SamplingParams=SimpleNamespace,
            AdamParams=SimpleNamespace,
        )
        self.states: dict[str, tuple[dict, dict]] = {}
        self.calls: list[str] = []

    def ServiceClient(self, base_url, api_key):
        self.calls.append(f"{base_url} {api_key}")
        served = SimpleNamespace(model_name=str(self.model), max_context_length=1024)
        return SimpleNamespace(
            get_server_capabilities=lambda: SimpleNamespace(supported_models=[served]),
            create_lora_training_client=lambda base, **options: SdkClient(self, **options),
            create_training_client_from_state_with_optimizer=lambda path: SdkClient(self, path),
            create_rest_client=lambda: SimpleNamespace(get_checkpoint_archive_url=self.archive),
        )

    def archive(self, model_id, name):
        return done(url=(self.folder / f"{name}.tar").as_uri())


def done(**values):
    return SimpleNamespace(result=lambda *_: SimpleNamespace(**values))


class SdkClient:
    model_id, holder = "model", SimpleNamespace(close=lambda: None)

    def __init__(self, sdk: Sdk, path="", *, rank=4, seed=0, train_unembed=False) -> None:
        assert not train_unembed
        torch.manual_seed(seed)
        self.sdk, self.sequences = sdk, 0
        self.policy = new_adapter(load_base(str(sdk.model), CPU), r=rank, alpha=32).eval()
        self.tensors = [p for p in self.policy.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(self.tensors)
        if path:
            self.policy.load_state_dict(sdk.states[path][0])
            self.adam.load_state_dict(sdk.states[path][1])

    def logprobs(self, datum):
        ids, inputs = datum
        scores = self.policy(input_ids=ids[None]).logits[0].log_softmax(-1)
        return scores.gather(1, torch.tensor(inputs["target_tokens"])[:, None])[:, 0]

    def forward(self, data, loss_fn):
        assert loss_fn == "cross_entropy"
        assert all(len(inputs["weights"]) == len(ids) for ids, inputs in data)
        with torch.no_grad():
            rows = [{"logprobs": SimpleNamespace(data=self.logprobs(d).tolist())} for d in data]
        extra = {} if self.sdk.sums else {"elementwise_loss": None}
        return done(loss_fn_outputs=[row | extra for row in rows])

    def forward_backward(self, data, loss_fn):
        assert loss_fn == "importance_sampling"
        for ids, inputs in data:
            assert inputs.keys() == {"target_tokens", "logprobs", "advantages"}
            ratio = (self.logprobs((ids, inputs)) - torch.tensor(inputs["logprobs"])).exp()
            losses = -ratio * torch.tensor(inputs["advantages"])
            (losses.sum() if self.sdk.sums else losses.mean()).backward()
        self.sequences += len(data)
        return done()

    def optim_step(self, params):
        for tensor in self.tensors:
            tensor.grad /= 1 if self.sdk.sums else self.sequences
        norm = torch.nn.utils.clip_grad_norm_(
            self.tensors, params.grad_clip_norm if self.sdk.sums else NO_CLIP
        )
        rates = {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
        rates |= {"eps": params.eps, "weight_decay": params.weight_decay}
        self.adam.param_groups[0].update(rates)
        self.adam.step()
        self.adam.zero_grad()
        self.sequences = 0
        return done(metrics={"skyrl.ai/grad_norm": norm.item()})

    def save_state(self, name):
        self.sdk.states[name] = copy.deepcopy((self.policy.state_dict(), self.adam.state_dict()))
        return done(path=name)

    def save_weights_for_sampler(self, name):
        folder = self.sdk.folder / name
        self.policy.save_pretrained(folder)
        with tarfile.open(f"{folder}.tar", "w") as tar:
            tar.add(folder, arcname=".")
        return done()

    def save_weights_and_get_sampling_client(self):
        sampler = Sampler(self.policy, load_tokenizer(str(self.sdk.model)), merged=False)

        def sample(prompt, n, wanted):
            assert (wanted.top_k, wanted.top_p, wanted.stop) == (-1, 1.0, [257])
            params = SamplingParams(wanted.max_tokens, wanted.temperature)
            drawn = sampler.sample([prompt], n, params, [wanted.seed])[0]
            rows = [(c.token_ids, c.logprobs, c.finish_reason) for c in drawn]
            names = ("tokens", "logprobs", "stop_reason")
            return done(
                sequences=[SimpleNamespace(**dict(zip(names, r, strict=True))) for r in rows]
            )

        return SimpleNamespace(sample=sample)


@pytest.fixture
def sdk(request, model_dir, tmp_path, monkeypatch) -> Sdk:
    sdk = Sdk(model_dir, tmp_path, sums=request.param == "sums")
    monkeypatch.setitem(sys.modules, "tinker", sdk)
    monkeypatch.setattr(engine, "version", lambda _: "0.24.1")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    return sdk


@pytest.mark.parametrize(("sdk", "name"), [("sums", "gspo"), ("means", "topr")], indirect=["sdk"])
def test_a_run_on_a_server_is_a_local_one_and_resumes(name, sdk, model_dir, tmp_path, in_fp32):
    """With two mini-batches, and two passes of gspo, the old log-probabilities are not the new."""
    url = None if sdk.sums else "http://there"
    config = a_config(tmp_path, url, **ALGORITHMS[name], max_grad_norm=0.1 if sdk.sums else NO_CLIP)

    def small_seeds(problems, seed, step, refill):  # the run sends 30 bits of a seed
        return [s % 2**30 for s in rollout_seeds(problems, seed, step, refill)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train_grpo.rollout_seeds", small_seeds)
        there = replace(config, steps=2)
        GRPOTrainer(str(model_dir), there, reward_fn=likes_letters).train(PROBLEMS)
        resumed = replace(config, resume=True)
        GRPOTrainer(str(model_dir), resumed, reward_fn=likes_letters).train(PROBLEMS)
        paths = {"run_dir": tmp_path / "run2", "output": tmp_path / "adapter2"}
        here = replace(config, backend="local", server=None, sampler="unmerged", **paths)
        local = GRPOTrainer(str(model_dir), here, reward_fn=likes_letters, device=CPU)
        local.train(PROBLEMS)
    rows = [
        [json.loads(line) for line in (c.run_dir / "metrics.jsonl").open()] for c in (config, here)
    ]
    for ours, theirs in zip(*rows, strict=True):
        for metric in ("reward/mean", "loss/policy", "optim/grad_norm"):
            pair = ours.get(metric, 0.0), theirs.get(metric, 0.0)  # 0 if no token was learned
            assert pair[0] == pytest.approx(pair[1], abs=1e-4), metric
    assert tensors_apart(config.output, here.output) < 1e-4
    assert sdk.calls[0] == f"{url} tml-key"


@pytest.mark.parametrize("sdk", ["means"], indirect=True)
def test_the_doctor_samples_there(sdk, model_dir, tmp_path, capsys):
    trainer = GRPOTrainer(
        str(model_dir), a_config(tmp_path, "http://there", doctor=True), reward_fn=likes_letters
    )
    found = run_doctor(trainer, PROBLEMS)
    said = capsys.readouterr().out
    assert "reward, mean" in said
    assert found == ("FAULT" in said)


# --- SkyRL's server -------------------------------------------------------------------------------


class Server:
    """SkyRL's server in .venv-engine, whose folder survives a restart."""

    def __init__(self, model: Path | str, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder / "log.txt"
        script, place = ROOT / "examples/tinker_server.py", ["--port", str(self.port)]
        self.command = [PYTHON, script, "--model", model, "--folder", folder, *place, *options]
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        offline = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        # Compiling takes most of the time, so disable optimisation and cache the result.
        offline |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        offline |= {"JAX_COMPILATION_CACHE_DIR": str(PYTHON.parents[1] / "jax_cache")}
        offline |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                list(map(str, self.command)),
                env={**os.environ, **offline},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        for _ in range(3000):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=1)
                return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A function that returns the model's folder and a running server; at most one server runs."""
    if not PYTHON.exists():
        pytest.skip("no .venv-engine: make test-engine")
    pytest.importorskip("tinker", reason="no tinker: make test-engine")
    running: dict[str, tuple[Path, Server]] = {}

    def serve(family: str) -> tuple[Path, Server]:
        if family not in running:
            for _, server in running.values():
                server.kill()
            running.clear()
            folder = tmp_path_factory.mktemp(family)
            model = Path(model_directory(family))
            if family in FAMILIES:
                model = folder / "model"
                tiny_model(family).save_pretrained(model)
                byte_tokenizer().save_pretrained(model)
            # JAX compiles for each number of sequences, which takes seconds, so limit the numbers.
            small = ("--max-lora-rank", "4", "--micro-batch", "1", "--max-num-seqs", "8")
            running[family] = model, Server(model, folder / "engine", *small)
        return running[family]

    yield serve
    for _, server in running.values():
        server.kill()


class Recorder:
    """Records the samples and scores of a run, or replays recorded samples."""

    def __init__(self, trainer: GRPOTrainer, sampled=None) -> None:
        self.sampled, self.scored, self.metrics, self.advantages = [], [], [], []
        sample, score, log = trainer.sampler.sample, trainer.weights.token_logprobs, trainer.log
        again = iter(sampled or [])

        def sample_again(prompts, n, params, seeds, on_finish=lambda: None):
            self.sampled.append(next(again) if sampled else sample(prompts, n, params, seeds))
            return self.sampled[-1]

        def score_again(batch, temperature):
            logprobs, entropy = score(batch, temperature)
            mask = batch.completion_mask
            rows = zip(batch.sequences(), logprobs.detach(), mask, strict=True)
            self.scored.append(sorted((p, c, row[m].tolist()) for (p, c), row, m in rows))
            return logprobs, entropy

        def log_again(run, metrics, groups, advantages):
            self.metrics.append(metrics)
            self.advantages.append(advantages)
            log(run, metrics, groups, advantages)

        trainer.sampler.sample, trainer.weights.token_logprobs = sample_again, score_again
        trainer.log = log_again


def apart(one, other) -> float:
    """Return the largest difference of log-probabilities that were scored in the same order."""
    assert [[r[:2] for r in batch] for batch in one] == [[r[:2] for r in batch] for batch in other]
    pairs = zip(chain(*one), chain(*other), strict=True)
    return max(abs(x - y) for a, b in pairs for x, y in zip(a[2], b[2], strict=True))


def compare_with_a_local_run(model: str, config: GRPOConfig, reward) -> dict[str, float]:
    """Train on the server, and on this machine from the same adapter and completions.

    Returns:
        The largest differences, and how far training moved the adapter.
    """
    start, here = config.run_dir.with_name("start"), config.run_dir.with_name("here")
    remote = GRPOTrainer(model, config, reward_fn=reward)
    remote.weights.fetch()
    save_adapter(remote.policy, remote.tokenizer, start, {})
    theirs = Recorder(remote)
    remote.train(PROBLEMS)
    paths = {"sft_adapter": start, "run_dir": here, "output": here / "adapter"}
    local = replace(config, backend="local", server=None, **paths)
    trainer = GRPOTrainer(model, local, reward_fn=reward, device=CPU)
    ours = Recorder(trainer, theirs.sampled)
    trainer.train(PROBLEMS)
    for one, other in zip(theirs.advantages, ours.advantages, strict=True):
        assert torch.equal(one, other)
    gaps = {"log-probability": apart(theirs.scored, ours.scored)}
    for metric in ("loss/policy", "optim/grad_norm"):
        pairs = zip(theirs.metrics, ours.metrics, strict=True)
        gaps[metric] = max(abs(a.get(metric, 0.0) - b.get(metric, 0.0)) for a, b in pairs)
    gaps["adapter"] = tensors_apart(config.output, local.output)
    gaps["moved"] = tensors_apart(config.output, start)
    print(model, config.algorithm, {what: f"{gap:.1e}" for what, gap in gaps.items()})  # noqa: T201
    return gaps


@pytest.mark.engine
@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_steps_are_those_of_a_local_run(name, served, tmp_path):
    model, server = served("llama")
    config = a_config(tmp_path, server.url, **ALGORITHMS[name])
    gaps = compare_with_a_local_run(str(model), config, likes_letters)
    assert gaps.pop("moved") > 1e-2
    assert max(gaps.values()) < 1e-4


@pytest.mark.engine
@pytest.mark.parametrize("moment", ["score", "update"])
def test_a_run_goes_on_where_its_server_was_killed(moment, served, tmp_path, monkeypatch):
    """The server is killed in the second step, after sampling or during the update."""
    model, server = served("llama")
    options = {"algorithm": "topr", "mini_batch_size": 4}  # one update per step
    whole = a_config(tmp_path, server.url, **options, run_dir=tmp_path / "whole")
    GRPOTrainer(str(model), whole, reward_fn=likes_letters).train(PROBLEMS)

    ask, updates = engine.TinkerEngine._ask, 0

    def kills(self, what, call):
        nonlocal updates
        if what == moment and updates == 1:
            server.kill()
        updates += what == "update"
        return ask(self, what, call)

    config = replace(whole, run_dir=tmp_path / "run", output=tmp_path / "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(engine, "WAIT", 60.0)
        patch.setattr(engine.TinkerEngine, "_ask", kills)
        with pytest.raises(UsageError, match="start this run again with --resume") as caught:
            GRPOTrainer(str(model), config, reward_fn=likes_letters).train(PROBLEMS)
    print(caught.value)  # noqa: T201
    assert "\n" not in str(caught.value)
    server.start()
    again = replace(config, resume=True)
    summary = GRPOTrainer(str(model), again, reward_fn=likes_letters).train(PROBLEMS)
    assert summary["steps_run"] == 3
    gap = tensors_apart(tmp_path / "resumed", whole.output)
    print(f"resumed and uninterrupted adapters apart by {gap:.1e}")  # noqa: T201
    assert gap < 1e-4


@pytest.mark.engine
def test_another_base_is_refused(served, tmp_path):
    _, server = served("llama")
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    with pytest.raises(UsageError, match=r"the server at .* does not serve --model .*other"):
        GRPOTrainer(str(other), a_config(tmp_path, server.url))


@pytest.mark.engine
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_exported_adapter_gives_the_servers_log_probabilities(family, served, tmp_path):
    """The adapter is loaded as inference.py does, and compared on the last validation."""
    model, server = served(family)
    config = a_config(tmp_path, server.url, algorithm="grpo")
    trainer = GRPOTrainer(str(model), config, reward_fn=likes_letters)
    there = Recorder(trainer)
    trainer.train(PROBLEMS, PROBLEMS[:4])
    prompts = [trainer.render(problem) for problem in PROBLEMS[:4]]
    rollouts = [
        Rollout(i, prompts[i], c.token_ids, 1.0, 1.0, c.logprobs)
        for i, group in enumerate(there.sampled[-1])
        for c in group
    ]
    policy = load_adapter(
        load_base(str(model), CPU), config.run_dir / "adapter_last", trainable=False
    )
    gaps = []
    for micro in make_micro_batches(rollouts, max_rows=8, max_tokens=512, device="cpu"):
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy, micro, 1.0)
        gap = (logprobs - micro.sampler_logprobs).abs()[micro.completion_mask]
        gaps += gap.tolist()
    print(family, f"log-probabilities apart by {max(gaps):.1e}")  # noqa: T201
    assert len(gaps) >= 8
    assert max(gaps) < 1e-4


@pytest.mark.engine
def test_smollm2_itself(served, smollm2, tmp_path):
    """The model is named although the server has a folder, and the learning rate is usual."""
    _, server = served(smollm2)
    options = {"learning_rate": 1e-4, "max_new_tokens": 12, "batch_size": 2}
    config = a_config(tmp_path, server.url, **ALGORITHMS["grpo"] | options)
    gaps = compare_with_a_local_run(smollm2, config, has_an_odd_length)
    assert gaps.pop("moved") > 1e-4
    assert max(gaps.values()) < 1e-3
