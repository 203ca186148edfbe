"""Where ranks of a test meet: one process instead of agents and supervisor, with a socket to each rank."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from resihp.executor.group_store import AgentRendezvous, JoinedMeeting
from resihp.protocol import messages as m
from resihp.protocol.channels import LocalChannel
from resihp.protocol.rendezvous import Attendance, Meetings, batches

LIMIT_S = 90.0


def serve(ends: list[socket.socket]) -> None:
    """Pass on what the ranks say to each other, until all have gone."""
    channels = {end.fileno(): (rank, LocalChannel(end)) for rank, end in enumerate(ends)}
    to = [LocalChannel(end) for end in ends]
    meetings: Meetings[int] = Meetings()
    while channels:
        for fileno in select.select(list(channels), [], [])[0]:
            rank, channel = channels[fileno]
            try:
                message = channel.recv(m.MeetingMessage)
            except (EOFError, OSError):
                meetings.leave(rank)
                del channels[fileno]
                continue
            meetings.open(message.meeting)
            if isinstance(message, m.Attend):
                told = {rank: meetings.attend(message.meeting, rank, message.groups)[0]}
            else:
                told = meetings.publish(message.meeting, message.said, rank)
            for other, said in told.items():
                for batch in batches(said):
                    try:
                        to[other].send(m.Published(meeting=message.meeting, said=batch))
                    except OSError:
                        meetings.leave(other)


class Line:
    """A rank's end: a `MeetingPlace`, as over its agent, and a store of torch's for what tests tell each other."""

    def __init__(self, end: socket.socket, port: int) -> None:
        self._channel = LocalChannel(end)
        self._port = port
        self._attended: dict[m.MeetingId, Attendance] = {}
        self._listening = False

    def keys(self) -> Any:
        return torch.distributed.TCPStore("127.0.0.1", self._port, None, False, timeout=timedelta(seconds=LIMIT_S))

    def attend(self, meeting: m.MeetingId, groups: Sequence[str], patience_s: float) -> JoinedMeeting:
        return AgentRendezvous(self._attend).attend(meeting, groups, patience_s)

    def _attend(self, meeting: m.MeetingId, groups: Sequence[str], patience_s: float) -> Attendance:
        attendance = self._attended[meeting] = Attendance(meeting, self._channel.send, patience_s)
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._listen, name="resihp-agent", daemon=True).start()
        self._channel.send(m.Attend(meeting=meeting, groups=tuple(groups)))
        return attendance

    def _listen(self) -> None:
        while True:
            try:
                published = self._channel.recv(m.Published)
            except (EOFError, OSError):
                os._exit(70)
            self._attended[published.meeting].hear(published.said)
