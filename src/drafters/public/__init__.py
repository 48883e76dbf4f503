"""Drafters made elsewhere: read in their own formats, which carry no contract, and turned into exports."""

from drafters.public.load import load_public, read_public, resolve_public

__all__ = ["load_public", "read_public", "resolve_public"]
