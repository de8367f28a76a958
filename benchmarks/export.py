"""Compares exported models with the base model and its adapter.

`inference.py` exports a merged model, which plain transformers runs, and GGUF files, which
llama.cpp runs. Each exported model answers problems greedily, without a tool. Its first answers are
compared token by token with those of the base model with the adapter in fp32. All answers are
graded.

    pip install -e '.[llama-cpp]'    # without it, only the merged model is tested
    python -m benchmarks.export --json docs/results/export.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import httpx2
import torch

from benchmarks import harness
from benchmarks.plain_generate import greedy
from rlm.cli import flag, run_main, terminal
from rlm.data import Format, Problem, load_problems, render_problem, stop_token_ids
from rlm.evaluation import percent, show_table, summarize_scores
from rlm.model import ADAPTER, AdapterInfo, Device, load_adapter, load_base, load_tokenizer

KINDS = ("f16", "q8_0")
SECONDS = 600  # time limit of llama.cpp for one answer
# Each exported model answers PROBLEMS problems. The base model with the adapter answers the first
# COMPARED of them.
PROBLEMS, COMPARED = 100, 20
MAX_NEW_TOKENS = 96

Conversations = Sequence[Sequence[dict[str, str]]]  # chat messages of each problem


@dataclass
class ExportConfig(harness.BenchmarkConfig):
    adapter: Path = flag(ADAPTER, "adapter to export")
    dataset: str = flag("elementary", "dataset whose test split is used")


@dataclass(frozen=True)
class Answers:
    """Contains the token ids of prompts, and of the completions by one inference engine."""

    prompts: list[list[int]]
    completions: list[list[int]]


@contextmanager
def llama_cpp(path: Path) -> Iterator[Callable[[str, dict[str, Any]], Any]]:
    """Serve a GGUF file with llama.cpp on one CPU thread; yield a function that posts JSON."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 1024, 1, 0, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)

    def post(place: str, body: dict[str, Any]) -> Any:
        reply = httpx2.post(server.listening_address + place, json=body, timeout=SECONDS)
        return reply.raise_for_status().json()

    yield post  # the server ends with the last reference to it


def ask_llama_cpp(path: Path, conversations: Conversations) -> Answers:
    """Return the greedy answers of a GGUF file with its own chat template and tokenizer."""
    prompts, completions = [], []
    with llama_cpp(path) as post:
        for messages in conversations:
            text = post("/apply-template", {"messages": messages})["prompt"]
            body = {"content": text, "parse_special": True, "add_special": True}
            prompts.append(post("/tokenize", body)["tokens"])
            body = {"prompt": prompts[-1], "n_predict": MAX_NEW_TOKENS, "temperature": 0}
            more = {"return_tokens": True, "cache_prompt": False}
            completions.append(post("/completion", body | more)["tokens"])
    return Answers(prompts, completions)


def ask_transformers(folder: Path, conversations: Conversations) -> Answers:
    """Return the greedy answers of a merged model in a process that imports only transformers."""
    program = Path(__file__).with_name("plain_generate.py")
    done = subprocess.run(
        [sys.executable, program, folder, str(MAX_NEW_TOKENS)],
        input=json.dumps(conversations),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Answers(**json.loads(done.stdout))


def measure(config: ExportConfig, folder: Path) -> dict[str, Any]:
    """Export the models, compare their answers, and return {exported model: figures}."""
    info = AdapterInfo.load(config.adapter)
    problems = load_problems(config.dataset, "test", max_samples=PROBLEMS, seed=config.seed)
    tokenizer = load_tokenizer(config.model)
    prompts = [render_problem(tokenizer, problem, info.format) for problem in problems]
    formats = [info.format.with_answer_type(problem.answer_type) for problem in problems]
    conversations = [
        [
            {"role": "system", "content": format.system_prompt},
            {"role": "user", "content": problem.question},
        ]
        for problem, format in zip(problems, formats, strict=True)
    ]
    base = load_base(config.model, Device("cpu", torch.float32, "as it is merged"))
    ends = sorted(stop_token_ids(tokenizer, base.generation_config))
    model = load_adapter(base, config.adapter, trainable=False)

    def cut(ids: list[int]) -> list[int]:
        return ids[:-1] if ids and ids[-1] in ends else ids

    options = {"eos_token_id": ends, "max_new_tokens": MAX_NEW_TOKENS}
    expected = [cut(greedy(model, prompt, **options)) for prompt in prompts[:COMPARED]]

    def export(*options: str | Path) -> None:
        script = ("inference.py", "--adapter", config.adapter.resolve(), "--model", config.model)
        subprocess.run([sys.executable, *script, *options], cwd=harness.ROOT, check=True)

    export("--merge", folder / "merged")
    answers = {"merged": ask_transformers(folder / "merged", conversations)}
    for kind in KINDS if util.find_spec("xllamacpp") else ():
        export("--gguf", folder / f"{kind}.gguf", "--gguf-type", kind)
        answers[kind] = ask_llama_cpp(folder / f"{kind}.gguf", conversations)

    def is_right(problem: Problem, format: Format, ids: list[int]) -> bool:
        return format.grade(str(tokenizer.decode(ids)), problem.answer, strict=True).correct

    figures = {}
    for name, found in answers.items():
        completions = [cut(ids) for ids in found.completions]
        right = [is_right(*row) for row in zip(problems, formats, completions, strict=True)]
        figures[name] = {
            "equal_prompts": sum(map(list.__eq__, found.prompts, prompts)),
            "equal_completions": sum(map(list.__eq__, completions, expected)),
            "compared": len(expected),
            "compared_tokens": sum(map(len, expected)),
            "right": summarize_scores(right, trials=True),
        }
    return figures


def main(config: ExportConfig) -> int:
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(config, Path(folder))
    rows = {
        name: {
            "same prompts": found["equal_prompts"],
            "same completions": f"{found['equal_completions']} of {found['compared']}",
            "tokens compared": found["compared_tokens"],
            f"right of {found['right']['total']}, %": percent(found["right"]),
        }
        for name, found in figures.items()
    }
    show_table("", rows, "exported model")
    package = None
    if len(figures) > 1:
        package = f"xllamacpp {metadata.version('xllamacpp')}"
    else:
        terminal.line("no GGUF file was tested; to test GGUF: pip install -e '.[llama-cpp]'")
    content = {"models": figures, "llama_cpp": package, **harness.provenance("export")}
    harness.write_report(config.json, content)
    merged = figures["merged"]
    return 0 if merged["equal_completions"] == merged["compared"] else 1


if __name__ == "__main__":
    run_main(main, ExportConfig, description=__doc__)
