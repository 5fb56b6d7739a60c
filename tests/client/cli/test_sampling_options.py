"""Each sampling parameter is an option of `tokenmill submit`."""

from typing import cast

import pytest

from tests.client.cli.support import Shell
from tokenmill import Client
from tokenmill.cli.sampling_options import HELP, WITHOUT_OPTION
from tokenmill_schemas.codec import decode_request
from tokenmill_schemas.generation import SamplingParams

pytestmark = pytest.mark.redis


def test_every_sampling_parameter_is_an_option_or_named_as_none() -> None:
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
