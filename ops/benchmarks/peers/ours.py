"""Our bare engine as a measured engine, without queue or text."""

import gc
import os
import time
from collections.abc import Sequence

from ops.benchmarks.measure.figures import Arrivals
from ops.benchmarks.measure.generation import generate
from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round
from ops.benchmarks.measure.workloads import WorkloadRequest
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines import kind_for
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.execution.warm_up import warm_up
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner


class Tokenmill(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        # from here on as in the worker's engine process
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._engine = self._load(EngineConfig(**options.engine_settings()))
        warm_up(self._engine.runner, lambda _message, _fraction: None)
        gc.collect()
        gc.freeze()
        self.description = self._engine.runner.info.description

    def _load(self, config: EngineConfig) -> Engine:
        if kind_for(config.model) == "own":
            return Engine.load(config)
        return Engine.around(SyntheticRunner.load(config))

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        # otherwise a later round finds the prompts of an earlier one
        self._engine.scheduler.reset_prefix_cache()
        params = [
            SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True)
            for r in requests
        ]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        batch_sizes, arrivals = [], Arrivals()
        started = time.perf_counter()

        def note(events: Sequence[TokenEvent]) -> None:
            now = time.perf_counter() - started
            if given := {event.request_id for event in events if event.token_ids}:
                first.update((name, now) for name in given if name not in first)
                last.update((name, now) for name in given)
                batch_sizes.append(len(given))
                arrivals.add(now, sum(len(event.token_ids) for event in events))

        answers = generate(self._engine, [request.prompt for request in requests], params, note)
        wall_s = time.perf_counter() - started
        first_s, last_s = ([times[name] for name in answers] for times in (first, last))
        return Round(
            wall_s=wall_s,
            tokens=[answer.token_ids for answer in answers.values()],
            first_s=first_s,
            steady_tok_s=arrivals.steady_rate(first_s, last_s),
            batch_sizes=batch_sizes,
        )

    def close(self) -> None:
        self._engine.stop(drain=False)
