"""Fetching: a trace's file from its publisher's own address, into the data folder, checked; only ever when asked for."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .workloads.origin import File, Origin, sha256

log = logging.getLogger(__name__)


class NotFetched(Exception):
    """A file could not be had; the message is one line for a person."""


def target_folder(to: str | None) -> Path:
    """Where a download goes: `to`, else LENGTHWISE_DATA. Raises NotFetched when neither says."""
    folder = to or os.environ.get("LENGTHWISE_DATA")
    if not folder:
        raise NotFetched("no folder to put it in: set LENGTHWISE_DATA, or give to=FOLDER")
    return Path(folder).expanduser()


def addressed(origin: Origin) -> File:
    """The first file of an origin that has an address. Raises NotFetched, saying what to do instead, when none has."""
    for file in origin.files:
        if file.url is not None:
            return file
    raise NotFetched(f"{origin.what} has no address to fetch it from: {origin.how} ({origin.page})")


def fetch(origin: Origin, to: str | None = None) -> Path:
    """Download the file of an origin and return its path; one that is there already with the right content stays.

    Raises NotFetched in one line: no address, no folder, no network, or another content than recorded (which is not kept).
    """
    import pooch

    file, folder = addressed(origin), target_folder(to)
    path = folder / file.name
    if path.is_file() and file.sha256 is not None and sha256(path) != file.sha256:
        raise NotFetched(f"{path} is there with another content than {file.url} has: move it away first")
    pooch.get_logger().setLevel(logging.WARNING)
    try:
        got = pooch.retrieve(file.url, file.sha256 and f"sha256:{file.sha256}", fname=file.name, path=folder)
    except OSError as error:  # what requests and urllib raise when there is no network, too
        raise NotFetched(f"cannot fetch {file.url}: {_reason(error)}. {by_hand(file)}") from error
    except ValueError as error:
        raise NotFetched(f"{file.url} has another content than recorded: {' '.join(str(error).split())[:300]}") from error
    log.info("fetched %s", got)
    return Path(got)


def _reason(error: OSError) -> str:
    """One line; what a network library says of a failed connection is several."""
    if "Connection" in type(error).__name__ or "Timeout" in type(error).__name__:
        return f"no connection ({type(error).__name__})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def by_hand(file: File) -> str:
    return f"Without a network here, fetch it elsewhere and put it below LENGTHWISE_DATA as {file.name}"
