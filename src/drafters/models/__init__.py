"""Drafter families, one file each, over the layers they share."""

from drafters.models.base import Drafter
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.models.medusa import MedusaDrafter, MedusaShape

FAMILIES: dict[str, type[Drafter]] = {each.family: each for each in (Eagle3Drafter, MedusaDrafter)}

__all__ = ["FAMILIES", "Drafter", "Eagle3Drafter", "Eagle3Shape", "MedusaDrafter", "MedusaShape"]
