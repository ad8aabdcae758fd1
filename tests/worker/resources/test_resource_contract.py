import numpy as np
import pytest
from hypothesis import given, settings

from protocol.errors import InvariantViolation
from tests.support.resource_contract import check_resource, context, histories
from worker.resources.attention.sdpa import SdpaAttention
from worker.resources.base import Resource
from worker.resources.kv.paged import PagedKv
from worker.resources.positions import Positions
from worker.resources.registry import KINDS
from worker.resources.sampler import Sampler

KV = {"layers": 1, "kv_heads": 1, "head_dim": 2, "pages": 9}


def kv(cls: type[PagedKv] = PagedKv) -> PagedKv:
    return cls(context("kv", **KV))


def attention() -> list[Resource]:
    pool = kv()
    return [pool, SdpaAttention(context("attention", pool))]


def positions_of_kv() -> list[Resource]:
    pool = kv()
    return [pool, Positions(context("positions", pool))]


MAKERS = {
    "paged_kv": lambda: [kv()],
    "sdpa_attention": attention,
    "positions": lambda: [Positions(context("positions"))],
    "positions over paged_kv": positions_of_kv,
    "sampler": lambda: [Sampler(context("sampler"))],
}


def test_every_kind_is_under_the_contract():
    assert set(KINDS) <= set(MAKERS)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=60, deadline=None)
@given(history=histories())
def test_contract(kind, history):
    check_resource(MAKERS[kind], history)


HISTORY = [("ingest", {1: 1, 2: 1}), ("step", {1: 20}), ("undo", {2: 20}), ("remove", {1: 1})]


class LeaksOnRemove(PagedKv):
    def remove_request(self, request_id):
        if self._params.pop(request_id, None) is not None:
            self._streams.release((request_id, "main"))
            self._members += 1


class ForgetsToRollBack(PagedKv):
    def rollback(self, step, ctx):
        pass


class ReservesTwice(PagedKv):
    def admit(self, step, ctx):
        outcome = super().admit(step, ctx)
        slot = self._streams.get((step.segments[0].request_id, "main"))
        held = self._streams.column("held")
        self._streams.column("table")[slot, held[slot]] = self.pool.take(1)[0]
        held[slot] += np.int64(1)
        return outcome


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (LeaksOnRemove, "total"),
        (ForgetsToRollBack, "rolled back"),
        (ReservesTwice, "reserved something twice"),
    ],
)
def test_contract_catches_planted_bugs(broken, says):
    check_resource(lambda: [kv()], HISTORY)
    with pytest.raises((AssertionError, InvariantViolation), match=says):
        check_resource(lambda: [kv(broken)], HISTORY)
