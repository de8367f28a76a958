"""OpenAI's official client with /v1; the goldens contain whole replies."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pytest
from live_server import ADD, live, make_service

from rlm.data.prompts import FORMATS
from rlm.serving.access import Keys
from rlm.serving.routes_openai import ChatRequest, reasoning_request
from rlm.serving.schema import ReasoningRequest

IN_JSON = '<think>so</think>\n<answer>{"a": "<answer>b</answer>"}</answer>'
SCRIPT = {
    "never thinks": "<answer>5",
    "in JSON": IN_JSON,
    "again": ADD.replace("5", "8"),
    "two and three": ADD,
    "vote": [ADD, "nothing"],
}
KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def server(tokenizer):
    service, _ = make_service(tokenizer, SCRIPT)
    with live(service, Keys([KEY])) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def ask(client, text: str = "two and three", **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tuned", messages=messages, **options)


def test_a_conversation(client):
    message = ask(client).choices[0].message
    turns = [
        {"role": "user", "content": "two and three"},
        message.model_dump(),  # as the client builds it, with fields that we lack
        {"role": "user", "content": [{"type": "text", "text": "again, plus three"}]},
    ]
    second = client.chat.completions.create(model="tuned", messages=turns)
    assert second.choices[0].message.content == "8"


TURNS = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "developer",
        "content": [{"type": "text", "text": "Use "}, {"type": "text", "text": "words."}],
    },
    {"role": "user", "content": "one and one"},
    {"role": "assistant", "content": "two", "reasoning_content": "1 + 1 = 2"},
    {"role": "user", "content": "one and two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "two and three"},
]


def test_every_field_is_asked_for():
    options = {"temperature": 0.3, "top_p": 0.8, "n": 2, "seed": 7, "thinking_budget": 4}
    request = ChatRequest(model="base", messages=TURNS, max_tokens=9, stop="x", **options)
    asked = {"prompt": "two and three", "max_new_tokens": 9, "stop": ["x"], "adapter": "base"}
    assert reasoning_request(request) == ReasoningRequest(**asked, **options)
    alone = ChatRequest(model="base", messages=TURNS[-1:], max_completion_tokens=8, seed=0)
    asked = {"prompt": "two and three", "max_new_tokens": 8, "adapter": "base", "temperature": 0.7}
    assert reasoning_request(alone) == ReasoningRequest(**asked)


def test_the_prompt_holds_the_whole_conversation(client, tokenizer, submitted):
    system = FORMATS["deepseek"].system_prompt
    client.chat.completions.create(model="tuned", messages=TURNS)
    ask(client)
    told = {"role": "system", "content": system}  # as in clients of other servers
    client.chat.completions.create(model="tuned", messages=[told, TURNS[-1]])
    turns = [
        ("system", f"{system}\nBe brief.\nUse words."),
        ("user", "one and one"),
        # in the format of training
        ("assistant", "<think>\n1 + 1 = 2\n</think>\n<answer>two</answer>"),
        ("user", "one and two"),
        ("assistant", "<think>\n\n</think>\n<answer>three</answer>"),
        ("user", "two and three"),
    ]
    word = system.split()[-1]  # a system message may repeat a part of the prompt
    told = {"role": "system", "content": word}
    client.chat.completions.create(model="tuned", messages=[told, TURNS[-1]])
    short = [("system", system), turns[-1]]
    longer = [("system", f"{system}\n{word}"), turns[-1]]
    for job, shown in zip(submitted, (turns, short, short, longer), strict=True):
        text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in shown)
        assert tokenizer.decode(job.prompt) == f"{text}<|im_start|>assistant\n"


def test_without_a_seed_each_call_draws_anew():
    """Otherwise a user who asks k times for a vote would get the same answer k times."""
    body = {"model": "tuned", "messages": [{"role": "user", "content": "2 + 3?"}]}
    asked = [reasoning_request(ChatRequest(**body)) for _ in range(5)]
    assert len({one.seed for one in asked}) == 5
    assert {one.temperature for one in asked} == {0.7}  # at 0, all completions would be equal
    assert reasoning_request(ChatRequest(**body, seed=0, temperature=0)).seed == 0


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([user("hi"), system("")], "hi"),
        ([user("hi"), system("Be brief.")], "hi"),
        ([user("hi"), user("")], "hi"),
        ([user(""), system("x")], None),
        ([user(" \u200b"), system("x")], None),
        ([system("x"), user("\u200b")], None),
        ([user("hi"), {"role": "assistant", "content": "ho"}, user(""), system("x")], None),
    ],
)
def test_the_question_is_what_the_user_said_last_and_is_not_empty(messages, prompt):
    if prompt is None:
        with pytest.raises(ValueError, match="the last message is empty"):
            ChatRequest(model="tuned", messages=messages)
    else:
        request = ChatRequest(model="tuned", messages=messages)
        assert reasoning_request(request).prompt == prompt


@pytest.mark.parametrize("content", [[{}] * 20_000, [1] * 20_000])
def test_a_body_full_of_mistakes_is_answered_briefly(client, content):
    with pytest.raises(openai.UnprocessableEntityError) as info:
        ask(client, extra_body={"messages": [{"role": "user", "content": content}]})
    assert len(info.value.response.content) < 3000


OF_VLLM = {"best_of": 1, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "seed": -1}
OF_VLLM |= {"length_penalty": 1.0, "ignore_eos": False, "min_tokens": 0, "chat_template_kwargs": {}}
OF_VLLM |= {"web_search_options": None, "skip_special_tokens": True, "stop_token_ids": []}
OF_VLLM |= {"audio": None, "use_beam_search": False}
OF_VLLM |= {"add_generation_prompt": True, "continue_final_message": False, "reasoning": {}}
NEUTRAL = {
    "logit_bias": {}, "top_logprobs": None, "functions": [], "function_call": "none",
    "parallel_tool_calls": True, "store": False, "metadata": {"run": "7"}, "service_tier": "auto",
    "modalities": ["text"], "extra_body": OF_VLLM | {"reasoning_effort": None},
    "verbosity": "medium", "prompt_cache_retention": "24h",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logprobs": False,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "user": "someone",
    "top_p": 1,
    "temperature": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (NEUTRAL, "5"),
        ({"extra_body": {"thinking_budget": 3}}, "7"),
        ({"n": 2, "stop": "thing"}, "5"),
    ],
)
def test_what_is_taken(client, asked, content):
    answer = ask(client, "vote" if "n" in asked else "two and three", **asked)
    assert answer.choices[0].message.content == content
    assert [choice.message.content for choice in answer.choices[1:]] == ["no"] * ("n" in asked)


SUM = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}}
SUM |= {"required": ["sum"], "additionalProperties": False}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}


@pytest.mark.parametrize(
    ("asked", "valid"),
    [
        ({"response_format": BY_SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SUM)),
        ({"extra_body": {"structured_outputs": {"json": SUM}}}, json.loads),
        ({"extra_body": {"structured_outputs": {"json": json.dumps(SUM)}}}, json.loads),
        (
            {"extra_body": {"structured_outputs": {"regex": "[5-9]{1,4}!"}}},
            re.compile("[5-9]{1,4}!").fullmatch,
        ),
        ({"extra_body": {"structured_outputs": {"choice": ["6", "5"]}}}, "5".index),
    ],
)
@pytest.mark.parametrize("script", ["two and three", "never thinks"])
def test_answers_are_structured_whole_streamed_and_of_several(client, script, asked, valid):
    """The model writes the reasoning. Without the structure, it would answer 5 or never end."""
    thought = "2 + 3 = 5" if script == "two and three" else None
    options = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 200} | asked
    whole = ask(client, script, **options).choices
    assert [choice.finish_reason for choice in whole] == ["stop", "stop"]
    streamed = [""] * 2
    for chunk in ask(client, script, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    for choice, text in zip(whole, streamed, strict=True):
        assert choice.message.reasoning == thought
        assert choice.message.content == text
        assert valid(text) is not None or asked == {"response_format": BY_SCHEMA}


def test_an_answer_that_is_json_anyway_stays_as_it_is(client):
    """Tags inside JSON are kept; in other answers they are dropped."""
    assert ask(client, "in JSON").choices[0].message.content == '{"a": "b"}'
    by_format = ask(client, "in JSON", response_format={"type": "json_object"})
    assert by_format.choices[0].message.content == '{"a": "<answer>b</answer>"}'
    assert by_format.choices[0].message.reasoning == "so"


def last(content, **others):
    return {"messages": [{"role": "user", "content": content, **others}]}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"top_k": 5}, "top_k: this is not supported: send -1 or 0 or null"),
        ({"presence_penalty": 0.5}, "presence_penalty: a penalty is not supported: send 0"),
        ({"logprobs": True}, "logprobs: a log-probability is not supported: send false"),
        ({"best_of": True}, "best_of: this is not supported: send 1 or null"),
        (
            {"max_tokens": 5, "max_completion_tokens": 5},
            "max_tokens and max_completion_tokens mean the same",
        ),
        ({"stop": ["x", "</answer>"]}, "stop: an answer tag cannot be a stop string"),
        ({"stop": "5<answer>"}, "stop: an answer tag cannot be a stop string"),
        ({"stream_options": {"include_usage": True}}, "stream_options requires stream: true"),
        ({"messages": []}, "messages: is empty"),
        ({"tools": [{}]}, "tools: a tool is not supported: send [] or null"),
        (
            {"reasoning_effort": "low"},
            "reasoning_effort: this is not supported: use thinking_budget",
        ),
        ({"n": 0}, "n: must be at least 1"),
        ({"n": "two"}, "n: must be a whole number"),
        ({"colour": 1}, "colour: this field does not exist"),
        (last([{"type": "image_url", "image_url": {"url": "x"}}]), "images are not supported"),
        (
            last([{"type": "input_text", "text": "x"}]),
            "content: the type of every part must be text",
        ),
        (last(None), "messages.0: content is missing"),
        (last(7), "messages.0: content must be a string"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool messages are not supported"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "the last message must have the ro",
        ),
        ({"response_format": BY_SCHEMA, "stop": "}"}, "stop: a structured answer ends by itself"),
        (
            {"response_format": BY_SCHEMA, "structured_outputs": {"regex": "a"}},
            "send response_format or structured_outputs, not both",
        ),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "exactly one of json"),
        ({"structured_outputs": {"regex": "("}}, "regex: unclosed group"),
        ({"structured_outputs": {"json": 5}}, "json: must be a string or an object"),
        (
            {"structured_outputs": {"grammar": "a"}},
            "structured_outputs.grammar: this field does not",
        ),
        ({"guided_json": SUM}, "guided_json: this field does not exist"),
        ({"response_format": {}}, "response_format: its 'type' is missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema: is missing",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema: this field does not exist",
        ),
        (
            {"response_format": {"type": "<b>"}},  # the message must not repeat it
            "response_format: its 'type' must be 'text', 'json_object', 'json_schema'",
        ),
    ],
)
def test_what_is_not_offered_is_named(client, body, said):
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        ask(client, extra_body=body)
    assert said in refused.value.body["message"]
    assert (refused.value.code, refused.value.type) == ("validation", "invalid_request_error")


def test_histories_as_frameworks_send_them_back(client, submitted, tokenizer):
    history = [
        {"role": "user", "content": "one", "name": "ann"},
        {"role": "user", "content": [{"type": "text", "text": "more", "cache_control": {"a": 1}}]},
        {"role": "assistant", "content": None, "tool_calls": [], "annotations": []},
        {"role": "assistant", "content": ADD, "id": "m1", "reasoning_details": []},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two and three"},
    ]
    reply = client.chat.completions.create(model="tuned", messages=history)
    assert reply.choices[0].message.content == "5"
    text = tokenizer.decode(submitted[-1].prompt)
    turns = [("user", "one\n\nmore"), ("assistant", ADD), ("user", "two and three")]
    shown = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    assert f"\nBe brief.<|im_end|>\n{shown}" in text


def test_options_of_a_stream_that_change_nothing_are_taken(client):
    options = {"include_usage": True, "continuous_usage_stats": False}
    *_, last = ask(client, stream=True, stream_options=options)
    assert last.usage.completion_tokens > 0


def test_one_model_is_described(client):
    assert client.models.retrieve("tuned").id == "tuned"
    with pytest.raises(openai.NotFoundError, match="see /v1/models"):
        client.models.retrieve("typo")
    with pytest.raises(openai.NotFoundError, match="see /v1/models"):
        client.chat.completions.create(model="typo", messages=[{"role": "user", "content": "?"}])


def test_what_is_wrong_with_a_request_is_said(client):
    with pytest.raises(
        openai.NotFoundError, match=r"this path does not exist; .*/v1/chat/completions"
    ):
        client.completions.create(model="tuned", prompt="two and three")
    with pytest.raises(openai.APIStatusError, match="does not support this method: use POST"):
        client.get("/chat/completions", cast_to=object)
    with pytest.raises(openai.UnprocessableEntityError, match=r"stop.*has more than 4 entries"):
        ask(client, stop=["a", "b", "c", "d", "e"])


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_is_told_by_the_name_that_was_sent(client, name):
    with pytest.raises(openai.UnprocessableEntityError, match=f"{name}: 301") as refused:
        ask(client, **{name: 301})
    assert refused.value.param == name
