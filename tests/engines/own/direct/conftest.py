"""An engine without a model, and a manager around it, for the tests of direct use."""

import pytest

from tests.support.collecting_engine import CollectingEngine
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own import ContinuousBatchingManager, EngineConfig
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = 800


def load(**changes):
    settings = {"model": "synthetic", "num_blocks": 256, "block_size": 8, "max_num_seqs": 32}
    return CollectingEngine.around(SyntheticRunner.load(EngineConfig(**(settings | changes))))


@pytest.fixture
def engine():
    with load() as loaded:
        yield loaded


@pytest.fixture
def manager(engine):
    with ContinuousBatchingManager(engine, GREEDY) as started:
        yield started
