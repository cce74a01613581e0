"""A bad wire between two hosts: it delays, loses and reorders the frames it carries.

A process with a TAP device at each end, since few kernels have tc's netem.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import sys
import time
from contextlib import suppress

import msgspec

# linux/if_tun.h
TUNSETIFF = 0x400454CA
IFF_TAP = 0x0002
IFF_NO_PI = 0x1000
LARGEST_FRAME = 2**16


class Wire(msgspec.Struct, frozen=True):
    """Two devices, and what happens between them."""

    delay: float  # seconds, of each frame
    jitter: float  # so much more or less: what is delayed less overtakes
    loss: float  # share of the frames
    seed: int
    near: str = ""
    far: str = ""


class Counts(msgspec.Struct):
    """What was done to the frames."""

    carried: int = 0
    lost: int = 0
    overtaken: int = 0


def open_tap(name: str) -> int:
    """Make a TAP device that lives as long as its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(wire: Wire, ends: tuple[int, int], counts: Counts) -> None:
    """Carry frames from each end to the other, for ever."""
    chance = random.Random(wire.seed)
    numbers = itertools.count()
    under_way: list[tuple[float, int, int, bytes]] = []
    arrived = dict.fromkeys(ends, -1)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0.0) if under_way else None
        for end in select.select(ends, [], [], wait)[0]:
            frame = os.read(end, LARGEST_FRAME)
            if chance.random() < wire.loss:
                counts.lost += 1
                continue
            at = time.monotonic() + wire.delay + chance.uniform(-wire.jitter, wire.jitter)
            heapq.heappush(under_way, (at, next(numbers), other[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, number, end, frame = heapq.heappop(under_way)
            with suppress(OSError):  # of an end that is not up yet
                os.write(end, frame)
            counts.carried += 1
            counts.overtaken += number < arrived[end]
            arrived[end] = max(arrived[end], number)


def main() -> None:
    wire = msgspec.json.decode(sys.argv[1], type=Wire)
    counts = Counts()
    try:
        ends = (open_tap(wire.near), open_tap(wire.far))
    except OSError as error:
        print(error, flush=True)
        return
    signal.signal(
        signal.SIGUSR1,
        lambda number, frame: print(msgspec.json.encode(counts).decode(), flush=True),
    )
    print("ready", flush=True)
    carry(wire, ends, counts)


if __name__ == "__main__":
    main()
