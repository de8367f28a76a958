"""The files in configs/ fit on simulated GPUs of their sizes, as configs/README.md says."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import byte_tokenizer
from empty_models import empty_model
from pretended_cards import pretended_cards
from transformers import AutoConfig

import eval as evaluate
import train_grpo
from rlm.cli.options import parse
from rlm.data import Problem, longest_prompts
from rlm.model import new_adapter
from rlm.training import PRESETS, GRPOConfig, SFTConfig
from rlm.training.memory_plan import activation_bytes, plan_memory
from rlm.training.sft import plan_sft

CONFIGS = Path(__file__).parents[1] / "configs"
README = (CONFIGS / "README.md").read_text(encoding="utf-8")
CARDS = {"t4": (15, (7, 5)), "24gb": (24, (8, 6)), "80gb": (80, (8, 0))}  # 15 GB of a T4 are usable
FILES = sorted(path.stem for path in CONFIGS.glob("qwen*.yaml"))
# Values of each model's published config.json.
SHAPES = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "tie_word_embeddings": True},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
           "tie_word_embeddings": False},
}  # fmt: skip
PARAMETERS = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616}  # in billions, as published
# Numbers of tokens in the longest training problem of GSM8K: the prompt, the system prompt at its
# beginning, and the example for SFT.
PROMPT, SHARED, EXAMPLE = 256, 40, 600


def size_of(model: str) -> str:
    return model.split("-")[1]


def shape_of(model: str):
    usual = {"vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    return AutoConfig.for_model("qwen2", **usual | SHAPES[size_of(model)])


def config_of(name: str) -> GRPOConfig:
    return parse(GRPOConfig, ["--config", str(CONFIGS / f"{name}.yaml")], presets=PRESETS)


class PlannedTrainer(train_grpo.GRPOTrainer):
    """A trainer with a model of the right shape, and with prompts as long as GSM8K's longest.

    A T4 computes in fp16, but the plan is made in bf16, which needs the same memory. fp16 matmuls
    would be much slower on a CPU.
    """

    dtype = torch.bfloat16

    def load_model(self, tokenizer, device):
        base = empty_model(shape_of(self.config.model), self.dtype, "cuda", self.config.quantize)
        assert self.config.quantize == "4bit" or base.num_parameters() / 1e9 == pytest.approx(
            PARAMETERS[size_of(self.config.model)], abs=0.001
        )
        return byte_tokenizer(), new_adapter(base, r=16, alpha=32).eval()

    def render(self, problem):
        return [0] * SHARED + [int(problem.id)] * (PROMPT - SHARED)


def activation_bytes_by_two_layers(policy) -> int:
    """Compute `activation_bytes` from one and two layers, because all layers save equal amounts.

    The head saves the same amount for any vocabulary. On a CPU without bf16 units, the whole model
    would take minutes.
    """
    base, kept = policy.get_base_model(), []
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    layers, config, weight = decoder.layers, decoder.config, head.weight
    head.weight = torch.nn.Parameter(weight[:8], requires_grad=False)
    for count in (1, 2):
        decoder.layers, config.num_hidden_layers = layers[:count], count
        kept.append(activation_bytes(policy))
    decoder.layers, config.num_hidden_layers, head.weight = layers, len(layers), weight
    return kept[0] + (len(layers) - 1) * (kept[1] - kept[0])


@pytest.fixture
def plan(monkeypatch, tmp_path):
    """Return a function that makes the trainer of a file and its memory plan on a simulated GPU."""
    monkeypatch.setattr(train_grpo, "base_model_hash", lambda *_, **__: "sha256:0")
    monkeypatch.setattr("rlm.training.memory_plan.activation_bytes", activation_bytes_by_two_layers)

    def plan(name, dtype=torch.bfloat16):
        options = {"sft_adapter": None, "run_dir": tmp_path / "run", "output": tmp_path / "out"}
        config = GRPOConfig(**{**vars(config_of(name)), **options})
        monkeypatch.setattr(PlannedTrainer, "dtype", dtype)
        trainer = PlannedTrainer(config.model, config)
        problems = [Problem(str(i), "?", "1") for i in range(1, config.batch_size + 1)]
        prompts = longest_prompts(trainer.render, problems)
        parts = trainer.config, trainer.weights, trainer.sampler
        return trainer, plan_memory(*parts, prompts, config.eval_samples)

    return plan


QUICK = "qwen2.5-0.5b_t4"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == QUICK else [pytest.mark.slow]) for n in FILES]
)
def test_a_config_fits_on_its_card(name, plan, capsys):
    """Both stages fit. On a T4 they also fit in fp32, which is used if fp16 overflows."""
    card = name.rpartition("_")[2]
    with pretended_cards(*CARDS[card]):
        trainer, found = plan(name)
        plan_sft(trainer.policy, SFTConfig(micro_batch=4), [{"input_ids": [0] * EXAMPLE}])
        stage_1 = float(re.findall(r"about (\S+) GB at the peak; ", capsys.readouterr().out)[0])
        del trainer
        if card == "t4":
            plan(name, torch.float32)
    assert "may not fit" not in capsys.readouterr().out
    usable = CARDS[card][0] - 0.5  # CUDA's context needs half a gigabyte
    assert max(stage_1, found.peak / 2**30) < usable
    assert row_of(name)[2:4] == [f"{stage_1:.1f} GB", f"{found.peak / 2**30:.1f} GB"]


def row_of(name):
    """Return the cells of a file's row in configs/README.md."""
    (row,) = re.findall(rf"^\| \[{re.escape(name)}\.yaml\].*$", README, re.M)
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_two_layers_say_what_all_layers_keep():
    """The shortcut of this file equals `activation_bytes` of the whole model."""
    with pretended_cards(*CARDS["24gb"]):
        config = shape_of("Qwen/Qwen2.5-0.5B-Instruct")
        config.hidden_size, config.vocab_size, config.num_hidden_layers = 448, 512, 6
        policy = new_adapter(empty_model(config, torch.bfloat16, "cuda"), r=16, alpha=32)
        assert activation_bytes_by_two_layers(policy) == activation_bytes(policy)


@pytest.mark.parametrize("name", FILES)
def test_the_lines_at_the_head_are_parsed(name):
    head = [line[4:] for line in (CONFIGS / f"{name}.yaml").read_text().splitlines()
            if line.startswith("#   ")]  # fmt: skip
    classes = {
        "train_sft.py": SFTConfig,
        "train_grpo.py": GRPOConfig,
        "eval.py": evaluate.EvaluateConfig,
    }
    assert [line.split()[1] for line in head] == [*classes]
    for line in head:
        _, script, *argv = shlex.split(line)
        if script == "train_grpo.py":
            assert argv == ["--config", f"configs/{name}.yaml"]
            continue
        config = parse(classes[script], argv)
        if script == "train_sft.py":
            grpo = config_of(name)
            assert (config.model, config.dataset) == (grpo.model, grpo.dataset)
            assert (config.quantize, config.output) == (grpo.quantize, grpo.sft_adapter)


def test_every_file_has_a_row_and_every_row_a_file():
    rows = re.findall(r"^\| \[(\S+\.yaml)\]", README, re.M)
    assert sorted(rows) == sorted(path.name for path in CONFIGS.glob("*.yaml"))
    for name in FILES:
        assert row_of(name)[-1] == "not run by us"
