from typing import Any

import pytest

from conductor.gateway.openai_schema import parse
from protocol.errors import InvalidRequest

HI = [{"role": "user", "content": "hi"}]


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HI, **fields}


def test_all_fields() -> None:
    r, ignored = parse(
        request(
            stream=True, stream_options={"include_usage": True}, max_tokens=5, temperature=0,
            top_p=0.5, top_k=3, seed=-1, n=1, stop=["a", "b"], stop_token_ids=[7], ignore_eos=True,
        )
    )  # fmt: skip
    assert (r.stream, r.include_usage, r.output_limit, r.temperature) == (True, True, 5, 0)
    assert (r.top_p, r.top_k, r.seed, r.stops, r.stop_token_ids) == (0.5, 3, -1, ["a", "b"], [7])
    assert ignored == []


def test_defaults_and_nulls() -> None:
    names = (
        "stream stream_options max_tokens max_completion_tokens temperature top_p top_k seed n stop"
        " stop_token_ids ignore_eos"
    )
    for r, _ in (parse(request()), parse(request(**dict.fromkeys(names.split())))):
        assert (r.stops, r.output_limit, r.include_usage) == ([], None, False)


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert parse(request(max_tokens=5, max_completion_tokens=7))[0].output_limit == 7


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content(content: Any, text: str) -> None:
    r, _ = parse(request(messages=[{"role": "user", "content": content}]))
    assert r.messages[0].for_template() == {"role": "user", "content": text}


def test_a_developer_is_a_system_and_names_reach_the_template() -> None:
    r, ignored = parse(request(messages=[{"role": "developer", "content": "x", "name": "n"}]))
    assert r.messages[0].for_template() == {"role": "system", "content": "x", "name": "n"}
    assert ignored == []


def test_unknown_fields_are_told() -> None:
    assert parse(request(user="u", logit_bias={}))[1] == ["logit_bias", "user"]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"model": None}, "model", "string"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content", "part 0"),
        (
            {"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.1.content", "part 0: type 'image_url': only 'text' is supported",
        ),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_completion_tokens": True}, "max_completion_tokens", "integer"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-1"),
        ({"seed": 1 << 64}, "seed", "less than"),
        ({"n": 2}, "n", "only one choice"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "1 to 1000 characters"),
        ({"stop": [1]}, "stop", "list of strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "0"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_field(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse(request(**fields))
    assert e.value.detail["param"] == param
    assert str(e.value).startswith(f"{param}: ")
    assert text in str(e.value)


@pytest.mark.parametrize("body", [None, [], "x", 3])
def test_a_body_that_is_no_object(body: Any) -> None:
    with pytest.raises(InvalidRequest, match="JSON object"):
        parse(body)
