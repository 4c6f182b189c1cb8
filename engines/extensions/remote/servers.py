"""Pool of rollout servers, with load balancing, failover and probes of servers that failed."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.extensions.wire.client import START, HttpClient, Reply, is_success, read_retry_after
from fluvial.engines.extensions.wire.decode import WireError
from fluvial.engines.sampling.config import ServersConfig

T = TypeVar("T")

READY = "/health_generate"
FIRST_PROBE, LAST_PROBE = 0.5, 15.0  # seconds until a failed server is probed; doubles from one probe to the next
PROBE_TIMEOUT = 10.0  # seconds
TRIES = 4  # failures of a request, on any servers, before it is given up
BUSY = 0.5  # pause of a server that answered 429 without Retry-After, in seconds
ELSEWHERE = (408, 409, 429)  # statuses below 500 with which the request goes to another server


class Server:
    """Server, with its clients and its state."""

    def __init__(self, url: str, config: ServersConfig) -> None:
        admin = config.admin_env or config.key_env
        self.client = HttpClient(
            url,
            timeout=config.timeout,
            patience=0.0,
            key_env=config.key_env,
            in_flight=config.in_flight,
            most_mb=config.most_mb,
        )
        self.control = HttpClient(url, timeout=config.timeout, patience=min(START, config.patience), key_env=admin)
        self.probe = HttpClient(url, timeout=min(PROBE_TIMEOUT, config.timeout), patience=0.0, key_env=config.key_env)
        self.in_flight = 0
        self.problem = ""  # why it gets no requests; empty if it does
        self.is_ready = True  # whether weights can be pushed to it, as of the last probe
        self.busy_until, self.probe_at, self.probe_delay = 0.0, 0.0, FIRST_PROBE

    @property
    def address(self) -> str:
        """Address of the server."""
        return self.client.address


class ServerPool:
    """Interchangeable servers. A request goes to the server with the fewest requests, and to another one if that fails.

    A server that does not answer is suspended until it is ready again and `revive` succeeds.

    Args:
        revive: function that brings a server that has come back to the state of the others; returns the problem, or None.

    Raises:
        UsageError: an address is invalid, or named twice.
    """

    def __init__(
        self, urls: Sequence[str], config: ServersConfig, *, revive: Callable[[Server], str | None] = lambda server: None
    ) -> None:
        self.servers = [Server(url, config) for url in urls]
        if len({server.address for server in self.servers}) < len(self.servers):
            raise UsageError(f"`rollout.source` names a server twice: {', '.join(urls)}")
        self.in_flight, self.patience, self.revive = config.in_flight, config.patience, revive
        self._changed, self._closed = threading.Condition(), False
        self._last_good = 0.0
        self._prober: threading.Thread | None = None
        self._pushes = 0  # number of pushes of weights

    @property
    def live(self) -> list[Server]:
        """Servers that get requests."""
        with self._changed:
            return [server for server in self.servers if not server.problem]

    @property
    def ready(self) -> list[Server]:
        """Servers that weights can be pushed to: live ones, and those that are back without weights."""
        with self._changed:
            return [server for server in self.servers if server.is_ready]

    def ask(self, path: str, body: bytes, read: Callable[[Reply, str], T]) -> T:
        """Return the result of `read` for the first usable reply. Thread-safe.

        Args:
            read: function of a reply and the server's address; raises WireError for a reply that cannot be used.

        Raises:
            RunError: the request is wrong, failed `TRIES` times, or no server answers for `patience` seconds.
        """
        failures, since, avoid = 0, None, None
        while True:
            server = self._take(avoid)
            if server is None:
                since = time.monotonic() if since is None else since
                self._check_patience(since)
                continue
            reply, problem = None, ""
            try:
                reply, problem = server.client.attempt(path, body)
                if reply is not None and is_success(reply):
                    answer = read(reply, server.address)
                    with self._changed:
                        self._last_good, server.probe_delay = time.monotonic(), FIRST_PROBE
                    return answer
            except WireError as error:
                problem = f"{server.address}{path} sent a reply that cannot be used: {error}"
            except RunError as error:  # too large
                problem = str(error)
            finally:
                with self._changed:
                    server.in_flight -= 1
                    self._changed.notify_all()
            status = 0 if reply is None else reply.status
            if 300 <= status < 500 and status not in ELSEWHERE:
                raise RunError(problem)
            failures += status != 429
            if failures >= TRIES:
                raise RunError(f"{problem}; {failures} tries failed")
            with self._changed:
                if status == 429:
                    server.busy_until = time.monotonic() + max(read_retry_after(reply), BUSY)
                else:
                    self._suspend(server, problem)
            since, avoid = time.monotonic() if since is None else since, server
            self._check_patience(since)

    def wait(self, since: float) -> None:
        """Wait until weights can be pushed to a server.

        Args:
            since: start of the waiting time, of the monotonic clock.

        Raises:
            RunError: no server was ready for `patience` seconds.
        """
        self._check_patience(since)
        while not self.ready:
            self._check_patience(since)
            with self._changed:
                self._changed.wait(0.05)

    def keep(self, addresses: Collection[str], reasons: dict[str, str] | None = None) -> None:
        """Send requests only to the servers with these addresses, which have the current weights."""
        with self._changed:
            self._pushes += 1
            for server in self.servers:
                if server.address in addresses:
                    server.problem, server.is_ready, server.probe_delay = "", True, FIRST_PROBE
                else:
                    reason = (reasons or {}).get(server.address, server.problem)
                    self._suspend(server, reason or f"{server.address} did not get the current weights")
            self._changed.notify_all()

    def drop(self, server: Server, problem: str) -> None:
        """Send no requests to a server until a probe succeeds."""
        with self._changed:
            self._suspend(server, problem)

    def remove(self, addresses: Collection[str]) -> bool:
        """Remove servers for good; return whether one is left."""
        with self._changed:
            self.servers = [server for server in self.servers if server.address not in addresses]
            return bool(self.servers)

    def close(self) -> None:
        """End the thread of the probes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, avoid: Server | None) -> Server | None:
        """Return a free server and count a request to it; None after a short wait without one."""
        with self._changed:
            now = time.monotonic()
            ready = [server for server in self.servers if not server.problem and server.busy_until <= now]
            free = [server for server in ready if server.in_flight < self.in_flight]
            if not free:
                self._changed.wait(0.05)
                return None
            server = min(free, key=lambda each: (each is avoid, each.in_flight))
            server.in_flight += 1
            return server

    def _suspend(self, server: Server, problem: str) -> None:
        """Send no requests to a server until a probe succeeds; the caller holds the lock."""
        server.is_ready = False
        if not server.problem:
            server.probe_at = time.monotonic() + server.probe_delay
        server.problem = problem
        if self._prober is None and not self._closed:
            self._prober = threading.Thread(target=self._probe_until_closed, name="fluvial probes of servers", daemon=True)
            self._prober.start()

    def _check_patience(self, since: float) -> None:
        """Raise RunError if no server has answered for too long and no request is in flight."""
        with self._changed:
            last = max(since, self._last_good)
            if time.monotonic() - last <= self.patience or any(server.in_flight for server in self.servers):
                return
            problems = {server.problem or f"{server.address} is busy" for server in self.servers}
            raise RunError(f"no server has answered for {time.monotonic() - last:.0f} s: {'; '.join(sorted(problems))}")

    def _probe_until_closed(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=0.05)
                if self._closed:
                    return
                now, pushes = time.monotonic(), self._pushes
                due = [server for server in self.servers if server.problem and server.probe_at <= now]
            for server in due:
                problem = self._probe(server)
                with self._changed:
                    if self._pushes != pushes:  # the result is about earlier weights
                        break
                    if problem is None:
                        server.problem, server.busy_until, server.is_ready = "", 0.0, True
                        self._changed.notify_all()
                    else:
                        server.problem = problem
                        server.probe_delay = min(2 * server.probe_delay, LAST_PROBE)
                        server.probe_at = time.monotonic() + server.probe_delay

    def _probe(self, server: Server) -> str | None:
        """Return why a server is not back; None if it is."""
        try:
            reply, problem = server.probe.attempt(READY)
            server.is_ready = is_success(reply)
            return self.revive(server) if server.is_ready else problem
        except (FluvialError, WireError) as error:
            return str(error)
