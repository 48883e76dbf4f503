"""Medusa and Hydra at run time: the text stays, trees are the heads' own, static trees have the best shape."""

from __future__ import annotations

import itertools

import pytest
import torch

from drafters.config import RuntimeConfig, TargetConfig
from drafters.corpus import ResponseRecord
from drafters.errors import ConfigError
from drafters.losses import Teacher
from drafters.models import heads
from drafters.models.heads import HeadsTraining
from drafters.models.layers import causal_attention
from drafters.models.layout import Features, make_layout
from drafters.target import Target
from runtime import Engine, SamplingParams
from runtime.debug import DebugError
from runtime.engine import EngineConfig
from runtime.evaluate import quick_acceptance
from runtime.proposers.base import Budget
from runtime.proposers.growth import NOISE_SCALE, best_shape, fixed_shape
from runtime.proposers.heads import HeadsProposer
from runtime.sampling import DraftNoise, Noise, drawing_noise
from tests.drafters.export_setup import build_drafter
from tests.drafters.test_heads import EVERY_KIND, KINDS, VOCAB, some, wild
from tests.drafters.test_ttt import pack
from tests.drafters.training_setup import run_settings, run_training
from tests.runtime import oracle
from tests.runtime.conftest import PROMPTS

DEPTH = 3


@pytest.fixture(scope="module")
def drafters(tiny_target):
    return {kind: wild(tiny_target, kind).eval() for kind in KINDS}


def _proposer(drafter, top_k=3, depth=9, accuracies=None):
    proposer = HeadsProposer(drafter, (8,), top_k, depth, accuracies)
    proposer.reserve(3, 64)
    return proposer


# ---- the text


@EVERY_KIND
@pytest.mark.parametrize(("batch_size", "tree"), [(1, "dynamic"), (3, "static")])
def test_any_weights_leave_the_text_as_it_is(tiny_target, drafters, kind, batch_size, tree):
    params = [SamplingParams(9, temperature=0.9 * (i % 2), seed=i, ignore_eos=True) for i in range(3)]
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[:3], params)
    drafter = drafters[kind]
    drafter.measured = {"positions": [1] * 3, "accuracies": [[0.5, 0.3, 0.1]] * 3}
    settings = {"num_draft_tokens": 9, "top_k": 3, "debug": batch_size > 1}
    engine = Engine.load(tiny_target, drafter, batch_size=batch_size, tree=tree, **settings)
    assert engine.proposer.name == drafter.family and engine.proposer.taps == (8,)
    answers = engine.generate(PROMPTS[:3], params)
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    assert sum(a.stats.drafted for a in answers) > 50


@pytest.fixture(scope="module")
def sharp(tiny_folder):
    """The tiny target with logits 150 times as large: the same greedy text, said with conviction."""
    target = Target.load(TargetConfig(name="sharp", path=str(tiny_folder), dtype="float32", device="cpu"))
    head = torch.nn.Linear(*target.head_weight.shape[::-1], bias=False)
    with torch.no_grad():
        head.weight.copy_(150 * target.head_weight)
    target.model.set_output_embeddings(head.requires_grad_(False))
    return target


@EVERY_KIND
def test_trained_on_one_text_it_drafts_it(sharp, tmp_path, kind):
    params = SamplingParams(33, ignore_eos=True)  # the first from the prompt, then rounds of one token and its drafts
    plain = Engine.load(sharp, "none").generate(PROMPTS[3:4], params)[0]
    record = ResponseRecord("one", "chat", plain.prompt_ids, plain.token_ids, "length", 0.0, 0)
    options = {"max_steps": 30, "learning_rate": 2e-2, "row_length": 128, "features": "cached"}
    drafter, _ = run_training(sharp, [record], run_settings(sharp, drafter=KINDS[kind], **options), tmp_path)
    engine = Engine.load(sharp, drafter, num_draft_tokens=4, depth=DEPTH, top_k=1)
    answer = engine.generate(PROMPTS[3:4], params)[0]
    assert answer.token_ids == plain.token_ids
    assert answer.stats.accepted >= 0.9 * DEPTH * answer.stats.rounds


# ---- training and decoding compute the same


@EVERY_KIND
def test_training_computes_what_decoding_computes(tiny_target, drafters, monkeypatch, kind):
    """What every head reads at every position, beside the runtime's own calls over the same tokens."""
    drafter, prompt, response = drafters[kind], 4, 7
    ids = torch.randint(3, 500, (prompt + response,), generator=torch.Generator().manual_seed(1)).tolist()
    batch = pack([(prompt, response)], prompt + response, ids)
    layout = make_layout(batch, DEPTH)
    taps = tiny_target.backbone(batch.ids).last_hidden_state[0].detach()
    seen, score = [], heads.score

    def spy(head, hidden, *rest):
        seen.append(head(hidden))
        return score(head, hidden, *rest)

    monkeypatch.setattr(heads, "score", spy)
    HeadsTraining(drafter, 1.0, KINDS[kind].loss)(layout, Features(taps[layout.active], _uniform(layout)))
    proposer = _proposer(drafter)
    proposer.start(0, ids[: prompt - 1], ids[prompt - 1], taps[: prompt - 1])
    for place, t in enumerate(range(prompt - 2, len(ids) - 2)):  # one token committed per round
        if place:
            proposer.commit(0, [ids[t + 1]], taps[t : t + 1])
        with torch.inference_mode():
            state = proposer._states([0])
            for j in range(min(DEPTH, len(ids) - 2 - t)):
                if j and drafter.reads_drafts:
                    state = drafter.extend(state, drafter.embed(torch.tensor([ids[t + 1 + j]])))
                torch.testing.assert_close(drafter.logits(j, state)[0], seen[j][place].detach(), rtol=0, atol=1e-5)
    assert [len(rows) for rows in seen] == [7, 6, 5]


def _uniform(layout):
    rows = len(layout.teacher)
    return Teacher(torch.full((rows, VOCAB), 1 / VOCAB), torch.zeros(rows, dtype=torch.long))


# ---- trees


def _started(drafter, rows=1, **settings):
    """A proposer with rows of random features and roots, and the logits [Vd] it must draft from after a path."""
    proposer, generator = _proposer(drafter, **settings), torch.Generator().manual_seed(4)
    texts = []
    for row in range(rows):
        taps, root = torch.randn(5 + row, 64, generator=generator), int(torch.randint(500, (1,), generator=generator))
        proposer.start(row, [1] * (5 + row), root, taps)
        texts.append((taps, root))

    @torch.no_grad()
    def logits(row, path):
        taps, root = texts[row]
        ids = torch.tensor([[0] * len(taps) + [root]])
        if not path:
            return drafter.first_logits(ids, taps[None], torch.arange(len(taps))[None])[0, -1]
        seen = drafter.look_back(taps[None], torch.arange(len(taps))[None], causal_attention)
        state = drafter.read(seen[0, -1:])
        for token in (root, *path):
            state = drafter.extend(state, drafter.embed(torch.tensor([token])))
        return drafter.logits(len(path), state)[0]

    return proposer, logits, [root for _, root in texts]


def _scores(logits, row, budget, target_ids, top_k):
    """All paths of the top_k best continuations of each node down to the budget's depth, with their scores."""
    found, level = {}, {(): 0.0}
    for depth in range(1, min(budget.depth, DEPTH) + 1):
        below = {}
        for path, score in level.items():
            ranked = torch.log_softmax(logits(row, path), -1)
            if budget.noise is not None:
                cooled = torch.log_softmax(logits(row, path) / budget.noise.temperature, -1)
                noisy = cooled + budget.noise.at(depth)[target_ids].float()
                ranked = torch.log_softmax(noisy / NOISE_SCALE, -1)
            best = ranked.topk(top_k)
            below |= {
                (*path, int(target_ids[token])): score + float(value) for value, token in zip(*best)
            }
        found |= below
        # The tree goes on from the top_k best of a level (EAGLE-2).
        level = dict(sorted(below.items(), key=lambda pair: -pair[1])[:top_k])
    return found


def _paths(tree):
    return {tuple(tree.tokens[up] for up in tree.path(node)[1:]): tree.scores[node] for node in range(1, len(tree))}


@EVERY_KIND
def test_dynamic_trees_hold_the_likeliest_paths_coupled_rows_with_the_noise(drafters, kind):
    proposer, logits, roots = _started(drafters[kind], rows=3)
    noise = DraftNoise(Noise(7, 512), 20, 0.8)
    budgets = {0: Budget(12, 9), 1: Budget(8, 2, noise), 2: Budget(9, 3)}
    trees = proposer.propose(budgets)
    for row, budget in budgets.items():
        found = _paths(trees[row])
        wanted = _scores(logits, row, budget, proposer.target_ids, 3)
        best = sorted(wanted.values(), reverse=True)[: budget.nodes - 1]
        assert trees[row].tokens[0] == roots[row] and set(trees[row].sources[1:]) == {drafters[kind].family}
        assert len(found) == budget.nodes - 1 and max(trees[row].depths) <= min(budget.depth, DEPTH)
        assert sorted(found.values(), reverse=True) == pytest.approx(best, abs=1e-3)
        for path, score in found.items():
            assert wanted[path] == pytest.approx(score, abs=1e-3)


def test_no_tree_is_deeper_than_there_are_heads_and_no_room_is_no_draft(drafters):
    proposer, _, roots = _started(drafters["medusa-2"], rows=2, top_k=1)
    assert proposer.trained_depth == DEPTH and proposer.models() == (drafters["medusa-2"],)
    trees = proposer.propose({0: Budget(20, 9), 1: Budget(1, 0)})
    assert len(trees[0]) == 4 and trees[1].tokens == (roots[1],)


@EVERY_KIND
def test_a_row_under_rejection_gets_a_drawn_tree_and_the_law_it_was_drawn_from(drafters, kind):
    proposer, logits, _ = _started(drafters[kind])
    noise = drawing_noise(3, 512, 20, 0.7)
    tree = proposer.propose({0: Budget(9, 3, noise, drawn=True)})[0]
    counts = [tree.parents.count(node) for node in range(len(tree))]
    shape = fixed_shape(9, 3, 3)
    assert counts[: sum(map(len, shape))] == sum(shape, []) and len(tree) == 9
    for node in range(len(tree)):
        if not counts[node]:
            continue
        path = tuple(tree.tokens[up] for up in tree.path(node)[1:])
        q = torch.softmax(logits(0, path).double() / 0.7, -1)
        assert torch.allclose(tree.draft_probs[node, proposer.target_ids], q, atol=1e-5)
        assert abs(float(tree.draft_probs[node].sum()) - 1) < 1e-12
        noisy = q.log() + noise.at(tree.depths[node] + 1)[proposer.target_ids]
        drawn = [tree.tokens[child] for child in range(len(tree)) if tree.parents[child] == node]
        assert drawn == proposer.target_ids[noisy.topk(counts[node]).indices].tolist()


# ---- static trees


def test_the_greedy_shape_is_the_best_of_all_shapes():
    chances = [[0.6, 0.25, 0.1], [0.5, 0.2, 0.05]]
    paths = [(r,) for r in range(3)] + list(itertools.product(range(3), repeat=2))
    worth = {path: torch.tensor([chances[d][r] for d, r in enumerate(path)]).prod().item() for path in paths}

    def closed(chosen):
        return all(path[:-1] in chosen or len(path) == 1 for path in chosen) and all(
            (*path[:-1], path[-1] - 1) in chosen for path in chosen if path[-1]
        )

    for nodes in (2, 4, 6, 8):
        shapes = [set(pick) for pick in itertools.combinations(paths, nodes - 1) if closed(set(pick))]
        best = max(sum(worth[path] for path in pick) for pick in shapes)
        shape = best_shape(chances, nodes)
        tree, level = [], [()]
        for counts in shape:
            level = [(*path, rank) for path, count in zip(level, counts) for rank in range(count)]
            tree += level
        assert len(tree) == nodes - 1
        assert sum(worth[path] for path in tree) == pytest.approx(best)
    assert best_shape(chances, 100) == [[3], [3, 3, 3]]
    assert best_shape(chances[:1], 3) == [[2]] and best_shape([], 5) == [] and best_shape(chances, 1) == []


@EVERY_KIND
def test_a_static_tree_has_the_shape_of_the_accuracies_and_the_heads_tokens(drafters, kind):
    # Rank 2 of head 0 was measured above rank 1: it counts as equal.
    table = [[0.5, 0.1, 0.2], [0.4, 0.3, 0.0], [0.9, 0.01, 0.0]]
    proposer, logits, _ = _started(drafters[kind], rows=3, accuracies=table)
    noise = DraftNoise(Noise(7, 512), 20, 0.8)
    trees = proposer.propose({0: Budget(7, 9), 1: Budget(4, 1), 2: Budget(7, 9, noise)})
    shape = best_shape([[0.5, 0.1, 0.1], [0.4, 0.3, 0.0], [0.9, 0.01, 0.0]], 7)
    assert shape == [[2], [2, 0], [1, 1]]
    tree = trees[0]
    assert [tree.depths.count(depth) for depth in (1, 2, 3)] == [2, 2, 2]
    for node in range(len(tree)):
        children = [tree.tokens[child] for child in range(len(tree)) if tree.parents[child] == node]
        path = tuple(tree.tokens[up] for up in tree.path(node)[1:])
        ranked = torch.log_softmax(logits(0, path), -1).topk(3) if len(path) < DEPTH else None
        assert children == ([] if ranked is None else proposer.target_ids[ranked.indices].tolist()[: len(children)])
        for child in range(len(tree)):
            if tree.parents[child] == node:
                place = children.index(tree.tokens[child])
                assert tree.scores[child] - tree.scores[node] == pytest.approx(float(ranked.values[place]), abs=1e-4)
    assert tree.draft_probs is None and set(trees[1].depths[1:]) == {1} and len(trees[1]) == 4
    # A row that samples has the dynamic tree all the same.
    wanted = _scores(logits, 2, Budget(7, 9, noise), proposer.target_ids, 3)
    assert _paths(trees[2]).keys() <= wanted.keys()


def test_static_trees_need_a_number_a_measurement_and_heads(tiny_target, drafters):
    with pytest.raises(ConfigError, match="tree=static needs a number of nodes, but .*num_draft_tokens is auto"):
        EngineConfig(num_draft_tokens="auto", tree="static")
    with pytest.raises(ConfigError, match="runtime.tree is 'round'; set it to one of dynamic, static"):
        EngineConfig(tree="round")
    drafter = drafters["medusa-2"]
    drafter.measured = {}
    for given in (drafter, "ngram", build_drafter(tiny_target)):
        with pytest.raises(ConfigError, match="needs one drafter whose heads were measured.*Set runtime.tree=dynamic"):
            Engine.load(tiny_target, given, tree="static")
    drafter.measure([some(tiny_target)[1:]])
    with pytest.raises(ConfigError, match="runtime.top_k is 12, but .* 10 ranks.*Set runtime.top_k=10 or less"):
        Engine.load(tiny_target, drafter, tree="static", top_k=12)
    assert Engine.load(tiny_target, drafter, tree="static").proposer.chances
    assert not Engine.load(tiny_target, drafter).proposer.chances
    Engine.load(tiny_target, "none", tree="static")  # plain decoding beside it has no tree


def test_quick_acceptance_needs_no_measurement(tiny_target, drafters):
    drafters["medusa-2"].measured = {}
    runtime = RuntimeConfig(num_draft_tokens=4, tree="static", depth=2)
    found = quick_acceptance((drafters["medusa-2"], (8,)), tiny_target, oracle.PROMPTS[:1], runtime, 6)
    assert found["rounds"] > 0


# ---- debug mode


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("medusa-2", r"row \d, last feature: kept .*, from scratch"),
        ("hydra++", r"row \d, features not yet run: kept .*, from scratch"),
        ("keys", r"row \d, prefix keys: kept .*, from scratch"),
    ],
)
def test_a_planted_bug_is_found_and_named(tiny_target, drafters, monkeypatch, kind, says):
    drafter = drafters[kind if kind in KINDS else "hydra++"]
    engine = Engine.load(tiny_target, drafter, batch_size=3, debug=True)
    engine._reserve(64)
    proposer = engine.proposer
    real = {name: getattr(proposer, name) for name in ("commit", "_states")}

    def states(rows):
        out = real["_states"](rows)
        for row in rows:
            proposer.cache.keys[row, :, proposer._rows[row].length - 1] += 1
        return out

    def commit(row, tokens, taps):
        real["commit"](row, tokens, taps.flip(-1))

    name, spoiled = ("_states", states) if kind == "keys" else ("commit", commit)
    monkeypatch.setattr(proposer, name, spoiled)
    with pytest.raises(DebugError, match=says):
        engine.generate(PROMPTS[:3], SamplingParams(12, ignore_eos=True))


def test_a_wide_medusa_level_asks_each_head_once(drafters, monkeypatch):
    """All nodes of a level share one distribution, which is computed once per row."""
    proposer, _, _ = _started(drafters["medusa-1"], rows=2)
    sizes, real = [], proposer.drafter.logits
    monkeypatch.setattr(
        proposer.drafter, "logits", lambda index, state: (sizes.append((index, *state.shape)), real(index, state))[1]
    )
    proposer.propose({0: Budget(30, 3), 1: Budget(30, 3)})
    assert sizes == [(index, 2, 1, 64) for index in range(3)]
