"""Each sampling parameter is an option of `tokenmill submit`."""

from typing import cast

import pytest

from tests.client.cli.support import Shell
from tokenmill import Client
from tokenmill.cli.sampling_options import HELP, WITHOUT_OPTION
from tokenmill_schemas.codec import decode_request
from tokenmill_schemas.generation import SamplingParams

pytestmark = pytest.mark.redis


def test_every_sampling_parameter_is_an_option_or_an_exception() -> None:
    fields = set(SamplingParams.__struct_fields__)
    assert set(HELP) | WITHOUT_OPTION == fields
    assert not set(HELP) & WITHOUT_OPTION


def test_options_of_every_kind_reach_the_request(shell: Shell, client: Client) -> None:
    done = shell(
        "submit", "Hello", "-n", "5", "-t", "0", "--top-k", "0", "--stop", "a", "--stop", "b",
        "--stop-token-ids", "5", "--stop-token-ids", "7", "--ignore-eos", "--logprobs", "2",
        "--lora", "poems", "--n", "2", "--tenant", "acme", "--continue-final-message", "--chat",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    payload = cast("bytes", client._redis.hget(client.keys.job(done.stdout.strip()), "request"))
    request = decode_request(payload)
    assert request.params == SamplingParams(
        max_tokens=5, temperature=0.0, top_k=0, stop=("a", "b"), stop_token_ids=(5, 7),
        ignore_eos=True, logprobs=2, lora="poems", n=2,
    )  # fmt: skip
    assert (request.tenant, request.continue_final_message) == ("acme", True)


def test_a_bias_is_json_from_token_ids_to_numbers(shell: Shell, client: Client) -> None:
    done = shell("submit", "Hello", "--logit-bias", '{"5": 10, "7": -0.5}')
    assert done.exit_code == 0, done.stderr
    payload = cast("bytes", client._redis.hget(client.keys.job(done.stdout.strip()), "request"))
    assert decode_request(payload).params.logit_bias == {5: 10, 7: -0.5}


def test_token_rules_are_options(shell: Shell, client: Client) -> None:
    done = shell(
        "submit", "Hello", "--bad-words-ids", "[[5, 4]]", "--sequence-bias", "[[[6, 7], 2.5]]",
        "--no-repeat-ngram-size", "3", "--suppress-tokens", "8", "--suppress-tokens", "9",
        "--begin-suppress-tokens", "10", "--forced-bos-token-id", "0", "--forced-eos-token-id", "2",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    payload = cast("bytes", client._redis.hget(client.keys.job(done.stdout.strip()), "request"))
    assert decode_request(payload).params == SamplingParams(
        bad_words_ids=((5, 4),),
        sequence_bias=(((6, 7), 2.5),),
        no_repeat_ngram_size=3,
        suppress_tokens=(8, 9),
        begin_suppress_tokens=(10,),
        forced_bos_token_id=0,
        forced_eos_token_id=(2,),
    )
