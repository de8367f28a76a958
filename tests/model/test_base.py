"""Which weights a name stands for, and which adapters are taken."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rlm.cli.options import UsageError
from rlm.model import base as models
from rlm.model.adapters import ADAPTER_FILES, check_adapter, load_adapter
from rlm.model.export import save_adapter
from rlm.runs.checkpoints import file_hash


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """As the hub's library lays it out; nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "hub_reachable", lambda: False)
    return tmp_path


def cached(cache, weights, name="models--org--tiny"):
    blob = cache / name / "blobs" / file_hash(weights)
    snapshot = cache / name / "snapshots" / "c0ffee"
    for folder in (blob.parent, snapshot, cache / name / "refs"):
        folder.mkdir(parents=True)
    (cache / name / "refs" / "main").write_text("c0ffee")
    shutil.copy(weights, blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
    return blob


def test_a_model_of_the_hub_and_a_copy_of_it_are_the_same(hub_cache, model_dir):
    blob = cached(hub_cache, model_dir / "model.safetensors")
    assert models.base_model_hash("org/tiny") == models.base_model_hash(str(model_dir))
    blob.write_bytes(b"")  # the name says it: gigabytes are not read again
    assert models.base_model_hash("org/tiny") == models.base_model_hash(str(model_dir))


def test_the_same_weights_under_another_name_do_not_count(model_dir, tmp_path):
    """A whole copy of a repository may hold them twice; other directories have only the other."""
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    assert models.base_model_hash(str(copy)) == models.base_model_hash(str(model_dir))
    (copy / "model.safetensors").unlink()
    assert models.base_model_hash(str(copy)) == models.base_model_hash(str(model_dir))


def test_what_the_hub_says_is_passed_on(hub_cache, monkeypatch):
    with pytest.raises(UsageError, match="no such directory, and the hub is out of reach"):
        models.base_model_hash("org/other")
    monkeypatch.setattr(models, "hub_reachable", lambda: True)

    def refuse(*_, **__):
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UsageError, match=r"^--model org/gated: You are trying to access a gated"):
        models.base_model_hash("org/gated")


@pytest.fixture
def plain(tmp_path):
    policy = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    policy.save_pretrained(tmp_path)
    return tmp_path


def test_saving_asks_no_hub(plain, tmp_path, tokenizer, monkeypatch):
    """PEFT would look there for the vocabulary of a base that a name stands for."""

    def look(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", look)
    policy = load_adapter(tiny_model(), plain, trainable=True)
    policy.peft_config["default"].base_model_name_or_path = "smollm2-135m"
    save_adapter(policy, tokenizer, tmp_path / "saved", {})


BROKEN = r"adapter .* does not fit this base: adapter_config\.json"


def text_with(**change):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Left out, the base would be measured, or a head that never trains, in silence.
        (text_with(peft_type="LOHA"), "of the kind LOHA; only LoRA"),
        (text_with(modules_to_save=["lm_head"]), "modules_to_save"),
        (text_with(trainable_token_indices=[1]), "trainable_token_indices"),
        (lambda file: file.write_text("{"), BROKEN),
        (lambda file: file.write_text("[1]"), BROKEN),
        (lambda file: file.write_text("null"), BROKEN),
        (lambda file: file.unlink(), BROKEN),
    ],
)
def test_an_adapter_config_that_cannot_be_taken_is_one_line(plain, change, message):
    change(plain / "adapter_config.json")
    with pytest.raises(UsageError, match=message):
        load_adapter(tiny_model(), plain, trainable=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["embed_tokens", "q_proj"]}, "token embeddings"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "more than plain LoRA"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "more than plain LoRA"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, options, message):
    get_peft_model(tiny_model(), LoraConfig(r=2, **options)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=message):
        load_adapter(tiny_model(), tmp_path, trainable=False)


def test_an_adapter_that_is_not_finite_is_refused(plain):
    file = plain / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UsageError, match="not finite"):
        load_adapter(tiny_model(), plain, trainable=False)


@pytest.mark.parametrize("size", [3_100_000_000, 10**18, 0])
def test_a_download_is_said_first_and_needs_room(hub_cache, monkeypatch, capsys, size):
    """With the hub's bars on, which transformers' switch turns off, and only what is not here."""
    from huggingface_hub import utils as hub

    hub.disable_progress_bars()
    monkeypatch.setattr(models, "hub_reachable", lambda: True)
    here = SimpleNamespace(file_size=7, will_download=False)
    bars = []

    def snapshot_download(name, *, dry_run=False, **options):
        if dry_run:
            return [here, SimpleNamespace(file_size=size, will_download=size > 0)]
        bars.append(not hub.are_progress_bars_disabled())
        return str(hub_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    if size == 10**18:
        with pytest.raises(UsageError, match="HF_HOME"):
            models.base_model_hash("some/model")
    else:
        models.base_model_hash("some/model")
        assert bars == [size > 0]
    assert ("downloading 3.1 GB: some/model" in capsys.readouterr().out) == (size == 3_100_000_000)
    assert hub.are_progress_bars_disabled()


def test_a_misspelt_adapter_is_answered_with_those_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as nothing_there:
        check_adapter(Path("weights/typo"), "do this")
    assert (
        str(nothing_there.value) == f"adapter weights/typo does not exist (in {tmp_path}); do this"
    )
    (tmp_path / "installed").mkdir()
    monkeypatch.setattr("rlm.model.adapter_info.ADAPTER", tmp_path / "installed")
    with pytest.raises(UsageError, match=r"does not exist \(there is \S+/installed\); do this"):
        check_adapter(Path("weights/typo"), "do this")
    for name in ("mine", ".mine.new"):  # the latter is half-written
        Path("weights", name).mkdir(parents=True)
        for file in ADAPTER_FILES:
            Path("weights", name, file).touch()
    with pytest.raises(UsageError) as one_there:
        check_adapter(Path("weights/typo"), "do this")
    assert "does not exist (there is weights/mine); do this" in str(one_there.value)
