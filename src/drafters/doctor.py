"""Why a drafter's tau is low: rules over what was measured of its data, its training and its serving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drafters.measures import Measures

# Causes in the order in which one brings another about: of two with equal effect the earlier is named first.
CAUSES = (
    "wrong_template", "shifted_mask", "off_policy_data", "small_draft_vocabulary", "too_little_data", "train_serve_gap",
    "answers_cut", "temperature_mismatch", "more_data", "weak_category", "weak_length", "drafting_switched_off",
    "draft_too_slow",
)  # fmt: skip

SOME = 0.02  # of the records: fewer bad ones than this do no harm worth a word
AGREEMENT = 0.9  # the target's own greedy answers agree with it on all but roundings; another model's on 0.5 to 0.8
EXCESS_NATS = 0.25  # per token; an answer the target sampled costs it its entropy, give or take the noise of a sample
COVERAGE = 0.9  # of the target's choices on training answers
LEARNT_BY_HEART = 0.7  # held-out gain below this share of the gain on training answers
GAP = 0.25  # of tau: smaller differences are noise of a few hundred rounds
PARITY = 0.1  # of tau: the same rounds differ by roundings alone
SERVED_SHARE = 0.9  # of the gain that teacher forcing promises in the same rounds
WARM_SHARE = 0.85  # of the gain at temperature 0; coupled drafting keeps more
DOUBLING = 0.1  # of tau: worth collecting as much again
WEAK = 0.6  # of the others' gain
ROUNDS = 20  # fewer say nothing about a group
SLOW_SHARE = 0.4  # of a round's time
OFF_SHARE = 0.5  # of the rounds: more without a draft hide what the drafter can do
CHEAPER = 0.3  # by so much drafting could be made cheaper
CUT = 0.1  # of the answers' tokens


@dataclass(frozen=True)
class Finding:
    """cause: one of CAUSES; evidence: the numbers; advice: what to set; effect: tau it costs, estimated."""

    cause: str
    evidence: str
    advice: str
    effect: float


def diagnose(found: Measures) -> list[Finding]:
    """The findings, the costliest first; none where nothing is wrong."""
    findings = [finding for rule in RULES for finding in rule(found)]
    return sorted(findings, key=lambda finding: (-round(finding.effect, 6), CAUSES.index(finding.cause)))


# ---- rules: the data --------------------------------------------------------------------------------------------


def _wrong_template(found: Measures) -> Iterator[Finding]:
    bounds = found.boundaries
    share = bounds.foreign / bounds.records
    if share > SOME:
        yield Finding(
            "wrong_template",
            f"{bounds.foreign} of {bounds.records} prompts do not start and end as the target's chat template renders "
            "them: the drafter learnt from contexts that serving never has.",
            "Collect the answers again with distill.py, which renders prompts with the target's own template; or give "
            "the target the template its prompts are served with.",
            share * found.room,
        )


def _shifted_mask(found: Measures) -> Iterator[Finding]:
    bounds = found.boundaries
    share = bounds.shifted / bounds.records
    if share > SOME:
        late = bounds.shift is not None and bounds.shift > 0
        where = "holds the first of the answer" if late else "ends inside the template's header"
        size = abs(bounds.shift or 0)
        yield Finding(
            "shifted_mask",
            f"in {bounds.shifted} of {bounds.records} records the boundary between prompt and answer is off, mostly by "
            f"{size} token{'' if size == 1 else 's'}: the prompt {where}, so the loss mask covers the wrong tokens.",
            "Split each record where the generation prompt ends (distill.py does), then train again.",
            share * found.room,
        )


def _off_policy(found: Measures) -> Iterator[Finding]:
    scores = found.on_policy
    if scores is None:
        return
    other = "" if found.other_target is None else f" They were collected from another target ({found.other_target})."
    advice = "Have this target answer the prompts itself: distill.py, or train.py without data.responses."
    if scores.agreement is not None and scores.agreement < AGREEMENT:
        yield Finding(
            "off_policy_data",
            f"only {scores.agreement:.0%} of the greedy training answers' tokens are what the target itself would say "
            f"({scores.tokens} tokens read, {scores.nll:.2f} nats per token): another author wrote them.{other}",
            advice,
            (1 - scores.agreement) * found.room,
        )
    elif scores.excess is not None and scores.excess > EXCESS_NATS:
        yield Finding(
            "off_policy_data",
            f"the sampled training answers cost the target {scores.nll:.2f} nats per token, {scores.excess:.2f} more "
            f"than answers of its own would ({scores.tokens} tokens read): another author wrote them.{other}",
            advice,
            min(1.0, scores.excess) * found.room,
        )


def _answers_cut(found: Measures) -> Iterator[Finding]:
    if found.cut_share > CUT:
        yield Finding(
            "answers_cut",
            f"{found.cut_share:.0%} of the answers' tokens lie beyond trainer.row_length and were not trained on.",
            "Raise trainer.row_length to the length of prompt and answer.",
            0.3 * found.cut_share * found.room,
        )


def _small_vocabulary(found: Measures) -> Iterator[Finding]:
    covered = found.coverage
    if covered.choices < COVERAGE:
        yield Finding(
            "small_draft_vocabulary",
            f"the draft vocabulary holds {covered.choices:.1%} of the target's choices on the training answers and "
            f"{covered.held_out:.1%} on new text: whatever it lacks is never drafted.",
            "Raise drafter.draft_vocab_size and train again.",
            (1 - covered.choices) * found.room,
        )


# ---- rules: the training ----------------------------------------------------------------------------------------


def _too_little_data(found: Measures) -> Iterator[Finding]:
    known, new = found.trained.tau - 1, found.held_out.tau - 1
    if new < LEARNT_BY_HEART * known and known - new > GAP:
        growth = "" if found.curve is None else f" Twice the tokens would give about {found.curve.gain:+.2f}."
        yield Finding(
            "too_little_data",
            f"teacher-forced tau is {found.trained.tau:.2f} on training answers ({found.trained.acc[0]:.0%} of first "
            f"drafts right) and {found.held_out.tau:.2f} on new ones ({found.held_out.acc[0]:.0%}): the "
            f"{found.distinct_tokens:,} distinct answer tokens were learnt by heart. The draft vocabulary holds "
            f"{found.coverage.held_out:.1%} of the target's choices on new text.{growth}",
            "Train on more prompts (data.num_prompts, data=jsonl or data=hub); fewer epochs until then.",
            known - new,
        )


def _more_data(found: Measures) -> Iterator[Finding]:
    curve = found.curve
    if curve is not None and curve.gain >= DOUBLING:
        yield Finding(
            "more_data",
            f"{curve.metric} = {curve.a:.3f} + {curve.b:.3f} * ln(tokens) over {curve.points} points: after "
            f"{curve.tokens:,.0f} tokens twice the data would give about {curve.gain:+.2f} tau.",
            "Train on more prompts, or longer.",
            curve.gain,
        )


# ---- rules: the serving -----------------------------------------------------------------------------------------


def _train_serve_gap(found: Measures) -> Iterator[Finding]:
    promised, got = found.served.forced_tau - 1, found.served.chain_tau - 1
    if got < SERVED_SHARE * promised and promised - got > PARITY:
        depths, accuracies = (
            ", ".join(f"{share:.2f}" for share in shares) for shares in (found.served.chain_at, found.served.forced_at)
        )
        yield Finding(
            "train_serve_gap",
            f"in the same rounds teacher forcing gives tau {found.served.forced_tau:.2f} (right by depth {accuracies}) "
            f"and decoding with one draft sequence {found.served.chain_tau:.2f} (accepted by depth {depths}): what is "
            "served is not what was trained.",
            "Look for features, positions or a head that differ between the two: serve.py runtime.debug=true; export "
            "again with the version that serves it.",
            promised - got,
        )


def _temperature(found: Measures) -> Iterator[Finding]:
    cold, warm = found.served.tau, found.served.tau_t1
    if found.temperature == 0 and warm - 1 < WARM_SHARE * (cold - 1) and cold - warm > GAP / 2:
        yield Finding(
            "temperature_mismatch",
            f"all training answers are greedy; tau is {cold:.2f} at temperature 0 and {warm:.2f} at temperature 1.",
            "To serve at temperature 1, add answers collected with data.temperature=1 (data.responses=GREEDY+SAMPLED).",
            cold - warm,
        )


def _weak_groups(found: Measures) -> Iterator[Finding]:
    for cause, groups, what, advice in (
        ("weak_category", found.served.by_category, "prompts of category", "Add prompts of this category."),
        ("weak_length", found.served.by_length, "answers of", "Add prompts with answers of this length."),
    ):
        for name, group in groups.items():
            rest = [other for key, other in groups.items() if key != name]
            rounds = sum(other.rounds for other in rest)
            if group.rounds < ROUNDS or rounds < ROUNDS:
                continue
            tau = sum(other.tau * other.rounds for other in rest) / rounds
            if group.tau - 1 < WEAK * (tau - 1) and tau - group.tau > GAP:
                yield Finding(
                    cause,
                    f"tau is {group.tau:.2f} on {what} {name} ({group.rounds} rounds), {tau:.2f} on the others.",
                    advice,
                    (tau - group.tau) * group.rounds / (group.rounds + rounds),
                )


def _switched_off(found: Measures) -> Iterator[Finding]:
    served = found.served
    if served.plain_share > OFF_SHARE and served.chain_tau > served.tau:
        yield Finding(
            "drafting_switched_off",
            f"in {served.plain_share:.0%} of the rounds the runtime drafted nothing, because by its measure of this "
            f"machine no draft was worth its check: tau is {served.tau:.2f}, and {served.chain_tau:.2f} where every "
            "round verifies one draft sequence.",
            "To see what the drafter can do, set runtime.num_draft_tokens=16. To gain time, mend what else is named "
            "here, or decode where a check of a few tokens costs little more than one.",
            served.chain_tau - served.tau,
        )


def _slow_draft(found: Measures) -> Iterator[Finding]:
    share = found.served.draft_share
    if share is not None and share > SLOW_SHARE:
        saved = CHEAPER * share
        yield Finding(
            "draft_too_slow",
            f"drafting takes {share:.0%} of a round's time; {CHEAPER:.0%} less of it would be worth as much as tau "
            f"{found.served.tau / (1 - saved):.2f} instead of {found.served.tau:.2f}.",
            "Draft less (runtime.depth, runtime.top_k), or train a smaller drafter (drafter.hidden_size, "
            "drafter.draft_vocab_size).",
            found.served.tau * saved / (1 - saved),
        )


RULES = (
    _wrong_template, _shifted_mask, _off_policy, _answers_cut, _small_vocabulary, _too_little_data, _more_data,
    _train_serve_gap, _temperature, _weak_groups, _switched_off, _slow_draft,
)  # fmt: skip
