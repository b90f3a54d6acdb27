"""Jobs done in turn and by a Ray cluster: the same results, also when a node is lost meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit import jobs
from tests.kit.cluster import Nodes, two_nodes
from vlmcompress.utils import workers
from vlmcompress.utils.errors import UserError
from vlmcompress.utils.workers import Failed, Workers


def test_one_worker_starts_a_job_when_its_result_is_needed() -> None:
    begun: list[int] = []
    results = workers.of(None).map(lambda job: begun.append(job) or job * 10, [5, 6, 7])
    assert not begun
    assert next(results) == (0, 50) and begun == [5]
    assert next(results) == (1, 60) and begun == [5, 6]
    results.close()
    assert begun == [5, 6]


def test_one_worker_continues_after_a_users_error_only() -> None:
    results = workers.of(None).map(jobs.square, [3, -1, 2])
    assert list(results) == [(0, 9), (1, Failed("-1 is negative; give a natural number")), (2, 4)]
    with pytest.raises(ZeroDivisionError):
        list(workers.of(None).map(jobs.inverse, [1, 0]))


@pytest.mark.parametrize(
    ("nodes", "query_aware", "size"),
    [
        ([{"CPU": 8.0, "memory": 1e9}], {"num_cpus": 8}, 1),
        ([{"CPU": 8.0}, {"CPU": 32.0}, {"CPU": 16.0}], {"num_cpus": 8}, 3),
        ([{"memory": 1e9}, {"CPU": 0.0}, {"CPU": 4.0}], {"num_cpus": 4}, 1),
        ([{"CPU": 64.0, "GPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}, {"CPU": 96.0}], {"num_gpus": 1, "num_cpus": 4}, 12),
        ([{"GPU": 2.0}], {"num_gpus": 1, "num_cpus": 0}, 2),
        ([{"memory": 1e9}], {"num_cpus": 0}, 0),
    ],
)
def test_shares(nodes: list[dict[str, float]], query_aware: dict[str, float], size: int) -> None:
    assert workers.shares(nodes) == (query_aware, size)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("here", "'here' is not the address of a Ray cluster; write auto, local or HOST:PORT of its head"),
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 ("),
        ("127.0.0.1:99999", "no Ray cluster answers at 127.0.0.1:99999 ("),
    ],
)
def test_bad_addresses_are_refused(address: str, message: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError) as caught:
        workers.of(address)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as Python marks what can't be imported
    with pytest.raises(UserError, match=r"^ray is not installed; pip install '\.\[ray\]'"):
        workers.of("auto")


@pytest.fixture(scope="module")
def nodes() -> Nodes:
    return two_nodes()


@pytest.fixture(scope="module")
def two(nodes: Nodes) -> Iterator[Workers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLMCOMPRESS_PASSED", "yes")
        patch.setenv("NOT_PASSED", "yes")
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        ours = signal.getsignal(signal.SIGTERM)
        with closing(workers.of(nodes.address)) as cluster:
            kept = signal.getsignal(signal.SIGTERM) is ours
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
            assert kept, "Ray's own would end a run with code 15, and no word of how to go on"
            yield cluster


def test_two_nodes_give_the_same_as_one_process(two: Workers) -> None:
    assert (two.name, two.size) == ("ray, 2 workers", 2)
    numbers = [3, 1, -4, 1, 5, -9, 2]
    assert sorted(two.map(jobs.square, numbers), key=lambda outcome: outcome[0]) == list(
        workers.InTurn().map(jobs.square, numbers)
    )
    assert not list(two.map(jobs.square, []))
    with pytest.raises(ZeroDivisionError):
        list(two.map(jobs.inverse, [1, 2, 0, 3]))
    outcome = dict(two.map(jobs.setting, ["VLMCOMPRESS_PASSED", "NOT_PASSED"]))
    assert outcome == {0: "yes", 1: None}


def test_closing_stops_what_is_open(two: Workers, tmp_path: Path) -> None:
    with closing(two.map(jobs.linger, [(str(tmp_path), 0), (str(tmp_path), 1)])) as results:
        assert next(results) == (0, 0)
        assert not (tmp_path / "stopped").exists()
    assert (tmp_path / "stopped").exists()


def test_a_job_that_kills_its_workers_fails(two: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "RETRIES", 1)
    outcomes = dict(two.map(jobs.die, [0, 1, 2]))
    assert (outcomes[0], outcomes[2]) == (0, 2)
    assert isinstance(outcomes[1], Failed) and outcomes[1].reason.startswith("a worker of Ray was lost, 2 times (")


def test_a_lost_nodes_job_is_done_again(
    two: Workers, nodes: Nodes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of two nodes has a job. The first node's may end only after the second node is gone; the second's never there."""
    killed: list[str] = []

    def kill() -> None:
        while not all((tmp_path / str(number)).exists() for number in range(2)):
            time.sleep(0.05)
        killed.append(nodes.kill())
        ran = {(tmp_path / str(number)).read_text().split()[0] for number in range(2)}
        for node in ran - set(killed):
            (tmp_path / node).touch()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        outcomes = dict(two.map(jobs.wait_for_go, [(str(tmp_path), number) for number in range(2)]))
        thread.join()
    finally:
        nodes.complete()
    (left,) = {node for _, node in outcomes.values()}
    assert outcomes == {number: (number, left) for number in range(2)} and left != killed[0]
    starts = sorted((tmp_path / str(number)).read_text().split() for number in range(2))
    assert starts == sorted([[left], [killed[0], left]])
    assert not capfd.readouterr().out, "standard output is for results"
