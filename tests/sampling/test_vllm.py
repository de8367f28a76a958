"""Completions from a vLLM server, with a scripted server."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_server import (
    BASE,
    END,
    HANG_UP,
    Reply,
    ScriptedServer,
    completion_choice,
    completions_reply,
    refuse,
)

from rlm.api_client import APIClient, APIError
from rlm.cli.options import UsageError
from rlm.sampling import SamplingParams, VLLMSampler


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


def client_of(server: ScriptedServer) -> APIClient:
    return APIClient(server.url, backoff=0.001)


@pytest.fixture
def sampler(server):
    sampler = VLLMSampler([client_of(server)], [END, 7])
    server.requests.clear()
    return sampler


def test_a_group_a_prompt_with_tokens_and_logprobs_from_the_server(server, sampler):
    server.script(
        completions_reply(  # deliberately out of order
            completion_choice([11, 12, 13], [-1.0, -2.0, -3.0], "length", index=1),
            completion_choice([10, END], [-0.25, -0.5], "stop", index=0),
        )
    )
    (group,) = sampler.sample([[5, 6]], 2, SamplingParams(3, temperature=0.7, top_p=0.9), [40])
    assert [c.token_ids for c in group] == [[10, END], [11, 12, 13]]  # with the end token
    assert [c.logprobs for c in group] == [[-0.25, -0.5], [-1.0, -2.0, -3.0]]
    assert [c.truncated for c in group] == [False, True]
    assert not sampler.matches_trainer  # so the loss has importance weights
    assert sampler.description == f"vLLM at {server.url}"
    assert server.asked("completions") == [
        {
            "model": BASE,
            "prompt": [5, 6],
            "n": 2,
            "seed": 40,
            "max_tokens": 3,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0,
            "repetition_penalty": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "stop_token_ids": [END, 7],
            "logprobs": 0,
            "return_token_ids": True,
        }
    ]


def test_many_prompts_at_once_come_back_in_order(server, sampler):
    server.delay = 0.02
    finished = threading.Semaphore(0)
    prompts, seeds = [[10 * i] for i in range(6)], [3 * i for i in range(6)]
    groups = sampler.sample(prompts, 2, SamplingParams(4), seeds, finished.release)
    # The scripted server's tokens count up from 3 + sum(prompt) + seed + i.
    assert [[c.token_ids[0] for c in group] for group in groups] == [
        [3 + 13 * i, 4 + 13 * i] for i in range(6)
    ]
    assert server.most_in_flight > 1
    assert sum(finished.acquire(blocking=False) for _ in range(99)) == 12
    again = sampler.sample(prompts[::-1], 2, SamplingParams(4), seeds[::-1])
    assert again[::-1] == groups
    assert sampler.sample([], 2, SamplingParams(4), []) == []


def test_greedy_is_asked_once(server, sampler):
    (group,) = sampler.sample([[1]], 3, SamplingParams(4, temperature=0), [0])
    assert server.asked("completions")[0]["n"] == 1  # vLLM rejects n > 1 at temperature 0
    assert len(group) == 3
    assert group[0] == group[2]
    assert group[0].token_ids is not group[2].token_ids


def test_a_failed_request_is_repeated_with_its_seed_and_a_refusal_ends_the_step(server, sampler):
    server.script(HANG_UP)
    sampler.sample([[1]], 2, SamplingParams(4), [9])
    first, second = server.asked("completions")
    assert first == second
    server.script(refuse(400, "maximum context length is 8"))
    with pytest.raises(APIError, match="maximum context length is 8"):
        sampler.sample([[i] for i in range(4)], 2, SamplingParams(4), list(range(4)))


GOOD = completion_choice([10, END], [-1.0, -1.0])
SAYS_NOTHING = "does not return token ids with log-prob"


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ([{key: value for key, value in GOOD.items() if key != "token_ids"}], SAYS_NOTHING),
        ([{key: value for key, value in GOOD.items() if key != "logprobs"}], SAYS_NOTHING),
        ([GOOD | {"logprobs": None}], SAYS_NOTHING),
        ([completion_choice([10, END], [-1.0])], SAYS_NOTHING),
        ([completion_choice([10, END], [None, -1.0])], SAYS_NOTHING),
        ([completion_choice([], [])], SAYS_NOTHING),
        ([completion_choice([10, 11], [-1.0, -1.0], "stop")], r"\(stop\) at token 11"),
        ([completion_choice([10, 11], [-1.0, -1.0], "abort")], r"\(abort\)"),
        ([GOOD, GOOD], "returned 2 completions instead of 1"),
        ([], "returned 0 completions instead of 1"),
    ],
)
def test_completions_that_could_not_be_trained_on(server, sampler, choices, says):
    server.script(Reply({"choices": choices} if choices else {}))
    with pytest.raises(UsageError, match=says):
        sampler.sample([[1]], 1, SamplingParams(4), [0])


def test_an_end_token_at_the_limit_ends_a_completion_also_in_older_versions(server, sampler):
    server.script(completions_reply(completion_choice([10, END], [-1.0, -1.0], "length")))
    ((completion,),) = sampler.sample([[1]], 1, SamplingParams(2), [0])
    assert completion.finish_reason == "stop"


def test_a_server_with_raw_logprobs_is_refused_at_the_start(server):
    server.processed_logprobs = False
    with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
        VLLMSampler([client_of(server)], [END])


def exporting(server, folder: Path, **options) -> VLLMSampler:
    return VLLMSampler([client_of(server)], [END], lambda: folder, **options)


def draw(sampler: VLLMSampler, prompts=1) -> None:
    sampler.sample([[i] for i in range(prompts)], 1, SamplingParams(4), list(range(prompts)))


def test_each_adapter_has_a_new_name_and_the_last_one_is_dropped(server, tmp_path):
    exported = [tmp_path / "two", tmp_path / "one"]
    sampler = VLLMSampler([client_of(server)], [END], exported.pop)
    server.requests.clear()
    draw(sampler)
    ((first, path),) = server.adapters.items()
    assert path == str((tmp_path / "one").resolve())
    sampler.release()  # called between two batches
    draw(sampler)  # the same adapter is neither exported nor loaded again
    sampler.invalidate_weights()
    draw(sampler)
    ((second, path),) = server.adapters.items()
    assert path == str((tmp_path / "two").resolve())
    assert re.fullmatch(r"rlm-[0-9a-f]{12}-\d", second)
    drawn = [body["model"] for body in server.asked("completions")]
    assert drawn == [first, first, second] != [first] * 3
    other = VLLMSampler([client_of(server)], [END])  # finds the base model beside adapters
    draw(other)
    assert server.asked("completions")[-1]["model"] == BASE


def test_servers_are_started_when_it_is_said_and_not_by_a_question(server):
    class Managed:
        def __init__(self):
            self.started = 0

        def start(self):
            self.started += 1
            return [client_of(server)]

    managed = Managed()
    sampler = VLLMSampler(managed, [END])
    assert sampler.bytes_for([4], 8, 12) == 0
    sampler.release()
    assert managed.started == 0
    for _ in range(2):
        sampler.start()
    assert managed.started == 1


def test_a_refused_adapter_is_one_line_and_the_old_one_stays(server, tmp_path):
    sampler = exporting(server, tmp_path)
    draw(sampler)
    before = dict(server.adapters)
    sampler.invalidate_weights()
    server.script(*[refuse(500, "LoRA rank 64 is greater than max_lora_rank 16.")] * 5)
    with pytest.raises(UsageError, match=r"did not load .*max_lora_rank 16.*--max-lora-rank"):
        draw(sampler)
    server.runtime_lora = False
    with pytest.raises(UsageError, match=r"404 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING") as caught:
        draw(sampler)
    assert "\n" not in str(caught.value)
    assert server.adapters == before


def test_several_servers_get_prompts_in_turn_and_all_get_the_adapter(server, tmp_path):
    with ScriptedServer() as second:
        second.max_model_len = 512
        clients = [client_of(each) for each in (server, second)]
        sampler = VLLMSampler(clients, [END], lambda: tmp_path)
        assert server.url in sampler.description
        assert second.url in sampler.description
        assert sampler.max_model_len == 512  # the minimum
        for each in (server, second):
            each.requests.clear()
        draw(sampler, prompts=5)
        asked = [sorted(b["prompt"][0] for b in s.asked("completions")) for s in (server, second)]
        assert asked == [[0, 2, 4], [1, 3]]
        assert server.adapters == second.adapters
        sampler.invalidate_weights()
        draw(sampler)
        assert len(server.adapters) == 1
        assert server.adapters == second.adapters  # both servers have dropped the first one
        second.processed_logprobs = False
        with pytest.raises(UsageError, match=f"{second.url} computes log-prob"):
            VLLMSampler(clients, [END])


def test_a_process_that_is_not_the_main_one_waits_for_the_adapter(server, tmp_path, monkeypatch):
    main = exporting(server, tmp_path, run="run")
    other = exporting(server, tmp_path / "never written", run="run", is_main=False)
    for _ in range(2):
        server.requests.clear()
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(draw, other)
            time.sleep(0.1)
            assert not server.asked("completions")
            assert not waiting.done()
            draw(main)
        assert len({body["model"] for body in server.asked("completions")}) == 1
        assert len(server.asked("load_lora_adapter")) == len(server.adapters) == 1
        for sampler in (main, other):
            sampler.invalidate_weights()
    monkeypatch.setattr("rlm.sampling.vllm.LOAD_TIMEOUT", 0.1)
    with pytest.raises(UsageError, match="main process has not loaded rlm-run-2"):
        draw(other)
