"""Passes commands to the engine's loop.

The mailbox has one reader, the loop, and any number of writers. The reader takes all waiting
commands at once and in order, so that requests which arrive together are admitted together.
"""

from __future__ import annotations

import threading

from tokenmill_worker.contract.messages import Command


class Mailbox:
    """A thread-safe queue whose reader takes all messages at once."""

    def __init__(self) -> None:
        self._messages: list[Command] = []
        self._arrived = threading.Condition()

    def put(self, message: Command) -> None:
        with self._arrived:
            self._messages.append(message)
            self._arrived.notify()

    def take_all(self, timeout: float = 0.0) -> list[Command]:
        """Return all messages; if there are none, wait up to `timeout` seconds for one."""
        # reading the list is atomic: no lock while steps run
        if not self._messages and not timeout:
            return []
        with self._arrived:
            if not self._messages and timeout:
                self._arrived.wait(timeout)
            messages, self._messages = self._messages, []
            return messages
