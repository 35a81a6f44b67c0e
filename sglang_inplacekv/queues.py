"""Work queues: one thread each, in order, with tickets. They stand for the streams of a GPU on hosts that have none."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

import torch

from sglang_inplacekv.tickets import Ticket, wait_all

logger = logging.getLogger(__name__)

# Delays of the jitter mode, seconds: mostly around a kernel's length, now and then longer than a layer.
_JITTER_SHORT_S, _JITTER_LONG_S, _JITTER_LONG_ODDS = 0.0005, 0.01, 0.05


class WorkQueue:
    """Runs jobs in the order of submission on its own thread.

    A job starts after every ticket in `after` is done, as a stream waits for events. With a jitter seed each job is
    delayed at random first, so that any missing wait shows as a wrong result.
    """

    def __init__(self, name: str, wait_timeout_s: float, jitter_seed: int | None = None) -> None:
        self.name = name
        self._timeout_s = wait_timeout_s
        self._jitter = None if jitter_seed is None else random.Random(f"{jitter_seed}/{name}")
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"inplacekv-{name}", daemon=True)
        self._thread.start()

    def submit(
        self,
        job: Callable[[], None],
        what: str,
        after: Sequence[Ticket] = (),
        note_wait: Callable[[float], None] | None = None,
    ) -> Ticket:
        """Queue `job`; the returned ticket completes when it has run, or fails with its error.

        note_wait(seconds) is called by the queue's thread with what it stood still for `after`.
        """
        if not self._thread.is_alive():
            raise RuntimeError(f"the {self.name} queue is closed: {what} cannot run")
        done = Ticket(what)
        self._jobs.put((job, what, tuple(after), note_wait, done))
        return done

    def close(self, timeout_s: float = 10.0) -> None:
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(f"the {self.name} queue has not ended after {timeout_s:g} s")

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, what, after, note_wait, done = item
            started_s = time.perf_counter()
            try:
                wait_all(after, self._timeout_s, f"{self.name} queue, before {what},")
                if note_wait is not None:
                    note_wait(time.perf_counter() - started_s)
                self._delay()
                # Grad and inference mode belong to a thread: SGLang's own setting does not reach this one.
                with torch.inference_mode():
                    job()
            except BaseException as error:  # the waiter raises it, on the thread that can act on it
                done.fail(error)
            else:
                done.complete()
            del item, job, after, note_wait, done

    def _delay(self) -> None:
        if self._jitter is None:
            return
        longest = _JITTER_LONG_S if self._jitter.random() < _JITTER_LONG_ODDS else _JITTER_SHORT_S
        time.sleep(self._jitter.random() * longest)
