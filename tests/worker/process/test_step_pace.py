"""What a worker announces of its step: busy is not hung, and hung is not busy."""

from worker.process.step_pace import HANG_FACTOR, StepPace

DECODE, PREFILL = ("m/decoder", "decode"), ("m/decoder", "prefill")


def ran(pace: StepPace, step: int, kind: tuple[str, str], tokens: int, *times: float) -> None:
    start, end = times
    pace.submitted(step, *kind, tokens, start)
    pace.done(step, end)


def test_a_long_prefill_after_many_short_decodes_is_expected_to_be_long() -> None:
    pace = StepPace(2.0)
    ran(pace, 1, PREFILL, 100, 0.0, 1.0)  # 10 ms a token
    now = 1.0
    for step in range(2, 50):
        ran(pace, step, DECODE, 1, now, now + 0.01)
        now += 0.01
    pace.submitted(50, *PREFILL, 2000, now)
    assert pace.expected() > 15.0  # 2,000 tokens at 10 ms
    assert pace.age(now + 18.0) < HANG_FACTOR * pace.expected()


def test_a_decode_step_is_not_excused_by_a_long_prefill() -> None:
    pace = StepPace(2.0)
    ran(pace, 1, PREFILL, 2000, 0.0, 20.0)
    ran(pace, 2, DECODE, 4, 20.0, 20.04)
    pace.submitted(3, *DECODE, 4, 20.04)
    assert pace.expected() == 2.0 / HANG_FACTOR  # the floor
    assert pace.age(23.0) > HANG_FACTOR * pace.expected()


def test_nothing_is_hung_before_its_floor_even_with_nothing_known() -> None:
    pace = StepPace(30.0)
    pace.submitted(1, *PREFILL, 1, 100.0)
    assert HANG_FACTOR * pace.expected() == 30.0
    assert pace.age(129.0) == 29.0


def test_the_age_is_that_of_the_oldest_step_since_it_could_run() -> None:
    pace = StepPace(2.0)
    assert pace.age(5.0) == 0.0
    pace.submitted(1, *DECODE, 1, 10.0)
    pace.submitted(2, *DECODE, 1, 10.0)
    assert pace.age(11.0) == 1.0
    pace.done(1, 13.0)
    assert pace.age(13.5) == 0.5  # the second waited for the first


def test_a_dearer_step_counts_at_once_and_is_forgotten_slowly() -> None:
    pace = StepPace(0.001)
    ran(pace, 1, DECODE, 1, 0.0, 1.0)
    ran(pace, 2, DECODE, 1, 1.0, 1.1)
    pace.submitted(3, *DECODE, 1, 1.1)
    assert 0.9 < pace.expected() < 0.92
