"""One chaos daemon for all tests here; `slow` ones run only where -m names them."""

from collections.abc import Iterator

import pytest

from tests.chaos.run import Chaos, chaos


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.option.markexpr:
        return
    slow = [i for i in items if i.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [i for i in items if i not in slow]


@pytest.fixture(scope="session")
def shared() -> Iterator[Chaos]:
    """Every fault point armed; each test leaves it at rest."""
    with chaos() as c:
        yield c
