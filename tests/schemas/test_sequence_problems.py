"""Sequences of tokens, n-grams and forced tokens are checked before a job is sent, with a sentence
that names the field.
"""

import math
from typing import Any

import pytest

from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.params_validation import params_problems

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bad_words_ids": ((5, -1),)}, "bad_words_ids holds -1, which is no token id"),
        ({"bad_words_ids": ((5,), ())}, "bad_words_ids[1] must have at least one id"),
        ({"bad_words_ids": ((5,),) * 1025}, "bad_words_ids may have 1024 entries, not 1025"),
        (
            {"bad_words_ids": ((5,) * 20_000,) * 2},
            "bad_words_ids may have 32768 ids, not 40000",
        ),
        ({"sequence_bias": (((), 1.0),)}, "sequence_bias[0] must have at least one id"),
        ({"sequence_bias": (((-2,), 1.0),)}, "sequence_bias holds -2, which is no token id"),
        (
            {"sequence_bias": (((2,), 1.0), ((3,), NAN))},
            "sequence_bias may have biases of at most 10000, not nan",
        ),
        ({"sequence_bias": (((2,), INF),)}, "biases of at most 10000, not inf"),
        *(
            (
                {"no_repeat_ngram_size": size},
                f"no_repeat_ngram_size must be from 1 to 256, not {size}",
            )
            for size in (0, -1, 257)
        ),
        ({"suppress_tokens": (-1,)}, "suppress_tokens holds -1, which is no token id"),
        ({"suppress_tokens": (1,) * 32769}, "suppress_tokens may have 32768 ids, not 32769"),
        ({"begin_suppress_tokens": (-1,)}, "begin_suppress_tokens holds -1"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id holds -1, which is no token id"),
        ({"forced_eos_token_id": (3, 2**31)}, "forced_eos_token_id holds 2147483648"),
        ({"forced_eos_token_id": ()}, "forced_eos_token_id must have at least one id"),
        (
            {"forced_bos_token_id": 7, "suppress_tokens": (6, 7)},
            "forced_bos_token_id 7 is in suppress_tokens, so it cannot be forced",
        ),
        (
            {"forced_eos_token_id": (8, 9), "suppress_tokens": (9,)},
            "forced_eos_token_id 9 is in suppress_tokens",
        ),
    ],
)
def test_invalid_token_sequences_are_refused_in_one_sentence(
    given: dict[str, Any], says: str
) -> None:
    problems = params_problems(SamplingParams(**given))
    assert len(problems) == 1
    assert says in problems[0]


def test_token_sequences_at_the_limits_are_accepted() -> None:
    allowed = SamplingParams(
        bad_words_ids=((5,) * 32,) * 1024,
        sequence_bias=(((5, 4), -INF), ((6,), 10_000.0)),
        no_repeat_ngram_size=256,
        suppress_tokens=(7,) * 32_768,
        forced_bos_token_id=0,
        forced_eos_token_id=(0, 2**31 - 1),
    )
    assert params_problems(allowed) == []


def test_logs_and_results_do_not_contain_token_sequences() -> None:
    params = SamplingParams(
        bad_words_ids=((5,),), sequence_bias=(((5,), 1.0),), suppress_tokens=(5,),
        begin_suppress_tokens=(5,), no_repeat_ngram_size=2, forced_bos_token_id=3,
    )  # fmt: skip
    assert params.without_content() == SamplingParams(no_repeat_ngram_size=2, forced_bos_token_id=3)
