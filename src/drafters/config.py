"""Typed, closed settings of the three scripts: one dataclass per Hydra group.

The dataclasses hold types and ranges; the values a user meets first are in conf/*.yaml. config_store.py registers
them with Hydra, config_check.py turns a composed config into one frozen run object.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from drafters.config_base import Section, option
from drafters.config_drafter import (
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    SmallConfig,
)
from drafters.config_export import ExportConfig

# ---- target


@dataclass
class WheelSource(Section):
    """A GGUF file inside a package of the Python registry, pinned by hash."""

    package: str = MISSING
    version: str = MISSING
    filename: str = MISSING  # the wheel's file name
    sha256: str = MISSING  # of the wheel
    gguf: str = MISSING  # path inside the wheel
    gguf_sha256: str = MISSING


@dataclass
class RandomSource(Section):
    """A small Llama with weights drawn from a seed, for tests."""

    seed: int = 0
    hidden_size: int = option(64, low=1)
    intermediate_size: int = option(128, low=1)
    num_layers: int = option(8, low=6)  # three taps need six layers
    num_heads: int = option(4, low=1)
    num_kv_heads: int = option(2, low=1)
    vocab_size: int = option(512, low=1)


@dataclass
class TargetFacts(Section):
    """Shape of the target from its config.json, kept here so that plan=true needs neither weights nor network."""

    hidden_size: int = option(MISSING, low=1)
    intermediate_size: int = option(MISSING, low=1)
    num_layers: int = option(MISSING, low=1)
    num_heads: int = option(MISSING, low=1)
    num_kv_heads: int = option(MISSING, low=1)
    head_dim: int = option(MISSING, low=1)
    vocab_size: int = option(MISSING, low=1)
    tie_word_embeddings: bool = MISSING


@dataclass
class TargetConfig(Section):
    """The frozen model that decides every token; exactly one of path, wheel and random says where it comes from."""

    name: str = MISSING  # names output folders and reports
    path: str | None = None  # local folder or hub id; wins over wheel and random
    revision: str | None = None  # commit of the hub repository
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16", "float16"))
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    license: str = ""
    kept_responses: str | None = None  # its answers kept in the repository: train.py takes them when no data.* is set
    wheel: WheelSource | None = None
    random: RandomSource | None = None
    facts: TargetFacts | None = None


# ---- data


@dataclass
class DataConfig(Section):
    """Common base of the prompt sources: what the target is asked, and how its own answers are sampled."""

    source: str = MISSING
    responses: str | None = None  # folders made by distill.py, joined by +: use them, collect nothing
    num_prompts: int | None = option(None, low=1)  # null: every prompt of the source
    max_prompt_tokens: int = option(512, low=1)  # longer prompts are left out and counted
    max_new_tokens: int = option(256, low=1)
    temperature: float = option(0.0, low=0.0)
    seed: int = 0
    batch_size: int = option(32, low=1)
    eval_prompts: int = option(40, low=0)  # held out of training, for acceptance during and after it


@dataclass
class BuiltinData(DataConfig):
    """The prompts shipped with Outrider; its eval split is never trained on."""

    source: str = option("builtin", choices=("builtin",))


@dataclass
class MagpieData(DataConfig):
    """The target writes the user turn too, from its chat template's own user prefix; needs no data."""

    source: str = option("magpie", choices=("magpie",))
    num_prompts: int = option(1000, low=1)
    user_temperature: float = option(1.0, above=0.0)  # of the user turn; 0 would write one prompt again and again


@dataclass
class JsonlData(DataConfig):
    """A JSONL file in the messages, ShareGPT or question_id/turns layout."""

    source: str = option("jsonl", choices=("jsonl",))
    path: str = MISSING


@dataclass
class HubData(DataConfig):
    """A `datasets` id or local dataset folder."""

    source: str = option("hub", choices=("hub",))
    dataset: str = MISSING
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    columns: dict[str, str] = dataclasses.field(default_factory=dict)  # ours -> theirs, e.g. {messages: conversation}


# ---- training


@dataclass
class TrainerConfig(Section):
    """Optimiser, schedule, cadence."""

    epochs: float = option(3.0, low=0.0)  # 0 exports what the run starts from: drafter.native=true or init_from
    max_steps: int | None = option(None, low=1)  # null: as many as epochs asks for
    max_records: int | None = option(None, low=1)  # train on the first so many responses; null: on all
    tokens_per_step: int = option(320, low=1)  # response tokens per optimiser step, all ranks together
    row_length: int = option(1024, low=8)  # tokens of one packed row
    features: str = option("online", choices=("online", "cached"))  # cached: taps of each row are stored once
    # Folder of the store; null: output_dir/features, with this family's taps alone. A folder given here also keeps what
    # the other families tap, so that their runs need not run the target again.
    feature_store: str | None = None
    learning_rate: float = option(2.0e-3, above=0.0)
    betas: list[float] = option([0.9, 0.95], low=0.0, below=1.0)
    weight_decay: float = option(0.0, low=0.0)
    warmup_ratio: float = option(0.05, low=0.0, below=1.0)
    min_lr_ratio: float = option(0.05, low=0.0, high=1.0)
    clip_grad: float = option(1.0, above=0.0)
    dtype: str = option("float32", choices=("float32", "bfloat16"))
    eval_every: int = option(400, low=1)  # steps
    save_every: int = option(100, low=1)  # steps
    log_every: int = option(10, low=1)  # steps
    seed: int = 0
    num_threads: int | None = option(None, low=1)  # null: chosen by a probe at start


@dataclass
class DeepSpeedConfig(Section):
    """The training engine; ZeRO stage 0 shards nothing, 1 the optimiser, 2 gradients too, 3 weights too."""

    zero_stage: int = option(0, low=0, high=3)


@dataclass
class LoggerConfig(Section):
    """Weights & Biases beside the JSONL file that is always written; WANDB_MODE decides (offline by default)."""

    wandb: bool = True
    project: str = "outrider"
    run_name: str | None = None  # null: the name of output_dir


# ---- runtime and evaluation


TREES = ("dynamic", "static")


@dataclass
class RuntimeConfig(Section):
    """Tree drafting."""

    # Nodes of one verified tree, its root included; auto: as many each round as measured costs say pay, none included.
    num_draft_tokens: Any = option("auto", low=1, words=("auto",))  # OmegaConf 2.3 cannot merge int | str
    depth: int = option(5, low=1)
    top_k: int = option(10, low=1)
    # Of drafters with heads (medusa, hydra): dynamic, each round the likeliest nodes; static, at temperature 0 one
    # shape, the best by what each head got right on held-out text.
    tree: str = option("dynamic", choices=TREES)
    batch_size: int = option(1, low=1)
    max_length: int | None = option(None, low=2)  # cache slots per row; null: as long as the prompts need
    debug: bool = False  # after every round compute everything that is kept again from the text, and compare: slow


LOSSY_RULES = ("typical",)  # of `verification`: the text is not the target's; labelled so wherever it shows


@dataclass
class EvalConfig(Section):
    """What is measured, on which prompts."""

    prompts: str | None = None  # JSONL (messages or question_id/turns); null: the built-in eval split
    num_prompts: int | None = option(None, low=1)  # null: all
    max_new_tokens: int = option(128, low=1)  # per answer, in every mode
    compare_transformers: bool = True
    check_identity: bool = True  # compare every text with plain decoding


@dataclass
class SamplingConfig(Section):
    """How the target chooses its tokens: fields of the runtime's SamplingParams, under the same names."""

    temperature: float = option(0.0, low=0.0)
    seed: int = 0
    top_k: int = option(0, low=0)  # 0: off
    top_p: float = option(1.0, above=0.0, high=1.0)  # 1: off
    min_p: float = option(0.0, low=0.0, high=1.0)  # 0: off
    repetition_penalty: float = option(1.0, above=0.0)  # over prompt and answer; 1: off
    presence_penalty: float = option(0.0, low=-2.0, high=2.0)  # over the answer alone; 0: off
    frequency_penalty: float = option(0.0, low=-2.0, high=2.0)  # over the answer alone; 0: off
    min_tokens: int = option(0, low=0)  # no end before so many tokens


# ---- the three scripts


@dataclass
class TrainRun(Section):
    """Settings of train.py."""

    target: TargetConfig = MISSING
    drafter: DrafterConfig = MISSING
    data: DataConfig = MISSING
    trainer: TrainerConfig = MISSING
    deepspeed: DeepSpeedConfig = MISSING
    runtime: RuntimeConfig = MISSING
    eval: EvalConfig = MISSING
    logger: LoggerConfig = MISSING
    output_dir: str = MISSING
    resume: str = option("auto", choices=("auto", "never"))
    init_from: str | None = None  # an export or checkpoint folder: its weights only
    plan: bool = False  # print memory, storage and time, load no weight
    doctor: str | None = None  # a training run's folder or an export: say why its tau is low, train nothing
    export: ExportConfig = dataclasses.field(default_factory=ExportConfig)


@dataclass
class DistillRun(Section):
    """Settings of distill.py."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    output_dir: str = MISSING
    features: bool = False  # also keep the hidden states EAGLE-3 taps: training then need not run the target
    inspect: int = option(0, low=0)  # print this many collected rows with supervised tokens coloured


@dataclass
class ServedDrafter(Section):
    """Which drafter serve.py runs."""

    path: str | None = None  # see parse_drafter_path; null: the newest export under outputs/


@dataclass
class ServeRun(Section):
    """Settings of serve.py."""

    target: TargetConfig = MISSING
    drafter: ServedDrafter = MISSING
    runtime: RuntimeConfig = MISSING
    eval: EvalConfig = MISSING
    sampling: SamplingConfig = MISSING
    # How drafts are accepted. coupled: the text of plain decoding; rejection: its distribution; typical: lossy.
    verification: str = option("coupled", choices=("coupled", "rejection", "typical"))
    mode: str = option("eval", choices=("eval", "compare", "generate", "chat", "import"))
    drafters: list[str] = option([])  # for mode=compare: what is compared, each as drafter.path
    prompt: str | None = None  # for mode=generate
    output_dir: str = MISSING


RUNS: dict[str, type[Section]] = {"train": TrainRun, "distill": DistillRun, "serve": ServeRun}
GROUPS = {
    "train": ("target", "drafter", "data", "trainer", "deepspeed", "runtime", "eval", "logger", "experiment"),
    "distill": ("target", "data", "experiment"),
    "serve": ("target", "runtime", "eval", "experiment"),
}
FAMILIES: dict[str, dict[str, type[Section]]] = {
    "drafter": {
        "eagle": EagleConfig,
        "eagle3": Eagle3Config,
        "hydra": HydraConfig,
        "medusa": MedusaConfig,
        "medusa2": Medusa2Config,
        "mtp": MtpConfig,
        "small": SmallConfig,
    },
    "data": {"builtin": BuiltinData, "magpie": MagpieData, "jsonl": JsonlData, "hub": HubData},
}
