"""Asks the trained model a question, streams its reasoning, and then prints the answer.

    python inference.py "Each box holds 6 eggs. How many eggs do 4 boxes hold?"
    python inference.py                # an interactive prompt
    python inference.py --base "…"     # the same model without the adapter, for comparison
    python inference.py --n 8 "…"      # eight answers; the most frequent one wins
    python inference.py --budget 64 "…"    # at most 64 tokens of reasoning
    python inference.py --response-format schema.json "…"  # JSON; also --regex, --choice yes,no
    python inference.py --json "…"     # one JSON object, for programs
    python inference.py --merge merged     # merge the adapter into the base model, and save it
    python inference.py --gguf rlm.gguf    # save the merged model for llama.cpp and ollama
    python inference.py --experiences LIBRARY.json "…"     # with lessons from recipes/experience

From Python:
    from inference import generate_reasoning, load_rlm_model
    model, tokenizer = load_rlm_model()
    print(generate_reasoning("…", model, tokenizer))
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlm.cli import UsageError, check_values, flag, run_main, terminal
from rlm.data import NEAREST, apply_experiences, load_experiences
from rlm.grading import ANSWER_TYPES
from rlm.model import ADAPTER, QUANTIZATIONS
from rlm.reasoner import TEMPERATURE_OF_SEVERAL, Reply, ask, load_rlm_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlm.reasoner import ReasoningModel, StructuredOutputs


@dataclass(frozen=True)
class InferenceConfig:
    CHANGED_FIRST = (
        *("adapter", "base", "n", "temperature", "max_new_tokens", "budget"),
        *("json", "tool", "merge", "gguf"),
    )

    question: str | None = flag(
        None, "the question", positional=True, default_text="start an interactive prompt"
    )
    adapter: Path = flag(ADAPTER, "adapter that answers the question")
    model: str | None = flag(
        None,
        "base model: hub id, folder, or smollm2-135m",
        default_text="base model of the adapter",
    )
    base: bool = flag(False, "use the base model without the adapter")
    experiences: Path | None = flag(
        None, "library of lessons; the most similar lessons are added to the prompt"
    )
    nearest: int = flag(NEAREST, "maximum number of lessons from --experiences in a prompt", min=1)
    quantize: str = flag(
        "auto",
        "load the base model quantized with bitsandbytes; auto: as in training",
        choices=("auto", *QUANTIZATIONS),
    )
    tool: str = flag(
        "auto",
        "tool that writes into completions: calculator, FILE.py:NAME or none; auto: as in training",
    )
    answer_type: str | None = flag(
        None,
        "expected answer type",
        choices=ANSWER_TYPES,
        default_text="as in training; number for a base model without an adapter",
    )
    response_format: str | None = flag(
        None,
        "restrict the answer to JSON: json_object, or a JSON schema (a file, or the schema itself)",
        default_text="any text",
    )
    regex: str | None = flag(
        None,
        "restrict the answer to texts that this regular expression matches completely",
        default_text="any text",
    )
    choice: str | None = flag(
        None, "restrict the answer to one of several texts, e.g. yes,no", default_text="any text"
    )
    json: bool = flag(False, "print one JSON object instead of text")
    max_new_tokens: int = flag(512, "maximum completion length in tokens", min=1)
    budget: int | None = flag(
        None, "maximum number of reasoning tokens", min=0, default_text="no limit"
    )
    n: int = flag(1, "number of samples; above 1, the most frequent answer is returned", min=1)
    temperature: float | None = flag(
        None,
        "sampling temperature; 0 selects the most likely token",
        min=0,
        default_text=f"0, or {TEMPERATURE_OF_SEVERAL} with --n above 1",
    )
    top_p: float = flag(
        1.0,
        "nucleus sampling: use only the most likely tokens with this total probability",
        above=0,
        max=1,
    )
    seed: int = flag(0, "random seed for the sampling")
    merge: Path | None = flag(
        None, "write base model and adapter as one model to this folder, and exit"
    )
    merge_dtype: str = flag(
        "float32",
        "dtype of the merged model; the adapter is added in fp32",
        choices=("float32", "bfloat16", "float16"),
    )
    gguf: Path | None = flag(
        None, "write base model and adapter to this GGUF file for llama.cpp, and exit"
    )
    gguf_type: str = flag("f16", "dtype of the GGUF file", choices=("f16", "q8_0"))

    def __post_init__(self) -> None:
        check_values(self)
        if self.question is not None and not self.question.strip():
            raise ValueError("the question is empty")
        if sum(x is not None for x in (self.response_format, self.regex, self.choice)) > 1:
            raise ValueError("give only one of --response-format, --regex and --choice")
        if self.n > 1 and self.temperature == 0:
            raise ValueError("--n above 1 needs --temperature above 0: else all answers are equal")
        if self.writes:
            if self.question is not None or self.base:
                raise ValueError(
                    "--merge and --gguf write a trained model: leave out the question and --base"
                )
            if self.gguf and self.merge_dtype != "float32":
                raise ValueError("--gguf needs --merge-dtype float32: use --merge in another run")
        elif self.json and self.question is None:
            raise ValueError("--json answers one question: give the question on the command line")

    @property
    def writes(self) -> bool:
        """Whether --merge or --gguf is given. Then a model is written, and no question is asked."""
        return bool(self.merge or self.gguf)


def generate_reasoning(
    prompt: str,
    model: ReasoningModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """Generate a completion with the reasoning, the answer and their tags."""
    from rlm.sampling import SamplingParams

    params = SamplingParams(max_new_tokens, temperature)
    return ask(prompt, model, tokenizer, params, seed=seed).answer.shown.response


def main(config: InferenceConfig) -> int:
    if config.writes:
        write_merged(config)
        return 0
    library = load_experiences(config.experiences) if config.experiences else ()
    options = {"seed": config.seed, "n": config.n, "budget": config.budget}
    options |= {"answer_type": config.answer_type, "structured": structured_outputs(config)}
    adapter, base = config.adapter, config.base
    model, tokenizer = load_rlm_model(adapter, config.model, base, config.quantize, config.tool)
    from rlm.sampling import SamplingParams  # imports torch, so as late as possible

    default = TEMPERATURE_OF_SEVERAL if config.n > 1 else 0.0
    temperature = default if config.temperature is None else config.temperature
    params = SamplingParams(config.max_new_tokens, temperature, config.top_p)
    for question in _questions(config):
        informed = apply_experiences(question, library, config.nearest)
        asked, options["examples"] = informed.question, informed.examples
        if config.json:
            reply = ask(asked, model, tokenizer, params, **options)
            result = {"question": question} | _as_json(reply) | {"experiences": informed.used}
            _write(json.dumps(result, ensure_ascii=False) + "\n")
            continue
        try:
            reply = ask(asked, model, tokenizer, params, **options, on_text=_write)
        except UsageError as error:  # for example, the question is too long
            if config.question is not None or not sys.stdin.isatty():
                raise
            terminal.line(f"error: {error}")
        else:
            _print_summary(reply, config)
    if not config.json and (note := model.rlm_sampler.batch_note):
        terminal.line(note)
    return 0


def structured_outputs(config: InferenceConfig) -> StructuredOutputs | None:
    """Return the constraint that the options put on the answer, or None without one."""
    schema = config.response_format
    if schema is None and config.regex is None and config.choice is None:
        return None
    if schema not in (None, "json_object") and not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--response-format {schema} cannot be read: {error}") from error
    from rlm.reasoner import StructuredOutputs  # imports torch, so the file is read first

    if config.choice is not None:
        return StructuredOutputs(choice=[c.strip() for c in config.choice.split(",")])
    if config.regex is not None:
        return StructuredOutputs(regex=config.regex)
    if schema == "json_object":
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=schema)


def write_merged(config: InferenceConfig) -> None:
    """Merge the adapter into the base model, and write a model that loads without this project."""
    from rlm.evaluation import model_card
    from rlm.model import (
        AdapterInfo,
        check_convertible,
        check_new,
        merge_adapter,
        prepare_process,
        save_merged,
        write_gguf,
    )

    prepare_process()
    for option, path in (("--merge", config.merge), ("--gguf", config.gguf)):
        if path:
            check_new(option, path)
    if config.gguf and (config.gguf.is_dir() or config.gguf == config.merge):
        raise UsageError(f"--gguf {config.gguf} is a folder: name a file, such as model.gguf")
    merged, tokenizer = merge_adapter(config.adapter, config.model, config.merge_dtype)
    if config.gguf:
        check_convertible(merged, tokenizer)
    if config.merge:
        card = model_card(config.merge, AdapterInfo.load(config.adapter), merged=True)
        save_merged(merged, tokenizer, card, config.merge)
        terminal.line(f"merged model ({config.merge_dtype}): {config.merge}")
    if config.gguf:
        write_gguf(merged, tokenizer, config.gguf, config.gguf_type)
        terminal.line(f"GGUF file ({config.gguf_type}): {config.gguf}")


def _questions(config: InferenceConfig) -> Iterator[str]:
    """Yield the question from the command line, typed questions, or the lines of a piped text.

    On a terminal, an empty line ends the session, and a question that cannot be read is reported
    before the next one is awaited. In a piped text, empty lines are skipped.
    """
    if config.question is not None:
        yield config.question
        return
    asked, typed = 0, sys.stdin.isatty()
    if typed:
        terminal.line("Ask a question; an empty line ends the session.")
        with suppress(ImportError):  # with this module, the arrow keys work in input()
            import readline  # noqa: F401
    while True:
        try:
            question = input("> ")
        except EOFError:
            terminal.line("")  # ends the line of the prompt
            break
        except UnicodeDecodeError as error:
            mistake = (
                f"the question is not {error.encoding} text; set PYTHONIOENCODING, for example to "
                "utf-8"
            )
            if not typed:
                raise UsageError(mistake) from error
            terminal.line(f"error: {mistake}")
            continue
        if not question.strip():
            if typed:
                break
            continue
        asked += 1
        yield question
    if not asked and not typed:
        raise UsageError('no question was typed or piped in; type: python inference.py "…"')


def _as_json(reply: Reply) -> dict[str, object]:
    votes, calls = reply.answer.vote_counts, reply.answer.tool_calls
    return asdict(reply.answer.shown) | {
        "answer_type": reply.answer.answer_type,
        "vote": asdict(votes) if votes else None,
        **({"tool_calls": list(map(asdict, calls))} if calls else {}),
        "prompt_tokens": reply.usage.prompt_tokens,
        "completion_tokens": reply.usage.completion_tokens,
        "seconds": round(reply.seconds, 3),
    }


def _write(text: str, by_tool: bool = False) -> None:
    """Write a chunk of streamed text; text that a tool wrote is underlined on a terminal."""
    if by_tool and terminal.console.is_terminal:
        text = f"\x1b[4m{text}\x1b[24m"
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_summary(reply: Reply, config: InferenceConfig) -> None:
    """Print the votes, the answer and the speed below the streamed text."""
    shown, tokens = reply.answer.shown, reply.usage.completion_tokens
    terminal.line("")
    if votes := reply.answer.vote_counts:
        if votes.winner is not None:
            terminal.line(
                f"\nthe most likely completion with the winning answer:\n{shown.response}"
            )
        terminal.bars(votes.counts, votes.n)
    who = "base" if config.base else str(config.adapter)
    status = shown.thinking.status
    notes = "" if status == "closed" else f", reasoning {status}"
    if shown.finish_reason == "length":
        notes += ", cut off at --max-new-tokens"
    terminal.line(
        f"\nanswer: {shown.final_answer or 'none found'}  "
        f"({who}, {tokens} tokens, {tokens / reply.seconds:.0f} tokens/s{notes})"
    )


if __name__ == "__main__":
    run_main(main, InferenceConfig, description=__doc__)
