"""The frozen target: load it once, read its logits and the hidden states a drafter taps."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from drafters.adapter import Adapter, can_be_tuned, merge, share
from drafters.attention_kinds import Windows, as_given, attention_windows, text_masks
from drafters.config import TargetConfig
from drafters.contract import hash_config, hash_template, hash_tokenizer, hash_weights
from drafters.errors import TargetError
from drafters.target_sources import resolve

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's taps as HF `hidden_states` indices: outputs of blocks 1, n//2 - 1 and n - 4, counted from 0."""
    if num_layers < 6:
        raise TargetError(f"EAGLE-3 taps need at least 6 layers, the target has {num_layers}. Set drafter.taps.")
    return (2, num_layers // 2, num_layers - 3)


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA where present, the device of this process's rank under torchrun, else the CPU."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise TargetError(f"target.device is {name!r}, but no CUDA device is present. Set target.device=cpu.")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device, saved: torch.dtype) -> torch.dtype:
    """`auto` keeps the saved dtype where the hardware computes in it, else float32 (measured: 7x faster)."""
    if name != "auto":
        if name not in DTYPES:
            raise TargetError(f"target.dtype is {name!r}. Set it to auto, {', '.join(DTYPES)}.")
        return DTYPES[name]
    if device.type == "cpu" and saved != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.info("target.dtype=auto: this CPU has no bfloat16 instructions, computing in float32")
        return torch.float32
    return saved


@dataclass
class Target:
    """A frozen causal LM, its tokenizer and what a drafter needs to know of both."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: TargetConfig
    folder: Path
    eos_ids: tuple[int, ...] = field(default=())
    adapter: Adapter | None = None  # merged into the model; None: the weights are the folder's

    @classmethod
    def load(cls, cfg: TargetConfig) -> Target:
        """Resolves, checks and loads a target; raises TargetError with the way out."""
        folder = resolve(cfg)
        device = pick_device(cfg.device)
        try:
            config = AutoConfig.from_pretrained(folder)
        except (ValueError, OSError, KeyError) as error:
            raise TargetError(
                f"target.path {folder}: config.json names no architecture transformers knows ({error}). "
                "Models that bring their own code are not loaded."
            ) from error
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise TargetError(
                f"target.path {folder} is a {config.model_type!r} model, not a causal language model. "
                "Set target.path to a decoder-only text model."
            )
        dtype = pick_dtype(cfg.dtype, device, config.dtype or torch.float32)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        except (OSError, ValueError, RuntimeError) as error:
            raise TargetError(f"target.path {folder} cannot be loaded: {error}") from error
        model.to(device).eval().requires_grad_(False)
        target = cls(model, tokenizer, cfg, folder, _end_ids(model, tokenizer))
        target.check_head()
        return target

    def with_adapter(self, adapter: Adapter) -> Target:
        """This target tuned by an adapter, as a target of its own; this one and its engines stay as they are.

        Weights that the adapter leaves alone are shared. Raises TargetError when it is tuned by another one already.
        """
        if self.adapter is not None:
            if self.adapter.sha256 == adapter.sha256:
                return self
            raise TargetError(
                f"target {self.title!r} is to be tuned by adapter {adapter.sha256[:12]} too: one adapter at a time. "
                "Load the target anew."
            )
        if can_be_tuned(self.model):
            base = share(self.model)
        else:
            log.info("target %s: read once more, an engine has laid its weights out", self.name)
            base = self._read()
        tuned = replace(self, model=merge(base, adapter), adapter=adapter)
        if "fingerprint" in self.__dict__:  # hashing the files again takes long
            tuned.__dict__["fingerprint"] = self.fingerprint | {"adapter_sha256": adapter.sha256}
        return tuned

    def own_model(self) -> PreTrainedModel:
        """The model read anew, with tensors of its own."""
        model = self._read()
        return model if self.adapter is None else merge(model, self.adapter)

    def _read(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype, attn_implementation="sdpa")
        return model.to(self.device).eval().requires_grad_(False)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def title(self) -> str:
        """Its name, and the adapter that its weights are tuned by."""
        return self.name if self.adapter is None else f"{self.name} tuned by adapter {self.adapter.sha256[:12]}"

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def text_config(self):
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.text_config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """Rows of the output head; the tokenizer may use fewer."""
        return self.text_config.vocab_size

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens the target's position table allows."""
        return self.text_config.max_position_embeddings

    @property
    def embed_weight(self) -> Tensor:
        """Input embeddings, [V, Ht]."""
        return self.model.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        """Output head, [V, Ht]."""
        return self.model.get_output_embeddings().weight

    @property
    def backbone(self) -> nn.Module:
        """The decoder without its head."""
        return self.model.base_model

    @cached_property
    def follows_length(self) -> bool:
        """Whether a forward changes what the next one reads: rotary angles that follow the longest text so far."""
        told = repr(getattr(self.text_config, "rope_parameters", None))
        return "dynamic" in told or "longrope" in told

    @cached_property
    def windows(self) -> Windows:
        """Its layer types and how many positions each sees; raises TargetError for kinds no drafter can serve."""
        return attention_windows(self.text_config, self.name)

    @torch.no_grad()
    def hidden(
        self, ids: Tensor, position_ids: Tensor, mask: Tensor | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Taps [B, T, len(taps)*Ht] and the last hidden state after the final norm [B, T, Ht].

        ids, position_ids: [B, T]; mask: bool [B, 1, T, T], True where a query may look, None where each row is one
        text. Layers with a sliding window see that much of it.
        """
        out = self.backbone(
            input_ids=ids,
            position_ids=position_ids,
            attention_mask=as_given(text_masks(self.windows, mask, position_ids)),
            use_cache=False,
            output_hidden_states=list(taps),
        )
        tapped = [out.hidden_states[index] for index in taps] or [out.last_hidden_state[..., :0]]
        return torch.cat(tapped, -1), out.last_hidden_state

    @torch.no_grad()
    def logits(self, last_hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of a final-norm hidden state [..., Ht]."""
        return self.model.get_output_embeddings()(last_hidden).float()

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes that tie an artifact to this target; the weights' hash is of the files, whatever the dtype.

        adapter_sha256 is there for a tuned target only.
        """
        tuned = {} if self.adapter is None else {"adapter_sha256": self.adapter.sha256}
        return {
            "target": self._label,
            # Of the file, not of the loaded object: a transformers upgrade adds defaults to the latter.
            "target_config_sha256": hash_config(json.loads((self.folder / "config.json").read_text())),
            "target_weights_sha256": hash_weights(self.folder),
            "tokenizer_sha256": hash_tokenizer(self.tokenizer),
            "chat_template_sha256": hash_template(self.tokenizer),
            **tuned,
        }

    @property
    def _label(self) -> str:
        """A hub id as it is; a local folder by the target's name, for its path means nothing elsewhere."""
        path = self.config.path
        return self.config.name if path is None or Path(path).expanduser().is_dir() else path

    def check_head(self) -> None:
        """Some models scale or cap logits after the head; drafters would then learn from other numbers."""
        ids = torch.arange(4, device=self.device)[None]
        with torch.no_grad():
            out = self.model(input_ids=ids, output_hidden_states=[-1], use_cache=False)
            mine = self.logits(out.hidden_states[-1])
        if not torch.allclose(mine, out.logits.float(), atol=1e-2, rtol=1e-2):
            gap = (mine - out.logits.float()).abs().max().item()
            raise TargetError(
                f"target {self.name!r} changes its logits after the output head (difference {gap:.3g}); "
                "drafters for such targets are not supported."
            )


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Union of the ends named by the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        if value is not None:
            found.update(value if isinstance(value, (list, tuple)) else [value])
    return tuple(sorted(found))
