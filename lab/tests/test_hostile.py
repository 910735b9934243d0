"""Attacks: how delays are counted, which targets a row misses, and what hostile clients report."""

import asyncio
import copy
import time

import pytest

from lab import hostile
from lab.attackers import Attackers
from lab.attacks import ATTACKS
from lab.hostile import Options
from lab.watch import Spans, figures
from peagle_jax.config import ConfigError

figure = lambda p50, p99, most: {"p50": p50, "p99": p99, "max": most}
QUIET = dict(gap_ms=figure(10.0, 20.0, 30.0), health_ms=figure(1.0, 5.0, 6.0))
UNDER = dict(gap_ms=figure(10.0, 29.0, 90.0), health_ms=figure(1.0, 99.0, 500.0))
UNDER |= dict(prober_late_ms=figure(1.0, 7.0, 9.0), probes=400, probes_failed=4)
FINE = dict(attack="http: text", attempts=1600, wrong=0, seconds=4.0, streams_cut=0)
FINE |= dict(streams_differ=0, log_mb_per_minute=0.5, kind="hostile", device="Chip", sha="abc")
FINE |= dict(service_cpu_seconds=1.5, attackers_cpu_seconds=2.5, missed=[])
FINE |= dict(date="2026-01-01T00:00:00Z", descriptors={"before": 15, "peak": 300, "after": 15})
FINE["memory_mb"] = {"before": 1000.0, "peak": 3000.0, "after": 1150.0}
FINE["quiet"] = QUIET | dict(rpc_health_ms=figure(1.0, 6.0, 7.0))
FINE["under_attack"] = UNDER | dict(rpc_health_ms=figure(1.0, 9.0, 500.0))


def test_a_slow_answer_counts_for_the_probes_that_it_delays():
    found = figures([0.01] * 3 + [1.0], interval=0.25)  # three more probes: 0.75, 0.5 and 0.25 s
    assert found["p50"] == pytest.approx(250)
    assert found["max"] == pytest.approx(1000)
    assert figures([0.01] * 3 + [1.0])["p50"] == pytest.approx(10)
    assert figures([]) == {"p50": 0.0, "p99": 0.0, "max": 0.0}


def test_spans_count_where_they_overlap_and_while_they_last():
    spans = Spans(done=[(0.0, 1.0), (2.0, 5.0), (7.0, 8.0)])
    assert spans.between(3.0, 4.0) == [3.0]
    assert spans.between(0.5, 7.5) == [1.0, 3.0, 1.0]
    spans.open = time.perf_counter() - 2.0
    (pending,) = spans.between(spans.open + 1.0, spans.open + 2.0)
    assert pending >= 2.0
    spans.end()
    assert spans.open is None
    assert len(spans.done) == 4


BROKEN = {
    "status": ("wrong", 1),
    "health": ("under_attack.rpc_health_ms.p99", 101.0),
    "latency": ("under_attack.gap_ms.p99", 31.0),
    "streams": ("streams_cut", 1),
    "memory": ("memory_mb.after", 1201.0),
    "log": ("log_mb_per_minute", 1.01),
}


@pytest.mark.parametrize("target", BROKEN)
def test_a_row_names_the_targets_that_it_misses(target):
    row = copy.deepcopy(FINE)
    assert hostile.missed(row, asks_for_work=False) == []
    path, value = BROKEN[target]
    *folders, name = path.split(".")
    place = row
    for folder in folders:
        place = place[folder]
    place[name] = value
    assert hostile.missed(row, asks_for_work=False) == [target]
    assert ("latency" in hostile.missed(row, asks_for_work=True)) is False


def test_more_than_one_probe_of_a_hundred_without_an_answer_misses_the_target_of_health():
    row = copy.deepcopy(FINE)
    row["under_attack"]["probes_failed"] = 5
    assert hostile.missed(row, asks_for_work=False) == ["health"]


def test_attacks_have_names_of_their_own_and_cover_both_protocols():
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert {name.partition(":")[0] for name in names} == {"http", "grpc"}
    assert all(attack.clients <= 64 for attack in ATTACKS)


def test_hostile_clients_report_every_attempt_and_what_was_wrong():
    """Against a server that answers 200 to everything, and closes."""

    async def answer(reader, writer):
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def attack(names) -> dict:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            where = dict(http=address, grpc=address, token="t", victim="v", scale=1 / 8)
            with Attackers(names, seconds=30.0, hold_seconds=30.0, **where) as attackers:
                attackers.begin()
                return await asyncio.to_thread(attackers.results)

    silent, header = "http: dripped headers", "http: header of 1 MiB"
    found = asyncio.run(attack([silent, header]))
    assert found["cpu_seconds"] > 0
    assert found["attacks"][silent] == {"attempts": 8, "answers": {"closed": 8}, "wrong": 0}
    assert found["attacks"][header]["attempts"] == 8
    assert found["attacks"][header]["wrong"] == 8


def test_attacks_are_chosen_by_name_and_run_together_at_the_end():
    plain = [one.name for one in ATTACKS if not one.needs_tls]
    of = lambda *only, **changes: hostile.groups_of(Options(only=only, **changes))
    assert of() == [*(([one.name], one.needs_tls) for one in ATTACKS), (plain, False)]
    assert len(of(together=False)) == len(ATTACKS)
    assert of(hostile.TOGETHER) == [(plain, False)]
    assert of(plain[0], together=False) == [([plain[0]], False)]
    with pytest.raises(ConfigError, match="named like magic"):
        of("magic")
