"""SFT: its loss equals TRL's, which scores every position; starting, stopping and resuming."""

import importlib
import json
import os
import re
import shlex
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import byte_tokenizer, let_it_speak, tiny_model
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

import rlm.training.logprobs
import train_grpo
import train_sft
from rlm.cli.options import UsageError
from rlm.data.loaders import load_problems
from rlm.data.problem import Problem
from rlm.data.prompts import FORMATS, IGNORE_INDEX
from rlm.model.adapters import new_adapter
from rlm.model.base import load_base
from rlm.model.export import save_adapter
from rlm.model.hardware import Device
from rlm.ops.fused_layers import ATTN_IMPLEMENTATION
from rlm.runs.atomic_files import read_lines
from rlm.training.config import GRPOConfig
from rlm.training.sft_config import SFTConfig
from rlm.training.sft_examples import pack_examples, to_example
from tests.test_scripts import DATA, run
from tests.test_train_grpo import CPU, a_start_adapter, a_trainer

# Pairs of token ids and the length of the prompt.
ROWS = [([5, 6, 7, 8, 9, 10], 4), ([11, 12, 13], 1), ([14, 15, 16, 17], 3)]
# The same rows after a common prefix. In the last row, the first learned token, 5, is also the
# token after the prefix in the first row.
SHARED = [([3, 4, *ids], 2 + prompt) for ids, prompt in ROWS] + [([3, 4, 5, 9], 2)]


@pytest.fixture(scope="module", autouse=True)
def stage_1() -> None:
    """Import TRL only if these tests run, because the import takes seconds."""
    importlib.import_module("rlm.training.sft")


def example(ids, prompt):
    return {"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]}


def trainer_of(cls, folder, rows=ROWS, **options):
    import datasets
    import trl

    torch.manual_seed(0)
    policy = new_adapter(tiny_model(), r=4, alpha=8, dropout=0.0)
    let_it_speak(policy, 1.0)  # otherwise half of the gradients are zero
    arguments = trl.SFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, fp16=False, report_to="none",
        max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, **options,
    )  # fmt: skip
    return cls(
        model=policy,
        processing_class=byte_tokenizer(),
        train_dataset=datasets.Dataset.from_list([example(*row) for row in rows]),
        args=arguments,
    )


@pytest.mark.parametrize(
    ("count", "rows", "attn"),
    [
        (None, SHARED, ATTN_IMPLEMENTATION),
        (11, ROWS, ATTN_IMPLEMENTATION),
        (11, SHARED, "sdpa"),
        (None, SHARED[:1], "sdpa"),
        (None, [([5, 6, 7], 0), *ROWS], ATTN_IMPLEMENTATION),  # a row without a prompt
        (None, [([3, 4, 5, 6], 2), ([3, 4, 5, 7], 2)], ATTN_IMPLEMENTATION),  # equal beginnings
    ],
)
def test_loss_and_gradient_are_trls(tmp_path, count, rows, attn):
    """The loss must match if micro-batches share a denominator, and if prompts have a prefix."""
    import trl

    found = []
    for cls in (trl.SFTTrainer, rlm.training.sft.SFTTrainer):
        trainer = trainer_of(cls, tmp_path, rows)
        trainer.model.set_attn_implementation(attn)
        batch = trainer.data_collator([example(*row) for row in rows])
        loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
        loss.backward()
        gradients = {n: p.grad for n, p in trainer.model.named_parameters() if p.requires_grad}
        found.append((loss.detach(), gradients))
    (theirs, their_gradients), (ours, our_gradients) = found
    assert torch.allclose(ours, theirs, rtol=1e-5)
    assert their_gradients.keys() == our_gradients.keys()
    for name, gradient in their_gradients.items():
        assert gradient.abs().max() > 0, name
        # Both differ by 3e-6 from the gradient in double precision, whose largest entry is 1.5.
        assert torch.allclose(our_gradients[name], gradient, rtol=1e-4, atol=1e-5), name


def test_what_all_examples_begin_with_is_computed_once():
    rows = [torch.tensor(ids) for ids, _ in SHARED]
    labels = [torch.tensor(example(*row)["labels"]) for row in SHARED]
    inputs = {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
    }
    packed = pack_examples(inputs, "cpu", packed=True)
    # The last token of each example is a target but not an input. Only learned tokens are targets.
    assert packed.input_ids.tolist() == [[3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 2, 3, 2, 3, 4, 2]]
    assert packed.segments.tolist() == [[0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 4]]
    assert packed.targets.tolist() == [9, 10, 12, 13, 17, 5, 9]
    assert packed.sources.tolist() == [5, 6, 7, 8, 11, 1, 12]
    assert packed.lengths == [2, 2, 1, 2]


@pytest.mark.parametrize(("prompt", "warns"), [(32, False), (33, True)])
def test_completions_that_will_not_fit_are_reported_before_training(prompt, warns, capsys):
    """The window of 128 tokens has room for 32 prompt tokens, besides 96 new tokens."""
    examples = [{"input_ids": [1] * 40, "labels": [IGNORE_INDEX] * prompt + [1] * (40 - prompt)}]
    model = tiny_model("mistral", sliding_window=128)
    rlm.training.sft.check_window(model, examples, "word-problems")
    said = capsys.readouterr().out
    assert "local attention layers of this model attend to only 128 tokens" in said
    assert ("warning: prompts of up to 33 tokens and --max-new-tokens 96" in said) == warns


def test_examples_beyond_the_local_window_are_left_out(sft, tokenizer, tmp_path, capsys):
    """Each byte is a token, so the examples have about 160 and 660 tokens."""
    data, model = tmp_path / "rows.jsonl", tmp_path / "local"
    rows = [
        {"question": f"{'x' * n} {n}", "answer": "1", "solution": "so 1"}
        for n in (*range(8), *range(500, 508))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.save_pretrained(model)
    for window, code in ((400, 0), (60, 2)):
        tiny_model("mistral", sliding_window=window).save_pretrained(model)
        options = ["--model", model, "--dataset", data, "--max-length", 1000, "--max-samples", 16]
        assert sft(*options) == code
    said, error = capsys.readouterr()
    used, left_out = map(int, re.search(r"(\d+) examples \((\d+) too long", said).groups())
    assert (used + left_out, used) == (15, history(tmp_path / "sft")["examples"])  # one is held out
    assert min(used, left_out) >= 7
    assert error.splitlines()[-1] == "error: no example fits into the context window of the model"


def test_training_ends_where_trls_does(tmp_path):
    """TRL's unchanged trainer makes the same three updates of two micro-batches each."""
    import trl

    ends = []
    for cls in (trl.SFTTrainer, rlm.training.sft.SFTTrainer):
        trainer = trainer_of(
            cls, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2,
            max_steps=3, learning_rate=1e-2, save_strategy="no",
        )  # fmt: skip
        losses = trainer.train().training_loss
        ends.append((losses, trainer.evaluate(trainer.train_dataset)["eval_loss"]))
    assert ends[1] == pytest.approx(ends[0], rel=1e-4)


def test_the_validation_loss_is_a_mean_over_tokens(tmp_path):
    """It must not depend on the micro-batch; the rows have two, one and two learned tokens."""
    losses = []
    for rows in (1, 2, 3):
        trainer = trainer_of(
            rlm.training.sft.SFTTrainer, tmp_path, per_device_eval_batch_size=rows
        )  # fmt: skip
        losses.append(trainer.mean_loss([example(*row) for row in ROWS]))
    batch = trainer.data_collator([example(*row) for row in ROWS])
    assert losses == pytest.approx([trainer.compute_loss(trainer.model, dict(batch)).item()] * 3)


# --- where it starts and stops --------------------------------------------------------------------


@pytest.fixture
def sft(model_dir, tmp_path):
    """A function that runs train_sft.py on eight examples, and returns the exit code."""

    def start(*more):
        return run(
            train_sft, "--model", model_dir, *DATA, "--max-samples", 8, "--batch-size", 4,
            "--micro-batch", 4, "--eval-samples", 0, "--output", tmp_path / "sft", "--run-dir",
            tmp_path / "run", *more,
        )  # fmt: skip

    return start


def own_file(path, rows, solved):
    """Write a data file in which only the first rows have a solution."""
    lines = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(rows)]
    lines = [{**row, "solution": f"so {row['answer']}"} if i < solved else row
             for i, row in enumerate(lines)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return path


@pytest.mark.parametrize(
    ("more", "steps", "said"),
    [
        ((), "20 × 12 examples, 20 passes (--epochs)", None),
        (("--epochs", 2), "2 × 12 examples, 2 passes", "warning: 2 steps are too few: "
         "use --epochs 20"),
    ],
)  # fmt: skip
def test_a_dozen_solutions_of_ones_own_are_enough(
    model_dir, tmp_path, monkeypatch, capsys, more, steps, said
):
    """GRPO can use the other rows, and the printed command for GRPO works unchanged."""
    monkeypatch.chdir(tmp_path)
    own_file(tmp_path / "my sums.jsonl", 30, 13)
    argv = ("--model", model_dir, "--dataset", "my sums.jsonl", "--output", "sft", *more)
    assert run(train_sft, *argv) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"1\d of 27 problems have no solution with steps: SFT learns from the other 1\d\n", out
    )
    assert f"steps: {steps}" in out
    assert (said or "done") in out
    assert ("warning" in out) == (said is not None)
    recorded = history(tmp_path / "sft")
    assert recorded["step"] == recorded["config"]["epochs"] == int(steps.split()[0])
    command = re.search(r"next: python train_grpo.py (.*)\n", out)[1]
    assert command == "--sft-adapter sft --dataset 'my sums.jsonl'"
    tiny = ("--steps", 1, "--batch-size", 2, "--group-size", 2, "--max-new-tokens", 4)
    assert more or run(train_grpo, *shlex.split(command), *tiny, "--eval-samples", 0) == 0


def test_a_file_without_solutions_is_refused(model_dir, tmp_path, capsys):
    file = own_file(tmp_path / "mine.jsonl", 30, 0)
    argv = ("--model", model_dir, "--dataset", file, "--output", tmp_path / "sft")
    assert run(train_sft, *argv) == 2
    error = capsys.readouterr().err
    assert "none of 27 problems has a solution to learn from; write a `solution`" in error


@pytest.mark.parametrize(
    ("dataset", "examples", "epochs"),
    [("mine.jsonl", 11, 20), ("mine.jsonl", 300, 2), ("mine.jsonl", 400, 1), ("gsm8k", 11, 1)],
)
def test_passes_over_a_small_file(dataset, examples, epochs):
    """With 16 examples per step, a pass has 1, 19 or 25 steps, and 20 steps are required."""
    assert SFTConfig(dataset=dataset).epochs_for(examples) == epochs
    assert SFTConfig(dataset=dataset, epochs=3).epochs_for(examples) == 3


def history(folder):
    return json.loads((folder / "run.json").read_text())


def test_it_goes_on_from_the_adapter_that_is_named(sft, model_dir, tmp_path, tokenizer):
    """With a tiny learning rate, the rank, scale and values stay those of the initial adapter."""
    start = a_start_adapter(model_dir, tokenizer, tmp_path / "start")
    assert sft("--adapter", start, "--learning-rate", 1e-12) == 0
    before, after = (
        load_file(path / "adapter_model.safetensors") for path in (start, tmp_path / "sft")
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.allclose(after[name], tensor, atol=1e-6), name
    assert any(tensor.abs().max() > 0.1 for name, tensor in before.items() if "lora_B" in name)
    assert history(tmp_path / "sft")["start_adapter"] == str(start)
    config = json.loads((tmp_path / "sft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_bf16_learns_what_fp32_does_and_without_autocast(sft, tmp_path, monkeypatch):
    """On a CPU with bf16 units, the adapter is nevertheless trained and saved in fp32."""
    seen, losses, score_tokens = [], [], rlm.training.logprobs.score_tokens

    def watched(hidden, *others):
        seen.append((hidden.dtype, torch.is_autocast_enabled("cpu")))
        return score_tokens(hidden, *others)

    monkeypatch.setattr(rlm.training.logprobs, "score_tokens", watched)
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(
            "train_sft.pick_device", lambda _, dtype=dtype: Device("cpu", dtype, "")
        )
        assert sft("--epochs", 4, "--learning-rate", 3e-2) == 0
        assert set(seen) == {(dtype, False)}
        seen.clear()
        saved = load_file(tmp_path / "sft" / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        losses.append([row["loss/sft"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")])
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_the_clock_ends_it_and_long_examples_are_left_out(sft, tmp_path, tokenizer, capsys):
    problems = load_problems(DATA[1], "train", max_samples=8, seed=0)
    lengths = sorted(
        len(to_example(tokenizer, problem, FORMATS["deepseek"])["input_ids"])
        for problem in problems
    )
    assert lengths[5] < lengths[6]
    assert sft("--max-minutes", 1e-6, "--epochs", 9, "--max-length", lengths[5]) == 0
    said = capsys.readouterr().out
    assert "6 examples (2 too long, left out)" in said
    assert "--max-minutes 1e-06 reached" in said
    assert re.search(r"^step 1/18  loss [\d.]+  about 0 s left$", said, re.M)
    found = history(tmp_path / "sft")  # the adapter is saved nevertheless
    assert (found["step"], found["examples"]) == (1, 6)
    assert sft("--max-length", lengths[0] - 1) == 2
    assert f"no example fits in --max-length {lengths[0] - 1} tokens" in capsys.readouterr().err


@pytest.fixture
def at_batch(monkeypatch):
    """A function that calls an action before the loss of the given batch, counted from 1.

    It returns a list that has an entry for each batch that was begun.
    """
    compute_loss = rlm.training.sft.SFTTrainer.compute_loss

    def install(number, action):
        begun = []

        def watched(*arguments, **options):
            begun.append(1)
            if len(begun) == number:
                action()
            return compute_loss(*arguments, **options)

        monkeypatch.setattr(rlm.training.sft.SFTTrainer, "compute_loss", watched)
        return begun

    return install


@pytest.fixture
def signals():
    """Let both signals raise KeyboardInterrupt, also if the shell ignores SIGINT."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def interrupt(number=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_the_old_adapter_stays(
    sft, tmp_path, at_batch, signals, capsys, number, code
):
    begun = at_batch(1, interrupt(number))
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "adapter_config.json").write_text("an older one's")
    assert sft("--epochs", 9) == code
    assert len(begun) == 1  # no further step was begun
    assert [file.name for file in (tmp_path / "sft").iterdir()] == ["adapter_config.json"]
    assert (tmp_path / "sft" / "adapter_config.json").read_text() == "an older one's"
    said = capsys.readouterr().err
    assert (
        f"{tmp_path / 'run'} is saved up to step 1; continue with: python" in said.splitlines()[-1]
    )
    assert said.endswith("--epochs 9 --resume\n")
    assert "Traceback" not in said


# Ten examples give three steps per epoch, with two, two and one micro-batches.
THREE_EPOCHS = ("--max-samples", 10, "--epochs", 3, "--learning-rate", 3e-2, "--micro-batch", 2)


def weights(folder):
    return load_file(folder / "sft" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("batch", "step", "dropout"),
    [
        pytest.param(3, 2, 0.0, marks=pytest.mark.slow),
        (5, 3, 0.0),  # the third step is the last of an epoch
        pytest.param(11, 7, 0.3, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_ends_as_one_that_was_not_stopped(
    sft, tmp_path, at_batch, signals, batch, step, dropout
):
    """A signal, then the time limit stop the run, and the adapters are bit-identical."""
    more = (*THREE_EPOCHS, "--lora-dropout", dropout)
    assert sft(*more) == 0
    whole, told = weights(tmp_path), history(tmp_path / "sft")
    losses = [row["loss/sft"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")]

    at_batch(batch, interrupt())
    assert sft(*more) == 143
    assert sft(*more, "--resume", "--max-minutes", 1e-6) == 0  # makes one step
    assert history(tmp_path / "sft")["step"] == step + 1
    assert sft(*more, "--resume") == 0
    assert all((tensor == whole[name]).all() for name, tensor in weights(tmp_path).items())
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["loss/sft"] for row in rows] == losses
    after = history(tmp_path / "sft")
    assert (after["step"], after["loss"]) == (9, told["loss"])
    assert after["loss"] == pytest.approx(sum(losses) / 9)


def test_after_a_crash_it_goes_on_from_the_newest_checkpoint(
    sft, tmp_path, at_batch, monkeypatch, capsys
):
    assert sft(*THREE_EPOCHS) == 0
    whole = weights(tmp_path)
    assert not (tmp_path / "run" / "checkpoints").exists()  # no checkpoint in less than a minute

    def crash():
        raise MemoryError("allocate memory")

    monkeypatch.setattr("rlm.training.sft.SAVE_SECONDS", 0.0)
    begun = at_batch(8, crash)
    assert sft(*THREE_EPOCHS) != 0
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000003", "step_000004"]
    (folder / "step_000004" / "state.safetensors").write_bytes(b"torn")
    capsys.readouterr()
    # The clock of the resumed run advances by eight seconds per micro-batch.
    clock = SimpleNamespace(monotonic=lambda: 8.0 * len(begun))
    monkeypatch.setattr("rlm.training.sft.time", clock)
    assert sft(*THREE_EPOCHS, "--resume", "--max-minutes", 2) == 0
    said = capsys.readouterr().out
    assert "checkpoint step_000004 is damaged" in said
    assert "before step 4" in said
    # Step 4, the first of six steps, took 16 seconds, so 5 more steps take 80 seconds.
    assert re.search(r"^step 4/9 .* about 80 s left$", said, re.M)
    assert all((tensor == whole[name]).all() for name, tensor in weights(tmp_path).items())


def test_a_slow_run_reports_and_saves_more_often_than_every_twentieth(sft, tmp_path, monkeypatch):
    # Of 40 steps, the first and every second one are logged.
    whole = ("--epochs", 40, "--max-samples", 1, "--batch-size", 1, "--micro-batch", 1,
             "--learning-rate", 1e-3, "--warmup-share", 0.25)  # fmt: skip
    assert sft(*whole) == 0
    log = tmp_path / "run" / "metrics.jsonl"
    rows = list(read_lines(log))
    assert [row["step"] for row in rows] == [0, *range(1, 40, 2)]
    warmup = [row["optim/lr"] for row in rows[:6]]  # the warm-up lasts ten steps
    assert warmup == pytest.approx([0, 1e-4, 3e-4, 5e-4, 7e-4, 9e-4])
    mean = history(tmp_path / "sft")["loss"]
    monkeypatch.setattr("rlm.training.sft.SAVE_SECONDS", 0.0)
    assert sft(*whole) == 0
    assert [row["step"] for row in read_lines(log)] == list(range(40))
    assert history(tmp_path / "sft")["loss"] == pytest.approx(mean)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_000038", "step_000039"]


def test_only_the_same_run_is_resumed(sft, tmp_path, at_batch, signals, capsys):
    assert sft(*THREE_EPOCHS, "--resume") == 2
    assert "no checkpoint in" in capsys.readouterr().err
    at_batch(3, interrupt())
    assert sft(*THREE_EPOCHS) == 143
    for option, value, change in (
        ("--learning-rate", 1e-3, "--learning-rate: 0.03 → 0.001"),
        ("--epochs", 4, "--epochs: 3 → 4"),
        ("--max-samples", 9, "training data: 10 examples, sha256"),
    ):
        assert sft(*THREE_EPOCHS, option, value, "--resume") == 2
        assert change in capsys.readouterr().err
    assert sft(*THREE_EPOCHS, "--resume", "--micro-batch", 4) == 0


def test_a_run_of_the_other_stage_is_not_resumed(sft, model_dir, tmp_path, at_batch, capsys):
    folder = tmp_path / "run"
    grpo = GRPOConfig(
        sft_adapter=None, steps=1, lora_r=4, batch_size=2, group_size=2, max_new_tokens=4,
        eval_every=0, run_dir=folder, output=tmp_path / "g",
    )  # fmt: skip
    problems = load_problems(DATA[1], "train", max_samples=2)
    a_trainer(model_dir, grpo).train(problems)
    assert sft("--resume") == 2
    assert f"{folder} is a run of another script" in capsys.readouterr().err

    at_batch(1, interrupt())
    assert sft(*THREE_EPOCHS) == 143  # the GRPO run is moved away
    with pytest.raises(UsageError, match="is a run of another script"):
        a_trainer(model_dir, replace(grpo, resume=True)).train(problems)


def test_what_happens_after_the_last_step_costs_no_adapter(sft, tmp_path, monkeypatch, signals):
    """The adapter is saved before the validation, and a signal waits until the validation ends."""
    monkeypatch.setattr(rlm.training.sft.SFTTrainer, "mean_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sft("--eval-samples", 1)
    assert (tmp_path / "sft" / "adapter_model.safetensors").exists()
    assert history(tmp_path / "sft")["validation_loss"] is None
    monkeypatch.setattr(rlm.training.sft.SFTTrainer, "mean_loss", lambda *_: interrupt()() or 0.5)
    assert sft("--eval-samples", 1) == 0
    assert history(tmp_path / "sft")["validation_loss"] == 0.5


def test_weights_that_are_not_finite_are_not_saved(sft, tmp_path, capsys):
    """transformers replaces a NaN loss in its log, so the weights themselves must be checked."""
    assert sft("--learning-rate", 1e30) == 2
    assert "weights of the adapter are no longer finite" in capsys.readouterr().err
    assert not (tmp_path / "sft").exists()


def test_a_start_that_fails_frees_the_run_directory(model_dir, tmp_path):
    """A notebook keeps the error and thus the frames, which must not keep the lock."""
    names = {"model": str(model_dir), "output": tmp_path / "sft", "run_dir": tmp_path / "run"}
    problems = [Problem("p", "1 + 1?", "2", "1 + 1 = 2")]
    with pytest.raises(UsageError, match="no checkpoint in") as kept:
        train_sft.train(SFTConfig(**names, resume=True), problems)
    assert train_sft.train(SFTConfig(**names), problems)["step"] == 1
    assert kept.tb


@pytest.mark.parametrize("seed", [-1, 2**32])  # numpy raises an error for these
def test_a_seed_that_numpy_does_not_take_is_one_line(sft, seed, capsys):
    assert sft(f"--seed={seed}") == 2
    assert "--seed must be at" in capsys.readouterr().err


def test_an_adapter_keeps_its_own_dropout(sft, model_dir, tmp_path, capsys):
    policy = new_adapter(load_base(str(model_dir), CPU), r=4, alpha=8,
                         dropout=0.5)  # fmt: skip
    save_adapter(policy, byte_tokenizer(), tmp_path / "start", {})
    assert sft("--adapter", tmp_path / "start", "--seed", 0) == 0
    config = train_sft.SFTConfig(model=str(model_dir), adapter=tmp_path / "start")
    wet = train_sft.start_policy(config, CPU, "").train()
    ids = torch.arange(5, 20)[None]
    torch.nn.init.normal_(next(t for n, t in wet.named_parameters() if "lora_B" in n))
    assert not torch.equal(wet(ids).logits, wet(ids).logits)  # dropout is active
    assert sft("--adapter", tmp_path / "start", "--lora-dropout", 0.1) == 2
    assert "--lora-dropout is for a new adapter" in capsys.readouterr().err


def test_an_output_that_is_no_adapter_is_refused_first(sft, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert sft("--output", tmp_path) == 2
    assert f"--output {tmp_path}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()  # the run was not started


def test_a_signal_in_the_last_step_loses_nothing(sft, tmp_path, at_batch, signals):
    at_batch(2, interrupt())
    assert sft() == 0
    assert history(tmp_path / "sft")["step"] == 2


# --- --dry-run -----------------------------------------------------------------------------------

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
LEARNED = "<think>\nShe sold 48/2 = 24 in May.\nIn all 48+24 = 72.\n</think>\n<answer>72</answer>"


@pytest.mark.parametrize(("typed", "shown"), [(["--dry-run", 2], 2), (["--dry-run"], 3)])
def test_a_dry_run_shows_what_is_learned_and_what_is_left_out(
    typed, shown, model_dir, tmp_path, capsys
):
    rows = [GSM8K | {"question": f"{i} {GSM8K['question']}"} for i in range(9)]
    rows += [GSM8K | {"question": "x" * 900}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common = ["--model", model_dir, "--dataset", f"openai/gsm8k:{tmp_path}"]
    output = ["--output", tmp_path / "sft", "--run-dir", tmp_path / "run"]
    before = sorted(tmp_path.iterdir())
    assert run(train_sft, *common, *output, *typed) == 0
    said = capsys.readouterr().out
    parts = re.findall(r"^--- (.*) \((\d+) tokens\)\n((?:(?!---).+\n)+)", said, re.M)
    assert [what for what, *_ in parts] == ["prompt, no loss", "completion, with loss"] * shown
    for (_, length, prompt), (_, learned_length, learned) in zip(
        parts[::2], parts[1::2], strict=True
    ):
        assert GSM8K["question"] in prompt
        assert "72" not in prompt
        assert learned.rstrip() == f"{LEARNED}<|im_end|>"
        assert int(learned_length) == len(LEARNED) + 1  # one token per byte, and the end token
        assert int(length) > len(GSM8K["question"])
    assert "problems: 9 read, 8 used, 1 left out (over --max-length 1024 tokens)" in said
    assert "validation problems: 1 read, 1 used, 0 left out" in said
    assert sorted(tmp_path.iterdir()) == before  # nothing was trained
