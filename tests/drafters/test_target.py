"""Finding, checking and reading the target: every refusal names the setting and the way out."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch

from drafters import target_sources
from drafters.config import RandomSource, TargetConfig, WheelSource
from drafters.errors import ArtifactError, TargetError
from drafters.target import Target, default_taps, pick_device, pick_dtype
from drafters.target_sources import resolve

WHEEL = WheelSource("pkg", "1.0", "pkg-1.0-py3-none-any.whl", "0" * 64, "pkg/model.gguf", "1" * 64)


def by_path(path, **more) -> TargetConfig:
    return TargetConfig(name="mine", path=str(path), device="cpu", **more)


@pytest.fixture
def copy(tiny_folder, tmp_path):
    """A private copy of the tiny target's folder."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_taps_are_the_official_three():
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    with pytest.raises(TargetError, match="at least 6 layers, the target has 4"):
        default_taps(4)


def test_a_tap_is_the_output_of_the_block_before_it(tiny_target):
    """hidden_states[k] is what block k - 1, counted from 0, puts out, before any norm: blocks run by hand."""
    ids = torch.arange(5)[None]
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    backbone = tiny_target.backbone
    hidden, after = backbone.embed_tokens(ids), []
    with torch.no_grad():
        for layer in backbone.layers:
            rotary = backbone.rotary_emb(hidden, ids)
            hidden = layer(hidden, attention_mask=mask, position_ids=ids, position_embeddings=rotary)
            after.append(hidden)
    for tap in (1, 2, 4, 5):
        taps, _ = tiny_target.hidden(ids, ids, mask, (tap,))
        assert torch.allclose(taps, after[tap - 1], atol=1e-6)
        assert not torch.allclose(taps, after[tap], atol=1e-2)


def test_the_head_of_the_last_hidden_state_is_the_models_logits(tiny_target):
    ids = torch.arange(9)[None]
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    taps, last = tiny_target.hidden(ids, ids, mask, (2, 4, 5))
    assert taps.shape == (1, 9, 3 * 64)
    with torch.no_grad():
        theirs = tiny_target.model(ids, attention_mask=mask).logits
    assert torch.allclose(tiny_target.logits(last), theirs, atol=1e-4)


def test_every_named_end_id_counts(tiny_target, copy):
    path = copy / "generation_config.json"
    settings = json.loads(path.read_text())
    settings["eos_token_id"] = [0, 7]
    path.write_text(json.dumps(settings))
    assert set(Target.load(by_path(copy)).eos_ids) == {0, 7} | set(tiny_target.eos_ids)


def test_nothing_of_the_target_is_trainable(tiny_target):
    assert not any(parameter.requires_grad for parameter in tiny_target.model.parameters())
    assert not tiny_target.model.training


def test_the_same_seed_builds_the_same_weights(cache, tiny_target):
    source = RandomSource(seed=0)
    config = TargetConfig(name="again", device="cpu", random=source)
    assert Target.load(config).fingerprint["target_weights_sha256"] == tiny_target.fingerprint["target_weights_sha256"]
    other = TargetConfig(name="again", device="cpu", random=RandomSource(seed=1))
    assert Target.load(other).fingerprint["target_weights_sha256"] != tiny_target.fingerprint["target_weights_sha256"]


def test_a_damaged_cache_is_built_again(cache):
    config = TargetConfig(name="tiny", random=RandomSource(seed=0))
    folder = resolve(config)
    (folder / "config.json").write_text("{}")
    assert json.loads((resolve(config) / "config.json").read_text())["model_type"] == "llama"


def test_neither_path_nor_source():
    with pytest.raises(TargetError, match="Set target.path to a local folder or a hub id"):
        resolve(TargetConfig(name="x"))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_missing_folder(path):
    with pytest.raises(TargetError, match="is not a folder"):
        resolve(by_path(path))


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(TargetError, match=r"has no config\.json"):
        resolve(by_path(tmp_path))


def test_a_folder_without_weights_and_one_with_pickles(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"has no \*\.safetensors weights\.$"):
        resolve(by_path(copy))
    (copy / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(TargetError, match=r"pickled weights \(pytorch_model\.bin\).*save the model again"):
        resolve(by_path(copy))


def test_a_missing_shard_is_named(copy):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model-00001-of-00002.safetensors").write_bytes(b"x")
    with pytest.raises(TargetError, match=r"lacks model-00002-of-00002\.safetensors"):
        resolve(by_path(copy))


def test_a_damaged_index_is_named(copy):
    (copy / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ArtifactError, match=r"index\.json: weight_map does not name"):
        resolve(by_path(copy))


def test_not_a_causal_language_model(copy):
    settings = {"model_type": "vit", "architectures": ["ViTModel"]}
    (copy / "config.json").write_text(json.dumps(settings))
    with pytest.raises(TargetError, match="'vit' model, not a causal language model"):
        Target.load(by_path(copy))


def test_an_unknown_architecture_is_not_run_from_its_own_code(copy):
    settings = {"model_type": "brand-new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}
    (copy / "config.json").write_text(json.dumps(settings))
    with pytest.raises(TargetError, match="own code"):
        Target.load(by_path(copy))


def test_logits_changed_after_the_head_are_refused(tmp_path, tiny_target):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, logits_scaling=8.0, initializer_range=1.0,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    tiny_target.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="changes its logits after the output head"):
        Target.load(by_path(tmp_path))


def test_dtype_and_device_settings():
    cpu = torch.device("cpu")
    assert pick_dtype("bfloat16", cpu, torch.float32) == torch.bfloat16
    assert pick_dtype("auto", cpu, torch.float32) == torch.float32
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert pick_dtype("auto", cpu, torch.bfloat16) == (torch.bfloat16 if native else torch.float32)
    with pytest.raises(TargetError, match="target.dtype is 'int3'"):
        pick_dtype("int3", cpu, torch.float32)
    assert pick_device("cpu") == cpu
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match="Set target.device=cpu"):
            pick_device("cuda")


# ---- the hub


def hub_error(kind: str) -> Exception:
    import httpx
    from huggingface_hub import errors

    if kind == "OSError":
        return OSError("no route to host")
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        return getattr(errors, kind)("offline")
    return getattr(errors, kind)("no", response=httpx.Response(403, request=httpx.Request("GET", "http://localhost")))


@pytest.mark.parametrize(
    "kind, word",
    [
        ("GatedRepoError", "gated.*hf auth login"),
        ("RepositoryNotFoundError", "does not exist on the hub"),
        ("RevisionNotFoundError", "no such revision.*target.revision"),
        ("LocalEntryNotFoundError", "hub cannot be reached.*target.path to a local folder"),
        ("OfflineModeIsEnabled", "hub cannot be reached"),
        ("HfHubHTTPError", "hub cannot be reached"),
        ("OSError", "hub cannot be reached"),
    ],
)
def test_each_hub_failure_names_its_way_out(monkeypatch, kind, word):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(TargetError, match=word):
        resolve(by_path("org/model", revision="main"))


@pytest.mark.parametrize("reachable", [True, False])
def test_the_pinned_revision_is_asked_for_and_the_cache_serves_offline(monkeypatch, tiny_folder, reachable):
    import huggingface_hub

    asked = {}

    def download(repo, **how):
        asked.update(repo=repo, **how)
        return str(tiny_folder)

    def metadata(url, timeout):
        assert url.endswith("/org/model/resolve/abc/config.json")
        if not reachable:
            raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve(by_path("org/model", revision="abc")) == tiny_folder
    assert (asked["repo"], asked["revision"]) == ("org/model", "abc")
    assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])
    assert asked.get("local_files_only", False) is not reachable


# ---- the wheel


def test_a_wheel_with_another_hash_is_refused(cache):
    kept = cache / "wheels" / WHEEL.filename
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"not the wheel")
    with pytest.raises(TargetError, match=r"target\.wheel\.sha256 is 0{64}, but pkg-1\.0"):
        resolve(TargetConfig(name="w", wheel=WHEEL))
    assert kept.exists()


def test_a_wheel_that_cannot_be_fetched_names_three_ways_out(cache, monkeypatch):
    def fail(command, **kwargs):
        assert command[1:4] == ["-m", "pip", "download"]
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")

    monkeypatch.setattr(target_sources.subprocess, "run", fail)
    with pytest.raises(TargetError, match=r"could not be fetched: ERROR: no network.*put pkg-1\.0.*set target\.path"):
        resolve(TargetConfig(name="w", wheel=WHEEL))


def test_a_wheel_without_the_named_file(cache):
    import dataclasses
    import zipfile

    kept = cache / "wheels" / WHEEL.filename
    kept.parent.mkdir(parents=True)
    with zipfile.ZipFile(kept, "w") as archive:
        archive.writestr("pkg/other.gguf", "x")
    wheel = dataclasses.replace(WHEEL, sha256=target_sources.sha256_file(kept))
    with pytest.raises(TargetError, match=r"target\.wheel\.gguf is 'pkg/model\.gguf', but the wheel holds"):
        resolve(TargetConfig(name="w", wheel=wheel))
    with zipfile.ZipFile(kept, "w") as archive:
        archive.writestr("pkg/model.gguf", "x")
    wheel = dataclasses.replace(WHEEL, sha256=target_sources.sha256_file(kept))
    with pytest.raises(TargetError, match=r"target\.wheel\.gguf_sha256 is 1{64}, but model\.gguf has"):
        resolve(TargetConfig(name="w", wheel=wheel))
