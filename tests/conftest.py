"""A tiny model with a tokenizer and a chat template, built in the process: no download, no weights.

Two layers, random weights wide enough apart (initializer_range 0.2) that a LoRA adapter can move
what it says; the byte-level tokenizer needs no vocabulary file.
"""

from __future__ import annotations

import functools
import gc
import io
import logging
import os
import shlex
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries below are imported
if not os.environ.get("RLM_TEST_GPU"):  # `make test-gpu`: a real card has other rounding
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import jinja2
import pytest
import torch
from expected_skips import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401  hooks
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from watched_browser import browser  # noqa: F401  a fixture: Playwright runs once a process

from rlm.cli.main import run_main
from rlm.ops.kernels import Kernels, load_ops

if TYPE_CHECKING:
    from peft import PeftModel

# A developer's endpoints and keys win over a test's own file: real requests, which cost money.
for name in [*os.environ]:
    if name.startswith(("GENERATOR_", "CRITIC_", "JUDGE_")):
        del os.environ[name]

# The same examples every time, and no time limit: a machine that pauses is no fault.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # bit-for-bit comparisons, and tests that run side by side
os.fsync = os.fstat  # a run waits for the disk forty times, and no test cuts the power
# A run's adapter is written several times; each time PEFT compiles the template of its model card.
jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def byte_tokenizer(pad: str = "<|pad|>", template: str = CHATML) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, *SPECIAL])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token=pad,
        additional_special_tokens=SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a text begins with a space, and other characters are bytes."""
    printable = {chr(c): c for c in range(33, 127)}
    pieces = [f"<0x{c:02X}>" for c in range(256)]
    vocabulary = {c: i for i, c in enumerate([*pieces, "▁", *printable, *SPECIAL, "<unk>"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = CHATML
    return tokenizer


FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def tiny_model(family: str = "llama", seed: int = 0, **options: object) -> PreTrainedModel:
    torch.manual_seed(seed)
    usual = {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "bos_token_id": None,
    }
    if family == "mistral":
        usual["sliding_window"] = None
    config = AutoConfig.for_model(family, **usual | options)
    return AutoModelForCausalLM.from_config(config).eval()


# Three query heads for each key-value head, of width 64, as SmolLM2-135M has.
USUAL_HEADS = {
    "hidden_size": 96,  # a multiple of the heads, as transformers asks
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


# Rows of 64 weights, which are packed in 4 bits as one block.
PACKABLE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def kernels(dtype: torch.dtype, queries: int = 3, width: int = 64) -> Kernels:
    """What is compiled for this CPU; that nothing can be is no failure. Each shape is a build of
    seconds, so tests share those of (3, 64), (2, 8) and (1, 8)."""
    made = load_ops(dtype, queries, width)
    if not isinstance(made, Kernels):
        pytest.skip(made.description)
    return made


@functools.cache
def loop_seconds() -> float:
    """Return the CPU seconds of 100,000 additions in Python, the unit of limits on computing.

    A limit in seconds would depend on the machine.
    """

    def once() -> float:
        start, total = time.thread_time(), 0
        for i in range(100_000):
            total += i
        return time.thread_time() - start

    return min(once() for _ in range(5))


def exit_code(script: ModuleType, config: type, *arguments: object) -> int:
    """What `python script.py arguments` does, in this process; its exit code."""
    with pytest.raises(SystemExit) as exit:
        run_main(script.main, config, argv=[str(argument) for argument in arguments])
    return exit.value.code or 0


@torch.no_grad()
def let_it_speak(policy: PeftModel, std: float) -> PeftModel:
    """Give a new adapter, whose B is zeros, values with which it says something else."""
    for name, tensor in policy.named_parameters():
        if "lora_B" in name:
            tensor.normal_(0, std)
    return policy


TILES = Path(__file__).parent / "ops" / "tiles.h"


@functools.cache
def tile_kernels() -> Kernels:
    """Kernels whose bf16 products are of AMX tiles: where the CPU has none, of tiles.h."""
    compiler = os.environ.get("CC") or "cc"
    stand_in = f"{compiler} -include {shlex.quote(str(TILES))}"
    for command in [compiler] * torch.cpu._is_amx_tile_supported() + [stand_in]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", command)
            made = load_ops.__wrapped__(torch.bfloat16, 3, 64)
        if isinstance(made, Kernels) and made._columns == 32:
            return made
    assert not isinstance(made, Kernels), "tiles were asked for and are not there"
    pytest.skip(made.description)


# The files of more than ten seconds (pytest --durations=0), the slowest first: one that starts last
# would leave the other processes idle.
SLOWEST = (
    "test_train_grpo", "test_experience_train", "test_serving", "test_gpu", "test_scripts",
    "test_engine", "test_faults", "test_evidence", "test_inference", "test_orchestrator_train",
    "test_same_prompts", "test_sft", "test_server", "test_kernels", "test_walkthroughs",
    "test_loaders", "test_answers", "test_linear",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(SLOWEST)))


@pytest.fixture(scope="module", autouse=True)
def imports_are_not_garbage() -> None:
    """Every run asks Python for a collection as it loads its model. That took half of a tiny run's
    time, because it looked at each object of the libraries and of the other tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def curves_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes three times as long as a tiny model's run. test_scripts draws what it trains
    (in a fixture of its module, which this one does not reach), test_evaluation every case."""
    if "train_grpo" in sys.modules:
        monkeypatch.setattr(
            "rlm.training.trainer.learning_curves", lambda rows, path, title: path.touch()
        )


@pytest.fixture(autouse=True)
def logging_is_as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that a test runs in this process turns on the lines about data."""
    monkeypatch.setattr(logging.getLogger("rlm"), "level", logging.NOTSET)
    logging.getLogger("rlm").manager._clear_cache()


@pytest.fixture(params=[1, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """On so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 on every machine, for what is compared token by token: bf16 rounds to whole percents."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list:
    """The requests of a server, as they reach its engine."""
    from rlm.serving.engine import Engine

    seen, add = [], Engine.add_request
    monkeypatch.setattr(Engine, "add_request", lambda self, r: (seen.append(r), add(self, r)))
    return seen


@pytest.fixture
def server_log() -> Iterator[io.StringIO]:
    """What is logged, as the server writes it; afterwards logging is as it was."""
    from rlm.serving import logging as logs

    stream, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure(stream)
    yield stream
    root.handlers[:], root.level = before


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The name of the embedded model, which is unpacked at its first use on a machine."""
    from rlm.cli import UsageError
    from rlm.model.base import model_directory

    try:
        model_directory("smollm2-135m")
    except UsageError as error:
        pytest.skip(str(error))
    return "smollm2-135m"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A base model on disk, as `--model` takes it."""
    path = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
