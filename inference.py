"""Ask the trained model: the reasoning streams by, then the answer.

    python inference.py "Tom has 12 apples and buys 7 more. How many apples does Tom have now?"
    python inference.py                # a prompt loop
    python inference.py --base "…"     # the same model without the adapter, for comparison
    python inference.py --json "…"     # one JSON object, for programs

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
from pathlib import Path
from typing import TYPE_CHECKING

from rlm import terminal
from rlm.answers import grade, split_completion
from rlm.config import UsageError, flag, run_main
from rlm.prompts import FORMATS, Format, render_prompt
from rlm.quantize import QUANTIZATIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlm.sampling import SamplingParams

ADAPTER = Path("weights/final_rlm_lora")


@dataclass
class InferenceConfig:
    question: str | None = flag(None, "what to ask; none starts a prompt loop", positional=True)
    adapter: Path = flag(ADAPTER, "trained adapter")
    model: str | None = flag(None, "base model (none: the one the adapter was trained on)")
    base: bool = flag(False, "answer without the adapter")
    quantize: str = flag(
        "auto", "load the base packed (auto: as in training)", choices=("auto", *QUANTIZATIONS)
    )
    json: bool = flag(False, "print one JSON object instead of text")
    max_new_tokens: int = flag(512, "longest completion")
    temperature: float = flag(0.0, "0 takes the most likely token")
    top_p: float = flag(1.0, "smallest set of tokens whose mass reaches this")
    seed: int = flag(0, "of sampling, where temperature is above 0")

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError("--max-new-tokens must be at least 1")
        if self.temperature < 0:
            raise ValueError("--temperature must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError("--top-p must be above 0 and at most 1")
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
    from rlm.machine import EMBEDDED_MODEL, pick_device, prepare_process
    from rlm.models import (
        base_hash,
        check_adapter,
        check_base,
        load_adapter,
        load_base,
        load_tokenizer,
        read_run,
    )
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
    quantize = run.get("quantize", "none") if quantize == "auto" else quantize
    loaded = load_base(model, pick_device(), quantize=quantize)
    if not base:
        check_base(adapter, model, base_hash(model))
        loaded = load_adapter(loaded, adapter, trainable=False)
    tokenizer = load_tokenizer(model)
    loaded.rlm_format = adapter_format(run)
    loaded.rlm_sampler = Sampler(loaded, tokenizer, seats=1)
    return loaded, tokenizer


def adapter_format(run: dict) -> Format:
    """The tags that an adapter was trained to write."""
    return FORMATS[run.get("config", {}).get("reasoning_format", "deepseek")]


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
    return _complete(prompt, model, tokenizer, params, seed, lambda text: None)["response"]


def _complete(
    question: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: SamplingParams,
    seed: int,
    show: Callable[[str], None],
) -> dict[str, object]:
    """Answer a question; `show` is given each new piece of text as it is drawn."""
    from rlm.sampling import Request, Sampler

    format = getattr(model, "rlm_format", FORMATS["deepseek"])
    prompt = render_prompt(tokenizer, question, format)
    started, ids, shown, reason = time.monotonic(), [], "", None
    sampler = getattr(model, "rlm_sampler", None) or Sampler(model, tokenizer, seats=1)
    for token in sampler.stream([Request(prompt, params, seed)]):
        ids.append(token.id)
        reason = token.finish_reason
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            show(text[len(shown) :])
            shown = text
    response = tokenizer.decode(ids, skip_special_tokens=True)
    tags = {"reasoning_tag": format.reasoning_tag, "answer_tag": format.answer_tag}
    reasoning, answer = split_completion(response, format.reasoning_tag)
    # The gold does not matter here: the verdict also carries the answer as it was found.
    found = grade(response, "0", strict=False, **tags).answer
    return {
        "question": question,
        "response": response,
        "reasoning": reasoning.strip() if reasoning else None,
        "answer": answer.strip(),
        "final_answer": found,
        "finish_reason": reason,
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "seconds": round(time.monotonic() - started, 3),
    }


def main(config: InferenceConfig) -> int:
    from rlm.sampling import SamplingParams

    model, tokenizer = load_rlm_model(config.adapter, config.model, config.base, config.quantize)
    params = SamplingParams(config.max_new_tokens, config.temperature, config.top_p)

    def ask(question: str) -> None:
        if not question.strip():
            raise UsageError("the question is empty")
        if config.json:
            result = _complete(question, model, tokenizer, params, config.seed, lambda text: None)
            sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
            return

        def show(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        result = _complete(question, model, tokenizer, params, config.seed, show)
        rate = result["completion_tokens"] / result["seconds"]
        who = "base" if config.base else str(config.adapter)
        cut = ", cut off at --max-new-tokens" if result["finish_reason"] == "length" else ""
        terminal.line(
            f"\n\nanswer: {result['final_answer'] or 'none found'}  "
            f"({who}, {result['completion_tokens']} tokens, {rate:.0f} tokens/s{cut})"
        )

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


if __name__ == "__main__":
    run_main(main, InferenceConfig, description=__doc__)
