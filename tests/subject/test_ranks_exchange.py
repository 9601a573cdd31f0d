"""What ranks exchange, here by threads that share a store: answers, ends, and that one is gone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from forge.api import OptimStepResult, ParallelismConfig, TrainerConfig
from forge_conformance.subject import CallFailed, RankLost, Ranks
from forge_conformance.subject.ranks import OutOfStep, RanksDisagree


def on_two(*programs: Callable[[Ranks], Any]) -> list[Any]:
    """What each rank's program returns or raises."""
    store = HashStore()
    ranks = [Ranks(rank, 2, store, patience=5.0) for rank in range(2)]

    def run(program: Callable[[Ranks], Any], its: Ranks) -> Any:
        try:
            return program(its)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, programs, ranks))


def config(**entries: int) -> TrainerConfig:
    """A configuration with these entries after many others."""
    others = {f"an entry {number}": number for number in range(20)}
    return TrainerConfig("tiny", others | entries, ParallelismConfig())


def test_each_learns_what_all_tell():
    def tell(ranks: Ranks) -> list[str]:
        return ranks.exchange("greeting", f"from {ranks.rank}")

    assert on_two(tell, tell) == [["from 0", "from 1"]] * 2


def test_one_process_has_nobody_to_wait_for():
    alone = Ranks()
    assert alone.exchange("greeting", 1) == [1]
    assert alone.from_first("folder", lambda: "here") == "here"
    assert not alone.several


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (OptimStepResult(1, 0.1, 2), OptimStepResult(1, 0.1, 3)),
        (torch.zeros(2), torch.tensor([0.0, 1e-30])),
        ("checkpoints/a", "checkpoints/b"),
        (config(vocab_size=256), config(vocab_size=257)),
    ],
    ids=["a count", "one bit of the logits", "a path", "a late entry of the configuration"],
)
def test_answers_that_differ_are_a_fault_on_both(here, there):
    faults = on_two(
        lambda ranks: ranks.agree("a call", here, None),
        lambda ranks: ranks.agree("a call", there, None),
    )
    assert [type(fault) for fault in faults] == [RanksDisagree] * 2
    assert on_two(*[lambda ranks: ranks.agree("a call", here, None)] * 2) == [None, None]


def test_a_failure_on_one_rank_alone_is_a_fault_on_both():
    failure = CallFailed("forward", ValueError("too long"))
    faults = on_two(
        lambda ranks: ranks.agree("forward", None, failure),
        lambda ranks: ranks.agree("forward", torch.zeros(1), None),
    )
    assert [fault.root for fault in faults] == ["distributed.failure"] * 2
    assert "failed on rank 0 only" in str(faults[1])
    assert on_two(*[lambda ranks: ranks.agree("forward", None, failure)] * 2) == [None, None]


def test_a_rank_that_has_come_to_its_end_stops_the_others_before_their_next_call():
    def still_calling(ranks: Ranks) -> list[str]:
        with pytest.raises(OutOfStep, match=r"the end of forward\.pure"):
            ranks.call("forward")
        return ranks.ends("forward.pure", "stopped")

    ended, stopped = on_two(lambda ranks: ranks.ends("forward.pure", "broke"), still_calling)
    assert ended == stopped == ["broke", "stopped"]


def test_what_the_first_rank_cannot_make_is_an_error_on_both():
    def make() -> str:
        raise ValueError("no room")

    errors = on_two(*[lambda ranks: ranks.from_first("folder", make)] * 2)
    assert [str(error) for error in errors] == ["no room"] * 2


def test_a_rank_that_blocks_is_lost_and_hears_what_the_other_came_to():
    store = HashStore()
    patient, blocking = (Ranks(rank, 2, store, patience=5.0) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patient.exchange, "forward", ("forward() raised ValueError", {}))
        store.wait(["1/0"])
        pool.submit(patient.leave)
        heard = blocking.last_words("in all_reduce")
    assert heard == "On rank 0 the same call failed: forward() raised ValueError.\n"
    with pytest.raises(RankLost, match=r"rank 1 blocks in it:\nin all_reduce"):
        waiting.result()


def test_a_rank_that_never_comes_is_lost():
    with pytest.raises(RankLost, match=r"rank 1 gave none within 0\.1 s"):
        Ranks(0, 2, HashStore(), patience=0.1).call("forward")


def test_the_ranks_are_lost_with_the_store_that_they_meet_in():
    class Unreachable:
        def set(self, _key: str, _value: bytes) -> None:
            raise DistNetworkError("Broken pipe")

    ranks = Ranks(1, 2, Unreachable(), patience=5.0)  # type: ignore[arg-type]
    with pytest.raises(RankLost, match=r"store can't be reached: Broken pipe"):
        ranks.exchange("greeting", "from 1")
    assert ranks.lost
    assert ranks.last_words("in a call") == ""
