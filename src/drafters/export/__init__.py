"""Exports in the ecosystem's own formats, one file per dialect."""

from drafters.export.card import DataSummary
from drafters.export.native import describe_drafter, export_drafter, load_drafter

__all__ = ["DataSummary", "describe_drafter", "export_drafter", "load_drafter"]
