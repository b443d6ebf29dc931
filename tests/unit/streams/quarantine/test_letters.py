"""How letters are named: places as commands take them."""

from __future__ import annotations

import pytest

from streams.quarantine.letters import Place, PlaceError

NS = "t1"


@pytest.mark.parametrize(
    ("text", "topic"),
    [
        ("usage/3/41", "t1.inference.usage.v1"),
        ("inference.usage.v1/3/41", "t1.inference.usage.v1"),
        ("t1.inference.usage.v1/3/41", "t1.inference.usage.v1"),
        (" requests.gpu-a/3/41 ", "t1.inference.requests.gpu-a.v1"),
    ],
)
def test_a_place_is_called_by_the_short_or_the_full_name_of_its_topic(text: str, topic: str) -> None:
    place = Place.parse(text, namespace=NS)
    assert place == Place(topic=topic, partition=3, offset=41)
    assert Place.parse(place.short(namespace=NS), namespace=NS) == place


@pytest.mark.parametrize(
    "text",
    ["", "usage", "usage/3", "usage/-1/3", "usage/3/", "usage/3/x", "usage/٣/1", "usage/3/9" + "9" * 30, "no/1/2"],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(PlaceError):
        Place.parse(text, namespace=NS)
