"""Validation bounds every number of the sampling parameters."""

import math
from typing import Any

import pytest

from tests.schemas.samples import PARAMS
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.params_validation import params_problems

NUMBERS = [
    name for name in SamplingParams.__struct_fields__ if type(getattr(PARAMS, name)) in (int, float)
]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_numeric_parameter_has_a_range(name: str) -> None:
    wrong: Any = math.nan if isinstance(getattr(PARAMS, name), float) else 2**70
    (problem,) = params_problems(SamplingParams(**{name: wrong}))
    assert problem.startswith((f"{name} must", f"{name} holds {wrong}"))
