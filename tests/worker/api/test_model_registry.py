import pytest

from protocol.errors import ConfigError
from worker.api.nearest import nearest
from worker.api.registry import load_builder


def test_a_kind_is_a_module_with_build():
    from worker.models import reference

    assert load_builder("reference") is reference.build


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("referense", "no model kind 'referense'; did you mean 'reference'"),
        ("zzzz", "no model kind 'zzzz'; known: .*decoder_lm.*reference"),
        ("../x", "no model kind"),
        ("reference.x", "no model kind"),
        ("reference_hash", "worker.models.reference_hash is not a model: it has no build"),
    ],
)
def test_an_unknown_kind_is_refused_with_the_nearest(kind, says):
    with pytest.raises(ConfigError, match=says):
        load_builder(kind)


def test_nearest():
    assert nearest("kv_head", ["kv_heads", "layers"]) == "; did you mean 'kv_heads'?"
    assert nearest("zz", ["b", "a"]) == "; known: a, b"
    assert nearest("zz", []) == "; known: none"
