"""Runs many graphs at once and scores them.

All first agents run in one batch, and then all second agents. The reward is 1 if the last agent's
final number is the reference answer, else 0. An invalid graph remains in its group with a reward of
0, because a retry would hide the failure from the learner. An orchestrator could also solve the
problem itself and write the answer into a prompt. Such leaks are counted, and by default their
reward is 0 (--zero-leaks).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from recipes.orchestrator.config import OrchestratorConfig
from recipes.orchestrator.graph import (
    AGENT_IDS,
    REASONS,
    Graph,
    InvalidGraph,
    is_leaked,
    parse_graph,
)
from rlm.api_client import APIClient, APIError, ChatReply
from rlm.cli import UsageError, terminal
from rlm.data import FORMATS, Format, Problem, render_prompt
from rlm.grading import Verdict, grade, parse_number
from rlm.rewards import Scores
from rlm.sampling import Sampler, SamplingParams, prompt_seed

if TYPE_CHECKING:
    from rlm.sampling import RolloutSampler

MAX_FAILED_CALLS = 3  # the run ends after this many consecutive calls in which every graph failed
_PLACEHOLDER = re.compile(r"\{(?:problem|agentA)\}")


@dataclass(frozen=True)
class Call:
    """Describes a request to an LLM. Equal calls at temperature 0 get equal replies."""

    system_prompt: str
    text: str
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """Contains the reply to a call. If the API failed, `error` is set and `text` is empty."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    logprobs: Sequence[float] = ()  # one per token; empty for an API
    truncated: bool = False  # whether the token limit cut the reply off


@dataclass
class LocalLLM:
    """Answers calls with a local model, using the sampling engine."""

    sampler: RolloutSampler
    tokenizer: PreTrainedTokenizerBase
    use_adapter: Callable[[], AbstractContextManager] = nullcontext  # entered while sampling

    def chat(
        self,
        calls: Sequence[Call],
        params: SamplingParams,
        on_finish: Callable[[], None] = lambda: None,
    ) -> list[Reply]:
        """Sample the replies to all calls in one batch."""
        # The system prompts were written by a model, so they are tokenized as plain text, in which
        # special tokens are not recognized.
        render = partial(render_prompt, self.tokenizer, format=FORMATS["deepseek"])
        prompts = [render(call.text, system_prompt=call.system_prompt) for call in calls]
        with self.use_adapter():
            seeds = [call.seed for call in calls]
            groups = self.sampler.sample(prompts, 1, params, seeds, on_finish)
        return [
            Reply(
                c.text(self.tokenizer),
                len(prompt),
                len(c.token_ids),
                logprobs=c.logprobs,
                truncated=c.truncated,
            )
            for prompt, (c,) in zip(prompts, groups, strict=True)
        ]

    def release(self) -> None:
        """Free the memory that is used only while a batch is sampled."""
        if isinstance(self.sampler, Sampler):  # the trainer releases a vLLM server
            self.sampler.release()


@dataclass
class RemoteLLM:
    """Answers calls with an OpenAI-compatible API. The reply to a failed call has an error.

    If the API separates the reasoning from the answer, the reply's text contains both in the tags
    of `format`, like the text of a local agent, so that the next agent can read the reasoning.
    """

    client: APIClient
    model: str
    format: Format = FORMATS["deepseek"]

    def __str__(self) -> str:
        return f"{self.model} at {self.client.url}"

    def chat(self, calls: Sequence[Call], params: SamplingParams) -> list[Reply]:
        """Request the replies to all calls, with the client's limit of concurrent requests."""
        with ThreadPoolExecutor(self.client.concurrency) as pool:
            return list(pool.map(partial(self._chat, params), calls))

    def _chat(self, params: SamplingParams, call: Call) -> Reply:
        system = {"role": "system", "content": call.system_prompt}
        try:
            reply = self.client.chat(
                [system, {"role": "user", "content": call.text}],
                model=self.model,
                temperature=params.temperature,
                max_tokens=params.max_new_tokens,
                seed=call.seed % 2**31,
            )
        except APIError as error:
            return Reply("", error=str(error))
        used = (reply.prompt_tokens, reply.completion_tokens)
        return Reply(self._text(reply), *used, truncated=reply.finish_reason == "length")

    def _text(self, reply: ChatReply) -> str:
        """Return the reasoning and the answer in one text. Only a bare number gets answer tags."""
        if not reply.reasoning:
            return reply.text
        tag, answer = self.format.reasoning_tag, reply.text
        opened = f"<{tag}>\n{reply.reasoning.strip()}"
        if not answer.strip():  # the token limit cut off the reasoning
            return opened
        if parse_number(answer) is not None:
            answer = answer.strip().join(self.format.answer_tags)
        return f"{opened}\n</{tag}>\n{answer}"


@dataclass
class Trajectory:
    """Records the run of a graph on a problem: the agents' calls, their replies and the verdict."""

    problem: Problem
    graph: Graph | InvalidGraph
    calls: list[Call] = field(default_factory=list)  # one per agent, in the graph's order
    replies: list[Reply] = field(default_factory=list)
    written: Reply | None = None  # the orchestrator's reply that contains the graph
    format: Format = FORMATS["deepseek"]  # of the agents' replies
    seed: int | None = None  # None if the agents are greedy

    @property
    def error(self) -> str | None:
        """The first error of an agent's API, or None. A run with an error has no valid verdict."""
        return next((reply.error for reply in self.replies if reply.error), None)

    @property
    def prompt_tokens(self) -> int:
        return sum(reply.prompt_tokens for reply in self.replies)

    @property
    def completion_tokens(self) -> int:
        return sum(reply.completion_tokens for reply in self.replies)

    @property
    def verdict(self) -> Verdict:
        """Grade the last reply leniently.

        If the graph is invalid or an API failed, the verdict is incorrect and its reason says why.
        """
        if isinstance(self.graph, InvalidGraph):
            return Verdict(False, self.graph.reason, None)
        if self.error:
            return Verdict(False, "agent_failed", None)
        text, tags = self.replies[-1].text, self.format.tags
        return grade(text, self.problem.answer, strict=False, kind="number", **tags)

    @property
    def leak(self) -> bool:
        """Whether a prompt contains the reference answer while the problem itself does not."""
        return is_leaked(self.problem, self.graph.texts)

    def reward(self, zero_leaks: bool) -> float | None:
        """Return 1 if the answer is right and, with `zero_leaks`, no prompt contains it, else 0.

        If an agent's API failed, return None.
        """
        solved = self.verdict.correct and not (zero_leaks and self.leak)
        return None if self.error else float(solved)

    def next_call(self) -> Call | None:
        """Return the next agent's call, or None if all agents have replied or one has failed."""
        asked, text = len(self.replies), self.problem.question
        if self.error or asked == len(self.graph.agents):
            return None
        agent = self.graph.agents[asked]
        if agent.question:
            draft = self.last_answer() or "?"
            known = {"{problem}": text, "{agentA}": draft}
            text = _PLACEHOLDER.sub(lambda match: known[match[0]], agent.question)
        elif asked:
            text = f"PROBLEM: {text}\n\nDRAFT of {AGENT_IDS[asked - 1]}: {self.replies[-1].text}"
        prompt = agent.system_prompt or self.format.system_prompt
        return Call(prompt, text, 0 if self.seed is None else prompt_seed(self.seed, agent.id))

    def last_answer(self) -> str | None:
        """Return the answer in the last reply, or None if it contains no answer.

        The reference answer is not used.
        """
        if not self.replies:
            return None
        tags = self.format.tags
        found = grade(self.replies[-1].text, None, strict=False, kind="number", **tags)
        return found.answer if found.is_answer else None

    def to_dict(self) -> dict[str, Any]:
        """Return the record for rollouts.jsonl."""
        row = {"verdict": self.verdict.reason, "correct": self.verdict.correct, "leak": self.leak}
        row |= {"error": self.error} if self.error else {}
        if isinstance(self.graph, InvalidGraph):
            return row | {"graph": None, "detail": self.graph.detail}
        agents = {
            name: {
                "system_prompt": call.system_prompt,
                "input_payload": call.text,
                "output_text": reply.text,
                "truncated": reply.truncated,
            }
            for name, call, reply in zip(AGENT_IDS, self.calls, self.replies, strict=False)
        }
        return row | {
            "graph": self.graph.to_dict(),
            "trace": {"agents": agents, "final_text": self.replies[-1].text},
            "tokens_read": self.prompt_tokens,
            "tokens_written": self.completion_tokens,
        }


@dataclass
class Runner:
    """Runs graphs on problems.

    The replies to greedy calls are cached by the content of the call, because the agents' model
    never changes.
    """

    agents: LocalLLM | RemoteLLM
    max_new_tokens: int
    temperature: float = 0.0
    format: Format = FORMATS["deepseek"]
    _cache: dict[Call, Reply] = field(default_factory=dict)

    def run(
        self,
        problems: Sequence[Problem],
        graphs: Sequence[Graph | InvalidGraph],
        numbers: Sequence[int],
        seed: int = 0,
    ) -> list[Trajectory]:
        """Run each graph on the problem at the same position, in one batch per agent of a graph.

        The numbers of the graphs give the graphs of the same problem different seeds.
        """
        runs = [
            Trajectory(*pair, format=self.format) for pair in zip(problems, graphs, strict=True)
        ]
        if self.temperature:
            for run, number in zip(runs, numbers, strict=True):
                run.seed = prompt_seed(seed, run.problem.id, number)
        while asking := [(run, call) for run in runs if (call := run.next_call())]:
            replies = self._chat([call for _, call in asking])
            for (run, call), reply in zip(asking, replies, strict=True):
                run.calls.append(call)
                run.replies.append(reply)
        if isinstance(self.agents, LocalLLM):
            self.agents.release()
        return runs

    def _chat(self, calls: Sequence[Call]) -> list[Reply]:
        """Return the replies to the calls, and send equal calls only once.

        Errors are not cached, so a failed call is sent again the next time.
        """
        new = [call for call in dict.fromkeys(calls) if call not in self._cache]
        params = SamplingParams(self.max_new_tokens, self.temperature)
        replies = dict(zip(new, self.agents.chat(new, params), strict=True)) if new else {}
        if self.temperature == 0:
            self._cache |= {call: reply for call, reply in replies.items() if not reply.error}
        return [replies.get(call) or self._cache[call] for call in calls]


@dataclass
class GraphReward:
    """Scores the graphs of a training step. `GRPOTrainer` calls an instance as its scorer."""

    runner: Runner
    config: OrchestratorConfig
    # One list of groups per call of the scorer.
    records: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    _errors: set[str] = field(default_factory=set)  # errors that were printed
    _failed_calls: int = 0  # consecutive calls of the scorer in which every graph failed

    def __call__(
        self,
        problems: Sequence[Problem],
        groups: Sequence[Sequence[str]],
        truncated: Sequence[Sequence[bool]] | None = None,
        token_ids: Sequence[Sequence[list[int]]] | None = None,
    ) -> Scores:
        """Score each graph by its text alone.

        `truncated` is not used, because hardly any truncated graph is valid JSON.
        """
        asked = [p for p, group in zip(problems, groups, strict=True) for _ in group]
        form = self.config.graph_form
        graphs = [parse_graph(text, form) for group in groups for text in group]
        # The seeds use the position of a graph in its group. Its position in the batch would depend
        # on the other problems and on the number of processes.
        numbers = [number for group in groups for number in range(len(group))]
        runs = self.runner.run(asked, graphs, numbers, self.config.seed)
        self._report_failures(runs)
        zero = self.config.zero_leaks
        rows = iter([run.to_dict() | {"reward": run.reward(zero)} for run in runs])
        records = [[next(rows) for _ in group] for group in groups]
        self.records.append(records)
        rewards = [[record["reward"] for record in group] for group in records]
        return Scores(rewards, graph_metrics(runs))

    def _report_failures(self, runs: Sequence[Trajectory]) -> None:
        """Print each new error once; raise UsageError if the agents failed too often in a row."""
        errors = [run.error for run in runs if run.error]
        for error in dict.fromkeys(errors):
            if error not in self._errors:
                terminal.line(f"warning: an agent failed, so its graph is left out: {error}")
        self._errors.update(errors)
        asked = sum(isinstance(run.graph, Graph) for run in runs)
        if asked:
            self._failed_calls = self._failed_calls + 1 if len(errors) == asked else 0
        if self._failed_calls >= MAX_FAILED_CALLS:
            raise UsageError(f"the agents failed for every graph: {errors[0]}")


def graph_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of graphs and agents over these trajectories.

    Rates are shares of all graphs, except for two: `graph/distinct` is a share of the valid graphs,
    and `agents/truncated_rate` is a share of the replies.
    """
    if not trajectories:  # this process received no problems
        return {}
    count = len(trajectories)
    graphs = [t.graph for t in trajectories if isinstance(t.graph, Graph)]
    replies = [reply for t in trajectories for reply in t.replies if not reply.error]
    invalid = Counter(t.graph.reason for t in trajectories if isinstance(t.graph, InvalidGraph))
    return {
        "graph/valid_rate": len(graphs) / count,
        **{f"graph/{reason}": invalid[reason] / count for reason in REASONS},
        "graph/distinct": len({g.to_json() for g in graphs}) / len(graphs) if graphs else 0.0,
        "graph/leak_rate": sum(t.leak for t in trajectories) / count,
        "agents/correct": sum(t.verdict.correct for t in trajectories) / count,
        "agents/failed_rate": sum(t.error is not None for t in trajectories) / count,
        "agents/truncated_rate": fmean(r.truncated for r in replies) if replies else 0.0,
        "agents/length_max": max((r.completion_tokens for r in replies), default=0),
        "agents/tokens_read": sum(t.prompt_tokens for t in trajectories) / count,
        "agents/tokens_written": sum(t.completion_tokens for t in trajectories) / count,
    }
