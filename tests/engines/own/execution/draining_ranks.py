"""Runs one of two ranks as a worker does, in an engine process that SIGTERM drains. `MODEL`.

Rank 0 prints STEPPING after its first token, and the number of tokens at the end; rank 1 has
nothing to drain.
"""

import asyncio
import os
import signal
import sys

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.process.host import EngineProcess

COUNT = 50


def print_line(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


async def lead(host: EngineProcess, must_end: asyncio.Event) -> None:
    await host.start()
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    host.submit([GenerationRequest(request_id="a", prompt=Prompt((3, 4, 5)), params=params)])
    count = 0
    async for frame in host.frames():
        for event in frame.events:
            count += len(event.token_ids)
            if count == 1:
                print_line("STEPPING")
                await must_end.wait()
                await asyncio.sleep(2)  # the other rank has the message by now
        if count == COUNT:
            break
    print_line(f"TOKENS {count}")
    await host.stop()


async def main(path: str) -> None:
    config = EngineConfig(
        model=path, dtype="float32", device="cpu", num_blocks=64, block_size=4,
        attention="reference",
        tensor_parallel=True, num_threads=1,
    )  # fmt: skip
    host, must_end = EngineProcess(start_of(config), is_alone=False), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, must_end.set)
    if os.environ["RANK"] == "0":  # noqa: TID251 - as torchrun tells it
        await lead(host, must_end)
        return
    starting = asyncio.create_task(host.start())
    await must_end.wait()
    await host.stop()
    try:
        await starting
    except EngineDied:
        print_line("ENDED")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
