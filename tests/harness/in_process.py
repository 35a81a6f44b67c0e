"""SGLang's scheduler with in-memory channels and an event loop that can be left."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import sglang.srt.managers.scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.utils.watchdog import Watchdog

from .mailbox import Inbox, Outbox


class InProcessScheduler(Scheduler):
    def __init__(self, server_args, port_args) -> None:
        self.inbox = Inbox()
        self.outbox = Outbox()
        # The stock watchdog thread would keep this scheduler alive for ever and, after a
        # long pause between steps, send SIGQUIT to the parent of the test process.
        with mock.patch.object(scheduler_module, "create_scheduler_watchdog", return_value=Watchdog()):
            super().__init__(server_args, port_args)

    def init_ipc_channels(self, port_args) -> None:
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=self.outbox,
            send_to_detokenizer=self.outbox,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    def init_request_receiver(self) -> None:
        self.request_receiver = self.inbox

    def _create_generation_req(self, recv_req, *args, **kwargs):
        req = super()._create_generation_req(recv_req, *args, **kwargs)
        self.outbox.handles[req.rid].req = req
        return req

    def drive(self, enough: Callable[[], bool]) -> None:
        """Run SGLang's event loop; the iteration at whose start `enough()` holds is the last."""

        def on_poll() -> None:
            self.gracefully_exit = enough()

        self.inbox.on_poll = on_poll
        self.gracefully_exit = False
        self.run_event_loop()
