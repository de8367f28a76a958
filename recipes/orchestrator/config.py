"""The options of orchestrator training: those of GRPO, and who the agents are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.orchestrator.graph import AGENTS, MOST_AGENTS
from rlm.cli import terminal
from rlm.cli.flags import flag
from rlm.training.config import GRPOConfig

ADAPTER = "adapters_lora"  # in the run directory, unless --output names another place
START = Path("weights/orchestrator_start")
AGENT_ADAPTER = Path("weights/final_rlm_lora")


def _also_called(name: str) -> Any:
    """A second name of a field, for code; the command line has aliases of its own."""
    return property(lambda self: getattr(self, name), lambda self, v: setattr(self, name, v))


@dataclass(frozen=True)
class Config(GRPOConfig):
    """One run. Making it touches no disk; values may be changed until training starts."""

    model: str | None = flag(
        None,
        "of the orchestrator: hub id, directory, smollm2-135m",
        aliases=("orchestrator-model",),
    )
    sft_adapter: Path | None = flag(START, "to start from, made if it is not there; or none")
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
    output: Path | None = flag(None, f"where the best adapter goes (none: {ADAPTER} in --run-dir)")

    agent_model: str | None = flag(None, "of the agents (none: the orchestrator's, shared)")
    agent_adapter: Path | None = flag(AGENT_ADAPTER, "what the agents wear; none is the bare model")
    agent_url: str | None = flag(None, "of an OpenAI-compatible API that serves --agent-model")
    agent_key: str | None = flag(None, "environment variable with that API's key")
    agent_max_tokens: int = flag(96, "longest reply of an agent", min=1)
    agent_temperature: float = flag(0.0, "of the agents; 0 is repeatable, and cached", min=0)
    max_agents: int = flag(AGENTS, "agents in a graph, at most", min=AGENTS, max=MOST_AGENTS)
    zero_leaks: bool = flag(True, "a graph whose prompts hold the answer earns nothing")
    format_reward: float = flag(0.0, "for a valid graph, besides the 0/1 for the answer", min=0)
    start_questions: int = flag(
        96, "cold start: problems, with several written graphs for each", min=1
    )
    debug: bool = flag(False, "5 steps of 2 × 2 at most, everything measured at each")

    # The names of the published description.
    orchestrator_id = _also_called("model")
    agent_model_id = _also_called("agent_model")
    batch_problems = _also_called("batch_size")
    trajectories_per_problem = _also_called("group_size")
    orch_max_tokens = _also_called("max_new_tokens")
    orch_temperature = _also_called("temperature")
    lr = _also_called("learning_rate")
    kl_coef = _also_called("kl_weight")
    val_rows = _also_called("eval_samples")
    val_every = _also_called("eval_every")

    def __post_init__(self) -> None:
        if self.output is None:
            self.output = self.run_dir / ADAPTER
        if self.debug:
            for name, most in {"steps": 5, "batch_size": 2, "group_size": 2}.items():
                setattr(self, name, min(getattr(self, name), most))
            self.eval_every = self.sample_every = 1
        for name in ("doctor", "reward", "reasoning_format"):  # of stage 2, and nothing to a graph
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"--{name.replace('_', '-')} is train_grpo.py's: not used here")
        super().__post_init__()
        if self.agent_url and not self.agent_model:
            raise ValueError("--agent-url needs --agent-model: the name that the server knows")
        if self.agent_key and not self.agent_url:
            raise ValueError("--agent-key goes with --agent-url")

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Add what the adapter to start from, the agents' and the machine decide."""
        from rlm.model.adapters import read_run
        from rlm.model.hardware import default_values

        start = given.get("sft_adapter", START)
        values = default_values(given, read_run(start) if start else {}, {})
        if not (AGENT_ADAPTER.exists() or "agent_adapter" in given or given.get("agent_url")):
            terminal.line(
                f"the agents are the bare model: {AGENT_ADAPTER} is not there (train_grpo.py)"
            )
            values["agent_adapter"] = None
        return values

    @property
    def run_root(self) -> Path:
        return self.run_dir

    @run_root.setter
    def run_root(self, path: str | Path) -> None:
        if self.output == self.run_dir / ADAPTER:
            self.output = Path(path) / ADAPTER
        self.run_dir = Path(path)


# Unlike GRPOConfig: the published block sets values one by one.
Config.__setattr__ = object.__setattr__
