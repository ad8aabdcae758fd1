"""Backoff doubles up to its bound; the budget is counted within its window."""

from conductor.shell.restart_policy import GiveUp, Restart, RestartPolicy
from protocol.config import SupervisionConfig

CONFIG = SupervisionConfig(
    backoff_ms=250, backoff_max_ms=1000, max_restarts=4, restart_window_s=300
)


def test_the_delay_doubles_up_to_its_bound_then_the_budget_ends() -> None:
    policy = RestartPolicy(CONFIG)
    assert [policy.exited(float(t)) for t in range(4)] == [
        Restart(0.25), Restart(0.5), Restart(1.0), Restart(1.0),
    ]  # fmt: skip
    verdict = policy.exited(4.0)
    assert isinstance(verdict, GiveUp)
    assert "4 restarts within 300 s" in verdict.why


def test_restarts_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy(CONFIG)
    for t in (0.0, 100.0, 200.0, 250.0):
        policy.exited(t)
    assert isinstance(policy.exited(299.9), GiveUp)
    assert policy.exited(300.0) == Restart(1.0)  # the first has just left the window
    assert policy.exited(1000.0) == Restart(0.25)


def test_no_restarts_means_none() -> None:
    policy = RestartPolicy(SupervisionConfig(max_restarts=0))
    assert isinstance(policy.exited(0.0), GiveUp)
