"""Hosts of their own: network namespaces, joined by veth to a bridge on the server's host.

The server has a namespace, too, so nothing of it touches the machine's own network, and
every run can use the same addresses.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec
from django.db import connection

from myxo_jobs.databases.postgres import NOTICE_A_DEAD_NETWORK
from tests.chaos.database import LEAVING
from tests.chaos.leftovers import do, is_left_over, name_of, need
from tests.chaos.rig import ROOT, Rig, Tree
from tests.chaos.server import Server
from tests.chaos.wire import Counts, Wire

SERVER = "10.77.0.1"

# What the docs advise for both ends of connections that cross a network.
OPTIONS = NOTICE_A_DEAD_NETWORK
SERVER_OPTIONS = {
    "tcp_keepalives_idle": 5,
    "tcp_keepalives_interval": 3,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 12_000,
}


class Host(msgspec.Struct, frozen=True):
    """A network namespace with one address."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def sessions(self) -> set[int]:
        """Return the local ports of its established connections to the server."""
        listed = do(*self.inside, "ss", "-Htn", "state", "established", "dst", SERVER)
        return {int(line.split()[2].rpartition(":")[2]) for line in listed.splitlines()}


class Network:
    """A server's host and some others, until the surroundings of the run are undone."""

    def __init__(self, rig: Rig, hosts: int) -> None:
        need("ip", "iptables", "ss", "setpriv")
        _sweep()
        self._rig = rig
        self._server = Host(name_of("server"), SERVER)
        self._stack = rig.surroundings.enter_context(ExitStack())
        self._add_namespace(self._server)
        self._on_server("ip", "link", "add", "br0", "type", "bridge")
        self._on_server("ip", "address", "add", f"{SERVER}/24", "dev", "br0")
        self._on_server("ip", "link", "set", "br0", "up")
        self.hosts = [
            Host(name_of(f"host{number}"), f"10.77.0.{10 + number}")
            for number in range(1, hosts + 1)
        ]

    def join(self) -> None:
        """Join the hosts to the bridge by veth, and move the server there."""
        for place, host in enumerate(self.hosts):
            self._add_namespace(host)
            end = f"to{place}"
            self._on_server(
                "ip", "link", "add", end, "type", "veth", "peer", "eth0", "netns", host.name
            )
            self._plug(host, end)
        self._move_server()

    def join_by_wires(self, wire: Wire) -> list[subprocess.Popen[str]]:
        """Join the hosts by wires that a process of ours carries each frame over."""
        processes = []
        for place, host in enumerate(self.hosts):
            self._add_namespace(host)
            near, far = f"mx{os.getpid() % 10**6}n{place}", f"mx{os.getpid() % 10**6}f{place}"
            order = msgspec.structs.replace(wire, near=near, far=far, seed=wire.seed + place)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.wire", msgspec.json.encode(order).decode()],
                cwd=ROOT, text=True, stdout=subprocess.PIPE,
            )  # fmt: skip
            self._stack.callback(_end, process)
            assert process.stdout is not None
            obstacle = process.stdout.readline().strip()
            if obstacle != "ready":
                raise RuntimeError(f"the wire: {obstacle}")
            do("ip", "link", "set", near, "netns", self._server.name)
            do("ip", "link", "set", far, "netns", host.name)
            do(*host.inside, "ip", "link", "set", far, "name", "eth0")
            self._plug(host, near)
            processes.append(process)
        self._move_server()
        return processes

    def start_workers(self, host: Host, *, processes: int = 0, advised: bool = True) -> Tree:
        """Start `runjobs` on a host, with the OPTIONS that the docs advise or with none."""
        return self._rig.start_workers(
            processes=processes,
            inside=host.inside,
            MYXO_TEST_POSTGRES=f"postgresql://postgres@{SERVER}/postgres",
            MYXO_CHAOS_OPTIONS=json.dumps(OPTIONS if advised else {}),
        )

    @contextmanager
    def cut(self, host: Host, port: int | None = None) -> Iterator[None]:
        """Drop, both ways and without a word, what a host, or one of its ports, says and hears."""
        there = () if port is None else ("-p", "tcp", "--dport", str(port))
        back = () if port is None else ("-p", "tcp", "--sport", str(port))
        rules = (
            ("INPUT", "-s", host.address, *back, "-j", "DROP"),
            ("OUTPUT", "-d", host.address, *there, "-j", "DROP"),
        )
        for rule in rules:
            self._on_server("iptables", "-w", "-I", *rule)
        yield
        for rule in rules:
            self._on_server("iptables", "-w", "-D", *rule)

    def _add_namespace(self, host: Host) -> None:
        do("ip", "netns", "add", host.name)
        self._stack.callback(_remove, host.name)
        do(*host.inside, "ip", "link", "set", "lo", "up")

    def _plug(self, host: Host, end: str) -> None:
        self._on_server("ip", "link", "set", end, "master", "br0", "up")
        do(*host.inside, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        do(*host.inside, "ip", "link", "set", "eth0", "up")

    def _move_server(self) -> None:
        server = self._rig.server
        self._rig.expected_log += LEAVING
        connection.close()
        server.stop("fast")
        with (server.data / "pg_hba.conf").open("a") as rules:
            rules.write(f"host all all {SERVER}/24 trust\n")
        server.inside = self._server.inside
        self._stack.callback(_let_go, server)
        server.options |= {"listen_addresses": SERVER, **SERVER_OPTIONS}
        server.start()

    def _on_server(self, *command: str) -> None:
        do(*self._server.inside, *command)


def counts_of(process: subprocess.Popen[str]) -> Counts:
    """Return what a wire has done to the frames so far."""
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    return msgspec.json.decode(process.stdout.readline(), type=Counts)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _let_go(server: Server) -> None:
    """Let a server be stopped from anywhere, since its host's name will be gone."""
    server.inside = ()


def _remove(name: str) -> None:
    do("ip", "netns", "delete", name)


def _sweep() -> None:
    """Remove what killed runs have left behind."""
    for line in do("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if is_left_over(name):
            for pid in do("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _remove(name)
