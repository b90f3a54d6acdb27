"""Memory of a server's processes while it works, on Linux."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from watching import watching

PERIOD = 1.0  # seconds between two samples
FEWEST = 5  # samples of a fifth of the requests
ALLOWED = 0.01  # share of its memory by which a server may grow while it answers the second half of the requests
ALLOWED_MB = 16.0  # or that much, if it is more


def resident_mb(session: int) -> float:
    """Measure the memory that the processes of a session hold for themselves or share with one another (anonymous and
    shared; not files, which the kernel may drop), in megabytes."""
    return (
        sum(_own_kb(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit() and _in(folder, session))
        / 1e3
    )


def _in(process: Path, session: int) -> bool:
    try:
        # pid (name) state parent group session ...; the name may hold spaces and brackets
        return int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session
    except (OSError, IndexError):  # the process has just ended
        return False


def _own_kb(process: Path) -> float:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1.024


@contextmanager
def watch(session: int, finished: Callable[[], int]) -> Iterator[list[tuple[int, float]]]:
    """Within the context, a list that grows by (finished requests, megabytes)."""
    samples: list[tuple[int, float]] = []
    with watching(lambda: samples.append((finished(), round(resident_mb(session), 1))), PERIOD):
        yield samples


def growth_mb(samples: Sequence[tuple[int, float]], requests: int) -> float | None:
    """Growth of memory over the second half of the requests: the median of the last fifth less that of the fifth after the
    middle, as the first half fills caches. None for a soak too short to tell."""
    early = [mb for done, mb in samples if 0.5 * requests <= done < 0.7 * requests]
    late = [mb for done, mb in samples if 0.8 * requests <= done]
    return median(late) - median(early) if min(len(early), len(late)) >= FEWEST else None


def flat(samples: Sequence[tuple[int, float]], requests: int) -> bool:
    """Whether memory grew by no more than is allowed."""
    return (growth_mb(samples, requests) or 0.0) <= max(ALLOWED_MB, ALLOWED * median(mb for _, mb in samples))
