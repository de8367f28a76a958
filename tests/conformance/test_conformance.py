"""The conformance kit: our formulas pass, broken ones fail, and TRL's differences are known.

The adapter and the table of the page are checked, too.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlm.cli import UsageError
from rlm.conformance import __main__ as kit
from rlm.conformance import compare, load_cases
from rlm.conformance.cases import place
from rlm.conformance.ours import ours
from rlm.ops import TorchOps
from rlm.training import advantages, batches, loss

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "conformance.md").read_text(encoding="utf-8")
CASES = load_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ours_equals_the_values_computed_by_hand(case):
    assert compare(case, ours)["status"] == "equal"


MUTATIONS = {
    "the population's std": lambda patch: patch.setattr(
        torch.Tensor, "sqrt", lambda x: x**0.5 * 0.866
    ),
    "a group without a difference by its advantages": lambda patch: patch.setattr(
        advantages, "has_signal", lambda rewards, kind: torch.ones(len(rewards), dtype=torch.bool)
    ),
    "clip on the wrong side": lambda patch: patch.setattr(
        loss, "torch", SimpleNamespace(minimum=torch.maximum, zeros=torch.zeros, where=torch.where)
    ),
    "a taper of the good": lambda patch: patch.setattr(
        loss, "torch", SimpleNamespace(minimum=torch.minimum, zeros=torch.zeros, where=lambda *_: 1)
    ),
    "a denominator of the rows with a gradient": lambda patch: patch.setattr(
        batches,
        "row_weights",
        lambda lengths, *_: [1 / (2 * max(length, 1)) for length in lengths],
    ),
    "k3 the wrong way round": lambda patch: patch.setattr(
        loss, "kl_estimate", lambda new, ref: (new - ref).exp() - (new - ref) - 1
    ),
    "a ratio of the sampler": lambda patch: patch.setattr(
        loss, "importance_weights", lambda old, sampled: (sampled - old).exp().clamp(max=2)
    ),
    "a tool's tokens are learned": lambda patch: patch.setattr(
        batches.MicroBatch,
        "completion_mask",
        property(lambda own: torch.arange(max(own.lengths)) < torch.tensor(own.lengths)[:, None]),
    ),
    "no temperature in the score": lambda patch: patch.setattr(
        TorchOps,
        "token_logprobs",
        lambda ops, logits, targets, *_: _token_logprobs(ops, logits, targets, 1.0, False),
    ),
}
_token_logprobs = TorchOps.token_logprobs


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_formula_is_noticed(mutation, monkeypatch, capsys):
    MUTATIONS[mutation](monkeypatch)
    monkeypatch.setattr("rlm.conformance.cases.PEERS", ())
    assert kit.main(kit.ConformanceConfig()) == 1
    assert "failed: rlm: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def trl():
    from rlm.conformance import peer_trl

    return peer_trl


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_trl_differs_where_it_is_known_to(case, trl):
    found = compare(case, trl.adapter, "trl", trl.SOURCE)
    if "trl" in case.known:
        file, _, line = found["place"].rpartition(":")
        text = Path(trl.SOURCE.__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert file == "trl/trainer/grpo_trainer.py"
        assert case.known["trl"]["line"] in text
        assert found["status"] == "documented"
        assert found["by"] > 0
    else:
        assert found["status"] in ("equal", "not offered")


def test_a_peer_of_another_version_is_a_row_and_no_crash(trl, monkeypatch, capsys):
    monkeypatch.setattr("rlm.conformance.cases.PEERS", ("trl",))
    monkeypatch.delattr(trl.SOURCE.GRPOTrainer, "_compute_loss")
    assert kit.main(kit.ConformanceConfig()) == 0
    printed = capsys.readouterr().out
    assert "| clip: four sides | equal | cannot be called (3) |" in printed
    assert re.search(r"^3\. trl .*: AttributeError: .*_compute_loss", printed, re.M)


def test_a_line_that_is_gone_is_said():
    assert place(kit, "no such line").endswith("(the line has changed)")


@pytest.mark.parametrize("name", [".", "file/out.json"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(name, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--json .* (is a directory|cannot be written)"):
        kit.main(kit.ConformanceConfig(json=tmp_path / name))


# ---- A user's own trainer ------------------------------------------------------------------


@pytest.fixture
def example(tmp_path):
    """Write the example adapter of the page to a file, and return its path."""
    file = tmp_path / "my_trainer.py"
    file.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0])
    return file


def run_on(file, tmp_path, monkeypatch):
    monkeypatch.setattr("rlm.conformance.cases.PEERS", ())
    output = tmp_path / "conformance.json"
    code = kit.main(kit.ConformanceConfig(trainer=f"{file}:adapter", json=output))
    rows = json.loads(output.read_text())["formulas"]
    return code, {row["formula"]: row["yours"] for row in rows}


def test_the_adapter_of_the_page_passes(example, tmp_path, monkeypatch):
    code, rows = run_on(example, tmp_path, monkeypatch)
    assert code == 0
    assert {row["status"] for row in rows.values()} == {"equal", "not offered"}
    assert rows["clip: four sides"]["status"] == rows["two processes (DAPO)"]["status"] == "equal"


def test_a_mistake_of_a_users_trainer_fails(example, tmp_path, monkeypatch, capsys):
    text = example.read_text()
    assert "torch.minimum" in text
    example.write_text(text.replace("torch.minimum", "torch.maximum"))
    code, rows = run_on(example, tmp_path, monkeypatch)
    assert code == 1
    assert rows["clip: four sides"]["status"] == "differs"
    assert "failed: yours: clip: four sides" in capsys.readouterr().out


def test_the_table_of_the_page_is_of_the_committed_run():
    record = json.loads((ROOT / "docs" / "results" / "conformance.json").read_text())
    lines = kit.markdown(record)
    equal = [line for line in lines if line.endswith("| equal | equal | equal |")]
    lacking = [line for line in lines if "| not offered |" in line and "documented" not in line]
    assert f"\n{len(equal)} formulas are equal in all three" in PAGE
    assert f"verl does not offer {len(lacking)} others, among them those of" in PAGE
    by_trl = [line for line in lacking if line.endswith("| equal | equal | not offered |")]
    assert f"TRL offers {len(by_trl)} of them, also equal" in PAGE
    assert all("differs" not in line for line in lacking)
    for line in lines:
        assert (line in PAGE) == (line not in [*equal, *lacking]), line
    assert [row["formula"] for row in record["formulas"]] == [case.name for case in CASES]
