"""A worker with its real threads and the reference model: tokens, ends, messages, faults."""

import random
from collections import Counter

import pytest

from protocol.messages import ROW_TRIAL, Beat, Exit, Kind, Owners, Reason, Refuse, Report
from tests.support.worker_rig import DECODE, LIFE, Rig
from worker.models.reference_hash import EOS, reference_tokens
from worker.process import exit_status
from worker.process.link import Refused

POISON = 200


@pytest.fixture
def rig():
    made: list[Rig] = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for r in made:
        r.close()


def prompts(n: int, seed: int = 1) -> dict[int, list[int]]:
    r = random.Random(seed)
    return {i: [r.randint(32, 126) for _ in range(r.randint(1, 40))] for i in range(1, n + 1)}


def test_tokens_equal_the_oracle_and_each_row_ends_once(rig) -> None:
    r = rig(eos_every=30)
    asked = prompts(40)
    for i, p in asked.items():
        r.run([r.row(i, p, 5 + i)])
    r.until_ended(*asked)
    r.rest()
    for i, p in asked.items():
        want = reference_tokens(p, 5 + i, eos_every=30)
        assert r.owner.tokens(i) == want
        assert r.owner.closed(i)
        reason = Reason.STOP if want[-1] == EOS else Reason.LENGTH
        assert r.owner.streams[i, 1].reason is reason
        kind, count, extra = r.conductor.end(i)
        assert (kind, count) == (Kind.FINISHED, len(want))
        assert extra == {"reason": reason, "closed": True}
    assert {r.owner.streams[i, 1].reason for i in asked} == {Reason.STOP, Reason.LENGTH}
    assert r.pages_used() == 0


def test_reports_of_a_plain_row(rig) -> None:
    r = rig()
    r.run([r.row(1, [50, 51], 4)])
    r.until(lambda: Kind.SETTLED in r.conductor.kinds(1))
    assert r.conductor.kinds(1) == [Kind.STARTED, Kind.MOVED, Kind.FINISHED, Kind.SETTLED]
    assert r.conductor.hellos[0].capacity["device"] == "cpu"
    assert r.conductor.hellos[0].specs[0]["model"] == "m"


def test_one_frames_per_step_and_owner(rig) -> None:
    r = rig(owners=(1, 2))
    rows = [r.row(i, [40 + i], 12, batch=1, owner=1 + i % 2) for i in range(1, 9)]
    r.run(rows)
    r.until_ended(*range(1, 9))
    r.rest()
    for owner in r.owners.values():
        full = [f for f in owner.frames if len(f.stream)]
        assert len(full) == 12  # one prefill, eleven decode steps: none in vain, none per row
        assert all(len(f.stream) == 4 for f in full)


def test_a_prompt_in_chunks_is_the_same_prompt(rig) -> None:
    r = rig()
    prompt = prompts(1, seed=9)[1] * 3
    n = len(prompt)
    chunked = r.row(1, prompt, 9, chunks=[n // 3, n // 3, n - 2 * (n // 3)])
    r.run([chunked])
    for batch, _ in chunked.path[1:-1]:
        r.run_chunk(batch, 1)
    r.run([r.row(2, prompt, 9)])
    r.until_ended(1, 2)
    r.rest()
    assert r.owner.tokens(1) == r.owner.tokens(2) == reference_tokens(prompt, 9)
    assert r.conductor.kinds(1).count(Kind.MOVED) == 3


def test_a_steady_batch_puts_only_beats_and_progress_on_the_control_link(rig) -> None:
    r = rig(pages=1024)
    rows = [r.row(i, [40 + i], 600, batch=1) for i in range(1, 17)]
    r.run(rows)
    r.until(lambda: len(r.owner.tokens(16)) >= 20)
    before = len(r.conductor.received)
    steps = len(r.owner.frames)
    r.until(lambda: len(r.owner.frames) >= steps + 500)
    sent = r.conductor.received[before:]
    assert {type(m) for m in sent} <= {Beat, Report}
    kinds = {k for m in sent if isinstance(m, Report) for k in m.kind}
    assert kinds <= {Kind.PROGRESS}
    assert len([m for m in sent if isinstance(m, Report)]) <= 500 // 10
    r.until_ended(*range(1, 17))


def test_a_leave_in_flight_ends_the_row_after_its_last_frame(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 5000), r.row(2, [41], 60)])
    r.until(lambda: len(r.owner.tokens(1)) >= 10)
    r.leave(1)
    r.until_ended(1, 2)
    r.rest()
    kind, count, _ = r.conductor.end(1)
    assert kind is Kind.LEFT
    assert count == len(r.owner.tokens(1))
    assert r.owner.tokens(1) == reference_tokens([40], count)
    assert not r.owner.streams[1, 1].flags
    assert r.owner.tokens(2) == reference_tokens([41], 60)
    assert r.pages_used() == 0


def test_cancel_storms_bring_the_pages_back(rig) -> None:
    r = rig(pages=200)
    dice = random.Random(3)
    alive: set[int] = set()
    everyone = 0
    for _ in range(60):
        for _ in range(dice.randint(1, 4)):
            everyone += 1
            r.run([r.row(everyone, [dice.randint(32, 126)] * dice.randint(1, 60), 200)])
            alive.add(everyone)
        for _ in range(dice.randint(0, 3)):
            r.turn()
        gone = dice.sample(sorted(alive), min(len(alive), dice.randint(0, 5)))
        alive.difference_update(gone)
        r.leave(*gone)
    r.leave(*alive)
    r.until_ended(*range(1, everyone + 1))
    r.rest()
    assert r.pages_used() == 0
    r.worker.gpu.call(r.worker.engine.check)
    r.worker.scheduler.check()


@pytest.mark.parametrize("point", ["prepare", "forward", "postprocess", "check_stop"])
def test_one_failing_request_fails_alone(rig, point: str) -> None:
    r = rig(faults=[{"point": point, "when_token": POISON, "at": 3}])
    asked = {i: [40 + i, 50] for i in range(1, 7)}
    asked[4] = [44, POISON]
    r.run([r.row(i, p, 20, batch=1) for i, p in asked.items()])
    r.until_ended(*asked)
    r.rest()
    for i, p in asked.items():
        kind, _, extra = r.conductor.end(i)
        if i == 4:
            assert kind is Kind.FAILED
            assert f"planted in {point}" in extra["error"]["message"]
            assert r.owner.tokens(4) == reference_tokens(p, 3)
        else:
            assert kind is Kind.FINISHED
            assert r.owner.tokens(i) == reference_tokens(p, 20)
    assert r.pages_used() == 0


def test_rows_that_do_not_fit_together_are_held_and_all_finish_or_are_preempted(rig) -> None:
    r = rig(pages=16)
    asked = {i: [40 + i] * 30 for i in range(1, 7)}
    r.run([r.row(i, p, 60, batch=1) for i, p in asked.items()])
    r.until_ended(*asked)
    r.rest()
    kinds = Counter(r.conductor.end(i)[0] for i in asked)
    assert set(kinds) <= {Kind.FINISHED, Kind.PREEMPTED}
    assert r.conductor.end(1)[0] is Kind.FINISHED
    assert Kind.HELD in {k for _, k, _, _ in r.conductor.lines}
    for i, p in asked.items():
        got = r.owner.tokens(i)
        assert got == reference_tokens(p, 60)[: len(got)]
        assert r.conductor.end(i)[1] == len(got)
    assert r.pages_used() == 0


def test_what_never_fits_is_refused_with_the_numbers(rig) -> None:
    r = rig(pages=4)
    r.run([r.row(1, [40] * 200, 5)])
    r.until_ended(1)
    kind, _, extra = r.conductor.end(1)
    assert kind is Kind.REFUSED
    assert extra["error"]["code"] == "cannot_fit"
    assert "pages" in extra["error"]["message"]


def test_an_owner_that_goes_takes_its_rows_along_and_no_others(rig) -> None:
    r = rig(owners=(1, 2))
    r.run([r.row(1, [40], 300), r.row(2, [41], 100_000 // 40, owner=2)])
    r.until(lambda: len(r.owners[2].tokens(2)) >= 5)
    r.say(Owners(2, "", False))
    r.until_ended(1, 2)
    r.rest()
    assert r.conductor.end(2)[0] is Kind.LEFT
    assert r.owner.tokens(1) == reference_tokens([40], 300)
    assert r.pages_used() == 0


def test_a_lost_frame_is_sent_again(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 50)])
    r.until(lambda: len(r.owner.tokens(1)) >= 5)
    r.owner.lose = 2
    r.until_ended(1)
    r.until(lambda: r.owner.closed(1))
    assert r.owner.tokens(1) == reference_tokens([40], 50)
    r.rest()


def test_a_lost_last_frame_shows_and_is_sent_again(rig) -> None:
    r = rig()
    r.owner.lose = 1 << 30
    r.run([r.row(1, [40], 3)])
    r.until_ended(1)
    assert Kind.SETTLED not in r.conductor.kinds(1)
    r.owner.lose = 0
    r.until(lambda: Kind.SETTLED in r.conductor.kinds(1))
    assert r.owner.tokens(1) == reference_tokens([40], 3)


def test_a_history_goes_on_where_it_stood(rig) -> None:
    r = rig()
    want = reference_tokens([40, 41], 12)
    r.run([r.row(1, [40, 41, *want[:5]], 7, base=5, attempt=2)])
    r.until_ended(1)
    r.rest()
    assert r.owner.tokens(1, 2) == want[5:]
    assert r.conductor.end(1)[1] == 12


def test_a_history_that_met_its_stop_gets_one_empty_closing_frame(rig) -> None:
    r = rig()
    r.run([r.row(1, [40, 41, 42], 0, base=1)])
    r.run([r.row(2, [40, 41, EOS], 9, base=1)])
    r.run([r.row(3, [40, 41, 77], 9, base=1, stop_token_ids=[77])])
    r.run([r.row(4, [40, 41, EOS], 2, base=1, ignore_eos=True)])
    r.until_ended(1, 2, 3, 4)
    r.rest()
    for i, reason in ((1, Reason.LENGTH), (2, Reason.STOP), (3, Reason.STOP)):
        assert r.owner.tokens(i) == []
        assert r.owner.closed(i)
        assert r.owner.streams[i, 1].reason is reason
        assert r.conductor.kinds(i) == [Kind.FINISHED, Kind.SETTLED]
        assert r.conductor.end(i)[1] == 1
    assert len(r.owner.tokens(4)) == 2


def test_own_stop_ids_and_ignore_eos(rig) -> None:
    r = rig(eos_every=6)
    whole = reference_tokens([40, 41], 40, eos_every=6, stop_at_eos=False)
    stop = next(t for t in whole[4:] if t != EOS)
    r.run([r.row(1, [40, 41], 40, ignore_eos=True)])
    r.run([r.row(2, [40, 41], 40, ignore_eos=True, stop_token_ids=[stop])])
    r.until_ended(1, 2)
    r.rest()
    assert r.owner.tokens(1) == whole
    assert r.owner.tokens(2) == whole[: whole.index(stop) + 1]


def test_a_row_without_may_close_only_ends_its_channel(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 3, flags=0)])
    r.until_ended(1)
    assert r.conductor.end(1)[2] == {"reason": Reason.LENGTH, "closed": False}
    r.until(lambda: r.owner.streams[1, 1].flags == 1)


def test_a_trial_row_steps_alone_and_tells_its_progress_at_once(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 400)])
    r.until(lambda: len(r.owner.tokens(1)) >= 5)
    r.run([r.row(2, [41], 30, flags=1 | ROW_TRIAL)])
    r.until_ended(2)
    mixed = [f for f in r.owner.frames if set(f.stream) == {1, 2}]
    first = min(f.first[list(f.stream).index(2)] for f in mixed)
    assert first >= 4
    assert (2, Kind.PROGRESS, 4, {}) in r.conductor.lines
    r.leave(1)
    r.until_ended(1)


def test_resync_brings_a_new_hello_with_rows_and_unacknowledged_ends(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 100_000 // 40)])
    r.until(lambda: len(r.owner.tokens(1)) >= 3)
    r.conductor.acknowledges = False
    r.run([r.row(2, [41], 3)])
    r.until_ended(2)
    r.say(Refuse("resync", "again"))
    r.until(lambda: len(r.conductor.hellos) == 2)
    inventory = r.conductor.hellos[1].inventory
    assert [e[:3] for e in inventory["ends"]] == [[2, Kind.FINISHED, 3]]
    assert inventory["ends"][0][3] == {"reason": Reason.LENGTH, "closed": True}
    assert [row[:2] for row in inventory["rows"]] == [[1, 1]]
    assert inventory["rows"][0][2] >= 3
    assert DECODE in inventory["batches"]
    r.conductor.acknowledges = True
    r.say(Owners(1, r.owner.address, True))
    r.leave(1)
    r.until_ended(1)
    r.say(Refuse("resync", "and again"))
    r.until(lambda: len(r.conductor.hellos) == 3)
    assert 2 not in [e[0] for e in r.conductor.hellos[2].inventory["ends"]]


def test_a_hole_in_the_session_is_mended_by_a_new_hello(rig) -> None:
    r = rig()
    r.conductor.session.stamp(Beat())  # a message that gets lost
    r.say(Beat())
    r.until(lambda: len(r.conductor.hellos) == 2)
    r.run([r.row(1, [40], 3)])
    r.until_ended(1)


def test_fenced_means_exit(rig) -> None:
    r = rig()
    r.say(Refuse("fenced", "this life was counted as lost"))
    with pytest.raises(Refused, match="fenced"):
        r.until(lambda: False)
    r.status = exit_status.FENCED


def test_sigterm_drains_and_exit_says_bye(rig) -> None:
    r = rig()
    r.run([r.row(1, [40], 200)])
    r.until(lambda: len(r.owner.tokens(1)) >= 3)
    r.loop.ask_to_leave()
    r.until(lambda: r.conductor.counts["Leaving"] == 1)
    assert r.status is None
    r.until_ended(1)
    r.say(Exit(5000))
    r.until(lambda: r.status == 0)
    r.conductor.listen()
    assert r.conductor.counts["Bye"] == 1
    assert r.owner.tokens(1) == reference_tokens([40], 200)


def test_beats_carry_load(rig) -> None:
    r = rig()
    r.run([r.row(1, [40] * 40, 300)])
    r.until(lambda: r.conductor.last_beat.load.get("rows") == 1 and r.conductor.last_beat.steps > 0)
    load = r.conductor.last_beat.load
    assert load["pages_used"] + load["pages_free"] == load["pages_total"] == 512
    assert load["tokens_out"] > 0
    assert load["held"] == load["one_shot"] == 0
    assert set(load["stage_s"]) >= {"prepare", "forward", "postprocess"}
    r.until_ended(1)


def test_lives_are_checked_on_the_stream_link(rig) -> None:
    """Windows of another life are strays: they acknowledge nothing."""
    from protocol.codec import encode
    from protocol.messages import Window

    r = rig()
    r.owner.mute = True
    r.run([r.row(1, [40], 3)])
    r.until_ended(1)
    peer = next(iter(r.owner.channel.peers))
    r.owner.channel.send(encode(Window(10, 1 << 20), LIFE + 1, 1, 1), peer)
    r.until(lambda: r.worker.post.statistics().get("strays") == 1)
    assert not r.worker.post.settled
    r.owner.mute = False
    r.until(lambda: Kind.SETTLED in r.conductor.kinds(1))
