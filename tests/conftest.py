"""Fixtures: a tiny model with a tokenizer and a chat template, built without any download.

The model has two layers. Its random weights are so large (initializer_range 0.2) that a LoRA
adapter can change the output. The byte-level tokenizer needs no vocabulary file.
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
if not os.environ.get("RLM_TEST_GPU"):  # set by `make test-gpu`; a real GPU rounds otherwise
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

# A developer's endpoints and keys would override those of a test, and real requests cost money.
for name in [*os.environ]:
    if name.startswith(("GENERATOR_", "CRITIC_", "JUDGE_")):
        del os.environ[name]

# Each run uses the same examples. There is no time limit, because a machine may pause.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
torch.set_num_threads(1)  # results are compared bit by bit, and tests run in parallel
os.fsync = os.fstat  # saves time: a run would wait for the disk forty times
# Cached, because PEFT compiles the template of its model card each time an adapter is saved.
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
    """Make a tokenizer like Llama 2's: texts begin with a space, and rare characters are bytes."""
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


# Like SmolLM2-135M, with heads of width 64 and three query heads for each key-value head.
USUAL_HEADS = {
    "hidden_size": 96,  # transformers requires a multiple of the heads
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


# Rows of 64 weights, which form one block when they are quantized to 4 bits.
PACKABLE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}


def kernels(dtype: torch.dtype, queries: int = 3, width: int = 64) -> Kernels:
    """Return the kernels compiled for this CPU; skip the test if they cannot be compiled.

    Each shape takes seconds to build, so the tests share (3, 64), (2, 8) and (1, 8).
    """
    made = load_ops(dtype, queries, width)
    if not isinstance(made, Kernels):
        pytest.skip(made.description)
    return made


@functools.cache
def loop_seconds() -> float:
    """Return the CPU seconds of 100,000 additions in Python.

    Tests use this time as the unit of time limits, because seconds would depend on the machine.
    """

    def once() -> float:
        start, total = time.thread_time(), 0
        for i in range(100_000):
            total += i
        return time.thread_time() - start

    return min(once() for _ in range(5))


def exit_code(script: ModuleType, config: type, *arguments: object) -> int:
    """Run `python script.py arguments` in this process, and return its exit code."""
    with pytest.raises(SystemExit) as exit:
        run_main(script.main, config, argv=[str(argument) for argument in arguments])
    return exit.value.code or 0


@torch.no_grad()
def let_it_speak(policy: PeftModel, std: float) -> PeftModel:
    """Fill the zeros of a new adapter's B with random values, so that the output changes."""
    for name, tensor in policy.named_parameters():
        if "lora_B" in name:
            tensor.normal_(0, std)
    return policy


TILES = Path(__file__).parent / "ops" / "tiles.h"


@functools.cache
def tile_kernels() -> Kernels:
    """Return bf16 kernels that use AMX tiles; tiles.h emulates the tiles if the CPU has none."""
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


# The test files that take more than ten seconds (pytest --durations=0), the slowest first. If a
# slow file started last, the other processes would be idle.
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
    """Exclude the objects that already exist from garbage collection.

    Each run collects garbage when it loads its model. With all objects of the libraries and of
    other tests, this takes half of the time of a tiny run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def curves_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the drawing of learning curves, which takes three times as long as a tiny run.

    A module fixture in test_scripts runs before this one, and draws the curves of its runs.
    test_evaluation draws every kind of figure.
    """
    if "train_grpo" in sys.modules:
        monkeypatch.setattr(
            "rlm.training.trainer.learning_curves", lambda rows, path, title: path.touch()
        )


@pytest.fixture(autouse=True)
def logging_is_as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the log level, which a script that runs in this process may have changed."""
    monkeypatch.setattr(logging.getLogger("rlm"), "level", logging.NOTSET)
    logging.getLogger("rlm").manager._clear_cache()


@pytest.fixture(params=[1, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test with one thread and with five threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(usual)


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select fp32 on every machine; bf16 is too inexact for a comparison of tokens."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list:
    """Return a list that collects the requests that reach the engine of a server."""
    from rlm.serving.engine import Engine

    seen, add = [], Engine.add_request
    monkeypatch.setattr(Engine, "add_request", lambda self, r: (seen.append(r), add(self, r)))
    return seen


@pytest.fixture
def server_log() -> Iterator[io.StringIO]:
    """Yield a stream of what the server logs, and restore the logging afterwards."""
    from rlm.serving import logging as logs

    stream, root = io.StringIO(), logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure(stream)
    yield stream
    root.handlers[:], root.level = before


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the name of the embedded model, and unpack it if this machine has not used it yet."""
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
    """Return the folder of a tiny base model, for `--model`."""
    path = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
