"""Everything that decodes: trees, the one acceptance rule, caches, the engine and its measurements."""

from runtime.custom import outrider_generate
from runtime.engine import Engine
from runtime.request import Result
from runtime.sampling import SamplingParams

__all__ = ["Engine", "Result", "SamplingParams", "outrider_generate"]
