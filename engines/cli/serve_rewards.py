"""`fluvial serve-rewards NAME...` and `fluvial rewards vote`: serve rewards and the voting page over HTTP."""

import math
import secrets
from dataclasses import dataclass
from pathlib import Path

from fluvial.core.checks import check_fields
from fluvial.engines.cli.parse import check_server_packages, flags_in_errors, parse_config
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class ServeRewardsConfig:
    """Serve rewards over HTTP, in the JSON of Flow-Factory (POST /compute) and of UniRL (POST /score).

    A run uses them as `--rewards unirl:url=http://HOST:PORT,rewards=NAME`. Set host to serve other machines; the environment
    variable FLUVIAL_SERVE_KEY must then hold an API key, which clients send (key_env).

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one, which is printed.
        batch: Largest number of samples per call of a reward.
        linger_ms: Milliseconds that a request waits for others to fill a batch.
        most_mb: Largest request, in megabytes.
        most_megapixels: Pixels of all images of a request, in millions.
        most_waiting: Largest number of samples that wait for a reward; further requests are answered with 429.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    batch: int = 16
    linger_ms: float = 5.0
    most_mb: int = 64
    most_megapixels: int = 128
    most_waiting: int = 1024

    def __post_init__(self) -> None:
        limits = {name: (1, math.inf) for name in ("batch", "most_mb", "most_megapixels", "most_waiting")}
        check_fields(self, "", port=(0, 65535), linger_ms=(0, 10_000), **limits)


@dataclass(frozen=True)
class VoteConfig:
    """Serve a page on which people compare two images of a group at a time, for runs that use the reward votes.

    The page and the runs need a key, which is printed; FLUVIAL_SERVE_KEY sets one. Votes are appended to
    OUT/preferences.jsonl and count again after a restart. fluvial train dpo --preferences OUT trains on them.

    Args:
        out: Folder for the votes and their images; one with votes is continued.
        rounds: Number of times that each image of a group is compared with two others.
        host: Address to listen on; set it for voters on other machines.
        port: Port to listen on; 0 takes a free one, which is printed.
    """

    out: Path = Path("votes")
    rounds: int = 1
    host: str = "127.0.0.1"
    port: int = 8700

    def __post_init__(self) -> None:
        check_fields(self, "", rounds=(1, 1000), port=(0, 65535))


def run(args: list[str]) -> None:
    """Serve the named rewards until SIGINT or SIGTERM."""
    count = next((number for number, word in enumerate(args) if word.startswith("-")), len(args))
    names, flags = args[:count], args[count:]
    config = parse_config(ServeRewardsConfig(), "fluvial serve-rewards", flags)
    if not names:
        raise UsageError("serve-rewards needs the names of rewards, e.g. fluvial serve-rewards pickscore ocr --port 8000")
    with flags_in_errors(config):
        serve_rewards(names, config)


def serve_rewards(names: list[str], config: ServeRewardsConfig) -> None:
    """Load the rewards and serve them."""
    check_server_packages("serve-rewards")
    from fluvial.engines.extensions.servers.asgi import read_key, serve
    from fluvial.engines.extensions.servers.formats import ScoringLimits
    from fluvial.engines.extensions.servers.rewards import RewardService, build_application
    from fluvial.engines.scoring.registry import select

    key = read_key(config.host)
    rewards = {}
    for name, (reward, weight) in select({}, names).items():
        if weight != 1:
            raise UsageError(
                f"reward {name!r} has the weight {weight:g}, but a server returns plain scores: set the weight in the run"
            )
        short = name.rpartition(":")[2]  # score for mine:score
        rewards[name if short in rewards else short] = reward
    limits = ScoringLimits(most_bytes=config.most_mb * 1_000_000, most_pixels=config.most_megapixels * 1_000_000)
    service = RewardService(
        rewards, limits=limits, batch=config.batch, linger=config.linger_ms / 1000, most_waiting=config.most_waiting
    )

    def print_ready(address: str) -> None:
        print(f"serving {', '.join(rewards)} on {address}", flush=True)

    serve(build_application(service, key=key), host=config.host, port=config.port, ready=print_ready)


def run_vote(args: list[str]) -> None:
    """Serve the page of votes until SIGINT or SIGTERM."""
    config = parse_config(VoteConfig(), "fluvial rewards vote", args)
    with flags_in_errors(config):
        serve_votes(config)


def serve_votes(config: VoteConfig) -> None:
    """Open the folder of votes and serve it."""
    check_server_packages("rewards vote")
    from fluvial.engines.extensions.servers.asgi import KEY_ENV, check_address, read_key, serve
    from fluvial.engines.extensions.votes.records import VoteFolder
    from fluvial.engines.extensions.votes.service import VoteService, application

    key = read_key(config.host) or secrets.token_urlsafe(16)
    check_address(config.host, config.port)
    folder = VoteFolder(config.out)

    def print_ready(address: str) -> None:
        print(f"{len(folder.votes)} votes in {config.out}; the page for voters is {address}/#key={key}")
        print(
            f"train on them with {KEY_ENV}={key} fluvial train ... --rewards votes:url={address},key_env={KEY_ENV}",
            flush=True,
        )

    app = application(VoteService(folder, rounds=config.rounds), key=key)
    serve(app, host=config.host, port=config.port, ready=print_ready)
    print(f"{len(folder.votes)} votes in {config.out}")
