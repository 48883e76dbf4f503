"""Exports in the ecosystem's own formats, one file per dialect."""

from drafters.export.card import DataSummary
from drafters.export.official import describe_drafter, export_eagle3, load_eagle3

__all__ = ["DataSummary", "describe_drafter", "export_eagle3", "load_eagle3"]
