"""Settings: composed, closed, checked, frozen; every wrong one answered with its key path and the way out."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from omegaconf import OmegaConf

from drafters.config import (
    FAMILIES,
    GROUPS,
    RUNS,
    BuiltinData,
    DeepSpeedConfig,
    Eagle3Config,
    EvalConfig,
    LoggerConfig,
    RuntimeConfig,
    SamplingConfig,
    Section,
    TargetConfig,
    TrainerConfig,
    TrainRun,
)
from drafters.config_allowed import describe, keys, leaves
from drafters.config_check import check, freeze, to_dict, validate
from drafters.errors import ConfigError
from tests.helpers import CONF, complaint, composed, settings

SCRIPTS = ("train", "distill", "serve")
MUST = {("data", "jsonl"): ["data.path=pyproject.toml"], ("data", "hub"): ["data.dataset=a/b"]}
MUST[("target", "custom")] = ["target.path=org/model"]
SMALL = ["drafter.draft_vocab_size=256"]  # for the tiny target's 512 tokens


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


CHOICES = [("train", group, option) for group in GROUPS["train"] for option in options(group)]
CHOICES += [(script, "experiment", option) for script in ("distill", "serve") for option in options("experiment")]


@pytest.mark.parametrize(("script", "group", "option"), CHOICES)
def test_every_option_of_every_group_composes_and_is_valid(script, group, option, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    small = SMALL if (script, option) == ("train", "tiny-random") else []
    run = settings(script, f"{group}={option}", *MUST.get((group, option), []), *small)
    assert isinstance(run, RUNS[script])
    if group in FAMILIES:
        assert type(getattr(run, group)) is FAMILIES[group][option]


def test_groups_are_those_of_the_scripts_and_of_the_folder():
    for script in SCRIPTS:
        choices = composed(script, hydra=True).hydra.runtime.choices
        found = {name for name in choices if "/" not in name}
        assert found == set(GROUPS[script])
    folders = {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    assert folders == set(GROUPS["train"]) | {"hydra"}


def test_yaml_defaults_and_dataclass_defaults_are_the_same():
    run = composed("train", "target=llama3-8b")  # the default target has a start recipe of its own
    for name, section in {
        "drafter": Eagle3Config,
        "data": BuiltinData,
        "trainer": TrainerConfig,
        "deepspeed": DeepSpeedConfig,
        "runtime": RuntimeConfig,
        "eval": EvalConfig,
        "logger": LoggerConfig,
    }.items():
        assert dict(run[name]) == to_dict(section()), name
    assert dict(composed("serve").sampling) == to_dict(SamplingConfig())


def test_the_start_recipe_is_the_default_targets_alone():
    assert composed("train").trainer.max_records is not None
    assert composed("train", "target=llama3-8b").trainer.max_records is None
    assert composed("train", "experiment=smollm2_cpu").trainer.max_records is None
    assert composed("train", "trainer.max_records=7").trainer.max_records == 7


def test_default_commands():
    train, distill, serve = (settings(script) for script in SCRIPTS)
    assert train.output_dir == "outputs/eagle3-smollm2-135m"
    assert distill.output_dir == "outputs/responses-smollm2-135m-builtin"
    assert serve.output_dir == "outputs/serve-smollm2-135m"
    assert (train.target.name, train.drafter.family, train.data.source) == ("smollm2-135m", "eagle3", "builtin")
    assert (train.resume, train.init_from, train.plan, distill.inspect) == ("auto", None, False, 0)
    assert (serve.mode, serve.prompt, serve.drafter.path) == ("eval", None, None)


def test_output_dir_follows_drafter_and_target():
    assert settings("train", "target=llama3-8b").output_dir == "outputs/eagle3-llama3-8b"
    assert settings("train", "output_dir=here").output_dir == "here"
    run = settings("train", "target=custom", "target.path=/models/My Model")
    assert (run.output_dir, run.target.name) == ("outputs/eagle3-My-Model", "My-Model")


def test_target_path_replaces_a_built_in_source():
    run = settings("train", "target.path=org/other", "target.dtype=float32")
    assert run.output_dir == "outputs/eagle3-other"
    assert (run.target.name, run.target.path, run.target.dtype) == ("other", "org/other", "float32")
    assert (run.target.wheel, run.target.random, run.target.facts, run.target.license) == (None, None, None, "")


def test_target_path_of_a_hub_target_keeps_name_and_facts():
    run = settings("train", "target=llama3-8b", "target.path=/copy")
    assert (run.target.name, run.target.path) == ("llama3-8b", "/copy")
    assert run.target.facts.num_layers == 32


@pytest.mark.parametrize("name", [name for name in options("target") if name not in ("custom", "tiny-random")])
def test_targets_carry_all_facts_and_one_source(name):
    target = settings("train", f"target={name}").target
    assert target.name == name and target.license
    assert (target.path is None) == (target.wheel is not None)
    facts = target.facts
    assert facts.num_heads % facts.num_kv_heads == 0
    if target.path:
        assert len(target.revision) == 40 and int(target.revision, 16)


def test_sweep_jobs_get_folders_of_their_own():
    def folder(*overrides: str) -> tuple[str, str]:
        hydra = composed("train", *overrides, hydra=True).hydra
        return hydra.sweep.dir, hydra.sweep.subdir

    # compose() leaves override_dirname empty; the launcher fills it per job, and the hash must follow it.
    cfg = composed("train", "output_dir=a/b", hydra=True)
    names = set()
    for dirname in ("drafter.ttt_steps=3", "drafter.ttt_steps=4"):
        cfg.hydra.job.override_dirname = dirname
        names.add(cfg.hydra.sweep.subdir)
    assert len(names) == 2 and all(name.startswith("b-") and len(name) == 10 for name in names)
    assert cfg.hydra.sweep.dir == "a"
    assert folder()[0] == "outputs"
    assert list(cfg.hydra.job.config.override_dirname.exclude_keys) == ["output_dir", "resume"]
    assert cfg.hydra.run.dir == "a/b" and cfg.hydra.job.chdir is False


# ---- wrong command lines: the whole answer is compared

TRAINER_KEYS = ", ".join(keys(TrainerConfig))
EAGLE3_KEYS = ", ".join(keys(Eagle3Config))
TARGETS = ", ".join(options("target"))
NODES = "must be a whole number >= 1 or auto."


@pytest.mark.parametrize(
    ("script", "overrides", "answer"),
    [
        (
            "train",
            ["trainer.learning_rat=1"],
            "trainer.learning_rat=1: trainer has no key 'learning_rat'. Did you mean trainer.learning_rate? "
            f"Allowed: {TRAINER_KEYS}.",
        ),
        (
            "train",
            ["trainer.lr=1"],
            f"trainer.lr=1: trainer has no key 'lr'. Did you mean trainer.learning_rate? Allowed: {TRAINER_KEYS}.",
        ),
        (
            "train",
            ["drafter.learning_rate=1"],
            "drafter.learning_rate=1: drafter=eagle3 has no key 'learning_rate'. Did you mean trainer.learning_rate? "
            f"Allowed: {EAGLE3_KEYS}.",
        ),
        (
            "train",
            ["learning_rate=1"],
            "learning_rate=1: the top level has no key 'learning_rate'. Did you mean trainer.learning_rate? "
            f"Allowed: {', '.join(keys(TrainRun))}.",
        ),
        (
            "train",
            ["drafter.medusa_layers=3"],
            f"drafter.medusa_layers=3: drafter=eagle3 has no key 'medusa_layers'. Allowed: {EAGLE3_KEYS}.",
        ),
        (
            "train",
            ["data.user_temperature=1"],
            "data.user_temperature=1: data=builtin has no key 'user_temperature'. It belongs to data=magpie. "
            f"Allowed: {', '.join(keys(BuiltinData))}.",
        ),
        (
            "train",
            ["+trainer.zzz=1"],
            f"trainer.zzz: trainer has no key 'zzz'. Allowed: {TRAINER_KEYS}.",
        ),
        (
            "train",
            ["target.wheel.foo=3"],
            "target.wheel.foo=3: target.wheel has no key 'foo'. "
            "Allowed: package, version, filename, sha256, gguf, gguf_sha256.",
        ),
        ("train", ["trainer.epochs=abc"], "trainer.epochs=abc: must be a number >= 0."),
        ("train", ["trainer.max_steps=1.5"], "trainer.max_steps=1.5: must be a whole number >= 1 or null."),
        ("train", ["trainer.seed=null"], "trainer.seed=null: must be a whole number."),
        ("train", ["trainer.betas=3"], "trainer.betas=3: must be a list, each entry a number >= 0 and < 1."),
        ("train", ["plan=perhaps"], "plan=perhaps: must be true or false."),
        ("train", ["resume=maybe"], "resume=maybe: must be one of auto, never."),
        ("serve", ["mode=http"], "mode=http: must be one of eval, compare, generate, chat, import."),
        ("serve", ["verification=fast"], "verification=fast: must be one of coupled, rejection, typical."),
        *(
            (script, [f"runtime.num_draft_tokens={value}"], f"runtime.num_draft_tokens={shown}: {NODES}")
            for script in ("train", "serve")
            for value, shown in (("0", "0"), ("many", "many"), ("1.5", "1.5"), ("true", "True"), ("null", "None"))
        ),
        ("serve", ["sampling.top_p=0"], "sampling.top_p=0.0: must be a number > 0 and <= 1."),
        ("train", ["drafter.family=medusa"], "drafter.family=medusa: must be one of eagle3."),
        (
            "train",
            ["drafter=eagle5"],
            "drafter=eagle5: group 'drafter' has no such option. Did you mean drafter=eagle? "
            "Allowed: eagle, eagle3, hydra, medusa, medusa2, mtp, small.",
        ),
        (
            "train",
            ["target=/models/mine"],
            "target=/models/mine: group 'target' has no such option. For your own model set target=custom "
            f"target.path=/models/mine. Allowed: {TARGETS}.",
        ),
        (
            "distill",
            ["experiment=tini"],
            "experiment=tini: group 'experiment' has no such option. Did you mean experiment=tiny? "
            "Allowed: none, smollm2_cpu, tiny.",
        ),
        ("train", ["trainer=null"], "trainer=null: a group takes the name of one of its options. See train.py --help."),
        (
            "serve",
            ["drafter=eagle3"],
            "drafter=eagle3: serve.py runs a trained drafter. Set drafter.path=EXPORT; see --help for others.",
        ),
        (
            "serve",
            ["data=jsonl"],
            "data=jsonl: serve.py has no group 'data'. Groups: target, runtime, eval, experiment.",
        ),
        (
            "train",
            ["trainer"],
            "trainer: not understood. Write KEY=VALUE; text with special characters: 'KEY=\"a, b\"'.",
        ),
        ("train", ["~target"], "target has no value. Set target=OPTION."),
        ("train", ["~drafter"], "drafter has no value. Set drafter=OPTION."),
        ("train", ["data=jsonl"], "data.path has no value. Set data.path=VALUE."),
        ("train", ["target=custom"], "target.path has no value. Set target.path=FOLDER or target.path=ORG/MODEL."),
        ("train", ["output_dir=${nope}"], "output_dir=${nope}: Interpolation key 'nope' not found."),
        ("train", ["hydra.foo=1"], "hydra.foo=1: Key 'foo' not in 'HydraConf'."),
        ("train", ["drafter.ttt_steps.x=3"], "drafter.ttt_steps={}: must be a whole number >= 1."),
    ],
)
def test_wrong_command_lines(script, overrides, answer):
    assert complaint(script, *overrides) == answer


@pytest.mark.parametrize(
    ("script", "overrides", "parts"),
    [
        ("train", ["target=custom", "target.path=null"], ["target.path", "FOLDER"]),
        ("train", ["+target.random={seed: 1}"], ["+target.random={seed: 1}", "is null here"]),
        ("train", ["target.device=tpu"], ["target.device=tpu", "cuda:N"]),
        ("train", ["target.device=cuda:x"], ["target.device=cuda:x"]),
        ("train", ["target.device=cpu:1"], ["target.device=cpu:1"]),
        ("train", ["trainer.betas=[0.9]"], ["trainer.betas=[0.9]", "two numbers"]),
        (
            "train",
            ["trainer.feature_store=shared", "trainer.features=online"],
            ["trainer.feature_store=shared", "trainer.features=cached"],
        ),
        ("train", ["drafter.curriculum=[0.6,0.3]"], ["drafter.curriculum=[0.6, 0.3]", "must rise"]),
        ("train", ["drafter.curriculum=[0.5,0.5]"], ["drafter.curriculum=[0.5, 0.5]", "must rise"]),
        ("train", ["drafter.curriculum=[1.5]"], ["drafter.curriculum=[1.5]", "> 0 and < 1"]),
        ("train", ["drafter.taps=[1,2]"], ["drafter.taps=[1, 2]", "three rising"]),
        ("train", ["drafter.taps=[3,2,9]"], ["drafter.taps=[3, 2, 9]", "three rising"]),
        ("train", ["drafter.taps=[2,15,31]"], ["drafter.taps=[2, 15, 31]", "0 to 30"]),
        ("train", ["drafter.num_heads=9", "drafter.num_kv_heads=4"], ["drafter.num_heads=9", "num_kv_heads=4"]),
        ("train", ["drafter.draft_vocab_size=49153"], ["draft_vocab_size=49153", "49152", "smollm2-135m"]),
        ("train", ["target=tiny-random"], ["draft_vocab_size=32000", "512", "tiny-random"]),
        ("train", ["runtime=chain", "runtime.depth=16"], ["runtime.depth=16", "num_draft_tokens >= 17", "it is 6"]),
        ("serve", ["runtime=chain", "runtime.depth=16"], ["runtime.depth=16", "runtime.num_draft_tokens >= 17"]),
        ("train", ["init_from=nowhere"], ["init_from=nowhere", "no such folder"]),
        ("train", ["data.responses=nowhere"], ["data.responses=nowhere", "distill.py output_dir=nowhere"]),
        ("train", ["data=jsonl", "data.path=nowhere"], ["data.path=nowhere", "no such file"]),
        ("distill", ["data=jsonl", "data.path=nowhere"], ["data.path=nowhere", "no such file"]),
        ("distill", ["data.responses=x"], ["data.responses=x", "Set output_dir=x"]),
        ("train", ["eval.prompts=nowhere"], ["eval.prompts=nowhere", "no such file"]),
        ("serve", ["eval.prompts=nowhere"], ["eval.prompts=nowhere", "no such file"]),
        ("serve", ["drafter.path=nowhere"], ["drafter.path=nowhere", "no such folder", "Set drafter.path to"]),
        ("serve", ["sampling.min_tokens=129"], ["sampling.min_tokens=129", "eval.max_new_tokens=128", "Lower it"]),
        ("serve", ["mode=generate"], ["mode=generate needs a prompt", 'Set prompt="..."']),
        ("serve", ["prompt=hello"], ["prompt='hello'", "mode=eval", "Set mode=generate"]),
    ],
)
def test_settings_at_odds(script, overrides, parts):
    answer = complaint(script, *overrides)
    assert [part for part in parts if part not in answer] == [], answer


@pytest.mark.parametrize(
    ("script", "overrides"),
    [
        ("train", ["drafter.draft_vocab_size=49152"]),
        ("train", ["drafter.taps=[2,15,30]"]),
        ("train", ["target.device=cuda:1"]),
        ("train", ["runtime.depth=15"]),
        ("train", ["runtime.num_draft_tokens=1"]),  # plain decoding: depth is moot
        ("serve", ["runtime.num_draft_tokens=auto", "runtime.depth=40"]),
        ("serve", ["verification=typical", "sampling.min_tokens=128", "sampling.top_k=40", "sampling.top_p=0.9"]),
        ("train", ["drafter.curriculum=[]"]),
        ("serve", ["mode=generate", "prompt=hello"]),
        ("serve", ["drafter.path=none"]),
        ("serve", ["drafter.path=ngram"]),
        ("serve", ["drafter.path=conf"]),
        ("train", ["data.responses=conf", "init_from=conf", "eval.prompts=pyproject.toml"]),
    ],
)
def test_settings_at_the_edge_are_accepted(script, overrides, monkeypatch):
    monkeypatch.chdir(CONF.parent)
    assert isinstance(settings(script, *overrides), RUNS[script])


# ---- ranges: every bound of every setting

PRESENT = [TargetConfig, Eagle3Config, BuiltinData, TrainerConfig, DeepSpeedConfig, RuntimeConfig, EvalConfig]
PRESENT += [LoggerConfig, SamplingConfig, *RUNS.values()]


def _rules() -> list[tuple[str, str, Any]]:
    """(script, key path, a value just outside one bound) for every bound of every section a default run has."""
    found = []
    for script, run in RUNS.items():
        for path, schema, name in leaves(run):
            field = next(field for field in dataclasses.fields(schema) if field.name == name)
            rule, step = field.metadata, 0.001 if "float" in str(field.type) else 1
            if schema not in PRESENT or not rule:
                continue
            outside = {"low": -step, "above": 0, "high": step, "below": 0}
            wrong = [rule[kind] + shift for kind, shift in outside.items() if rule[kind] is not None]
            wrong += ["nonsense"] if rule["choices"] else []
            found += [(script, path, [value] * 2 if "list" in str(field.type) else value) for value in wrong]
    return found


@pytest.fixture(scope="module")
def default_runs() -> dict[str, Any]:
    return {script: OmegaConf.to_object(composed(script)) for script in SCRIPTS}


@pytest.mark.parametrize(("script", "path", "value"), _rules())
def test_every_bound_is_kept(default_runs, script, path, value):
    run = copy.deepcopy(default_runs[script])
    check(run)
    section = run
    for name in path.split(".")[:-1]:
        section = getattr(section, name)
    setattr(section, path.split(".")[-1], value)
    with pytest.raises(ConfigError) as caught:
        check(run)
    assert str(caught.value).startswith(f"{path}={value}: must be ")


def test_the_bounds_are_many():
    assert len(_rules()) > 60


def test_random_targets_and_facts_are_bounded_too():
    assert complaint("train", "target=tiny-random", "target.random.num_layers=5").endswith("a whole number >= 6.")
    assert complaint("train", "target.facts.hidden_size=0").endswith("a whole number >= 1.")
    assert complaint("train", "data=magpie", "data.user_temperature=0").endswith("a number > 0.")


def test_describe_says_type_range_and_choices():
    assert describe(DeepSpeedConfig, "zero_stage") == "a whole number >= 0 and <= 3"
    assert describe(TrainerConfig, "features") == "one of online, cached"
    assert describe(Eagle3Config, "taps") == "a list, each entry a whole number >= 0 or null"
    assert describe(FAMILIES["data"]["hub"], "columns") == "a mapping of text to text"
    assert describe(RuntimeConfig, "num_draft_tokens") == "a whole number >= 1 or auto"
    assert describe(TrainRun, "plan") == "true or false"
    assert describe(TrainRun, "init_from") == "text or null"
    assert describe(TrainRun, "trainer").startswith("a group of settings: epochs, ")


# ---- frozen


def test_settings_are_frozen_all_the_way_down():
    run = settings("train")
    for section, name in ((run, "plan"), (run.trainer, "seed"), (run.target.facts, "hidden_size")):
        before = getattr(section, name)
        with pytest.raises(ConfigError, match=f"{type(section).__name__}.{name} is fixed"):
            setattr(section, name, 1)
        assert getattr(section, name) == before
    changed = dataclasses.replace(run.trainer, seed=7)
    changed.seed = 8
    assert (changed.seed, run.trainer.seed) == (8, 0)


def test_to_dict_is_plain_and_complete():
    run = settings("train", "target=tiny-random", "drafter.draft_vocab_size=256")
    plain = to_dict(run)
    assert plain["trainer"]["betas"] == [0.9, 0.95]
    assert plain["target"]["random"]["vocab_size"] == 512
    assert set(plain) == set(keys(TrainRun))


def test_library_users_are_checked_like_the_command_line():
    run = settings("serve")
    loose = dataclasses.replace(run, runtime=RuntimeConfig(top_k=0))
    with pytest.raises(ConfigError, match=r"runtime\.top_k=0: must be a whole number >= 1"):
        check(loose)
    section = RuntimeConfig()
    freeze(section)
    with pytest.raises(ConfigError, match=r"RuntimeConfig\.depth is fixed"):
        section.depth = 2


def test_only_the_three_runs_are_validated():
    cfg = composed("train").trainer
    with pytest.raises(ConfigError, match="TrainerConfig, not one of train, distill, serve"):
        validate(cfg)


def test_every_section_is_a_section():
    for run in RUNS.values():
        for path, schema, _ in leaves(run):
            assert issubclass(schema, Section), path
