"""Ask the trained model: the reasoning streams by, then the answer.

    python inference.py "Each box holds 6 eggs. How many eggs do 4 boxes hold?"
    python inference.py                # a prompt loop
    python inference.py --base "…"     # the same model without the adapter, for comparison
    python inference.py --n 8 "…"      # eight answers, which vote
    python inference.py --budget 64 "…"    # at most 64 tokens of reasoning
    python inference.py --json "…"     # one JSON object, for programs
    python inference.py --experiences data/grpo_experiences/generator_1_experiences.json "…"

From Python:
    from inference import generate_reasoning, load_rlm_model
    model, tokenizer = load_rlm_model()
    print(generate_reasoning("…", model, tokenizer))
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import terminal
from rlm.cli.main import run_main
from rlm.cli.options import UsageError, check_values, flag
from rlm.data.experiences import load_experiences, with_experiences
from rlm.data.prompts import FORMATS, render_prompt, trained_format
from rlm.model.quantize import QUANTIZATIONS, trained_on

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlm.sampling import SamplingParams

ADAPTER = Path("weights/final_rlm_lora")
SEATS = 16  # answers drawn at the same time


@dataclass(frozen=True)
class InferenceConfig:
    question: str | None = flag(None, "what to ask; none starts a prompt loop", positional=True)
    adapter: Path = flag(ADAPTER, "trained adapter")
    model: str | None = flag(None, "base model (none: the one the adapter was trained on)")
    base: bool = flag(False, "answer without the adapter")
    experiences: Path | None = flag(None, "library of lessons to put in front of the question")
    quantize: str = flag(
        "auto",
        "quantize the base (bitsandbytes) (auto: as in training)",
        choices=("auto", *QUANTIZATIONS),
    )
    json: bool = flag(False, "print one JSON object instead of text")
    max_new_tokens: int = flag(512, "longest completion", min=1)
    budget: int | None = flag(None, "most tokens of reasoning (none: as many as fit)", min=0)
    n: int = flag(1, "answers to draw; above 1 they vote", min=1)
    temperature: float | None = flag(
        None, "0 takes the most likely token (none: 0; 0.7 if n > 1)", min=0
    )
    top_p: float = flag(1.0, "smallest set of tokens whose mass reaches this", above=0, max=1)
    seed: int = flag(0, "of sampling, where temperature is above 0")

    def __post_init__(self) -> None:
        check_values(self)
        if self.n > 1 and self.temperature == 0:
            raise ValueError("--n above 1 needs a temperature above 0: all answers would be one")
        if self.json and self.question is None:
            raise ValueError("--json answers one question: give it on the command line")


def load_rlm_model(
    adapter: str | Path = ADAPTER,
    model: str | None = None,
    base: bool = False,
    quantize: str = "auto",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The base the adapter was trained on, with the adapter on it, and the tokenizer.

    Args:
        model: another copy of that base (a directory, say); needed if run.json names none.
        base: leave the adapter off.
        quantize: none, 4bit, 8bit, or auto: as the adapter was trained.

    Raises:
        UsageError: no adapter, or one of another base; the message says what to run.
    """
    from rlm.model.adapters import check_adapter, check_base, load_adapter, read_run
    from rlm.model.base import base_hash, load_base, load_tokenizer
    from rlm.model.hardware import EMBEDDED_MODEL, pick_device, prepare_process
    from rlm.sampling import Sampler

    prepare_process()
    adapter = Path(adapter)
    if not (base and model):
        if base and not adapter.exists():
            model = model or EMBEDDED_MODEL
        else:
            check_adapter(adapter, "run: python train_sft.py && python train_grpo.py")
    run = read_run(adapter)
    model = model or run.get("base_model")
    if model is None:
        raise UsageError(f"{adapter} does not say what it was trained on; name it with --model")
    quantize = trained_on(run) if quantize == "auto" else quantize
    loaded = load_base(model, pick_device(), quantize=quantize)
    if not base:
        check_base(adapter, model, base_hash(model))
        loaded = load_adapter(loaded, adapter, trainable=False)
    tokenizer = load_tokenizer(model)
    loaded.rlm_format = trained_format(run)
    loaded.rlm_sampler = Sampler(loaded, tokenizer, max_num_seqs=SEATS)
    return loaded, tokenizer


def generate_reasoning(
    prompt: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The model's completion, reasoning visible: `<think>…</think>` and `<answer>…</answer>`."""
    from rlm.sampling import SamplingParams

    params = SamplingParams(max_new_tokens, temperature)
    return _complete(prompt, model, tokenizer, params, seed)["response"]


def _complete(
    question: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    seed: int,
    n: int = 1,
    budget: int | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> dict[str, object]:
    """Answer a question; `show` is given each new piece of the first answer as it is drawn."""
    from rlm.sampling import Request, Sampler, prompt_seed
    from rlm.serving import answering
    from rlm.serving.thinking import Thinking

    format = getattr(model, "rlm_format", FORMATS["deepseek"])
    prompt = render_prompt(tokenizer, question, format)
    started, shown = time.monotonic(), 0
    sampler = getattr(model, "rlm_sampler", None) or Sampler(model, tokenizer, max_num_seqs=SEATS)
    thinking = Thinking(
        tokenizer,
        format,
        sampler.stop_ids,
        n=n,
        max_new_tokens=params.max_new_tokens,
        budget=budget,
        stop=params.stop,
    )
    for token in sampler.stream([Request(prompt, params, prompt_seed(seed), n, thinking)]):
        thinking.take(token)
        if token.row == 0:
            text = thinking.rows[0].text
            show(text[shown:])
            shown = len(text)
    samples = answering.finished_samples(thinking)
    votes = answering.count_votes(samples)
    best = answering.shown_sample(samples, votes)
    return {
        "question": question,
        "response": best.response,
        "reasoning": best.reasoning,
        "answer": best.answer,
        "final_answer": best.final_answer,
        "finish_reason": best.finish_reason,
        "thinking": best.thinking.model_dump(),
        "vote": answering.vote_report(votes).model_dump() if n > 1 else None,
        "prompt_tokens": len(prompt),
        "completion_tokens": sum(sample.completion_tokens for sample in samples),
        "seconds": round(time.monotonic() - started, 3),
    }


def main(config: InferenceConfig) -> int:
    from rlm.sampling import SamplingParams

    library = load_experiences(config.experiences) if config.experiences else ()
    model, tokenizer = load_rlm_model(config.adapter, config.model, config.base, config.quantize)
    usual = 0.7 if config.n > 1 else 0.0
    temperature = usual if config.temperature is None else config.temperature
    params = SamplingParams(config.max_new_tokens, temperature, config.top_p)
    answer = partial(
        _complete,
        model=model,
        tokenizer=tokenizer,
        params=params,
        seed=config.seed,
        n=config.n,
        budget=config.budget,
    )

    def ask(question: str) -> None:
        if not question.strip():
            raise UsageError("the question is empty")
        asked = with_experiences(question, library)
        if config.json:
            result = answer(asked) | {"question": question, "experiences": len(library)}
            sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        else:
            _print(answer(asked, show=_write), config)

    if config.question is not None:
        ask(config.question)
        return 0
    terminal.line("Ask a question; an empty line ends.")
    while True:
        try:
            question = input("> ")
        except EOFError:
            return 0
        if not question.strip():
            return 0
        ask(question)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print(result: dict, config: InferenceConfig) -> None:
    """What stands below the streamed text: the votes, the answer, what it took."""
    terminal.line("")
    if vote := result["vote"]:
        if vote["winner"] is not None:
            terminal.line(f"\nthe likeliest of the winners:\n{result['response']}")
        terminal.bars(vote["counts"], vote["n"])
    rate = result["completion_tokens"] / result["seconds"]
    who = "base" if config.base else str(config.adapter)
    status = result["thinking"]["status"]
    notes = "" if status == "closed" else f", reasoning {status}"
    if result["finish_reason"] == "length":
        notes += ", cut off at --max-new-tokens"
    terminal.line(
        f"\nanswer: {result['final_answer'] or 'none found'}  "
        f"({who}, {result['completion_tokens']} tokens, {rate:.0f} tokens/s{notes})"
    )


if __name__ == "__main__":
    run_main(main, InferenceConfig, description=__doc__)
