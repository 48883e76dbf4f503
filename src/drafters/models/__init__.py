"""Drafter families, one file each, over the layers they share."""

from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape

__all__ = ["Eagle3Drafter", "Eagle3Shape"]
