"""What each forward of our backend attended, and what all of them transferred."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    is_decode: bool
    attended_tokens: dict[str, int]  # by region


class ForwardLog:
    """Follows an InplaceMHAPool from forward to forward."""

    def __init__(self, pool) -> None:
        self._executor, self._page_size = pool.executor, pool.page_size
        self.forwards: list[Forward] = []
        for name in ("begin_forward", "begin_device_forward"):
            self._follow(pool, name)

    def _follow(self, pool, name: str) -> None:
        begin = getattr(pool, name)

        def logged(spans, is_decode, **rest):
            plan = begin(spans, is_decode, **rest)
            if plan is None:  # all of it is homed in D, nothing is transferred
                attended = {"D": sum(span.length for span in spans), "C": 0, "T": 0, "stolen": 0}
            else:
                attended = plan.attended_tokens(self._page_size)
            self.forwards.append(Forward(is_decode, attended))
            return plan

        setattr(pool, name, logged)

    def clear(self) -> None:
        self.transfers("decode")
        self.forwards.clear()

    def transfers(self, kind: str) -> dict:
        """Of all forwards of a kind (decode, extend) since `clear`; once, and empty where the executor keeps no account.

        Waits for the GPU. exposed_s is what the compute stream waited for, hidden_s the rest.
        """
        take = getattr(self._executor, "take_transfers", None)
        if take is None:
            return {}
        taken, forwards = take()[kind], sum(f.is_decode == (kind == "decode") for f in self.forwards)
        return {
            "forwards": forwards,
            "transferred_bytes": taken.bytes,
            "transfer_s": taken.transfer_s,
            "hidden_s": taken.transfer_s - taken.exposed_s,
            "exposed_s": taken.exposed_s,
        }

    def last_decode(self) -> Forward | None:
        return next((forward for forward in reversed(self.forwards) if forward.is_decode), None)
