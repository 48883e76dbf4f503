"""Training-time test against a dense, step-by-step reference; packing and supervision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafters.batches import Batch
from drafters.config_drafter import Eagle3Config, Objective
from drafters.losses import Teacher
from drafters.models.layout import Features, make_layout
from drafters.models.ttt import TestTimeTraining
from tests.drafters.test_eagle3 import SHAPE, build

DECAY = 0.8
# (prompt, response) lengths; the last two are too short for the later steps, or for any.
DOCUMENTS = [(4, 6), (3, 7), (1, 3), (2, 1)]
LENGTH = 32


def pack(documents: list[tuple[int, int]], length: int, tokens: list[int]) -> Batch:
    """Lay documents out in one row, with filler behind."""
    positions, owners, mask = [], [], []
    for number, (prompt, response) in enumerate(documents):
        positions += range(prompt + response)
        owners += [number] * (prompt + response)
        mask += [False] * prompt + [True] * response
    filler = length - len(owners)
    return Batch(
        ids=torch.tensor([tokens + [0] * filler]),
        position_ids=torch.tensor([positions + [0] * filler]),
        document_ids=torch.tensor([owners + [-1] * filler]),
        loss_mask=torch.tensor([mask + [False] * filler]),
        record_ids=(tuple(f"r{n}" for n in range(len(documents))),),
    )


def tokens_of(documents: list[tuple[int, int]]) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 50, (sum(map(sum, documents)),), generator=generator).tolist()


class Labels:
    """Target-side tensors for every flat position of a row; features of a layout are looked up in them."""

    def __init__(self, positions: int, seed: int = 3, width: int = 96) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.taps = torch.randn(positions, width, generator=generator, dtype=torch.float64)
        logits = torch.randn(positions, 20, generator=generator, dtype=torch.float64)
        self.probabilities = torch.softmax(logits, -1)
        self.choice = torch.randint(-1, 20, (positions,), generator=generator)

    def part(self, start: int, end: int) -> Labels:
        other = Labels.__new__(Labels)
        other.taps, other.probabilities = self.taps[start:end], self.probabilities[start:end]
        other.choice = self.choice[start:end]
        return other

    def features(self, layout) -> Features:
        teacher = Teacher(self.probabilities[layout.teacher], self.choice[layout.teacher])
        return Features(self.taps[layout.active], teacher)


def dense(drafter, batch: Batch, labels: Labels, steps: int, add=lambda at, loss, out: loss):
    """One position and one step at a time, keys listed explicitly; returns loss and [4, steps] statistics.

    add: what a family makes of a draft's cross-entropy, given the flat position that it speaks of and its output.
    """
    layer, total = drafter.layer, torch.zeros((), dtype=torch.float64)
    stats = torch.zeros(4, steps)
    for document in range(int(batch.document_ids.max()) + 1):
        where = (batch.document_ids[0] == document).nonzero().flatten().tolist()
        first, size = where[0], len(where)
        ids, answers = batch.ids[0][where], batch.loss_mask[0][where]

        def joined(hidden, token, position):
            x, residual = layer.inputs(drafter.embed(token.view(1, 1)), hidden.view(1, 1, -1))
            at = torch.tensor([[position]])
            return residual, layer.queries(x, at)[0, :, 0], *(t[0, :, 0] for t in layer.keys_values(x, at))

        fused = [drafter.fuse(labels.taps[first + t]) for t in range(size)]
        block = [joined(fused[t], ids[t + 1], t) for t in range(size - 1)]
        for t in range(size - 2):
            hidden, own, alive = fused[t], [], True
            for j in range(steps):
                if t + 2 + j >= size or not answers[t + 2 : t + 3 + j].all():
                    break
                residual, q, k, v = block[t] if j == 0 else joined(hidden, ids[t + 1 + j], t + j)
                own += [] if j == 0 else [(k, v)]
                seen = [(k, v) for _, _, k, v in block[: t + 1]] + own
                keys = torch.stack([k for k, _ in seen], 1).repeat_interleave(2, 0)
                values = torch.stack([v for _, v in seen], 1).repeat_interleave(2, 0)
                weights = torch.softmax((q[:, None] * keys).sum(-1) / 8**0.5, -1)
                mixed = (weights[..., None] * values).sum(1)
                out = layer.finish(residual, mixed[None, :, None])[0, 0]
                at, logits, hidden = first + t + 1 + j, drafter.logits(out), drafter.feedback(out)
                choice = int(labels.choice[at])
                right = choice >= 0 and int(logits.argmax()) == choice
                alive = alive and right
                stats[1:, j] += torch.tensor([float(right), float(alive), 1.0])
                if choice >= 0:
                    loss = add(at, -(labels.probabilities[at] * torch.log_softmax(logits, -1)).sum(), out)
                    stats[0, j] += loss.item()
                    total = total + DECAY**j * loss
    return total, stats


def run(drafter, batch: Batch, labels: Labels, steps: int):
    layout = make_layout(batch, steps)
    return TestTimeTraining(drafter, DECAY, Objective())(layout, labels.features(layout))


def gradients(drafter, loss) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(drafter.parameters())))


@pytest.mark.parametrize("fc_norm", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_equals_dense_reference_forward_and_gradient(steps, norm_output, fc_norm):
    drafter = build(replace(SHAPE, fc_norm=fc_norm, norm_output=norm_output))
    batch, labels = pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS)), Labels(LENGTH)
    loss, stats = run(drafter, batch, labels, steps)
    wanted, wanted_stats = dense(drafter, batch, labels, steps)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(drafter, loss), gradients(drafter, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_objective_of_the_settings_is_what_trains():
    drafter, batch, labels = build(), pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS)), Labels(LENGTH)
    layout = make_layout(batch, 2)
    graph = drafter.training_graph(Eagle3Config(ttt_steps=2, objective="tvd"), None)
    loss, _ = graph(layout, labels.features(layout))

    def rejected(at, _, out):
        return 1 - torch.minimum(torch.softmax(drafter.logits(out), -1), labels.probabilities[at]).sum()

    wanted, _ = dense(drafter, batch, labels, 2, rejected)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    for mine, theirs in zip(gradients(drafter, loss), gradients(drafter, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert graph.decay == DECAY
    asked = drafter.training_graph(Eagle3Config(objective="lk", lk_decay=1.5, jsd_beta=0.5), None).objective
    assert asked == Objective("lk", decay=1.5)


def test_packed_equals_the_sum_of_separate_documents():
    drafter, tokens = build(), tokens_of(DOCUMENTS)
    labels = Labels(LENGTH)
    loss, stats = run(drafter, pack(DOCUMENTS, LENGTH, tokens), labels, 3)
    alone, alone_stats, start = 0.0, torch.zeros(4, 3), 0
    for prompt, response in DOCUMENTS:
        end = start + prompt + response
        batch = pack([(prompt, response)], prompt + response, tokens[start:end])
        part, part_stats = run(drafter, batch, labels.part(start, end), 3)
        alone, alone_stats, start = alone + part, alone_stats + part_stats, end
    torch.testing.assert_close(loss, alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(stats, alone_stats, rtol=1e-6, atol=1e-6)


def test_rows_of_a_batch_are_independent():
    # One document each: only the row tells the two documents number 0 apart.
    drafter, tokens = build(), tokens_of(DOCUMENTS)
    one, other = pack(DOCUMENTS[:1], 10, tokens[:10]), pack(DOCUMENTS[1:2], 10, tokens[10:20])
    fields = ("ids", "position_ids", "document_ids", "loss_mask")
    two = Batch(*(torch.cat((getattr(one, f), getattr(other, f))) for f in fields), one.record_ids + other.record_ids)
    labels = Labels(20)
    both = run(drafter, two, labels, 3)[0]
    parts = run(drafter, one, labels.part(0, 10), 3)[0] + run(drafter, other, labels.part(10, 20), 3)[0]
    torch.testing.assert_close(both, parts, rtol=1e-6, atol=0)


def test_supervised_positions_are_exactly_those_whose_drafts_are_response_tokens():
    layout = make_layout(pack([(3, 4), (2, 2)], 12, tokens_of([(3, 4), (2, 2)])), 3)
    # Row: p p p r r r r | p p r r; position t drafts token t+2.
    assert layout.active[layout.steps[0].reach].tolist() == [1, 2, 3, 4, 7, 8]
    assert layout.active[layout.steps[1].reach].tolist() == [1, 2, 3, 7]
    assert layout.active[layout.steps[2].reach].tolist() == [1, 2]
    assert layout.counts() == [6, 4, 2]
    assert layout.teacher.tolist() == [2, 3, 4, 5, 8, 9]
    assert layout.active.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_a_multi_turn_prompt_between_responses_is_never_supervised():
    batch = pack([(2, 8)], 10, tokens_of([(2, 8)]))
    batch.loss_mask[0, 5:7] = False
    layout = make_layout(batch, 2)
    assert layout.active[layout.steps[0].reach].tolist() == [0, 1, 2, 5, 6, 7]
    assert layout.active[layout.steps[1].reach].tolist() == [0, 1, 5, 6]


def test_gradient_reaches_only_what_supervised_positions_read():
    documents = [(4, 6), (5, 0)]
    drafter, batch = build(), pack(documents, 16, tokens_of(documents))
    labels = Labels(16)
    labels.taps.requires_grad_()
    labels.probabilities.requires_grad_()
    run(drafter, batch, labels, 2)[0].backward()
    touched = labels.taps.grad.abs().sum(-1) > 0
    # Position 8 feeds no draft: the last one, of token 9, starts at 7. The second document has no response.
    assert touched.tolist() == [True] * 8 + [False] * 8
    assert labels.probabilities.grad is None


def test_predictions_outside_the_draft_vocabulary_are_misses_without_gradient():
    drafter, batch = build(), pack([(2, 6)], 8, tokens_of([(2, 6)]))
    labels = Labels(8)
    labels.choice[:] = -1
    loss, stats = run(drafter, batch, labels, 2)
    assert loss.item() == 0.0
    assert stats.tolist() == [[0, 0], [0, 0], [0, 0], [6, 5]]
    assert all(g.abs().sum() == 0 for g in gradients(drafter, loss))


def test_filler_only_row_has_zero_loss_and_finite_zero_gradient():
    drafter = build()
    batch = pack([], 8, [])
    loss, stats = run(drafter, batch, Labels(8), 3)
    assert loss.item() == 0.0 and stats.abs().sum() == 0
    assert all(g.abs().sum() == 0 for g in gradients(drafter, loss))


def test_joint_prefix_needs_every_earlier_draft():
    # Tokens 0..3: position 0 drafts tokens 2 and 3, position 1 drafts token 3.
    drafter, batch, labels = build(), pack([(1, 3)], 4, tokens_of([(1, 3)])), Labels(4)

    def stats(first: int, second: int) -> list[list[float]]:
        labels.choice = torch.tensor([-1, first, second, -1])
        return run(drafter, batch, labels, 2)[1].tolist()

    first = next(c for c in range(20) if stats(c, -1)[1][0] == 1)
    second = next(c for c in range(20) if stats(-1, c)[1][1] == 1)
    assert stats(first, second)[2][1] == 1
    assert stats((first + 1) % 20, second)[2][1] == 0
    assert stats(first, (second + 1) % 20)[2][1] == 0
