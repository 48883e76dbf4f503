"""Drafting without a model: best-first trees, known noise, n-grams, suffixes, recycled logits, random ids."""

import math
import random
import sys

import pytest
import torch

from runtime import SamplingParams
from runtime.engine import Engine
from runtime.proposers import automaton
from runtime.proposers.automaton import SuffixAutomaton
from runtime.proposers.base import Budget
from runtime.proposers.lookup import FLOOR, best_first, coupled
from runtime.proposers.ngram import MATCHES, NgramProposer
from runtime.proposers.random import RandomProposer
from runtime.proposers.recycle import RecycleProposer, top_logits
from runtime.proposers.suffix import SuffixProposer
from runtime.tree import DraftTree
from tests.runtime.conftest import PROMPTS


class FixedNoise:
    """The same noise at every depth."""

    def __init__(self, values, temperature=1.0):
        self.values, self.temperature = torch.tensor(values, dtype=torch.float64), temperature

    def at(self, depth):
        return self.values


def drafted(proposer, budget=None, row=0):
    return proposer.propose({row: budget or Budget(16, 8)})[row]


def paths(tree):
    """path of tokens -> chance of the path."""
    found = {(): 1.0}
    keys = [()]
    for node in range(1, len(tree)):
        keys.append((*keys[tree.parents[node]], tree.tokens[node]))
        found[keys[node]] = math.exp(tree.scores[node])
    return found


def started(kind, ids):
    proposer = kind()
    proposer.start(0, ids[:-1], ids[-1], None)
    return proposer


# ---- noise and trees


@pytest.mark.parametrize("p", [0.05, 0.5, 0.97])
def test_the_chance_under_known_noise_averages_to_the_probability(p):
    count = 200_000
    uniform = ((i + 0.5) / count for i in range(count))
    mean = sum(math.exp(coupled(p, -math.log(-math.log(u)))) for u in uniform) / count
    assert mean == pytest.approx(p, abs=1e-5)


def test_the_chance_under_known_noise_is_that_of_beating_every_other_token():
    p, g = (0.2, 0.5, 0.3), 0.7
    beaten = [math.exp(-math.exp(-(math.log(p[0]) + g - math.log(other)))) for other in p[1:]]
    assert math.exp(coupled(p[0], g)) == pytest.approx(math.prod(beaten), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_best_first_takes_the_likeliest_paths(seed):
    rng = random.Random(seed)
    chances = {}

    def expand(path):
        if path not in chances:
            chances[path] = [(token, rng.uniform(0.3, 1.0), (*path, token)) for token in rng.sample(range(9), 3)]
        return chances[path]

    def everything(path, chance, depth):
        for _, own, child in expand(path) if depth else []:
            yield child, chance * own
            yield from everything(child, chance * own, depth - 1)

    budget = Budget(9, 4)
    tree = best_first(7, (), expand, budget, "x")
    best = sorted(((c, path) for path, c in everything((), 1.0, 4) if c >= FLOOR), reverse=True)[:8]
    assert {path: c for path, c in paths(tree).items() if path} == pytest.approx({path: c for c, path in best})
    assert tree.tokens[0] == 7 and set(tree.sources[1:]) == {"x"} and tree.sources[0] == ""
    assert max(tree.depths) <= 4


def test_a_path_below_the_floor_is_not_drafted():
    tree = best_first(0, 1.0, lambda chance: [(1, 0.5, None)], Budget(16, 16), "x")
    assert len(tree) == 1 + int(math.log(FLOOR, 0.5))


def test_known_noise_decides_between_continuations_unless_the_row_is_drawn():
    expand = {"root": [(1, 0.6, "leaf"), (2, 0.4, "leaf")], "leaf": []}.get
    noise = FixedNoise([0.0, -3.0, 4.0])
    assert best_first(0, "root", expand, Budget(2, 2, noise), "x").tokens == (0, 2)
    assert best_first(0, "root", expand, Budget(2, 2), "x").tokens == (0, 1)
    assert best_first(0, "root", expand, Budget(2, 2, noise, drawn=True), "x").tokens == (0, 1)


# ---- ngram


def test_ngram_merges_matches_into_a_tree():
    # "1 2" went on with 3 twice, with 9 last; "2" alone also with 5
    tree = drafted(started(NgramProposer, [1, 2, 3, 4, 1, 2, 3, 4, 7, 2, 5, 1, 2, 9, 8, 1, 2]))
    found = paths(tree)
    assert found[(3,)] > found[(9,)] > found.get((5,), 0.0)
    scale = 2 / 4 / (3 * 4.0**2 + 4.0)  # two tokens match; three places of length 2, one of length 1
    assert found[(3,)] == pytest.approx(scale * 32) and found[(9,)] == pytest.approx(scale * 16)
    assert found[(3, 4)] == pytest.approx(found[(3,)] * 3 / 5)


def test_ngram_takes_the_longest_match_then_the_latest():
    ids = [1, 2, 3, 4, 9, 2, 3, 5, 7, 1, 2, 3]
    assert drafted(started(NgramProposer, ids), Budget(2, 9)).tokens == (3, 4)  # "1 2 3" before the later "2 3"
    assert drafted(started(NgramProposer, [1, 5, 1, 6, 1]), Budget(2, 9)).tokens == (1, 6)  # of equals the later


def test_ngram_goes_on_past_the_end_of_a_text_that_repeats_itself():
    tree = drafted(started(NgramProposer, [4, 5, 6] * 4), Budget(9, 8))
    assert tree.tokens == (6, 4, 5, 6, 4, 5, 6, 4, 5) and max(tree.depths) == 8


def test_ngram_looks_at_the_latest_places_only():
    ids = [token for i in range(200) for token in (1, 100 + i)]
    found = paths(drafted(started(NgramProposer, [*ids, 1]), Budget(1000, 1)))
    assert found == {(): 1.0}  # 16 places, each a sixteenth: none likely enough
    wide = started(NgramProposer, [*ids, 1])._rows[0].matches()
    assert [place for place, _ in wide] == [399 - 2 * i for i in range(MATCHES)]


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
@pytest.mark.parametrize("ids", [[5], [5, 6], [5, 6, 7, 8]])
def test_without_a_match_nothing_is_drafted(kind, ids):
    assert drafted(started(kind, ids)).tokens == (ids[-1],)


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_budgets_are_kept(kind):
    rng = random.Random(0)
    ids = [rng.randrange(4) for _ in range(300)]
    proposer = started(kind, ids)
    for nodes, depth in ((1, 0), (1, 5), (5, 2), (16, 8), (7, 1), (64, 3)):
        tree = drafted(proposer, Budget(nodes, depth))
        assert len(tree) <= nodes and max(tree.depths) <= depth
        assert all(tree.scores[n] <= tree.scores[tree.parents[n]] for n in range(1, len(tree)))
    assert len(drafted(proposer, Budget(5, 2))) == 5


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
@pytest.mark.parametrize("seed", range(4))
def test_state_after_any_commits_is_that_of_the_text(kind, seed):
    """However the text came in, in whatever batch, the drafts are those of a request that starts with all of it."""
    rng = random.Random(seed)
    ids = [[rng.randrange(5) for _ in range(120)] for _ in range(2)]
    proposer = kind()
    at = [3, 7]
    for row in range(2):
        proposer.start(row, ids[row][: at[row] - 1], ids[row][at[row] - 1], None)
    while any(at[row] < 120 for row in range(2)):
        for row in range(2):
            if size := min(rng.randrange(5), 120 - at[row]):
                proposer.commit(row, ids[row][at[row] : at[row] + size], None)
                at[row] += size
        trees = proposer.propose({0: Budget(12, 6), 1: Budget(9, 4)})
        for row, budget in ((0, Budget(12, 6)), (1, Budget(9, 4))):
            assert trees[row] == drafted(started(kind, ids[row][: at[row]]), budget)


def opcodes(call):
    """Bytecode instructions executed in the proposers' files."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "proposers" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
@pytest.mark.parametrize("text", ["words", "one word", "one word followed by all"])
def test_work_per_token_does_not_grow_with_the_text(kind, text):
    rng = random.Random(1)
    ids = {
        "words": [min(499, int(rng.paretovariate(0.6))) for _ in range(8001)],
        "one word": [3] * 8001,
        "one word followed by all": [token for i in range(4001) for token in (3, 10 + i)],
    }[text]
    short, long = (started(kind, ids[:length]) for length in (501, 8001))
    # Drafting is bounded by MATCHES, WIDEST and nodes.
    assert opcodes(lambda: drafted(long)) < 2 * opcodes(lambda: drafted(short)) + 2000
    grown = opcodes(lambda: long.commit(0, ids[7801:8001], None))
    assert grown < 1.3 * opcodes(lambda: short.commit(0, ids[301:501], None))


# ---- the automaton


def occurrences(ids, part):
    return sum(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


def walk(text, part):
    state = 0
    for token in part:
        state = text.moves[state].get(token)
        if state is None:
            return None
    return state


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("most", [64, 3])
def test_the_automaton_counts_every_substring(seed, most, monkeypatch):
    monkeypatch.setattr(automaton, "MOST", most)
    rng = random.Random(seed)
    ids = [rng.randrange(2 + seed % 3) for _ in range(60)]
    text = SuffixAutomaton()
    for size, token in enumerate(ids, start=1):
        text.extend(token)
        if size not in (1, 7, 23, 60):
            continue
        seen = ids[:size]
        for first in range(size):
            for last in range(first + 1, size + 1):
                part = seen[first:last]
                assert text.counts[walk(text, part)] == min(most, occurrences(seen, part))
                assert walk(text, [*part, 9]) is None
        assert len(text.links) <= 2 * size


def test_the_automaton_counts_a_text_of_one_token():
    text = SuffixAutomaton()
    for _ in range(300):
        text.extend(7)
    for length in (1, 100, 236, 237, 290, 300):
        assert text.counts[walk(text, [7] * length)] == min(64, 301 - length)


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_match_follows_a_text_while_the_automaton_grows(seed):
    rng = random.Random(seed)
    text, known, read, state, length = SuffixAutomaton(), [], [], 0, 0
    for _ in range(300):
        if rng.random() < 0.5 + 0.08 * seed:
            known.append(rng.randrange(3))
            text.extend(known[-1])
            continue  # what was matched before still is; a longer match may have come up, which is not looked for
        read.append(rng.randrange(3))
        before = read[len(read) - 1 - length : -1]
        state, length = text.step(state, length, read[-1])
        longest = max(n for n in range(len(before) + 2) if n == 0 or occurrences(known, read[-n:]))
        assert length == longest
        assert text.shrink(state, length) == walk(text, read[len(read) - length :])


def test_a_match_finds_its_state_again_after_several_splits():
    text = SuffixAutomaton()
    for token in (1, 2, 3):
        text.extend(token)
    state, length = text.step(0, 0, 3)  # "3" shares its state with "2 3" and "1 2 3"
    for token in (9, 2, 3, 8, 3):  # which now occur one, two and three times
        text.extend(token)
    assert text.shrink(state, length) == walk(text, [3]) != walk(text, [2, 3])
    assert text.counts[text.shrink(state, length)] == 3
    assert text.step(state, length, 8) == (walk(text, [3, 8]), 2)


# ---- suffix


def test_suffix_goes_on_with_what_followed_the_longest_match():
    # "1 2 3" is found once, followed by 4 5 6; "2 3" is also followed by 9
    tree = drafted(started(SuffixProposer, [1, 2, 3, 4, 5, 6, 7, 2, 3, 9, 8, 1, 2, 3]), Budget(16, 8))
    found = paths(tree)
    assert found[(4,)] == pytest.approx(3 / 5)
    assert found[(4, 5)] == pytest.approx(3 / 5 * 4 / 6)
    assert found[(9,)] == pytest.approx(2 / 4 / 2)
    assert (4, 5, 6) in found and (4, 5, 6, 7) not in found  # a match of three tokens is drafted three deep


def test_suffix_shares_follow_the_counts():
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    found = paths(drafted(started(SuffixProposer, ids), Budget(16, 1)))
    longest = paths(drafted(started(SuffixProposer, [1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2]), Budget(16, 1)))
    assert longest[(3,)] == pytest.approx(2 / 4 * 2 / 3) and longest[(4,)] == pytest.approx(2 / 4 / 3)
    assert found[(3,)] > found.get((4,), 0.0)


def test_suffix_believes_the_suffix_that_promises_most():
    # after "1 2" four tokens came once each; after "2" alone 3 came nine times of twelve
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, *(t for i in range(8) for t in (20 + i, 2, 3)), 99, 1, 2]
    found = paths(drafted(started(SuffixProposer, ids), Budget(16, 1)))
    assert found[(3,)] == pytest.approx(1 / 3 * 9 / 12)
    assert found[(4,)] == pytest.approx(2 / 4 / 4)


def test_suffix_goes_on_past_the_end_of_a_text_that_repeats_itself():
    tree = drafted(started(SuffixProposer, [4, 5, 6] * 5), Budget(9, 8))
    assert tree.tokens == (6, 4, 5, 6, 4, 5, 6, 4, 5) and max(tree.depths) == 8


def test_suffix_learns_from_past_answers_and_not_from_other_prompts():
    proposer = SuffixProposer()
    proposer.start(0, [50, 51, 52], 10, None)
    proposer.commit(0, [11, 12, 13], None)
    proposer.start(1, [1, 2, 10], 11, None)
    assert drafted(proposer, row=1).tokens == (11,)
    proposer.release(0)
    proposer.release(1)
    proposer.start(0, [1, 2, 10], 11, None)
    assert drafted(proposer, Budget(3, 8)).tokens == (11, 12, 13)
    proposer.commit(0, [12], None)
    assert drafted(proposer, Budget(3, 8)).tokens == (12, 13)  # 13 ended that answer, 11 began the next
    proposer.release(0)
    proposer.start(0, [9, 50], 51, None)
    assert drafted(proposer).tokens == (51,)


def test_suffix_never_drafts_the_mark_between_answers():
    proposer = SuffixProposer()
    for _ in range(20):
        proposer.start(0, [1], 5, None)
        proposer.commit(0, [6, 7], None)
        assert min(drafted(proposer).tokens) >= 0
        proposer.release(0)
    proposer.start(0, [1], 6, None)
    assert drafted(proposer).tokens == (6, 7)
    proposer.commit(0, [7], None)
    assert drafted(proposer).tokens == (7,)


def test_suffix_forgets_the_oldest_answers_first_and_stays_under_its_cap():
    proposer = SuffixProposer(past_tokens=60)
    for number in range(32):
        proposer.start(0, [0], 1000 + number, None)
        proposer.commit(0, [2000 + number, 3000 + number, 4000 + number], None)
        proposer.release(0)
        assert sum(text.size for text in proposer._past) <= 60
        assert len(proposer._past) <= 2
    drafts = {}
    for number in range(32):
        proposer.start(1, [0], 1000 + number, None)
        drafts[number] = len(drafted(proposer, row=1)) > 1
        del proposer._rows[1]  # looked at, not answered
    kept = [number for number, found in drafts.items() if found]
    assert kept == list(range(24, 32))  # five tokens each with their mark: six fill the older half, two are new


def test_suffix_keeps_the_end_of_an_answer_longer_than_its_cap():
    proposer = SuffixProposer(past_tokens=20)
    proposer.start(0, [0], 100, None)
    proposer.commit(0, list(range(101, 160)), None)
    proposer.start(1, [0], 7, None)  # runs while the past is exchanged
    proposer.release(0)
    assert sum(text.size for text in proposer._past) <= 20
    proposer.commit(1, [157], None)
    assert drafted(proposer, row=1).tokens[:2] == (157, 158)
    proposer.release(1)
    proposer.start(0, [0], 101, None)
    assert drafted(proposer).tokens == (101,)


# ---- recycle


def logits_of(*favourites, vocab=20):
    """Rows in which favourites come first, second, ... at logits 10, 9, ..."""
    rows = torch.full((len(favourites), vocab), -5.0)
    for row, best in zip(rows, favourites):
        for rank, token in enumerate(best):
            row[token] = 10.0 - rank
    return rows


def test_recycle_drafts_what_the_target_thought_of_last():
    proposer = RecycleProposer(20)
    proposer.start(0, [1], 2, None)
    assert drafted(proposer).tokens == (2,)
    proposer.observe(0, DraftTree.chain(2, [3, 4]), logits_of([3, 9], [4], [5]))
    proposer.commit(0, [3, 2], None)
    found = paths(drafted(proposer))
    share = math.exp(10) / (math.exp(10) + math.exp(9) + 6 * math.exp(-5))
    assert found[(3,)] == pytest.approx(share, rel=1e-6)
    assert found[(9,)] == pytest.approx(share / math.e, rel=1e-6)
    assert (3, 4, 5) in found and (9, 3) not in found
    proposer.observe(0, DraftTree.chain(2, [2]), logits_of([6], [7]))  # of one token seen twice the later stays
    proposer.start(1, [1], 2, None)
    assert drafted(proposer, Budget(2, 1), row=1).tokens == (2, 7)


def test_recycle_follows_temperature_and_noise():
    proposer = RecycleProposer(20)
    proposer.start(0, [1], 2, None)
    proposer.observe(0, DraftTree.root(2), logits_of([3, 9]))
    cold, hot = FixedNoise([0.0] * 20, 0.25), FixedNoise([0.0] * 20, 4.0)
    chance = {name: paths(drafted(proposer, Budget(2, 1, noise)))[(3,)] for name, noise in (("c", cold), ("h", hot))}
    weights = [math.exp(0), math.exp(-4)] + [math.exp(-60)] * 6
    assert chance["c"] == pytest.approx(math.exp(coupled(1 / sum(weights), 0.0)), rel=1e-6)
    assert chance["h"] < 0.5 < chance["c"]
    noisy = [0.0] * 20
    noisy[3], noisy[9] = -2.0, 6.0
    assert drafted(proposer, Budget(2, 1, FixedNoise(noisy))).tokens == (2, 9)


def test_recycle_on_a_vocabulary_smaller_than_its_table():
    proposer = RecycleProposer(3)
    proposer.start(0, [1], 2, None)
    proposer.observe(0, DraftTree.root(2), torch.tensor([[0.0, 3.0, -1.0]]))
    assert drafted(proposer, Budget(2, 1)).tokens == (2, 1)


@pytest.mark.parametrize("size", [5, 64 * 8, 64 * 9, 64 * 20 + 7])
def test_the_largest_logits_are_those_of_topk(size):
    torch.manual_seed(size)
    logits = torch.randn(6, size)
    logits[0, -3:] = torch.tensor([7.0, 9.0, 8.0])  # in the rest that fills no block
    logits[1, :5] += 9.0  # all in one block
    logits[2] = -torch.inf
    logits[2, 3] = 0.0
    count = min(8, size)
    values, ids = top_logits(logits, count)
    assert torch.equal(values, logits.topk(count).values)
    assert torch.equal(logits.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())


# ---- random


def test_random_takes_the_whole_budget_and_claims_certainty():
    proposer = RandomProposer(50, seed=3)
    proposer.start(0, [1], 2, None)
    for nodes, depth in ((16, 5), (16, 1), (2, 1), (40, 30)):
        tree = drafted(proposer, Budget(nodes, depth))
        assert len(tree) == nodes and max(tree.depths) <= depth and set(tree.scores) == {0.0}
        assert all(0 <= token < 50 for token in tree.tokens) and set(tree.sources[1:]) == {"random"}
    assert drafted(proposer, Budget(1, 0)).tokens == (2,)
    again = RandomProposer(50, seed=3)
    again.start(0, [1], 2, None)
    other = RandomProposer(50, seed=4)
    other.start(0, [1], 2, None)
    first = drafted(again)
    proposer = RandomProposer(50, seed=3)
    proposer.start(0, [1], 2, None)
    assert drafted(proposer) == first != drafted(other)


# ---- in the engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "recycle", "random", "ngram+suffix+recycle+random"])
def test_text_is_plain_decodings(tiny_target, drafter, temperature):
    prompts = PROMPTS[:4]
    params = [SamplingParams(12, temperature, seed) for seed in range(len(prompts))]
    plain = Engine.load(tiny_target, "none").generate(prompts, params)
    engine = Engine.load(tiny_target, drafter, batch_size=3)
    for _ in range(2):  # the second time past answers are known
        answers = engine.generate(prompts, params)
        assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    if temperature == 0.0:  # under noise a lookup drafts only what it may win
        assert sum(a.stats.drafted for a in answers) > 0


def test_suffix_answers_known_questions_in_fewer_rounds(tiny_target):
    engine = Engine.load(tiny_target, "suffix", depth=8)
    first, second = (engine.generate(PROMPTS[:2], SamplingParams(30)) for _ in range(2))
    rounds = [sum(answer.stats.rounds for answer in answers) for answers in (first, second)]
    assert rounds[1] < 0.5 * rounds[0]


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
@pytest.mark.parametrize("favourite", [2, 3])
def test_lookup_follows_the_noise_of_the_row(kind, favourite):
    noise = [-2.0] * 5
    noise[favourite] = 5.0
    proposer = started(kind, [1, 2, 1, 3, 1, 2, 1, 3, 1])
    assert drafted(proposer, Budget(2, 1, FixedNoise(noise))).tokens == (1, favourite)
