"""Defines the options of orchestrator training: the GRPO options and the agents' options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlm.cli import flag, takes_aliases, terminal
from rlm.data import data_files, has_test, split_slice
from rlm.training import GRPOConfig, resolve

DEFAULT_START = Path("weights/orchestrator_start")
DEFAULT_AGENT_ADAPTER = Path("weights/final_rlm_lora")  # used if it fits the agents' model


@takes_aliases
@dataclass(frozen=True)
class OrchestratorConfig(GRPOConfig):
    """The options of a training run. Only `resolve` reads the adapters."""

    CHANGED_FIRST = (
        *("model", "dataset", "sft_adapter", "agent_model", "agent_adapter", "agent_url"),
        *("steps", "batch_size", "group_size", "run_dir"),
    )

    PROVISIONAL: ClassVar = {}

    # GRPO options that do not apply to graphs. They are rejected and are not shown in --help.
    NOT_USED = (
        *("doctor", "plan", "reward", "backend"),
        *("reasoning_format", "system_prompt", "tool"),
    )

    model: str | None = flag(
        None,
        "base model of the orchestrator: hub id, folder, or smollm2-135m",
        aliases=("orchestrator-model",),
        default_text="base model of --sft-adapter, else one that fits this machine",
    )
    sft_adapter: Path | None = flag(
        DEFAULT_START,
        "adapter to start from; if it does not exist, the cold start trains it; none: start from a "
        "new adapter, without a cold start",
    )
    steps: int = flag(100, "number of training steps", min=1)
    batch_size: int = flag(4, "problems per step", aliases=("batch-problems",), min=1)
    group_size: int = flag(
        4, "graphs per problem", aliases=("trajectories", "trajectories-per-problem"), min=2
    )
    max_new_tokens: int = flag(400, "maximum length of a graph in tokens", min=1)
    learning_rate: float = flag(1e-4, "peak learning rate", aliases=("lr",), min=0)
    kl_weight: float = flag(
        0.1,
        "coefficient of the KL penalty (TRL's beta); the reference model is the policy before "
        "training; 0: off",
        aliases=("kl-coef",),
        min=0,
    )
    eval_samples: int = flag(
        50,
        "number of validation problems, the same at each validation",
        aliases=("val-rows",),
        min=1,
    )
    test_samples: int = flag(
        100, "number of test problems for the evaluation at the end; 0: none", min=0
    )
    run_dir: Path = flag(
        Path("runs/orchestrator"),
        "folder for metrics, graphs, checkpoints and the adapter",
        aliases=("run-root",),
    )
    output: Path | None = flag(
        None, "folder for the exported adapter", default_text="adapters_lora in --run-dir"
    )

    graph_form: str = flag(
        "prompts",
        "what a graph contains for each agent: a system prompt, or a separate question",
        choices=("prompts", "questions"),
    )
    agent_model: str | None = flag(
        None, "base model of the agents", default_text="that of the orchestrator, loaded only once"
    )
    agent_adapter: Path | None = flag(
        DEFAULT_AGENT_ADAPTER, "adapter of the agents; none: the base model without an adapter"
    )
    agent_url: str | None = flag(
        None,
        "URL of an OpenAI-compatible API that serves --agent-model",
        default_text="the agents run in this process",
    )
    agent_key: str | None = flag(
        None,
        "environment variable that contains the API key for --agent-url",
        default_text="no key",
    )
    agent_max_tokens: int = flag(96, "maximum length of an agent's reply in tokens", min=1)
    agent_temperature: float = flag(
        0.0, "sampling temperature of the agents; with 0, their replies are cached", min=0
    )
    zero_leaks: bool = flag(
        True, "set the reward of a graph to 0 if its prompts contain the answer"
    )
    start_questions: int = flag(
        192,
        "number of problems for training a missing --sft-adapter, with two graphs per problem",
        min=1,
    )
    start_from: Path | None = flag(
        None,
        "adapter from which the training of a missing --sft-adapter starts",
        default_text="a new adapter",
    )
    debug: bool = flag(
        False, "run at most 5 steps of 2 problems x 2 graphs, and validate after each step"
    )

    @classmethod
    def complete(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the values that follow from --run-dir, --debug and the algorithm."""
        made = dict(values)
        made["output"] = made["output"] or Path(made["run_dir"]) / "adapters_lora"
        if made["debug"]:
            limits = {"steps": 5, "batch_size": 2, "group_size": 2}
            made |= {name: min(made[name], limit) for name, limit in limits.items()}
            made["eval_every"] = 1
        return super().complete(made)

    def __post_init__(self) -> None:
        for name in self.NOT_USED:
            value = getattr(self, name)
            is_resolved = (name, value) == ("reasoning_format", "deepseek")  # set by `resolve`
            if value != getattr(OrchestratorConfig, name) and not is_resolved:
                option = name.replace("_", "-")
                raise ValueError(
                    f"--{option} is an option of train_grpo.py; it is not supported here"
                )
        super().__post_init__()
        if self.agent_url and not self.agent_model:
            raise ValueError("--agent-url requires --agent-model: the model's name on the server")
        if self.agent_key and not self.agent_url:
            raise ValueError("--agent-key requires --agent-url")

    def eval_group_size_for(self, problem_count: int) -> int:
        """Return 1, because validation runs only the greedy graph of each problem."""
        return 1

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in the values that follow from the adapters of the run and from the machine."""
        from rlm.model import AdapterInfo, adapter_mismatch

        start = given.get("sft_adapter", DEFAULT_START)
        info = AdapterInfo.load(start) if start else None
        values = resolve({**given, "tool": "none"}, info, {})
        # The orchestrator always uses its own prompt, not that of its initial adapter.
        values |= {"system_prompt": None, "reasoning_format": "deepseek"}
        by_default = not ("agent_adapter" in given or given.get("agent_url"))
        name = values.get("agent_model") or values.get("model")
        if by_default and name and (why := adapter_mismatch(DEFAULT_AGENT_ADAPTER, name)):
            terminal.line(f"the agents use their base model without an adapter: {why}")
            values["agent_adapter"] = None
        return values


def has_unseen_test(dataset: str, config: OrchestratorConfig) -> bool:
    """Return whether a dataset has a test split that contains no training problem of the run.

    It does not for a local file, whose test split is the whole file, or if the run was trained on
    test problems, as with `--split test[:400]`.
    """
    is_trained = split_slice(config.split or "train")[0] == "test"
    return has_test(dataset) and not data_files(dataset) and not is_trained


# Maps each name of the original README (docs/reference/names.md) to the option that it sets.
PUBLISHED_NAMES = {
    "orchestrator_id": "model", "agent_model_id": "agent_model", "run_root": "run_dir",
    "steps": "steps", "batch_problems": "batch_size", "trajectories_per_problem": "group_size",
    "val_rows": "eval_samples",
}  # fmt: skip


class Config:
    """Contains the options in PUBLISHED_NAMES, as attributes that code can assign."""

    def __init__(self) -> None:
        for name, option in PUBLISHED_NAMES.items():
            setattr(self, name, getattr(OrchestratorConfig, option))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in PUBLISHED_NAMES:
            raise AttributeError(
                f"Config has no attribute {name}; its attributes are {', '.join(PUBLISHED_NAMES)} "
                "(OrchestratorConfig has all options)"
            )
        super().__setattr__(name, value)

    def to_options(self) -> OrchestratorConfig:
        """Convert the options to an OrchestratorConfig."""
        values = {option: getattr(self, name) for name, option in PUBLISHED_NAMES.items()}
        return OrchestratorConfig(**values)
