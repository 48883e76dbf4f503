"""An MTP module in DeepSeek-V3's names, as a checkpoint of its own."""

from __future__ import annotations

from typing import Any

from drafters.contract import Contract
from drafters.export.official import CONFIG_NAME, decoder_config
from drafters.target import Target


def mtp_configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json: the target's sizes, and one layer behind its last one."""
    graph = contract.graph
    config = decoder_config(contract, target, graph["target_hidden_size"]) | {
        "architectures": [f"{type(target.model).__name__}NextN"],
        "model_type": target.text_config.model_type,
        "num_hidden_layers": graph["layer_index"],
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": graph["draft_vocab_size"],
        "attention_bias": graph["qkv_bias"],
    }
    return {CONFIG_NAME: config}
