"""Structured outputs: what may be drawn, what is refused, and that every answer is valid."""

import json
import random
import re
import sys
import time
from contextlib import suppress

import jsonschema
import pytest
import torch
from conftest import byte_tokenizer, loop_seconds, tiny_model

from benchmarks.structured_outputs import INTEGER, KINDS, random_schema
from rlm.cli import UsageError
from rlm.data import FORMATS
from rlm.ops import TorchOps
from rlm.reasoner import GrammarCompiler, ReasoningStream, StructuredOutputs
from rlm.sampling import Request, Sampler, SamplingParams
from rlm.sampling.draw import exclude_tokens, sample_tokens

FORMAT = FORMATS["deepseek"]


@pytest.fixture(scope="module")
def sampler():
    return Sampler(tiny_model(), byte_tokenizer(), max_num_seqs=8)


@pytest.fixture(scope="module")
def compiler(sampler):
    return GrammarCompiler(sampler.tokenizer, sampler.stop_ids, sampler.vocab_size)


def answers(sampler, structured, n=2, seed=0, new_tokens=400, format=FORMAT, begin=""):
    """A stream of n completions at temperature 1, of a model that writes whatever it may."""
    begun = sampler.tokenizer.encode(begin, add_special_tokens=False)
    compiler = GrammarCompiler(sampler.tokenizer, sampler.stop_ids, sampler.vocab_size)
    grammar = compiler.compile(structured, format)
    options = {"n": n, "max_new_tokens": new_tokens, "budget": 12, "grammar": grammar}
    stream = ReasoningStream(sampler.tokenizer, format, sampler.stop_ids, **options)
    params = SamplingParams(new_tokens, 1.0)

    def allowed(row, ids):
        mask = stream.allowed_tokens(row, ids)
        if len(ids) < len(begun):
            assert mask[begun[len(ids)]]
            mask[:] = torch.arange(len(mask)) == begun[len(ids)]
        return mask

    for token in sampler.stream([Request([65], params, seed, n, stream, allowed)]):
        stream.add_token(token)
    return stream


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_fits_its_schema(sampler, kind):
    rng = random.Random(kind)
    for number in range(4):
        schema = random_schema(kind, rng)
        for state in answers(sampler, StructuredOutputs(schema), seed=100 * number).completions:
            assert state.finish_reason == "stop"
            jsonschema.validate(json.loads(state.answer), schema)


def test_an_answer_is_constrained_after_reasoning_and_without_it(sampler):
    """Both orders: thinking tags and then the answer, and the answer alone. In a reasoning that is
    cut anywhere, in the middle of a character too, nothing is forbidden but special tokens."""
    for begin, status in ("<think>", "forced"), ("<answer>", "absent"):
        stream = answers(sampler, StructuredOutputs(choice=["yes", "no"]), n=8, begin=begin)
        for state in stream.completions:
            thought = r"<think>.*</think>\n" * (status == "forced")
            assert re.fullmatch(rf"(?s){thought}<answer>(yes|no)</answer>", state.text)
            assert state.answer in ("yes", "no")
            assert (state.status, state.finish_reason) == (status, "stop")
        assert any("\ufffd" in state.text for state in stream.completions) == (status == "forced")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_tags_of_every_format_frame_a_structured_answer(sampler, format):
    (state,) = answers(sampler, StructuredOutputs(regex="[ab]{3}"), n=1, format=format).completions
    assert re.fullmatch("[ab]{3}", state.answer)


TRICKY = [
    'say "no"',
    "a\\b",
    " spaced ",
    "two\nlines",
    "ñ\u2028 €",
    "</answer>",
    "<think>x</think>",
]


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"regex": r"^\d{3}-[a-z]+/x$"}, r"\d{3}-[a-z]+/x"),
        ({"regex": "[^<]?|</answer>{2}"}, "[^<]?|</answer>{2}"),
        ({"regex": ".{0,4}"}, ".{0,4}"),
        ({"regex": r"[1-9]\$"}, r"[1-9]\$"),  # a literal dollar, no anchor
        ({"regex": r"[1-9]\\$"}, r"[1-9]\\"),
        ({"choice": TRICKY}, "|".join(map(re.escape, TRICKY))),
        ({"json_object": True}, r"(?s)\{.*\}"),
    ],
)
def test_an_answer_is_the_text_between_the_tags_whole(sampler, asked, fits):
    for state in answers(sampler, StructuredOutputs(**asked), n=8, new_tokens=200).completions:
        if state.finish_reason == "stop":
            assert re.fullmatch(fits, state.answer), state.answer
            assert state.text.endswith(f"<answer>{state.answer}</answer>")


def test_a_row_is_masked_by_itself_and_scored_by_what_is_left():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 2)
    mask = torch.tensor([True, False, True, False])
    masked = exclude_tokens(logits.clone(), [None, mask])
    assert torch.equal(masked[0], logits[0])
    token, logprob = sample_tokens(masked, torch.tensor([0.5, 0.0]), SamplingParams(1), TorchOps())
    assert int(token[1]) == 0
    assert float(logprob[1]) == pytest.approx(-torch.tensor(1 + 2.718281828**2).log().item())


def test_a_neighbour_changes_nothing(sampler):
    schema = StructuredOutputs(random_schema("flat", random.Random(0)))
    alone, among = (answers(sampler, schema, n=n, seed=5).completions[0].ids for n in (1, 6))
    assert alone == among


def deep(levels: int) -> dict:
    schema: dict = INTEGER
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


ITSELF = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
LIST = {"$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}}
HUGE = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": deep(150)}, "recursion limit exceeded"),
        ({"json": deep(2000)}, "nested too deeply|has .* characters; the limit is"),
        ({"json": HUGE}, "characters; the limit is 16000"),
        ({"json": {"$ref": "#"}}, "no value fits it"),
        ({"json": ITSELF}, "JSON schema: it is too complex"),
        ({"json": LIST | {"$ref": "#/$defs/a"}}, "JSON schema: it is too complex"),
        ({"json": {"type": "nope"}}, "JSON schema: Invalid type: nope"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ."not".'),
        ({"json": {"allOf": [INTEGER, {"type": "string"}]}}, "Unsatisfiable schema"),
        ({"json": {"oneOf": [INTEGER, {"type": "number"}]}}, "not supported: use anyOf instead"),
        ({"json": {"type": "string", "pattern": "(" * 9}}, "unclosed group"),
        ({"json": {"$ref": "http://example.com/x.json"}}, "Default retriever does not fetch"),
        ({"json": "{"}, "the JSON schema is not valid JSON"),
        ({"json": "[1]"}, "a JSON schema must be a JSON object"),
        ({"regex": "["}, "regex: unclosed character class"),
        ({"regex": "(?=a)b"}, "regex: look-around"),
        ({"regex": r"(a)\1"}, "regex: backreferences are not supported"),
        ({"regex": r"\bword\b"}, "regex: lookarounds not supported yet"),
        ({"regex": "(a{1000}){1000}"}, "regex: it is too complex"),
        ({"regex": "((a{100}){100}){100}"}, "regex: it is too complex"),
        ({"regex": ""}, "regex is empty"),
        ({"choice": []}, "choice is empty"),
        ({"choice": ["a", ""]}, "choice contains an empty string"),
        ({"regex": "a", "choice": ["b"]}, "give exactly one"),
        ({}, "give exactly one"),
    ],
)
def test_hostile_and_impossible_ones_are_refused_in_a_line(compiler, asked, said):
    compiler.compile(StructuredOutputs(json_object=True), FORMAT)  # the vocabulary is read
    started = time.process_time()
    with pytest.raises(UsageError, match=said) as refused:
        compiler.compile(StructuredOutputs(**asked), FORMAT)
    assert time.process_time() - started < 200 * loop_seconds()
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def both(reference: dict) -> dict:
    return {
        "type": "object",
        "properties": {"x": reference, "y": reference},
        "required": ["x", "y"],
    }


SAME = {
    "required": both,
    "anyOf": lambda reference: {"anyOf": [reference, reference]},
    "allOf": lambda reference: {"allOf": [reference, reference]},
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("links", [60, 120])
def test_references_to_the_same_schema_are_not_followed_again_and_again(compiler, kind, links):
    """The calls of functions are counted: 2 ** 60 of them would not end."""
    definitions = {f"a{i}": SAME[kind]({"$ref": f"#/$defs/a{i + 1}"}) for i in range(links)}
    schema = {"$defs": definitions | {f"a{links}": INTEGER}, "$ref": "#/$defs/a0"}
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"
        assert calls < 10_000

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        text = StructuredOutputs(schema).grammar(FORMAT)
    finally:
        sys.setprofile(before)
    assert "value: %json" in text
    compiler.compile(StructuredOutputs(schema), FORMAT)


@pytest.mark.parametrize("part", ['{"allOf": [', '{"a": ', "["])
def test_a_schema_of_any_depth_is_compiled_or_refused(compiler, part):
    closing = part.replace("[", "]").replace('{"a": ', "}").replace('{"allOf": ', "}")[::-1]
    for depth in (10, 300, 500, 700, 900, 950, 990, 1000, 1010, 1200):
        text = part * depth + "{}" + closing * depth
        if len(text) > 16_000:
            break
        with suppress(UsageError):
            compiler.compile(StructuredOutputs(text), FORMAT)


def test_a_schema_that_may_hold_itself_is_none_of_these(sampler):
    node = {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#"}}}]}
    node["anyOf"][1] |= {"required": ["next"], "additionalProperties": False}
    for state in answers(sampler, StructuredOutputs(node), n=8).completions:
        if state.finish_reason == "stop":
            jsonschema.validate(json.loads(state.answer), node)


def test_a_schema_cannot_make_the_compiler_lenient(compiler):
    """`x-guidance` in a schema could say that what is not supported be ignored."""
    with pytest.raises(UsageError, match="Unimplemented"):
        compiler.compile(
            StructuredOutputs({"x-guidance": {"lenient": True}, "uniqueItems": True}), FORMAT
        )


def test_a_tokenizer_that_cannot_be_read_is_named():
    with pytest.raises(UsageError, match="do not support this model's tokenizer"):
        GrammarCompiler([], frozenset({1}), 10).compile(StructuredOutputs(json_object=True), FORMAT)
