"""The draft vocabulary of a public drafter: d2t and t2d, one of them, a token_map, or none where it is the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.errors import ContractError
from drafters.public.folder import PublicFolder


@dataclass(frozen=True)
class RowMap:
    """ids int64 [Vd]: the target id that each row of the drafter's output head stands for. others: maps by title that
    the same tensors would give if they were read otherwise."""

    ids: Tensor
    others: dict[str, Tensor]

    def tensors(self, vocab_size: int) -> dict[str, Tensor]:
        """d2t offsets [Vd] and t2d flags [V] of the rows in ascending order of their ids."""
        ordered = self.ids.sort().values
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ordered] = True
        return {"d2t": ordered - torch.arange(len(ordered)), "t2d": t2d}

    def order(self, head: Tensor) -> Tensor:
        """Rows of an output head [Vd, H] in ascending order of their ids."""
        return head if bool((self.ids.diff() > 0).all()) else head[self.ids.argsort()]


def row_map(folder: PublicFolder, tensors: dict[str, Tensor], size: int, vocab_size: int) -> RowMap:
    """The map of a drafter with `size` draft ids, taken out of `tensors`; errors name d2t, t2d or token_map.

    d2t decides where it is there, as it does in engines, which ignore t2d.
    """
    d2t, t2d, listed = (tensors.pop(name, None) for name in ("d2t", "t2d", "token_map"))
    where = _Where(folder, size, vocab_size)
    if listed is not None:
        return RowMap(where.checked("token_map", where.sized("token_map", listed, size)), {})
    by_flags = None
    if t2d is not None:
        flags = where.sized("t2d", t2d, vocab_size).bool()
        by_flags = flags.nonzero().flatten()
    if d2t is None:
        if by_flags is not None:
            return RowMap(where.sized("the kept ids of t2d", by_flags, size), {})
        if size != vocab_size:
            raise where.misfit(f"d2t and t2d are missing, but it has {size} draft ids of {vocab_size}")
        return RowMap(torch.arange(size), {})
    numbers = where.sized("d2t", d2t, size).to(torch.int64)
    return _of_numbers(where, numbers, by_flags)


def _of_numbers(where: _Where, d2t: Tensor, by_flags: Tensor | None) -> RowMap:
    """As offsets, which is the format's rule, or as absolute ids where only they can be or where t2d says so."""
    readings = {"d2t read as offsets": torch.arange(len(d2t)) + d2t, "d2t read as absolute ids": d2t}
    fitting = {title: ids for title, ids in readings.items() if where.problem(ids) is None}
    if not fitting:
        problem = where.problem(readings["d2t read as offsets"])
        raise where.misfit(f"d2t cannot be a map, neither of offsets nor of ids: {problem}")
    sure = [title for title, ids in fitting.items() if by_flags is not None and torch.equal(ids, by_flags)]
    title = sure[0] if sure else next(iter(fitting))
    ids = fitting.pop(title)
    if sure:
        return RowMap(ids, {})
    if by_flags is not None and len(by_flags) == len(ids):
        fitting["the ids of t2d in ascending order"] = by_flags
    elif bool((ids.diff() < 0).any()):
        fitting["the ids of d2t in ascending order"] = ids.sort().values
    return RowMap(ids, fitting)


@dataclass(frozen=True)
class _Where:
    folder: PublicFolder
    size: int
    vocab_size: int

    def misfit(self, problem: str) -> ContractError:
        return ContractError(
            f"{self.folder.path}: {problem}. Fetch the folder again, or set target.path to the model that this drafter "
            "was made for."
        )

    def sized(self, name: str, tensor: Tensor, count: int) -> Tensor:
        if tensor.dim() != 1 or len(tensor) != count or tensor.is_floating_point():
            raise self.misfit(f"{name} is {tensor.dtype} {list(tensor.shape)}, {count} whole numbers are needed")
        return tensor

    def problem(self, ids: Tensor) -> str | None:
        """Why these cannot be different ids of the target; None where they can."""
        outside = ((ids < 0) | (ids >= self.vocab_size)).nonzero().flatten()
        if len(outside):
            return f"row {int(outside[0])} is id {int(ids[outside[0]])} of {self.vocab_size}"
        ordered = ids.sort().values
        twice = ordered[1:][ordered.diff() == 0]
        return f"id {int(twice[0])} has more than one row" if len(twice) else None

    def checked(self, name: str, ids: Tensor) -> Tensor:
        problem = self.problem(ids)
        if problem is not None:
            raise self.misfit(f"{name}: {problem}")
        return ids.to(torch.int64)
