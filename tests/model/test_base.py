"""Loading base models and adapters: the identity of weights, and which files are rejected."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from rlm.cli.options import UsageError
from rlm.model import base as models
from rlm.model.adapters import (
    ADAPTER_FILES,
    adapter_tensors,
    check_adapter,
    check_base,
    exported_tensors,
    load_adapter,
    new_adapter,
)
from rlm.model.export import save_adapter
from rlm.model.hardware import Device
from rlm.ops import use_fused_layers
from rlm.runs.checkpoints import file_hash

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options", "local", "longest"),
    [
        ("llama", {}, None, 1024),
        ("mistral", {"sliding_window": 40}, 40, 40),
        ("gemma3_text", {"sliding_window": 40, "sliding_window_pattern": 2}, 40, 40),
        # No layer uses this window.
        ("qwen2", {"use_sliding_window": True, "sliding_window": 40}, None, 1024),
        (
            "phi3",
            {"original_max_position_embeddings": 40, "rope_parameters": LONGROPE},
            *(None, 40),
        ),
    ],
)
def test_local_attention_limits_the_length(family, options, local, longest, capsys):
    model = tiny_model(family, **options)
    assert models.local_window(model) == local
    assert models.context_window(model) == longest
    models.announce_local_window(model)
    assert ("attend to only 40 tokens" in capsys.readouterr().out) == bool(local)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """Return an empty cache of the hub, which is out of reach."""
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
    blob.write_bytes(b"")  # the name is the hash, so the file is not read
    assert models.base_model_hash("org/tiny") == models.base_model_hash(str(model_dir))


def test_the_same_weights_under_another_name_do_not_count(model_dir, tmp_path):
    """A repository may contain a second copy of the weights, and a directory only that copy."""
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
    """PEFT would ask the hub for the vocabulary of the base model."""

    def look(*_):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", look)
    policy = load_adapter(tiny_model(), plain, trainable=True)
    policy.peft_config["default"].base_model_name_or_path = "smollm2-135m"
    save_adapter(policy, tokenizer, tmp_path / "saved", {})


BROKEN = r"adapter .* does not fit this base model: adapter_config\.json"


def text_with(**change):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # If this were ignored, another model than the trained one would be evaluated.
        (text_with(peft_type="LOHA"), "has peft_type LOHA, but only LoRA"),
        (text_with(target_modules="(q"), r"fit this base model: .*unterminated subpattern"),
        (text_with(rank_pattern=[1]), "fit this base model: "),
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


OF_ANOTHER_KIND = [
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": [1]},
    {"use_dora": True},
    {"lora_bias": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"layer_replication": [[0, 2], [0, 2]]},
    {"alora_invocation_tokens": [5]},
]
TOKENS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("options", OF_ANOTHER_KIND)
def test_an_adapter_that_is_more_than_plain_lora_is_refused(tmp_path, options):
    model = tiny_model("qwen2")  # its projections have biases
    options = {"target_modules": ["q_proj"]} | options
    get_peft_model(model, LoraConfig(r=2, **options)).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="more than plain LoRA of linear layers") as refused:
        load_adapter(tiny_model("qwen2"), tmp_path, trainable=False)
    is_named = "adapter_config.json" in str(refused.value)
    assert is_named == str(refused.value).endswith(
        "merge_and_unload), and pass the result with --model"
    )


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        *({"init_lora_weights": init} for init in ("gaussian", "orthogonal", "eva")),
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3}},
        {"target_modules": ["model.layers.1.self_attn.q_proj"]},
        {"layers_to_transform": [1], "lora_dropout": 0.1, "exclude_modules": ["v_proj"]},
    ],
)
def test_plain_lora_is_loaded_and_leaves_the_base_as_it_is(plain, options):
    """The other adapters and the reference model share the base model."""
    if "init_lora_weights" not in options:  # PEFT cannot create an eva adapter without data
        options = {"r": 2, "target_modules": ["q_proj"]} | options
        get_peft_model(tiny_model(), LoraConfig(**options)).save_pretrained(plain)
    text_with(**options)(plain / "adapter_config.json")
    base = tiny_model()
    before = base(TOKENS).logits
    policy = load_adapter(base, plain, trainable=False)
    with policy.disable_adapter():
        assert torch.equal(policy(TOKENS).logits, before)


@torch.no_grad()
@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_4", "olora", "mica", "loftq", "corda", "lora_ga"]
)
def test_an_adapter_that_was_subtracted_from_the_base_is_refused(plain, init):
    text_with(init_lora_weights=init)(plain / "adapter_config.json")
    base = tiny_model()
    before = base(TOKENS).logits
    with pytest.raises(UsageError, match="path_initial_model_for_weight_conversion"):
        load_adapter(base, plain, trainable=False)
    assert torch.equal(base(TOKENS).logits, before)


PREFIX = "base_model.model."
FULL_NAMES = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]


def renamed(old, new):
    return lambda name: name.replace(old, new)


def without(part):
    return lambda name: "" if part in name else name


@pytest.mark.parametrize(
    ("rename", "config", "base", "message"),
    [
        (renamed(PREFIX, ""), {}, {}, "4 of 4 tensors of the file do not exist"),
        (renamed(PREFIX, PREFIX + PREFIX), {}, {}, "4 of 4 LoRA matrices of the base model are"),
        (renamed(PREFIX, PREFIX + "_orig_mod."), {}, {}, "do not exist"),
        (renamed("layers.1", "layers.7"), {}, {}, r"2 of 4 .*layers\.7.*2 of 4"),
        (without("layers.1"), {}, {}, "2 of 4 LoRA matrices"),
        (without("lora_B"), {}, {}, r"2 of 4 .*lora_B"),
        (renamed("lora_A", "base_layer"), {}, {}, "2 of its 4 tensors are not LoRA matrices"),
        (str, {"target_modules": ["q_proj", "v_proj"]}, {}, "4 of 8 LoRA matrices"),
        (str, {"layers_to_transform": [0]}, {}, "2 of 4 tensors of the file"),
        (str, {"r": "2"}, {}, "r of adapter_config.json is '2', which is not a number"),
        (str, {"lora_alpha": None}, {}, "lora_alpha of adapter_config.json is None"),
        (str, {"r": 4}, {}, r"4 of 4 tensors have another shape .*\(2, 32\), here \(4, 32\)"),
        (str, {}, {"num_hidden_layers": 4}, "4 of 8 LoRA matrices"),
        (str, {}, {"num_hidden_layers": 1}, "2 of 4 tensors of the file"),
        (str, {}, {"hidden_size": 64}, "another shape"),
        (str, {"base_model_name_or_path": "org/b"}, {"num_hidden_layers": 1}, "made for org/b"),
        # These adapters are loaded.
        (renamed(".weight", ".default.weight"), {}, {}, None),
        (str, {"peft_type": "lora"}, {}, None),
        (str, {"new_in_peft_9": {"a": 1}, "also_new": None}, {}, None),
        (str, {"target_modules": FULL_NAMES}, {"num_hidden_layers": 4}, None),
    ],
)
@torch.no_grad()
def test_every_tensor_of_an_adapter_lands_in_the_base_and_fills_it(
    plain, rename, config, base, message, capsys
):
    """If a tensor were skipped, the base model would answer without the adapter.

    The name of the adapter in the model makes no difference.
    """
    file = plain / "adapter_model.safetensors"
    tensors = {rename(name): tensor + 1 for name, tensor in load_file(file).items()}
    tensors.pop("", None)
    save_file(tensors, file)
    text_with(**config)(plain / "adapter_config.json")
    model = tiny_model(**base)
    if message:
        with pytest.raises(UsageError, match=f"(?s)^adapter [^\n]*{message}[^\n]*$"):
            load_adapter(model, plain, trainable=False)
        return
    policy = load_adapter(model, plain, trainable=False, name="first")
    load_adapter(policy, plain, trainable=False, name="reference")
    for name in ("first", "reference"):
        loaded = exported_tensors(policy, name).values()
        assert sum(t.sum() for t in loaded) == pytest.approx(sum(t.sum() for t in tensors.values()))
    assert ("new_in_peft_9" in capsys.readouterr().err) == ("new_in_peft_9" in config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_an_adapter_in_fewer_bits_is_loaded(plain, dtype):
    file = plain / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    policy = load_adapter(tiny_model(), plain, trainable=True)
    assert {t.dtype for t in adapter_tensors(policy).values()} == {torch.float32}


def test_a_model_that_was_not_downloaded_whole_is_one_line(model_dir, tmp_path):
    model = shutil.copytree(model_dir, tmp_path / "model")

    def load():
        models.load_tokenizer(str(model))
        models.load_base(str(model), Device("cpu", torch.float32, ""))

    def refusal(file, content):
        whole = (model / file).read_bytes()
        (model / file).write_bytes(content(whole))
        with pytest.raises(UsageError) as refused:
            load()
        (model / file).write_bytes(whole)
        return str(refused.value)

    for file in ("model.safetensors", "tokenizer.json"):
        said = refusal(file, lambda _: b"version https://git-lfs.github.com/spec/v1\noid 0\n")
        assert f"{file} is a Git LFS pointer, not the content: run git lfs pull" in said
    assert "no loadable model" in refusal("model.safetensors", lambda whole: whole[:-1])
    assert "no loadable model" in refusal("tokenizer.json", lambda _: b'{"version": "1.0"}')
    assert "'hidden_size'" in refusal("config.json", lambda whole: edited(whole, hidden_size="x"))
    said = refusal("config.json", lambda whole: edited(whole, intermediate_size=128))
    assert "6 tensors that its config.json describes are not in its weight files, or" in said
    assert "(model.layers.0.mlp.down_proj.weight …)" in said
    said = refusal("config.json", lambda whole: edited(whole, num_hidden_layers=3))
    assert "9 tensors" in said
    assert "(model.layers.2.input_layernorm.weight …)" in said
    load()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (model / file).unlink()
    with pytest.raises(UsageError, match=r"tokenizer is missing: copy tokenizer\.json and "):
        models.load_tokenizer(str(model))
    (model / "model.safetensors").write_bytes(b"{")  # the message must not blame the tokenizer
    with pytest.raises(UsageError, match=r"no loadable model .Error while deserializing"):
        models.load_base(str(model), Device("cpu", torch.float32, ""))
    (model / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no safetensors files"):
        models.base_model_hash(str(model))


def edited(config, **change):
    return json.dumps(json.loads(config) | change).encode()


def test_an_adapter_is_not_loaded_as_a_base_model(plain, model_dir):
    """transformers loads the base model that its config names, and applies the adapter."""
    text_with(base_model_name_or_path=str(model_dir))(plain / "adapter_config.json")
    with pytest.raises(UsageError, match=r"contains an adapter .* pass its base model with --mod"):
        models.load_base(str(plain), Device("cpu", torch.float32, "for a test"))


def test_a_chat_template_that_was_cut_off_is_one_line(plain, model_dir):
    (plain / "tokenizer_config.json").write_text('{"chat')
    with pytest.raises(UsageError, match=r"tokenizer_config\.json is not valid JSON, so copy it"):
        check_base(plain, str(model_dir), "")


def test_a_chat_template_with_line_ends_of_windows_is_the_same_in_either_file(plain, tmp_path):
    (plain / "chat_template.jinja").write_text("{% if 1 %}\r\n{% endif %}", newline="")
    base = tmp_path / "base"
    base.mkdir()
    template = '{"chat_template": "{% if 1 %}\\r\\n{% endif %}"}'
    (base / "tokenizer_config.json").write_text(template)
    check_base(plain, str(base), "")


def test_an_adapter_whose_weights_are_not_there_is_one_line(plain):
    file = plain / "adapter_model.safetensors"
    whole = file.read_bytes()
    for content, said in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (whole[:200], "is broken or cut off, so copy it again"),
        (whole[:-1], "is broken or cut off, so copy it again"),
    ):
        file.write_bytes(content)
        with pytest.raises(UsageError, match=said):
            load_adapter(tiny_model(), plain, trainable=False)


def test_an_adapter_that_is_not_finite_is_refused(plain):
    file = plain / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UsageError, match="not finite"):
        load_adapter(tiny_model(), plain, trainable=False)


@pytest.mark.parametrize("size", [3_100_000_000, 10**18, 0])
def test_a_download_is_said_first_and_needs_room(hub_cache, monkeypatch, capsys, size):
    """Only missing files count. The progress bars of the hub are on during the download."""
    from huggingface_hub import utils as hub

    hub.disable_progress_bars()
    monkeypatch.setattr(models, "hub_reachable", lambda: True)
    (hub_cache / "model.safetensors").touch()
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
    with pytest.raises(UsageError, match=r"does not exist \(there is .+/installed\); do this"):
        check_adapter(Path("weights/typo"), "do this")
    for name in ("mine", "mine.prev", ".mine.new"):  # the last two are replaced and half-written
        Path("weights", name).mkdir(parents=True)
        for file in ADAPTER_FILES:
            Path("weights", name, file).touch()
    with pytest.raises(UsageError) as one_there:
        check_adapter(Path("weights/typo"), "do this")
    assert "does not exist (there is weights/mine); do this" in str(one_there.value)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for base in ("Qwen/Qwen2.5-0.5B-Instruct", "base"):
        with pytest.raises(UsageError, match=f"^{base} is a base model, .* --model; .*, do this$"):
            check_adapter(Path(base), "do this")


def test_an_adapter_of_another_shape_of_folder_is_answered_with_what_is_there(plain, tmp_path):
    outer = tmp_path / "outer"
    shutil.copytree(plain, outer / "default", ignore=shutil.ignore_patterns("outer"))
    pickled = shutil.copytree(outer / "default", tmp_path / "pickled")
    (pickled / ADAPTER_FILES[1]).rename(pickled / "adapter_model.bin")
    of_mlx = shutil.copytree(outer / "default", tmp_path / "mlx")
    grpo_run = tmp_path / "grpo_run"
    shutil.copytree(outer / "default", grpo_run / "adapter_best")
    sft_run = tmp_path / "sft_run"
    sft_run.mkdir()
    for run in (grpo_run, sft_run):
        (run / "config.json").write_text('{"model": "m", "output": "mine/sft"}', encoding="utf-8")
    (of_mlx / ADAPTER_FILES[1]).rename(of_mlx / "adapters.safetensors")
    for path, said in (
        (of_mlx, r"it contains adapters\.safetensors, but only adapter_model\.safetensors"),
        (outer, rf"no adapter_config\.json; name a folder inside it: {outer}/default"),
        (grpo_run, rf"no adapter_config\.json; name a folder inside it: {grpo_run}/adapter_best"),
        (sft_run, r"it is the directory of a run, whose adapter is saved in mine/sft$"),
        (pickled, r"contains adapter_model\.bin.*save_pretrained"),
        (
            outer / "default" / ADAPTER_FILES[1],
            rf"is a file; name the folder that contains it: {outer}/default",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            check_adapter(path, "do this")


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # its router is a Linear
        # PEFT mistakes the projections of its shared experts for those of the other experts.
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    ],
)
def test_a_mixture_of_experts_has_its_adapter_on_linear_layers(family, options, capsys):
    """Routers return tuples, and experts are parameters rather than linear layers."""
    base = tiny_model(family, **options)
    before = base(TOKENS).logits
    policy = new_adapter(base, r=2, alpha=4)
    adapted = [module for module in policy.modules() if hasattr(module, "lora_A")]
    assert {type(layer.get_base_layer()) for layer in adapted} == {torch.nn.Linear}
    assert len(adapted) == 2 * 4
    assert "LoRA is on k_proj, o_proj, q_proj, v_proj; experts" in capsys.readouterr().err
    for layer in adapted:
        layer.lora_B["default"].weight.normal_()
    by_peft = policy(TOKENS).logits
    use_fused_layers(policy)
    torch.testing.assert_close(policy(TOKENS).logits, by_peft, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(by_peft, before)


@torch.no_grad()
def test_a_base_with_dropout_of_its_own_computes_without_it(tmp_path):
    tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64).save_pretrained(tmp_path)
    base = models.load_base(str(tmp_path), Device("cpu", torch.float32, ""))
    assert base.config.attn_pdrop == 0.1
    assert torch.equal(base.train()(TOKENS).logits, base.eval()(TOKENS).logits)


def test_an_architecture_that_takes_no_adapter_is_one_line():
    with pytest.raises(UsageError, match=r"^mamba models cannot be trained here .PEFT: .*"):
        new_adapter(tiny_model("mamba", state_size=4), r=2, alpha=4)


@pytest.mark.parametrize("cache", ["/proc/x", "/dev/null/x"])
def test_a_cache_that_cannot_be_written_is_one_line(cache, monkeypatch):
    monkeypatch.setenv("RLM_CACHE", cache)
    with pytest.raises(UsageError, match=rf"^the cache \(RLM_CACHE\) {cache} cannot be written: "):
        models.model_directory("smollm2-135m")
