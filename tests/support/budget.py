"""How much the property machines may try: the hypothesis profile that is loaded says it.

    scripts/test tests/properties                               # a few seconds each, the same
    scripts/test tests/properties --hypothesis-profile long     # minutes each, different every time

A failure prints the shortest sequence of rules that hypothesis found, as a program to paste.
"""

from hypothesis import HealthCheck, Phase, settings

LONG = "long"
FACTOR = 40
settings.register_profile(LONG, deadline=None, print_blob=True)


def budget(examples: int, steps: int = 50) -> settings:
    """`examples` tries (40 times as many in the long profile) of at most `steps` rules each.

    In the short profile the tries are always the same ones, so that CI fails for a reason.
    """
    long = settings.get_current_profile_name() == LONG
    return settings(
        max_examples=examples * (FACTOR if long else 1),
        stateful_step_count=steps,
        deadline=None,
        derandomize=not long,
        database=None,
        print_blob=long,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
        ],
    )


def hunt(examples: int, steps: int = 50) -> settings:
    """For a planted bug: it is to be found, not made short."""
    return settings(budget(examples, steps), phases=[Phase.generate], report_multiple_bugs=False)
