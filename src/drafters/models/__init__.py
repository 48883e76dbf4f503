"""Drafter families, one file each, over the layers they share."""

from drafters.models.base import Drafter
from drafters.models.eagle import EagleDrafter, EagleShape
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.models.hydra import HydraDrafter, HydraShape
from drafters.models.medusa import MedusaDrafter, MedusaShape
from drafters.models.medusa2 import Medusa2Drafter, Medusa2Shape
from drafters.models.mtp import MtpDrafter, MtpShape
from drafters.models.small import SmallDrafter, SmallShape

FAMILIES: dict[str, type[Drafter]] = {
    each.family: each
    for each in (EagleDrafter, Eagle3Drafter, HydraDrafter, MedusaDrafter, Medusa2Drafter, MtpDrafter, SmallDrafter)
}

__all__ = [
    "FAMILIES",
    "Drafter",
    "EagleDrafter",
    "EagleShape",
    "Eagle3Drafter",
    "Eagle3Shape",
    "HydraDrafter",
    "HydraShape",
    "MedusaDrafter",
    "MedusaShape",
    "Medusa2Drafter",
    "Medusa2Shape",
    "MtpDrafter",
    "MtpShape",
    "SmallDrafter",
    "SmallShape",
]
