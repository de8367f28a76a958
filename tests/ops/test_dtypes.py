"""The dtype for a CPU is chosen by measurement, not by the flags of the CPU."""

import json
import shlex
import sys

import pytest
import torch
from conftest import tiny_model

from rlm.model import pick_device
from rlm.ops import TorchOps
from rlm.ops import cpu as this_cpu
from rlm.sampling import Sampler, SamplingParams, sampling_dtype


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """A CPU with bf16 units whose times the test sets; returns the list of timed functions."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("RLM_CACHE", str(tmp_path / "cache"))
    timed = []

    def having(fp32, bf16):
        def time_in_turns(functions):
            timed.append({name: function() for name, function in functions.items()})
            return {"float32": fp32, "bfloat16": bf16}

        monkeypatch.setattr(this_cpu, "_time_in_turns", time_in_turns)
        return timed

    return having


@pytest.mark.parametrize(
    ("fp32", "bf16", "dtype"),
    [(4.0, 1.0, torch.bfloat16), (1.0, 2.0, torch.float32), (1.05, 1.0, torch.float32)],
)
def test_the_faster_type_is_taken_and_fp32_where_they_are_alike(cpu, fp32, bf16, dtype):
    cpu(fp32, bf16)
    device = pick_device()
    assert device.dtype == dtype
    assert f"bf16 is {fp32 / bf16:.2g} times as fast as fp32" in str(device)
    assert sampling_dtype(tiny_model().to(dtype))[0] == dtype


@pytest.mark.parametrize(
    ("limit", "dtype"),
    [
        ("DEFAULT", torch.bfloat16),
        ("AVX512_CORE_BF16", torch.bfloat16),
        ("avx2", torch.float32),
        ("AVX512_CORE_VNNI", torch.float32),
    ],
)
def test_a_limit_of_the_instructions_may_disable_bf16(cpu, monkeypatch, limit, dtype):
    cpu(4.0, 1.0)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert pick_device().dtype == dtype


def test_each_kind_of_work_is_measured_once_on_a_machine(cpu, tmp_path):
    timed = cpu(4.0, 1.0)
    for _ in range(2):
        pick_device()
        sampling_dtype(tiny_model().bfloat16())
    assert len(timed) == 2 * 2  # two timings that agree, for both kinds of work
    assert all({*each} == {*this_cpu.DTYPES} for each in timed)
    file = tmp_path / "cache" / "number_types.json"
    kinds = sorted(key.split(",")[0] for key in json.loads(file.read_text()))
    assert kinds == ["learning", "sampling 32 x 64"]
    cpu(1.0, 4.0)  # the cached result is used
    assert pick_device().dtype == torch.bfloat16
    file.write_text("{broken")
    assert pick_device().dtype == torch.float32


@pytest.mark.parametrize("changed", ["limit", "features", "compiler", "source", "threads", "torch"])
def test_what_a_measurement_depends_on_is_in_its_key(cpu, tmp_path, monkeypatch, changed):
    monkeypatch.setenv("CC", shlex.quote(sys.executable))  # a program with --version
    cpu(4.0, 1.0)
    assert pick_device().dtype == torch.bfloat16
    cpu(1.0, 4.0)
    with monkeypatch.context() as patch:
        if changed == "limit":  # this limit allows bf16
            patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        elif changed == "features":
            patch.setattr(this_cpu, "CPU_INFO", tmp_path / "cpuinfo")
            this_cpu.CPU_INFO.write_text("flags : others")
        elif changed == "compiler":
            patch.setenv("CC", "none")
        elif changed == "source":
            source = tmp_path / "more.c"
            source.write_text("int more(void) { return 1; }\n")
            patch.setattr(this_cpu, "SOURCES", [*this_cpu.SOURCES, source])
        elif changed == "threads":
            patch.setattr("torch.get_num_threads", lambda: 77)
        else:
            patch.setattr("torch.__version__", "0")
        assert pick_device().dtype == torch.float32
    assert pick_device().dtype == torch.bfloat16  # the first result is still cached


@pytest.mark.parametrize(
    ("times", "dtype", "is_steady"),
    [
        ([9.0, 2.0, 0.5, 2.1], torch.bfloat16, True),  # the second and the fourth agree
        ([0.3, 0.5, 0.9, 1.6, 3.0, 0.1], torch.float32, False),
    ],
)
def test_a_measurement_that_other_programs_spoil_is_repeated(
    cpu, monkeypatch, tmp_path, capsys, times, dtype, is_steady
):
    cpu(0.0, 1.0)
    left = iter(times)
    monkeypatch.setattr(
        this_cpu, "_time_in_turns", lambda _: {"float32": next(left), "bfloat16": 1.0}
    )
    assert pick_device().dtype == dtype
    assert list(left) == []
    said = "bf16 was 0.1 to 3 times as fast" in " ".join(capsys.readouterr().out.split())
    assert said != is_steady
    assert (tmp_path / "cache" / "number_types.json").exists() == is_steady  # else not cached


def test_sampling_and_learning_may_differ(cpu):
    """On some CPUs, bf16 matmuls are slow, but sampling gains from reading half the bytes."""
    cpu(1.0, 2.0)
    assert pick_device().dtype == torch.float32
    cpu(2.0, 1.0)
    assert sampling_dtype(tiny_model())[0] == torch.bfloat16


def test_a_type_that_somebody_chose_is_not_measured(cpu):
    timed = cpu(4.0, 1.0)
    assert pick_device("float32").dtype == torch.float32
    assert sampling_dtype(tiny_model(), "float32")[0] == torch.float32
    assert sampling_dtype(tiny_model().bfloat16(), "bfloat16")[0] == torch.bfloat16
    assert not timed
    assert sampling_dtype(tiny_model())[0] == torch.float32  # the model is not in the fast dtype


def test_the_clock_takes_the_faster_for_faster():
    work = {"slow": lambda: torch.ones(300, 300) @ torch.ones(300, 300), "fast": lambda: None}
    seconds = this_cpu._time_in_turns(work)
    assert 0 < seconds["fast"] < seconds["slow"]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_merged_copy_in_bf16_draws_for_a_model_in_fp32(family, compiled, tokenizer, monkeypatch):
    """The samples equal those of a bf16 model: the copy is rounded once, after merging."""
    if not compiled:
        monkeypatch.setattr("rlm.sampling.engine.ops_for", lambda *_: TorchOps())
    model, params = tiny_model(family), SamplingParams(12, 1.0)
    mixed = Sampler(model, tokenizer, dtype=torch.bfloat16)
    assert (mixed.dtype, model.dtype) == (torch.bfloat16, torch.float32)
    assert not mixed.matches_trainer
    assert "in bfloat16" in mixed.description
    assert mixed.bytes_for([4], 8, 12) < Sampler(model, tokenizer).bytes_for([4], 8, 12)
    drawn = mixed.sample([[1, 2, 3]], 4, params, [7])
    rounded = tiny_model(family).bfloat16()
    rounded.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq  # fp32, as after loading
    usual = Sampler(rounded, tokenizer).sample([[1, 2, 3]], 4, params, [7])
    assert [c.token_ids for c in drawn[0]] == [c.token_ids for c in usual[0]]


def test_an_unmerged_sampler_computes_in_the_model_s_type(tokenizer):
    sampler = Sampler(tiny_model(), tokenizer, merged=False, dtype=torch.bfloat16)
    assert sampler.dtype == torch.float32
    assert sampler.sample([[1, 2]], 1, SamplingParams(3), [0])[0][0].token_ids
