"""Unchanged clients of other projects make a call and a stream with /v1.

`make test-clients` installs the clients in an environment of their own (.venv-clients).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from live_server import ADD, live, make_service

CLIENTS = Path(__file__).parents[2] / ".venv-clients"
KEY = "a-key-of-some-length"
QUESTION = "two and three"

OPENAI_PYTHON = f"""
import openai
client = openai.OpenAI(base_url=URL, api_key=KEY)
ask = dict(model="tuned", messages=[dict(role="user", content="{QUESTION}")])
print(client.chat.completions.create(**ask).choices[0].message.content)
stream = client.chat.completions.create(**ask, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
"""
LANGCHAIN = f"""
from langchain_openai import ChatOpenAI
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
model = ChatOpenAI(base_url=URL, api_key=KEY, model="tuned", temperature=0)
first = model.invoke([SystemMessage("Be brief."), HumanMessage("{QUESTION}")])
print(model.invoke([HumanMessage("one", name="ann"), first, HumanMessage("{QUESTION}")]).content)
print("".join(chunk.content for chunk in model.stream("{QUESTION}")))
"""
LITELLM = f"""
import litellm
ask = dict(model="openai/tuned", api_base=URL, api_key=KEY,
           messages=[dict(role="user", content="{QUESTION}")])
print(litellm.completion(**ask).choices[0].message.content)
stream = litellm.completion(**ask, stream=True)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
"""
JAVASCRIPT = f"""
const OpenAI = require("openai").default;
const client = new OpenAI({{ baseURL: process.argv[2], apiKey: process.argv[3] }});
const ask = {{ model: "tuned", messages: [{{ role: "user", content: "{QUESTION}" }}] }};
(async () => {{
  console.log((await client.chat.completions.create(ask)).choices[0].message.content);
  let text = "";
  for await (const chunk of await client.chat.completions.create({{ ...ask, stream: true }}))
    text += chunk.choices[0]?.delta?.content ?? "";
  console.log(text);
}})();
"""
HEAD = "import sys\nURL, KEY = sys.argv[1:]\n"


@pytest.mark.clients
@pytest.mark.parametrize(
    ("command", "script"),
    [
        pytest.param([CLIENTS / "bin/python", "-c"], HEAD + OPENAI_PYTHON, id="openai-python"),
        pytest.param([CLIENTS / "bin/python", "-c"], HEAD + LANGCHAIN, id="langchain"),
        pytest.param([CLIENTS / "bin/python", "-c"], HEAD + LITELLM, id="litellm"),
        pytest.param(["node", "-e"], JAVASCRIPT, id="openai-javascript"),
    ],
)
def test_a_call_and_a_stream(tokenizer, command, script):
    from rlm.serving.access import Keys

    service, _ = make_service(tokenizer, {QUESTION: ADD})
    environment = os.environ | {"NODE_PATH": str(CLIENTS / "node_modules")}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    with live(service, Keys([KEY])) as server:
        arguments = [*command, script, f"{server.url}/v1", KEY]
        if command[0] == "node":  # in Node, argv[1] is the script
            arguments = [*command, script, "script", f"{server.url}/v1", KEY]
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.stdout.split() == ["5", "5"], done.stderr[-2000:]
