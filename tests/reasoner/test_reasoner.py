"""Reasoning apart from the answer, however the text is cut; budgets, stops, answer now."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from conftest import byte_fallback_tokenizer, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from live_server import ADD
from scripted_sampler import ScriptedSampler

from rlm.data.prompts import FORMATS
from rlm.reasoner.answers import Answer, Sample, Thinking, read_answer
from rlm.reasoner.stream import ReasoningParser, ReasoningStream, ToolCall
from rlm.sampling import ToolTokens
from rlm.sampling.requests import Completion, Request, SamplingParams, Token
from rlm.tools import Calculator

FORMAT = FORMATS["deepseek"]
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    " ",
    "\n",
    "a",
    "b.",
    "<",
    "</",
    "thi",
    "STOP",
]


def split(pieces: list[str], stop: tuple[str, ...] = ()) -> tuple[str, str]:
    parser = ReasoningParser(FORMAT, stop)
    parts = [*map(parser.feed, pieces), parser.finish()]
    return tuple(map("".join, zip(*parts, strict=True)))


@given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.integers(1, 5), min_size=60, max_size=60),
    st.sampled_from(
        [(), ("STOP",), ("\n\n", "b. a"), ("<",), ("ans", "th"), ("r>",), ("STOP", "TO")]
    ),
)
def test_text_is_split_the_same_however_it_arrives(text, sizes, stop):
    cut, at = [], 0
    for size in sizes:
        cut.append(text[at : at + size])
        at += size
    cut.append(text[at:])
    assert split(cut, stop) == split([text], stop)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\n1 + 1 = 2\n</think>\n<answer>2</answer>", "1 + 1 = 2", "2"),
        ("  <think>a", "a", ""),
        ("<think>a < b </thin", "a < b </thin", ""),
        ("no tags at all", "", "no tags at all"),
        ("<thin", "", "<thin"),
        ("text <think>a</think>b", "", "text <think>a</think>b"),  # not at the beginning
        ("<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        ("<think>\n</think>\n<answer>2</answer>", "", "2"),
        ("<think>a STOP</think>b STOP c", "a STOP", "b"),
    ],
)
def test_split(text, reasoning, answer):
    assert split([text], ("STOP",)) == (reasoning, answer)
    assert split(list(text), ("STOP",)) == (reasoning, answer)


@pytest.mark.parametrize(
    ("text", "stop", "whole", "answer"),
    [
        ("<think>a</think>\n<answer>5</answer>\nmore", "\n", "…</think>\n<answer>5</answer>", "5"),
        ("\n\n5 is it\n\nbye", "\n\n", "\n\n5 is it", "5 is it"),
        ("<think>a</think>4<answer>2 is it", "42", "…</think>", ""),
        ("<think>a END</think>b END c", "END", "…</think>b ", "b"),
        ("<think>a</think>b", "END", "…</think>b", "b"),
        # A stop string that is also a part of a tag does not end the answer inside the tag.
        ("<think>a</think><answer>42</answer>", "<", "…</think><answer>42</answer>", "42"),
        ("<think>a</think><answer>4 < 2</answer>", "<", "…</think><answer>4 ", "4"),
        ("<think>a</think><answer>4 answers", "answer", "…</think><answer>4 ", "4"),
        ("<think>a</think>4 <an", "<", "…</think>4 ", "4"),
    ],
)
def test_the_whole_text_is_cut_where_the_answer_is(text, stop, whole, answer):
    parser = ReasoningParser(FORMAT, (stop,))
    parts = [parser.feed(text), parser.finish()]
    assert "".join(part[1] for part in parts) == answer
    assert parser.text == whole.replace("…", text.partition("</think>")[0])


def test_a_tag_that_is_cut_off_is_not_text():
    for text in ("<thi", "<think>a\n</th", "<think>a</think>\n<answ", "b</ans", "<answer>b </"):
        for verbatim in (False, True):
            parser = ReasoningParser(FORMAT, verbatim=verbatim)
            parts = [*parser.feed(text), *parser.finish(cut=True)]
            assert "".join(parts) in ("a", "b", "b " if verbatim else "", "")


# --- the budget, on the real sampler with scripted tokens -----------------------------------------


def run_each(tokenizer, script: str, limits, now_after: str = "!", **options):
    """The rows of requests whose model would write `script`, each with a limit of its own."""
    sampler = ScriptedSampler(tiny_model(), tokenizer, {"": script}, max_num_seqs=len(limits))
    prompt = tokenizer.encode("<|im_start|>user\nq<|im_end|>\n")
    streams = [
        ReasoningStream(tokenizer, FORMAT, sampler.stop_ids, max_new_tokens=limit, **options)
        for limit in limits
    ]
    requests = [
        Request(prompt, SamplingParams(stream.max_new_tokens, 0.0), seed=0, force_tokens=stream)
        for stream in streams
    ]
    texts = [[] for _ in limits]
    for token in sampler.stream(requests):
        stream = streams[token.request]
        texts[token.request].append(stream.add_token(token))
        stream.answer_now |= stream.completions[0].reasoning.endswith(now_after)
    rows = [stream.completions[0] for stream in streams]
    for row, said in zip(rows, texts, strict=True):
        assert tuple(map("".join, zip(*said, strict=True))) == (row.reasoning, row.answer)
    return rows


def run(tokenizer, script: str, *, max_new_tokens: int = 400, **options):
    """The only row of a request whose model would write `script`."""
    return run_each(tokenizer, script, [max_new_tokens], **options)[0]


def test_no_part_of_a_tag_is_in_the_texts_wherever_the_limit_is(tokenizer):
    limits = range(1, len(ADD) + 30)
    for limit, row in zip(limits, run_each(tokenizer, ADD, limits), strict=True):
        assert not re.search("<[/a-z]", row.reasoning + row.answer), limit
    # Reasoning that repeats the beginning of a closing tag is closed, too.
    assert run(tokenizer, "<think>" + "</" * 90, max_new_tokens=80).status == "forced"


SUM = "<think>\n2 + 3 = <<2+3=5>>5, and then it goes on\n</think>\n<answer>5</answer>"


def test_a_tool_goes_before_the_budget_unless_it_does_not_fit(tokenizer):
    tool = {"tool_tokens": ToolTokens(Calculator(), tokenizer)}
    row = run(tokenizer, SUM, **tool)
    start = SUM.index("5>>")
    assert (row.text, row.tool_calls) == (SUM, [ToolCall("5>>", start, start + 3)])
    assert len(row.logprobs) == len(row.ids) - 3  # three were not drawn
    thought = start - len("<think>")  # bytes, and so tokens, before the insertion
    fits = run(tokenizer, SUM, budget=thought + 3, **tool)
    assert fits.text.startswith(SUM[: start + 3] + "\n</think>")
    assert (fits.status, fits.reasoning_tokens) == ("forced", thought + 3)
    short = run(tokenizer, SUM, budget=thought + 2, **tool)
    assert short.text.startswith(SUM[:start] + "\n</think>")
    assert (short.tool_calls, short.status, short.answer) == ([], "forced", "7")
    assert short.reasoning_tokens == thought
    # Of 56 tokens 14 are for the answer and 18 close the reasoning: two are left for the tool.
    late = run(tokenizer, SUM, max_new_tokens=56, **tool)
    told = run(tokenizer, SUM, now_after="<<2+3=", **tool)
    for row in (late, told):
        assert row.text.startswith(SUM[:start] + "\n</think>")
        assert row.tool_calls == []
    assert run(tokenizer, SUM, max_new_tokens=57, **tool).tool_calls


def test_an_end_token_that_an_insertion_replaces_ends_nothing(tokenizer):
    """It was drawn, and thrown away."""
    row = run(tokenizer, SUM[: SUM.index("5>>")], tool_tokens=ToolTokens(Calculator(), tokenizer))
    assert row.text.startswith(SUM[: SUM.index(">>") + 2])


LONG = "<think>\n" + "one two three four five six " * 8 + "</think>\n<answer>42</answer>"


def test_a_reasoning_that_ends_by_itself_is_closed(tokenizer):
    row = run(tokenizer, "<think>\nabc\n</think>\n<answer>5</answer>", budget=100)
    assert (row.reasoning, row.answer, row.status) == ("abc", "5", "closed")
    assert row.reasoning_tokens == len("\nabc\n")  # one byte a token here
    assert row.finish_reason == "stop"
    assert len(row.logprobs) == len(row.ids)  # every token was drawn


@pytest.mark.parametrize("budget", [0, 1, 7, 40, 41, 200])
def test_the_budget_is_never_exceeded(tokenizer, budget):
    row = run(tokenizer, LONG, budget=budget)
    assert row.reasoning_tokens <= budget
    assert (row.status, row.answer, row.finish_reason) == ("forced", "7", "stop")
    assert "\n</think>\n<answer>7" in row.text  # as in training, also with a budget of 0
    assert len(row.logprobs) < len(row.ids)  # forced tokens were not drawn


def test_the_end_of_a_sentence_closes_in_the_last_quarter(tokenizer):
    text = "x" * 50 + ". " + "y" * 20 + ". " + "z" * 200
    row = run(tokenizer, f"<think>{text}", budget=80)  # 60 to 80 is the last quarter
    assert row.reasoning == "x" * 50 + ". " + "y" * 20 + "."
    row = run(tokenizer, f"<think>{text}", budget=60)  # 45 to 60
    assert row.reasoning == "x" * 50 + "."
    lines = "12 * 4 = 48\n" * 20
    row = run(tokenizer, f"<think>{lines}", budget=80)  # a line that begins with a digit
    assert row.reasoning == lines[:59]
    price = "x" * 63 + "3.50? " + "z" * 200
    assert run(tokenizer, f"<think>{price}", budget=80).reasoning == "x" * 63 + "3.50?"


def test_room_for_the_answer_is_kept_without_a_budget(tokenizer):
    row = run(tokenizer, "<think>" + "a" * 1000, max_new_tokens=200)
    assert (row.status, row.answer, row.finish_reason) == ("forced", "7", "stop")
    assert len(row.ids) <= 200


@pytest.mark.parametrize(
    ("script", "options", "reasoning", "answer", "status", "finish_reason"),
    [
        ("<think>abc", {}, "abc", "7", "forced", "stop"),  # an end token in the reasoning
        ("just 12, 13", {"budget": 3}, "", "just 12, 13", "absent", "stop"),  # nothing is forced
        (LONG, {"now_after": "three"}, "one two three", "7", "forced", "stop"),  # answer now
        ("<think>a END</think>c END d", {"stop": ["END"]}, "a END", "c", "closed", "stop"),
        ("<think>a</think>b", {"stop": ["</think>"]}, "a", "b", "closed", "stop"),
        ("<think>a</think>" + "b" * 90, {"max_new_tokens": 60}, "a", "b" * 44, "closed", "length"),
        ("<think>größer → 日本 🍎</think>½", {}, "größer → 日本 🍎", "½", "closed", "stop"),
    ],
)
def test_how_a_completion_ends(
    tokenizer, script, options, reasoning, answer, status, finish_reason
):
    row = run(tokenizer, script, **options)
    assert (row.reasoning, row.answer) == (reasoning, answer)
    assert (row.status, row.finish_reason) == (status, finish_reason)


def test_a_character_that_is_cut_off_after_a_line_break_fails_nothing():
    """The bytes are decoded together with the line break, which was text already."""
    tokenizer = byte_fallback_tokenizer()
    cut = [*"<think>a", "<0x0A>", "<0xF0>", "<0x9F>"]
    ids = tokenizer.convert_tokens_to_ids(cut)
    stream = ReasoningStream(
        tokenizer, FORMAT, frozenset({1}), max_new_tokens=99, budget=len("a") + 3
    )
    ids += stream._close_text
    ids += tokenizer.encode(" b c</answer>", add_special_tokens=False)
    for i, token in enumerate(ids):
        finish = "length" if i + 1 == len(ids) else None
        stream.add_token(Token(0, 0, token, 0.0, finish))
    state = stream.completions[0]
    assert (state.reasoning, state.answer, state.status) == ("a", "b c", "closed")


def test_an_end_token_that_is_not_marked_as_special_is_no_text(tokenizer):
    """As in Yi-6B-Chat; after </answer>, it would make every format wrong."""
    ids = [*tokenizer.encode("<think>a</think>\n<answer>5</answer>~")]
    completion = Completion(ids, [], "stop")
    assert completion.text(tokenizer) == "<think>a</think>\n<answer>5</answer>"
    assert replace(completion, finish_reason="length").text(tokenizer).endswith("~")
    stream = ReasoningStream(tokenizer, FORMAT, frozenset({ids[-1]}), max_new_tokens=99)
    for id in ids:
        stream.add_token(Token(0, 0, id, 0.0, "stop" if id == ids[-1] else None))
    [sample] = read_answer(stream).samples
    assert (sample.response, sample.format) == (completion.text(tokenizer), "strict")
    assert stream.completions[0].text == sample.response


# --- which answer is shown, and how sure it is ----------------------------------------------------


def sample(final_answer: str | None, mean_logprob: float | None, format: str = "strict") -> Sample:
    return Sample(
        response="",
        reasoning=None,
        answer="",
        final_answer=final_answer,
        finish_reason="stop",
        thinking=Thinking("closed", 0, None),
        format=format,
        completion_tokens=1,
        mean_logprob=mean_logprob,
    )


def test_shown_is_the_likeliest_of_those_that_voted_for_the_winner():
    samples = [
        sample("6", -0.1),  # outvoted
        sample("5", -0.9),
        sample("5.0", -0.4),
        sample("5", None),  # all of it was forced
        sample("5", -0.01, "no_reasoning"),  # has no vote
    ]
    calls = [[ToolCall(str(number), 0, 1)] for number in range(5)]
    answer = Answer(samples, calls=calls)
    assert (answer.vote.winner, answer.vote.members) == ("5", (1, 2, 3))
    assert answer.shown is samples[2]
    assert answer.tool_calls is calls[2]
    assert answer.confidence.value == 3 / 5
    silent = [sample(None, None), sample(None, -0.5), sample(None, -0.2), sample("5", -0.3, "x")]
    assert Answer(silent).shown is silent[2]


def test_one_answer_is_as_sure_as_its_drawn_tokens_are_likely_on_average(tokenizer):
    stream = ReasoningStream(tokenizer, FORMAT, frozenset({257}), max_new_tokens=400)
    ids = tokenizer.encode("<think>a</think><answer>5</answer>")
    drawn = [-1.0, -3.0] + [math.nan] * (len(ids) - 1)  # those of the forced tokens are NaN
    for id, logprob in zip([*ids, 257], drawn, strict=True):
        stream.add_token(Token(0, 0, id, logprob, "stop" if id == 257 else None))
    confidence = read_answer(stream).confidence
    assert (confidence.value, confidence.method) == (math.exp(-2), "mean_token_probability")
    assert Answer([sample("5", None)]).confidence is None
