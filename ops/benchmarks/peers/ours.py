"""Our bare engine in one process, without queue or text; `python -m` runs it as a child process."""

import gc
import os
import time

from ops.benchmarks.measure.collecting_engine import CollectingEngine
from ops.benchmarks.measure.figures import Arrivals
from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest
from tokenmill_worker.engines import kind_for
from tokenmill_worker.engines.own import EngineConfig, SamplingParams
from tokenmill_worker.engines.own.execution.warm_up import warm_up
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner


class Tokenmill(MeasuredEngine):
    def __init__(self, options: EngineOptions) -> None:
        # as the worker sets it for the engine's process
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._engine = self._load(EngineConfig(**options.engine_settings()))
        # as the worker's engine process does
        warm_up(self._engine.runner, lambda _message, _fraction: None)
        gc.collect()
        gc.freeze()
        self.description = self._engine.runner.info.description

    def _load(self, config: EngineConfig) -> CollectingEngine:
        if kind_for(config.model) == "own":
            return CollectingEngine.load(config)
        return CollectingEngine.around(SyntheticRunner.load(config))

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        engine = self._engine
        # otherwise a later round finds the prompts of an earlier one
        engine.scheduler.reset_prefix_cache()
        params = [
            SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True)
            for r in requests
        ]
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        batch_sizes, arrivals = [], Arrivals()
        started = time.perf_counter()
        request_ids = engine.add_requests([request.prompt for request in requests], params)
        while engine.has_work:
            events = engine.step()
            now = time.perf_counter() - started
            given = {event.request_id for event in events if event.token_ids}
            for request_id in given:
                first.setdefault(request_id, now)
                last[request_id] = now
            if given:
                batch_sizes.append(len(given))
                arrivals.add(now, sum(len(event.token_ids) for event in events))
        wall_s = time.perf_counter() - started
        outputs = [engine.result(request_id) for request_id in request_ids]
        if failed := [output.error for output in outputs if output.error]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[:1]}")
        first_s, last_s = ([times[each] for each in request_ids] for times in (first, last))
        return Round(
            wall_s=wall_s,
            tokens=[list(output.token_ids) for output in outputs],
            first_s=first_s,
            steady_tok_s=arrivals.steady_rate(first_s, last_s),
            batch_sizes=batch_sizes,
        )

    def close(self) -> None:
        self._engine.stop(drain=False)


if __name__ == "__main__":
    serve(Tokenmill)
