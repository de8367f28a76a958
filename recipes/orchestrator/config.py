"""Defines the options of orchestrator training: those of GRPO, and who the agents are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlm.cli import flag, takes_aliases, terminal
from rlm.training import GRPOConfig

DEFAULT_START = Path("weights/orchestrator_start")
DEFAULT_AGENT_ADAPTER = Path("weights/final_rlm_lora")  # taken if it is there


@takes_aliases
@dataclass(frozen=True)
class OrchestratorConfig(GRPOConfig):
    """Holds the options of one training run; making it touches no disk."""

    model: str | None = flag(
        None,
        "of the orchestrator: hub id, directory, smollm2-135m",
        aliases=("orchestrator-model",),
    )
    sft_adapter: Path | None = flag(DEFAULT_START, "to start from, made if missing; or none")
    steps: int = flag(100, "rounds of sampling and learning", min=1)
    batch_size: int = flag(4, "problems in a step", aliases=("batch-problems",), min=1)
    group_size: int = flag(4, "graphs for each problem", aliases=("trajectories",), min=2)
    max_new_tokens: int = flag(400, "longest graph, as text", min=1)
    learning_rate: float = flag(1e-4, "peak", aliases=("lr",), min=0)
    kl_weight: float = flag(0.1, "pull toward the start adapter", aliases=("kl-coef",), min=0)
    eval_samples: int = flag(50, "validation problems, always the same", min=1)
    test_samples: int = flag(100, "test problems at the end (0: none)", min=0)
    sample_every: int = flag(10, "steps between printed graphs (0: none)", min=0)
    run_dir: Path = flag(Path("runs/orchestrator"), "logs, rollouts, checkpoints and the adapter")
    output: Path | None = flag(None, "for the best adapter (none: adapters_lora in --run-dir)")

    graph_form: str = flag(
        "prompts",
        "what a graph gives each agent: a system prompt, or a question of its own",
        choices=("prompts", "questions"),
    )
    agent_model: str | None = flag(None, "of the agents (none: the orchestrator's, shared)")
    agent_adapter: Path | None = flag(DEFAULT_AGENT_ADAPTER, "of the agents; none: the bare model")
    agent_url: str | None = flag(None, "of an OpenAI-compatible API that serves --agent-model")
    agent_key: str | None = flag(None, "environment variable with that API's key")
    agent_max_tokens: int = flag(96, "longest reply of an agent", min=1)
    agent_temperature: float = flag(0.0, "of the agents; 0 is repeatable, and cached", min=0)
    max_agents: int = flag(2, "agents in a graph: two", min=2, max=2)  # older runs' options have it
    zero_leaks: bool = flag(True, "a graph whose prompts hold the answer earns nothing")
    format_reward: float = flag(0.0, "for a valid graph, besides the 0/1 for the answer", min=0)
    start_questions: int = flag(96, "cold start: problems, with several graphs for each", min=1)
    start_from: Path | None = flag(None, "cold start: the adapter it goes on from; none: a new one")
    debug: bool = flag(False, "5 steps of 2 × 2 at most, everything measured at each")

    def __post_init__(self) -> None:
        derived = {"output": self.output or Path(self.run_dir) / "adapters_lora"}
        if self.debug:
            limits = {"steps": 5, "batch_size": 2, "group_size": 2}
            derived |= {name: min(getattr(self, name), most) for name, most in limits.items()}
            derived |= {"eval_every": 1, "sample_every": 1}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        # Options of stage 2 that are nothing to a graph; old records of runs hold these tags.
        tags = None if self.reasoning_format == "deepseek" else self.reasoning_format
        names = ("doctor", "plan", "reward", "num_epochs", "system_prompt")
        given = {name: getattr(self, name) for name in names}
        given |= {"reasoning_format": tags, "tool": None if self.tool == "none" else self.tool}
        for name, value in given.items():
            if value:
                raise ValueError(f"--{name.replace('_', '-')} is train_grpo.py's: not used here")
        super().__post_init__()
        if self.agent_url and not self.agent_model:
            raise ValueError("--agent-url needs --agent-model: the name that the server knows")
        if self.agent_key and not self.agent_url:
            raise ValueError("--agent-key goes with --agent-url")

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the adapter to start from, the agents' and the machine decide."""
        from rlm.model import AdapterInfo, default_values

        start = given.get("sft_adapter", DEFAULT_START)
        values = default_values(given, AdapterInfo.load(start) if start else None, {})
        by_default = not ("agent_adapter" in given or given.get("agent_url"))
        if by_default and not DEFAULT_AGENT_ADAPTER.exists():
            terminal.line(
                f"the agents are the bare model: {DEFAULT_AGENT_ADAPTER} is not there "
                "(train_grpo.py)"
            )
            values["agent_adapter"] = None
        return values


# Name in the published description → option.
PUBLISHED_NAMES = {
    "orchestrator_id": "model", "agent_model_id": "agent_model", "run_root": "run_dir",
    "steps": "steps", "batch_problems": "batch_size", "trajectories_per_problem": "group_size",
    "orch_max_tokens": "max_new_tokens", "orch_temperature": "temperature",
    "agent_max_tokens": "agent_max_tokens", "lr": "learning_rate", "kl_coef": "kl_weight",
    "val_rows": "eval_samples", "val_every": "eval_every",
}  # fmt: skip


class Config:
    """Holds the published description's options, for Python code that sets one after the other."""

    __slots__ = tuple(PUBLISHED_NAMES)  # a misspelt name is an error

    def __init__(self) -> None:
        for name, option in PUBLISHED_NAMES.items():
            setattr(self, name, getattr(OrchestratorConfig, option))

    def to_options(self) -> OrchestratorConfig:
        """Return the same options under the names of the command line."""
        values = {option: getattr(self, name) for name, option in PUBLISHED_NAMES.items()}
        return OrchestratorConfig(**values)
