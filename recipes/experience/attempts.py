"""What a role does with one problem: a generator's rollout, the critic's fusion, the lesson."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.experience.judge import Judge, fusion_score, graph_score
from recipes.experience.library import Library
from recipes.experience.prompting import Prompts
from recipes.experience.roles import Role
from recipes.experience.scaffold import Scaffold, ScaffoldError, find_object, parse_scaffold
from rlm.api_client import APIError, ChatReply
from rlm.data import Problem, experience_block

ROUNDING = 1e-9  # σ > τ means: by more than this
MAX_SHOWN = 1500  # characters of one solution in a prompt that compares several

Row = dict[str, Any]


def group_statistics(rewards: Sequence[Mapping[str, float | None]]) -> tuple[float | None, float]:
    """(μ, population σ) of r_total over the attempts whose parts all have a score.

    What a failed call or a failed judge left open compares with nothing. Without any attempt
    μ is None; fewer than two do not differ: σ is 0.
    """
    totals = [reward["r_total"] for reward in rewards if None not in reward.values()]
    return (statistics.fmean(totals), statistics.pstdev(totals)) if totals else (None, 0.0)


def differs(std: float, tau: float) -> bool:
    """σ > τ, rounding noise apart."""
    return std > tau + ROUNDING


@dataclass(frozen=True)
class Actor:
    """A role at work: how it is asked, and how its attempts are scored."""

    role: Role
    prompts: Prompts
    judge: Judge
    temperature: float
    max_tokens: int
    weights: tuple[float, ...]
    seed: int = 0

    @property
    def retries(self) -> int:
        """Tries after the first, of the role's requests and of the judge, whom all roles share."""
        judge = self.judge.role.client.retries if self.judge.role else 0
        return self.role.client.retries + judge

    def ask(self, stage: str, seed: str, **values: str) -> ChatReply:
        """The role's reply to the prompt of this name."""
        limits = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        prompt = self.prompts.fill(stage, **values)
        return self.role.ask(stage, prompt, seed=f"{self.seed} {seed}", **limits)

    def rollout(self, problem: Problem, lessons: Sequence[str], number: int) -> Row:
        """Write a scaffold, follow it, be scored; text that is no scaffold is followed as it is.

        A call that failed for good makes a row with an error and no scores.
        """
        seed, scaffold, plan, refused = f"{problem.id} {number}", None, "", None
        try:
            block = experience_block(lessons)
            plan = self.ask("scaffold", seed, experiences=block, problem=problem.question).text
            try:
                scaffold = parse_scaffold(plan)
            except ScaffoldError as error:
                refused = str(error)
            attempt = self._solve(problem, scaffold, plan, seed)
        except APIError as error:
            attempt = self._failed(error)
        row = {"rollout_id": number, "scaffold": scaffold_text(scaffold, plan)}
        return row | attempt | {"scaffold_error": refused}

    def fusion(
        self, problem: Problem, lessons: Sequence[str], generator: str, rollouts: Sequence[Row]
    ) -> Row:
        """Fuse the valid scaffolds of one generator into one, follow it, be scored.

        fusion: `fused`; `best_of` where the fusion was refused (r_fusion is 0) or only one
        proposal is valid; `none` where no one is (r_fusion is None: there was nothing to fuse).
        """
        pairs = [(_valid(row["scaffold"]), row["answer"]) for row in rollouts]
        proposals = [(scaffold, answer) for scaffold, answer in pairs if scaffold]
        scaffolds = [scaffold for scaffold, _ in proposals]
        fused = max(scaffolds, key=graph_score, default=None)
        how, refused = "best_of" if scaffolds else "none", None
        r_fusion = 0.0 if len(scaffolds) > 1 else None
        seed = f"{problem.id} {generator}"
        try:
            if len(scaffolds) > 1:
                shown = [f"{s.text()}\nIts answer: {answer or '–'}" for s, answer in proposals]
                numbered = [f"Proposal {i}: {text}" for i, text in enumerate(shown, 1)]
                values = {"problem": problem.question, "proposals": "\n\n".join(numbered)}
                block = experience_block(lessons)
                reply = self.ask("fusion", seed, experiences=block, **values)
                try:
                    candidate = parse_scaffold(reply.text)
                    candidate.refuse_cycle()
                    how, fused = "fused", candidate
                    r_fusion = fusion_score(fused, scaffolds)
                except ScaffoldError as error:
                    refused = str(error)
            attempt = self._solve(problem, fused, "–", seed, r_fusion=r_fusion)
        except APIError as error:
            attempt = self._failed(error, "r_fusion")
        row = {"generator_id": generator, "fused_scaffold": scaffold_text(fused, "")}
        row |= {"final_answer": attempt.pop("answer")} | attempt
        return row | {"fusion": how, "scaffold_error": refused}

    def _solve(
        self, problem: Problem, scaffold: Scaffold | None, plan: str, seed: str, **extra: Any
    ) -> Row:
        text = scaffold.text() if scaffold else plan
        reply = self.ask("answer", seed, problem=problem.question, scaffold=text)
        scores = self.judge.score(problem, scaffold, reply.text, self.weights, seed, **extra)
        thought = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
        return scores | {"solution": thought + reply.text, "error": None}

    def _failed(self, error: APIError, *more: str) -> Row:
        parts = ("r_ans", "r_logic", "r_graph", *more, "r_total")
        row = {"answer": "", "is_correct": False, "rewards": dict.fromkeys(parts)}
        row |= {"r_total_of": [], "answer_reason": "no_reply", "scored_by": {}}
        row |= {"judge_failed": False, "judge_error": None}
        return row | {"solution": "", "error": str(error)}

    def extract(
        self, stage: str, problem: Problem, attempts: str, library: Library, gold: str, now: str
    ) -> Row:
        """Ask for operations on the library after a comparison, and apply what is allowed."""
        values = {"problem": problem.question, "gold": gold, "rollouts": attempts}
        values |= {"library": library.listing(), "room": library.room()}
        try:
            reply = self.ask(stage, problem.id, **values)
            proposed = find_operations(reply.text)
        except (APIError, ScaffoldError) as error:
            return {"error": str(error), "operations": []}
        return {"error": None, "operations": library.apply(proposed, problem, now)}


def find_operations(reply: str) -> list[Any]:
    """What a reply proposes to do with a library.

    Raises:
        ScaffoldError: no_json, bad_json or schema.
    """
    proposed = find_object(reply, "operations")["operations"]
    if not isinstance(proposed, list):
        raise ScaffoldError("schema", "operations is no list")
    return proposed


def scaffold_text(scaffold: Scaffold | None, plan: str) -> str:
    """JSON text in any case; what is no scaffold stands under `invalid`."""
    return scaffold.text() if scaffold else json.dumps({"invalid": plan}, ensure_ascii=False)


def _valid(text: str) -> Scaffold | None:
    try:
        return parse_scaffold(text)
    except ScaffoldError:
        return None


def show_attempts(attempts: Sequence[Row], *, scores: bool = True) -> str:
    """The attempts for the prompt that compares them; without scores, not who is right."""
    texts = []
    for number, row in enumerate(attempts, 1):
        solution, rewards = row["solution"], row["rewards"].items()
        if len(solution) > MAX_SHOWN:
            solution = f"{solution[: MAX_SHOWN // 2]} … {solution[-MAX_SHOWN // 2 :]}"
        listed = ", ".join(f"{k} {'–' if v is None else f'{v:.3g}'}" for k, v in rewards)
        verdict = f" ({'right' if row['is_correct'] else 'wrong'}; {listed})" if scores else ""
        name = f"Fusion of {row['generator_id']}" if "fusion" in row else f"Attempt {number}"
        plan = row.get("fused_scaffold", row.get("scaffold"))
        answer = row.get("final_answer", row.get("answer")) or "none found"
        texts.append(f"{name}{verdict}\nPlan: {plan}\nSolution: {solution}\nAnswer: {answer}")
    return "\n\n".join(texts)
